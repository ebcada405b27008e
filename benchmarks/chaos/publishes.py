"""A trainer publishes to a server while both, its shards and the network fail; clients judge every response.

    kill -9      the trainer, which goes on from its last save as a new run; the server; one of its shards
    SIGSTOP      the trainer or the server, for up to 8 s
    network      the link between them is down for up to 12 s (namespaces, as root)

`trainer.py` writes what each version must answer before it can be served.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.chaos.actors import shard_cards
from benchmarks.chaos.trainer import DIM, ROWS, UNIVERSE, Trainer
from benchmarks.exchange.network import Net
from benchmarks.freshness.live import LiveServer
from benchmarks.serve.load_client import METHOD, OPTIONS
from thermocline import save
from thermocline.serve.protocol import schema

CLIENTS, RECOVERY_S, KILL_SHARE = 3, 90.0, 0.4  # the server is killed in the first part of the time only
_OUTPUTS = {"a": ROWS, "b": UNIVERSE, "b.known": UNIVERSE}
Arrays = Mapping[str, Any]


class Expected:
    """What versions must answer, from the files of the trainer."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, OrderedDict[str, Arrays]()

    def of(self, version: str) -> Arrays | None:
        if version not in self._known:
            save, _, number = version.partition("+")
            try:
                found = self._read(f"save-{save}")
                self._known[version] = self._read(f"{found['run']}/{number}") if number else found
            except OSError:
                return None
            if len(self._known) > 40:
                self._known.popitem(last=False)
        return self._known[version]

    def place(self, version: str) -> tuple[int, int]:
        """Run and number of the publish of a version."""
        found = self.of(version)
        return (0, 0) if found is None else (int(found["run"]), int(version.partition("+")[2] or 0))

    def others(self) -> list[Arrays]:
        return list(self._known.values())

    def _read(self, name: str) -> Arrays:
        with np.load(self._folder / f"{name}.npz") as file:
            found = dict(file)
        return {"a": found["a"], "b": found["b"], "b.known": found["known"], "run": found["run"]}


class PublishChaos:
    """The processes, the clients and the faults."""

    def __init__(self, folder: Path, net: Net, seconds: float) -> None:
        self._folder, self._net, self._seconds, self._draw = folder, net, seconds, random.Random(7)
        self._secret, self._state = folder / "secret", folder / "state"
        self._secret.write_text("a secret of this benchmark alone")
        self._state.mkdir()
        self.expected = Expected(self._state / "expected")
        self.counts, self.unexpected, self.faults = Counter[str](), Counter[str](), Counter[str]()
        self.lost: list[str] = []
        self.recovery: list[float] = []
        self.memory: list[int] = []
        self.shards = 0  # killed
        self.versions: set[str] = set()
        self._served, self._failing = (0, 0), False
        net.enter(0)
        self.trainer: subprocess.Popen[bytes] | None = None
        self._make_first_save()
        self.server = self._start_server({})
        self._start_trainer()

    # -- processes ------------------------------------------------------------------------------------------------------------

    def _make_first_save(self) -> None:
        """A server needs a folder to start with."""
        first = Trainer(self._folder / "model", self._state)
        first.expect_save()
        save(first.model, self._folder / "model")

    def _start_server(self, ports: Mapping[str, int]) -> LiveServer:
        return LiveServer(self._folder / "model", self._secret, 2, "0.0.0.0", ports)

    def _start_trainer(self) -> None:
        host = self._net.environment()["MASTER_ADDR"]  # that of node 0
        address = f"{host}:{self.server.ports['publish']}"
        arguments = [str(each) for each in (self._folder / "model", self._state, address, self._secret)]
        with open(self._folder / "trainer.log", "ab") as log:
            command = [*self._net.prefix(1), sys.executable, "-m", "benchmarks.chaos.trainer", *arguments]
            self.trainer = subprocess.Popen(command, stderr=log, stdout=log)

    # -- clients --------------------------------------------------------------------------------------------------------------

    async def client(self, draw: random.Random) -> None:
        while True:
            async with grpc.aio.insecure_channel(self.server.grpc, options=OPTIONS) as channel:
                for _ in range(50):
                    await self.ask(channel, draw)
                    await asyncio.sleep(0.005)

    async def ask(self, channel: Any, draw: random.Random, everything: bool = False) -> str:
        """Ask for rows, and judge the response. Returns its version."""
        names = list(_OUTPUTS) if everything else draw.choice((["a"], ["b", "b.known"], list(_OUTPUTS)))
        count = draw.choice((1, 7, 300))
        ids: dict[str, Any] = {
            name: np.arange(_OUTPUTS[name]) if everything else np.array(draw.choices(range(_OUTPUTS[name]), k=count))
            for name in ("a", "b") if name in names
        }  # fmt: skip
        message = schema.ModelInferRequest(model_name="tables")
        for name, ids_N in ids.items():
            message.inputs.add(name=name, datatype="INT64", shape=[len(ids_N)])
            message.raw_input_contents.append(ids_N.astype(np.int64).tobytes())
        for name in names if names != ["a"] else []:
            message.outputs.add(name=name)
        failing = self._failing
        try:
            data = await channel.unary_unary(METHOD)(message.SerializeToString(), timeout=20)
        except grpc.RpcError as error:
            if failing or self._failing:
                self.counts["failed during a fault"] += 1
            else:
                self.unexpected[f"{error.code().name}: {error.details()[:200]}"] += 1
            return ""
        response = schema.ModelInferResponse.FromString(data)
        found = {
            output.name: np.frombuffer(raw, np.bool_ if output.datatype == "BOOL" else np.float32).reshape(list(output.shape))
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        version = str(response.model_version)
        self.counts[self._judge(version, ids, found)] += 1
        self.versions.add(version)
        self._served = max(self._served, self.expected.place(version))
        return version

    def _judge(self, version: str, ids: Mapping[str, Any], found: Mapping[str, Any]) -> str:
        expected = self.expected.of(version)
        if expected is None or not found:
            return "wrong"

        def fits(name: str, rows: Arrays) -> bool:
            return np.array_equal(found[name], rows[name][ids[name.partition(".")[0]]])

        if all(fits(name, expected) for name in found):
            return "answered"
        return "mixed" if all(any(fits(name, rows) for rows in self.expected.others()) for name in found) else "wrong"

    # -- faults ---------------------------------------------------------------------------------------------------------------

    async def fail(self) -> None:
        """One fault after another, each followed by waiting until what was published since is served."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(self._draw.uniform(1, 4))
            kinds = {"kill shard": self._kill_shard, "kill trainer": self._kill_trainer, "stop server": self._stop_server,
                     "stop trainer": self._stop_trainer}  # fmt: skip
            if self._net.owner:
                kinds |= {"network": self._cut}
            if time.monotonic() - began < KILL_SHARE * self._seconds:
                kinds |= {"kill server": self._kill_server}
            name = self._draw.choice(sorted(kinds))
            self.faults[name] += 1
            self._failing = True
            await kinds[name]()
            await self._recover(name)
            self._failing = False

    async def _recover(self, name: str) -> None:
        begin, now = time.monotonic(), (0, 0)
        runs = self._run()
        while time.monotonic() - begin < RECOVERY_S:
            with suppress(OSError, ValueError):
                found = json.loads((self._state / "now").read_text())
                if not now[0] and (name != "kill trainer" or found["run"] > runs):
                    now = found["run"], found["number"] + 1  # the next one: the last may have been served before the fault
            if now[0] and self._served >= now:
                self.recovery.append(time.monotonic() - begin)
                return
            await asyncio.sleep(0.05)
        self.lost.append(name)

    def _run(self) -> int:
        with suppress(OSError, ValueError):
            return int(json.loads((self._state / "now").read_text())["run"])
        return 0

    async def _kill_shard(self) -> None:
        with suppress(OSError):
            shards = await asyncio.to_thread(shard_cards, f"127.0.0.1:{self.server.ports['http']}")
            pids = [shard["pid"] for shard in shards if shard["ready"] and shard["pid"]]
            if pids:
                os.kill(self._draw.choice(pids), signal.SIGKILL)
                self.shards += 1

    async def _kill_trainer(self) -> None:
        assert self.trainer is not None
        self.trainer.kill()
        self.trainer.wait()
        self._start_trainer()

    async def _kill_server(self) -> None:
        self.server.process.kill()
        self.server.process.wait()
        self.server = await asyncio.to_thread(self._start_server, self.server.ports)

    async def _pause(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._draw.uniform(0.5, 8))
        os.kill(pid, signal.SIGCONT)

    async def _stop_server(self) -> None:
        await self._pause(self.server.process.pid)

    async def _stop_trainer(self) -> None:
        assert self.trainer is not None
        await self._pause(self.trainer.pid)

    async def _cut(self) -> None:
        self._net.set_link(1, False)
        await asyncio.sleep(self._draw.uniform(0.5, 12))
        self._net.set_link(1, True)

    # -- the run --------------------------------------------------------------------------------------------------------------

    async def run(self, progress: Callable[[int, int, str], None]) -> None:
        playing = [asyncio.ensure_future(self.client(random.Random(n))) for n in range(CLIENTS)]
        playing.append(asyncio.ensure_future(self.fail()))
        try:
            for second in range(round(self._seconds)):
                await asyncio.sleep(1)
                if ended := [one for one in playing if one.done()]:
                    ended[0].result()  # a fault of the benchmark
                if second > (KILL_SHARE + 0.1) * self._seconds:
                    self.memory.append(self.server.private_bytes())
                done = f"{self.counts['answered']:,} answers, {sum(self.faults.values())} faults, {len(self.lost)} lost"
                if self.trainer is not None and self.trainer.poll() is not None:
                    self.unexpected[f"the trainer ended with {self.trainer.returncode}"] += 1
                    self._start_trainer()
                progress(second, round(self._seconds), done)
        finally:
            for one in playing:
                one.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
        await self._finish()

    async def _finish(self) -> None:
        """Undo what is going on, let the trainer flush, and compare every row."""
        assert self.trainer is not None
        self._failing = False
        if self._net.owner:
            self._net.set_link(1, True)
        for process in (self.trainer, self.server.process):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        (self._state / "stop").touch()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.trainer.wait, 180)
        final = json.loads((self._state / "final").read_text()) if (self._state / "final").exists() else {}
        async with grpc.aio.insecure_channel(self.server.grpc, options=OPTIONS) as channel:
            before = self.counts["answered"]
            version = await self.ask(channel, random.Random(1), everything=True)
        served = self.counts["answered"] == before + 1 and self.expected.place(version)
        if not final.get("served") or served != (final["run"], final["number"]):
            self.lost.append(f"the end: {final} is published, {version} is served")

    def close(self) -> int:
        assert self.trainer is not None
        if self.trainer.poll() is None:
            self.trainer.kill()
            self.trainer.wait()
        return self.server.end()


def record(recorder: Any, found: PublishChaos, code: int) -> None:
    """Add the results."""

    def none(case: str, count: int, **further: Any) -> None:
        recorder.add(f"chaos/publish-{case}", count, case, "none", 0, float(count == 0), **further)

    runs = {version.partition("+")[0] for version in found.versions}
    none("wrong", found.counts["wrong"], answered=found.counts["answered"], outcomes=dict(found.counts))
    none("mixed", found.counts["mixed"], versions=len(found.versions), saves=len(runs), columns=DIM)
    slow = {"median_s": statistics.median(found.recovery), "slowest_s": max(found.recovery)} if found.recovery else {}
    none(
        "lost",
        len(found.lost),
        faults=dict(found.faults),
        shards=found.shards,
        recovered=len(found.recovery),
        examples=found.lost[:5],
        **slow,
    )
    none("unexpected", sum(found.unexpected.values()) + (code != 0), exit_code=code, examples=list(found.unexpected)[:10])
    third = len(found.memory) // 3
    if third:
        middle, last = statistics.median(found.memory[third : 2 * third]), statistics.median(found.memory[2 * third :])
        recorder.add("chaos/publish-memory", last, "bytes", "middle third", middle, middle / last, largest=max(found.memory))
