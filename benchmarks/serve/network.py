"""Network part of the serve benchmark: the server on a CPU against other Python servers of the same protocol.

    network/64/CLIENTS/kserve        requests per second of the server's processor time, over KServe's
    network/64/CLIENTS/kserve/p99    KServe's p99 over ours
    network/2048/CLIENTS/echo        the same over an echo server's: the share that is left by the gRPC library
    network/cards/CARDS/p50, p99     one shard's latency over that of several, through the server, one client

One table of 1M x 64 fp32 with uniform ids. Servers run in turn, each alone with the same clients (`load_client.py`). Results
are medians of rounds. Rounds start 15 s after readiness, so that work at the start, such as moving rows to huge pages, is not
measured. Responses of every server are compared with the table first. A peer runs in its own environment; a missing one is
recorded as absent.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner.record import Recorder, brief
from thermocline.errors import BadInput
from thermocline.nn.config import RowConfig

CLIENTS = (1, 8, 32, 64)
CARDS = (2, 4, 8)
FEATURE, DIM = "t", 64
START_S = 120.0
UNIT = "requests/cpu-s"
Result = dict[str, float]


@dataclass(frozen=True)
class LoadBudget:
    rows: int
    rounds: int
    seconds: float
    clients: Sequence[int] = CLIENTS
    cards: Sequence[int] = CARDS
    settle: float = 0.0  # seconds between being ready and being measured, for every server


FULL = LoadBudget(1_000_000, 5, 2.0, settle=15.0)
QUICK = LoadBudget(10_007, 1, 0.5, (1, 4), (2,))


@dataclass(frozen=True)
class ServerContender:
    """A server: how it is started, given a port."""

    name: str
    command: Sequence[str]


class RunningServer:
    """A started server."""

    def __init__(self, contender: ServerContender, log: Path) -> None:
        self.name, self.port = contender.name, _free_port()
        self._log = log.open("w+")
        command = [part.replace("PORT", str(self.port)) for part in contender.command]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def wait(self, check: Callable[[str], None]) -> None:
        """Wait for a response that `check` accepts."""
        end, last = time.monotonic() + START_S, ""
        while time.monotonic() < end and self.process.poll() is None:
            try:
                check(f"127.0.0.1:{self.port}")
                return
            except OSError as error:  # not there yet, or not ready
                last = str(error)
            time.sleep(0.2)
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        raise BadInput(brief(f"{self.name} did not come up: {lines[-1] if lines else last}"))

    def measure(self, clients: int, ids: int, rows: int, seconds: float, features: Sequence[str] = (FEATURE,)) -> Result:
        job = {"address": f"127.0.0.1:{self.port}", "pid": self.process.pid, "clients": clients, "seconds": seconds}
        job |= {"ids": ids, "rows": rows, "features": list(features)}
        command = [sys.executable, "-m", "benchmarks.serve.load_client"]
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=60 + 3 * seconds)
        if done.returncode:
            raise BadInput(brief(f"clients of {self.name}: {done.stderr.strip().splitlines()[-1]}"))
        measured: Result = json.loads(done.stdout)
        return measured

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


def run(
    recorder: Recorder,
    wanted: Callable[[str], bool],
    quick: bool,
    progress: Callable[[int, int, str], None],
    peers: dict[str, Path | None],
) -> None:
    """Measure all rows. `peers`: the Python of each peer's environment, by name."""
    effort = QUICK if quick else FULL
    many = [(clients, [f"network/64/{clients}/{name}" for name in peers]) for clients in effort.clients]
    large = [(clients, f"network/2048/{clients}/echo") for clients in effort.clients[:2]]
    cards = [count for count in effort.cards if wanted(f"network/cards/{count}/p50") or wanted(f"network/cards/{count}/p99")]
    many = [(clients, cases) for clients, cases in many if any(map(wanted, cases))]
    large = [(clients, case) for clients, case in large if wanted(case)]
    if not (many or large or cards):
        return
    total = len(many) + len(large) + 1
    with tempfile.TemporaryDirectory() as folder:
        table, checkpoint = make_table(Path(folder), effort.rows)
        contenders = [ours(checkpoint, 1), *(_peer(name, python, Path(folder)) for name, python in peers.items() if python)]
        for number, (clients, cases) in enumerate(many):
            progress(number, total, f"{clients} clients")
            found = race(contenders, table, 64, clients, effort, recorder)
            for case, name in zip(cases, peers, strict=True):
                _add(recorder, case, found, name)
        for number, (clients, case) in enumerate(large, len(many)):
            progress(number, total, f"{clients} clients, 2,048 ids")
            found = race([ours(checkpoint, 1), echo(2048)], table, 2048, clients, effort, recorder)
            _add(recorder, case, found, "echo", p99=False)
        if cards:
            progress(total - 1, total, "cards")
            _parity(recorder, checkpoint, table, effort, cards)


def make_table(folder: Path, rows: int) -> tuple[np.ndarray[Any, np.dtype[np.float32]], Path]:
    """A table, as a checkpoint for us and as an array for peers."""
    import torch

    from thermocline import Embedding, save

    module = torch.nn.ModuleDict({FEATURE: Embedding(rows, DIM, rows=RowConfig("fp32", cache=0.0))})
    save(module, folder / "checkpoint")
    found: list[Any] = []
    with torch.no_grad():
        for first in range(0, rows, 1 << 16):
            found.append(module[FEATURE](torch.arange(first, min(rows, first + (1 << 16)))).numpy())
    table = np.concatenate(found)
    np.save(folder / "table.npy", table)
    return table, folder / "checkpoint"


def ours(checkpoint: Path, cards: int) -> ServerContender:
    start = "import sys; sys.argv[0] = 'thermocline'; from thermocline.cli import main; main()"
    options = ["--shards", str(cards), "--grpc-port", "PORT", "--http-port", "0", "--quiet"]
    return ServerContender(f"ours-{cards}", [sys.executable, "-c", start, "serve", "run", str(checkpoint), *options])


def echo(ids: int, features: int = 1) -> ServerContender:
    """A server that answers any request with the bytes of this many rows."""
    sizes = map(str, (ids, DIM, features))
    return ServerContender("echo", [sys.executable, "-m", "benchmarks.serve.echo_server", "PORT", *sizes])


def _peer(name: str, python: Path, folder: Path) -> ServerContender:
    return ServerContender(
        name, [str(python), str(Path(__file__).with_name(f"{name}_server.py")), "PORT", str(folder / "table.npy")]
    )


def race(
    contenders: Sequence[ServerContender],
    table: np.ndarray[Any, np.dtype[np.float32]],
    ids: int,
    clients: int,
    effort: LoadBudget,
    recorder: Recorder,
) -> dict[str, list[Result]]:
    """Measurements of every contender by round; empty for a contender that cannot run."""
    found: dict[str, list[Result]] = {contender.name: [] for contender in contenders}
    with tempfile.TemporaryDirectory() as folder, started(contenders, Path(folder)) as running:
        for one in list(running):
            try:
                one.wait(lambda address, one=one: _check(address, table, ids, exact=one.name != "echo"))  # type: ignore[misc]
            except BadInput as error:
                recorder.note(str(error))
                running.remove(one)
        time.sleep(effort.settle)
        for number in range(effort.rounds):
            for one in running[:: -1 if number % 2 else 1]:  # there and back: no server always follows the same one
                found[one.name].append(one.measure(clients, ids, effort.rows, effort.seconds))
    return found


@contextmanager
def started(contenders: Sequence[ServerContender], folder: Path) -> Iterator[list[RunningServer]]:
    running = [RunningServer(contender, folder / contender.name) for contender in contenders]
    try:
        yield list(running)
    finally:
        for one in running:
            one.end()


def check_ready(address: str) -> None:
    """OSError while the server does not respond with rows."""
    import grpc

    from benchmarks.serve.load_client import METHOD, OPTIONS, requests

    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        try:
            channel.unary_unary(METHOD)(requests(1, 1, ["C1"])[0][0], timeout=10)
        except grpc.RpcError as error:
            raise OSError(str(error)) from None


def _check(address: str, table: np.ndarray[Any, np.dtype[np.float32]], ids: int, exact: bool) -> None:
    """Compare responses with the table; OSError while the server does not respond."""
    import grpc

    from benchmarks.serve.load_client import METHOD, OPTIONS, requests
    from thermocline.serve.protocol import schema

    asked, ids_RN = requests(ids, len(table), [FEATURE])
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        for request, ids_N in list(zip(asked, ids_RN, strict=True))[:8]:
            try:
                data = channel.unary_unary(METHOD)(request, timeout=10)
            except grpc.RpcError as error:
                raise OSError(str(error)) from None
            response = schema.ModelInferResponse.FromString(data)
            raw = response.raw_output_contents
            rows_ND = (
                np.frombuffer(raw[0], np.float32) if raw else np.array(response.outputs[0].contents.fp32_contents, np.float32)
            )
            if exact and not np.array_equal(rows_ND.reshape(ids, DIM), table[ids_N]):
                raise BadInput(f"{address} answers other rows than the table has")
            assert rows_ND.size == ids * DIM, rows_ND.shape


def _add(recorder: Recorder, case: str, found: dict[str, list[Result]], peer: str, p99: bool = True) -> None:
    mine, theirs = found["ours-1"], found.get(peer, [])
    if not mine:
        recorder.fail(case, "our server did not come up")
        return
    for name, field, unit in ((case, "requests_per_cpu_s", UNIT), (f"{case}/p99", "p99_ms", "ms")):
        if field == "p99_ms" and not p99:
            continue
        value = _median(mine, field)
        spread = (max(each[field] for each in mine) - min(each[field] for each in mine)) / value
        if not theirs:
            recorder.add(name, value, unit, spread=spread, skipped=f"{peer} is absent")
            continue
        other = _median(theirs, field)
        ratio = value / other if unit == UNIT else other / value
        further = {"rounds": mine, "peer_rounds": theirs}
        recorder.add(name, value, unit, peer, other, ratio, spread, **(further if unit == UNIT else {}))


def _parity(
    recorder: Recorder,
    checkpoint: Path,
    table: np.ndarray[Any, np.dtype[np.float32]],
    effort: LoadBudget,
    counts: Sequence[int],
) -> None:
    contenders = [ours(checkpoint, 1), *(ours(checkpoint, cards) for cards in counts)]
    found = race(contenders, table, 64, 1, effort, recorder)
    for cards in counts:
        one, many = found["ours-1"], found[f"ours-{cards}"]
        for field in ("p50", "p99"):
            if not one or not many:
                recorder.fail(f"network/cards/{cards}/{field}", "a server did not come up")
                continue
            mine, other = _median(many, f"{field}_ms"), _median(one, f"{field}_ms")
            recorder.add(f"network/cards/{cards}/{field}", mine, "ms", "one card", other, other / mine)


def _median(found: Sequence[Result], field: str) -> float:
    return statistics.median(each[field] for each in found)


def _free_port() -> int:
    """A port with free ones behind it, for peers that take several."""
    while True:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = int(taken.getsockname()[1])
        if port < 60_000 and all(_is_free(port + more) for more in range(3)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0
