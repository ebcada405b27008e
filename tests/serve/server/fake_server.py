"""A server on free ports of the loopback, in a thread, with a model that needs no shards."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.errors import BadInput, IdOutOfRange
from thermocline.serve.errors import ShardDown
from thermocline.serve.served_model import ShardStatus, TensorMetadata
from thermocline.serve.server.config import ServerConfig, ServerLimits
from thermocline.serve.server.metrics import ServerMetrics
from thermocline.serve.server.model_repository import ModelRepository
from thermocline.serve.server.server import InferenceServer

ROWS, DIM = 1009, 7
PATIENCE_S = 120.0  # until a test fails instead of hanging
MARK = "fake_checkpoint"


def values_of(version: int, feature: str) -> np.ndarray:
    """The rows of a feature. No two tables or versions share a value."""
    start = version * 1e6 + (feature == "item") * 5e5
    return np.arange(start, start + ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)


class FakeTables:
    """Two tables in memory. A cleared `hold` makes it wait inside a batch; the next batch raises `fail`."""

    def __init__(self, name: str, version: str) -> None:
        self.name, self.version = name, version or "1"
        self.tables = {feature: values_of(int(self.version), feature) for feature in ("user", "item")}
        self.inputs = [TensorMetadata(feature, "INT64", (-1,), True) for feature in self.tables]
        self.inputs += [TensorMetadata(f"{feature}.offsets", "INT64", (-1,), True) for feature in self.tables]
        self.inputs += [TensorMetadata(f"{feature}.weights", "FP32", (-1,), True) for feature in self.tables]
        self.outputs = [TensorMetadata(feature, "FP32", (-1, DIM)) for feature in self.tables]
        self.hold = threading.Event()
        self.hold.set()
        self.entered = threading.Event()
        self.fail: Exception | None = None
        self.batches: list[int] = []
        self.lookups = [0, 0]
        self.down: int | None = None
        self.closed = False

    def infer(self, requests: Sequence[Mapping[str, np.ndarray]]) -> list[Mapping[str, np.ndarray] | Exception]:
        assert not self.closed
        self.batches.append(len(requests))
        self.entered.set()
        assert self.hold.wait(PATIENCE_S)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        return [self._one(request) for request in requests]

    def _one(self, request: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray] | Exception:
        answer = {}
        for feature, values_RD in self.tables.items():
            if feature not in request:
                continue
            ids_N = request[feature]
            bad_N = np.flatnonzero((ids_N < 0) | (ids_N >= ROWS))
            if len(bad_N):
                return IdOutOfRange(0, int(bad_N[0]), int(ids_N[bad_N[0]]), ROWS, feature)
            if self.down is not None and (ids_N % 2 == self.down).any():
                return ShardDown(self.down)
            for shard in range(2):
                self.lookups[shard] += int((ids_N % 2 == shard).sum())
            rows_ND = values_RD[ids_N]
            offsets_B = request.get(f"{feature}.offsets")
            if offsets_B is not None:
                if len(offsets_B) == 0 or offsets_B[0] != 0:
                    return BadInput("offsets must begin with 0", parameter=f"{feature}.offsets")
                rows_ND = np.add.reduceat(rows_ND, offsets_B)
            answer[feature] = rows_ND
        return answer

    def shards(self) -> list[ShardStatus]:
        return [ShardStatus(shard, shard != self.down, 4 * ROWS * DIM, self.lookups[shard], 1000 + shard) for shard in range(2)]

    def close(self) -> None:
        self.closed = True


@dataclass
class Running:
    """A server and the models that it loaded, the last one last."""

    http: str = ""
    grpc: str = ""
    server: InferenceServer | None = None
    loop: asyncio.AbstractEventLoop | None = None
    folder: Path = Path()
    models: list[FakeTables] = field(default_factory=list)
    ahead: float = 0.0  # seconds that the loop's clock is advanced

    @property
    def model(self) -> FakeTables:
        return self.models[-1]

    def do(self, coroutine: Any) -> Any:
        """Run a coroutine in the server's loop."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def pass_time(self, seconds: float) -> None:
        """Let the server handle its input, then advance the clock of its loop."""
        self.do(_turns())
        self.ahead += seconds
        self.do(_turns())

    def cut_off(self, data: bytes) -> bytes:
        """The response to incomplete HTTP input, after the server's timeout."""
        host, port = self.http.split(":")
        end, got = time.monotonic() + PATIENCE_S, b""
        with socket.create_connection((host, int(port))) as connection, suppress(ConnectionResetError):
            connection.sendall(data)
            connection.settimeout(0.05)
            while time.monotonic() < end:
                self.pass_time(7200)
                with suppress(TimeoutError):  # a worker thread is not done yet
                    while piece := connection.recv(1 << 16):
                        got += piece
                    return got
            raise AssertionError("the server never closed the connection")
        return got


async def _turns() -> None:
    """Enough turns of the loop to accept a connection and read its input."""
    for _ in range(50):
        await asyncio.sleep(0)


def make_folder(folder: Path, *names: str) -> Path:
    """Make folders that `FakeLoader` loads: '.' or 'name/3'."""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / MARK).touch()
    return folder


class FakeLoader:
    """Loads `FakeTables` into a list."""

    def __init__(self, models: list[FakeTables]) -> None:
        self.models = models

    def is_checkpoint(self, folder: Path) -> bool:
        return (folder / MARK).is_file()

    def load(self, name: str, version: str, folder: Path) -> FakeTables:
        if (folder / "damaged").exists():
            raise BadInput("block 3 of table 'user' has another checksum than its manifest", table="user")
        self.models.append(FakeTables(name, version))
        return self.models[-1]

    def companions(self, model: FakeTables) -> Sequence[FakeTables]:
        return ()


def start(
    folder: Path, limits: ServerLimits | None = None, new_loop: Callable[[], Any] | None = None, **settings: Any
) -> tuple[Running, Callable[[], None]]:
    """A server with every model of the folder loaded, and a function that stops it. Another loop's clock cannot be advanced."""
    running = Running(folder=folder)
    limits = limits or ServerLimits(drain=3)

    async def begin() -> None:
        repository = ModelRepository(folder, FakeLoader(running.models), limits, ServerMetrics())
        running.server = InferenceServer(repository, ServerConfig(http_port=0, grpc_port=0, limits=limits, **settings))
        await running.server.start()
        await running.server.load_all()

    loop = running.loop = (new_loop or asyncio.new_event_loop)()
    if new_loop is None:
        clock = loop.time
        loop.time = lambda: clock() + running.ahead  # type: ignore[method-assign]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    running.do(begin())
    assert running.server is not None
    running.http, running.grpc = f"127.0.0.1:{running.server.http_port}", f"127.0.0.1:{running.server.grpc_port}"

    def stop() -> None:
        for model in running.models:
            model.hold.set()
        assert running.server is not None
        running.do(running.server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert all(model.closed for model in running.models)

    return running, stop


def main() -> None:
    """Serve a folder in a process of its own: print both addresses, and end with standard input."""
    running, stop = start(Path(sys.argv[1]))
    print(running.http, running.grpc, flush=True)
    sys.stdin.read()
    stop()


def until(true: Callable[[], bool], words: str) -> None:
    """Wait for a condition that another thread brings about."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, words
        time.sleep(0.002)


if __name__ == "__main__":
    main()
