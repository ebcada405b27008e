"""`python -m benchmarks chaos`: a real server with four shards, and many faults at the same time.

For some minutes clients request rows of two tables and compare every response with the version that it names, while

    shards are killed (-9)                     versions are switched             incremental saves change rows
    bursts of requests overload the server     malformed requests arrive         memory and descriptors are sampled

    chaos/wrong        responses of no version                 chaos/mixed       responses of several versions
    chaos/unexpected   errors without a fault                  chaos/crashes     crashes of the front end
    chaos/malformed    requests sent, of 100,000               chaos/memory      of the front end: middle third over last
    chaos/recovered    shards that came back, of those killed

`actors.py` has the clients and the faults. Then a trainer publishes to a server while both, its shards and the network fail
(`publishes.py`); `--filter publishes` runs this alone.

    chaos/publish-wrong        responses other than what their version has
    chaos/publish-mixed        responses of several publishes
    chaos/publish-lost         faults after which newer publishes were not served within 90 s, and the last publish
    chaos/publish-unexpected   errors without a fault
    chaos/publish-memory       of the server while it is not killed: middle third over last
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos.actors import Actors, Chains
from benchmarks.chaos.publishes import PublishChaos, record
from benchmarks.exchange.network import cluster, why_not
from benchmarks.runner.record import Recorder
from thermocline.errors import BadInput

MALFORMED = 100_000  # asked of ten minutes
CARDS, QUEUE = 4, 32
_READY = re.compile(r"ready: http://(\S+)  grpc (\S+)")


class ChaosServer:
    """The server's process and its addresses."""

    def __init__(self, folder: Path, log: Path) -> None:
        start = "import sys; sys.argv[0] = 'thermocline'; from thermocline.cli import main; main()"
        options = ["--shards", str(CARDS), "--queue", str(QUEUE), "--follow", "0.5", "--http-port", "0", "--grpc-port", "0"]
        command = [sys.executable, "-c", start, "serve", "run", str(folder), *options]
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        found = _READY.match(self.process.stdout.readline())
        if found is None:
            raise BadInput(f"the server did not come up: {self.last_words()}")
        self.http, self.grpc = found[1], found[2]

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1][:300] if lines else "no output"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def memory(self) -> int:
        """Private bytes of the front end; memory shared with shards is not counted."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * sum(int(number) for number in re.findall(r"^RssAnon:\s+(\d+)", text, re.MULTILINE))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def run(
    minutes: float = 10.0, filter: str | None = None, progress: Callable[[int, int, str], None] = lambda done, total, what: None
) -> dict[str, Any]:
    """Run clients and faults for some minutes, and record the result."""
    recorder = Recorder("chaos", lambda line: None, judged=minutes >= 10)
    if filter is None or filter in "requests":
        _requests(recorder, minutes, progress)
    if filter is None or filter in "publishes":
        _publishes(recorder, minutes, progress)
    return recorder.record


def _publishes(recorder: Recorder, minutes: float, progress: Callable[[int, int, str], None]) -> None:
    if reason := why_not():
        recorder.note(f"no network faults: {reason}")
    with tempfile.TemporaryDirectory() as folder, cluster(2, 1) as net:
        chaos = PublishChaos(Path(folder), net, 60 * minutes)
        code = -1
        try:
            asyncio.run(chaos.run(progress))
        finally:
            code = chaos.close()
        record(recorder, chaos, code)


def _requests(recorder: Recorder, minutes: float, progress: Callable[[int, int, str], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        chains = Chains(Path(folder) / "models")
        server = ChaosServer(Path(folder) / "models", Path(folder) / "log")
        try:
            found = asyncio.run(_chaos(server, chains, 60 * minutes, progress))
        finally:
            code = server.end()
        _record(recorder, found, code, server)


async def _chaos(server: ChaosServer, chains: Chains, seconds: float, progress: Callable[[int, int, str], None]) -> Actors:
    actors = Actors(server.http, server.grpc, chains)
    playing = [asyncio.ensure_future(one) for one in actors.all()]
    try:
        for second in range(round(seconds)):
            await asyncio.sleep(1)
            if not server.alive:
                actors.crashes += 1
                break
            if ended := [one for one in playing if one.done()]:
                ended[0].result()  # a fault of the benchmark
            actors.memory.append(server.memory())
            actors.descriptors.append(server.descriptors())
            progress(second, round(seconds), f"{actors.counts['answered']:,} answers, {actors.malformed:,} malformed")
    finally:
        for one in playing:
            one.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
    if server.alive:
        await actors.settle()
    return actors


def _record(recorder: Recorder, found: Actors, code: int, server: ChaosServer) -> None:
    def none(case: str, count: int, **further: Any) -> None:
        recorder.add(f"chaos/{case}", count, case, "none", 0, float(count == 0), **further)

    none("wrong", found.counts["wrong"], answered=found.counts["answered"], outcomes=dict(found.counts))
    none("mixed", found.counts["mixed"], versions=len(found.seen), switches=found.switches, deltas=found.deltas)
    none("unexpected", sum(found.unexpected.values()), examples=list(found.unexpected)[:10])
    none("crashes", found.crashes + (code != 0), exit_code=code, last_words=server.last_words())
    recorder.add("chaos/malformed", found.malformed, "requests", "asked", MALFORMED, found.malformed / MALFORMED)
    back = found.recovered / found.kills if found.kills else None
    recorder.add("chaos/recovered", found.recovered, "cards", "killed", found.kills, back, slowest_s=found.slowest)
    third = len(found.memory) // 3
    if third:
        middle, last = statistics.median(found.memory[third : 2 * third]), statistics.median(found.memory[2 * third :])
        seen = [min(found.descriptors), max(found.descriptors)]
        recorder.add("chaos/memory", last, "bytes", "middle third", middle, middle / last, descriptors=seen)
