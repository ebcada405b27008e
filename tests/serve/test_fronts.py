"""Front processes over one copy of the rows: the same rows at each, through publishes, loads and killed fronts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http

import thermocline
from thermocline.checkpoint.publishes.row_delta import RowDelta
from thermocline.errors import BadInput
from thermocline.heat.text_ids import id_of_text
from thermocline.kernels import quantize_rows
from thermocline.models import DLRM
from thermocline.serve.fronts import front_processes
from thermocline.serve.fronts.front_processes import reserve_port
from thermocline.serve.fronts.fronts_server import FrontsServer
from thermocline.serve.server.config import ServerConfig, ServerLimits
from thermocline.serve.server.model_loader import ShardConfig, make_repository

ROWS, DIM, NAMES = 211, 8, ("user", "item", "shop")
PATIENCE_S = 120.0
PREFIX = f"thermocline-{os.getpid()}-"
IDS = {"user": np.arange(ROWS)}
INFER = "/v2/models/{}/infer"


def until(true: Callable[[], Any], words: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, words
        time.sleep(0.01)


class Fronts:
    """A server with two fronts, in a thread, over the checkpoint of a DLRM."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(3)
        tables = [thermocline.Table(name, ROWS, DIM, ids=thermocline.IdMap.hashed(ROWS)) for name in NAMES]
        rows = thermocline.RowConfig("fp32", cache=0.0)
        self.model = DLRM(thermocline.EmbeddingCollection(tables, rows=rows), features=3, dim=DIM, dense=5).eval()
        self.folder = folder
        thermocline.save(self.model, folder)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.do(self._start())

    async def _start(self) -> None:
        limits = ServerLimits(drain=3)
        repository = make_repository(self.folder, ShardConfig(2), limits)
        self.server = FrontsServer(
            repository, ServerConfig(http_port=0, grpc_port=0, limits=limits, fronts=2, shared_memory=PREFIX)
        )
        await self.server.start()
        await self.server.load_all()

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    @property
    def group(self) -> Any:
        return self.server.repository.served("tables").model

    @property
    def running(self) -> dict[int, Any]:
        assert self.server._fronts is not None
        return self.server._fronts.running

    def ask(self, path: str, body: Any = None, connection: HTTPConnection | None = None) -> Any:
        """The answer of one front, by default of a new connection."""
        own = connection or HTTPConnection("127.0.0.1", self.server.http_port, timeout=PATIENCE_S)
        own.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        text = own.getresponse().read().decode()
        if connection is None:
            own.close()
        return json.loads(text) if text[:1] in ("{", "[") else text

    def rows(self, connection: HTTPConnection | None = None) -> tuple[str, np.ndarray]:
        tensor = {"name": "user", "shape": [ROWS], "datatype": "INT64", "data": [*range(ROWS)]}
        found = self.ask(INFER.format("tables"), {"inputs": [tensor]}, connection)
        values = np.array(found["outputs"][0]["data"], np.float32)
        return found["model_version"], values.reshape(ROWS, DIM)

    def counter(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.ask("/metrics"), re.MULTILINE)
        return float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    running = Fronts(tmp_path_factory.mktemp("fronts") / "checkpoint")
    yield running
    pids = [front.process.pid for front in running.running.values()]
    running.do(running.server.stop())
    running.loop.call_soon_threadsafe(running.loop.stop)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def connections_to(fronts: Fronts, count: int) -> list[HTTPConnection]:
    """Connections that have been accepted, each by one of the fronts."""
    made = [HTTPConnection("127.0.0.1", fronts.server.http_port, timeout=PATIENCE_S) for _ in range(count)]
    for each in made:
        fronts.ask("/v2", connection=each)
    return made


def files_of(front: Any) -> int:
    return len(os.listdir(f"/proc/{front.process.pid}/fd"))


def test_every_front_answers_with_the_rows_of_the_module(fronts: Fronts) -> None:
    before = [files_of(front) for front in fronts.running.values()]
    answered = fronts.counter('thermocline_requests_total{model="tables",status="OK"}')
    connections = connections_to(fronts, 40)
    assert all(files_of(front) > number for front, number in zip(fronts.running.values(), before, strict=True))
    with torch.no_grad():  # all features of a module have as many ids
        columns = fronts.model.embeddings(torch.arange(ROWS)[:, None].expand(-1, 3)).values()
    expected = columns[:, :DIM].numpy()
    for each in connections:
        _, rows = fronts.rows(each)
        np.testing.assert_array_equal(rows, expected)
        each.close()
    name = 'thermocline_requests_total{model="tables",status="OK"}'
    until(lambda: fronts.counter(name) >= answered + 40, "requests were not counted")
    assert fronts.counter(name) == answered + 40
    assert sum(shard.lookups for shard in fronts.group.shards()) >= 40 * ROWS
    status = fronts.ask("/status.json")
    assert status["state"] == "ready" and [shard["ready"] for shard in status["models"][0]["cards"]] == [True, True]
    assert fronts.ask("/v2/models/tables/stats")["model_stats"][0]["inference_count"] == answered + 40


def test_fronts_rank_with_the_model_around_the_tables(fronts: Fronts) -> None:
    random = np.random.default_rng(3)
    ids = {"user": random.integers(0, ROWS, 1), "item": random.integers(0, ROWS, 63), "shop": random.integers(0, ROWS, 63)}
    dense = random.standard_normal((1, 5)).astype(np.float32)
    inputs = [{"name": n, "shape": list(a.shape), "datatype": "INT64", "data": a.tolist()} for n, a in ids.items()]
    inputs.append({"name": "dense", "shape": [1, 5], "datatype": "FP32", "data": dense.ravel().tolist()})
    columns = torch.stack([torch.from_numpy(ids[name]).expand(63) for name in NAMES], 1)
    with torch.no_grad():
        expected = fronts.model(torch.from_numpy(dense).expand(63, -1), columns).numpy()
    for _ in range(8):
        found = fronts.ask(INFER.format("rank"), {"inputs": inputs})
        np.testing.assert_allclose(found["outputs"][0]["data"], expected.ravel(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("client", [over_grpc, over_http])
def test_texts_are_ids_of_hashed_tables(fronts: Fronts, client: Any) -> None:
    texts = ["tea", "grüner Tee", ""]
    expected = fronts.group.lookup({"user": [id_of_text(text) for text in texts]})["user"].numpy()
    data = client.InferInput("user", [3], "BYTES")
    data.set_data_from_numpy(np.array(texts, np.object_))
    port = fronts.server.grpc_port if client is over_grpc else fronts.server.http_port
    with client.InferenceServerClient(f"127.0.0.1:{port}") as own:
        np.testing.assert_array_equal(own.infer("tables", [data]).as_numpy("user"), expected)


def test_shared_memory_is_known_to_all_fronts(fronts: Fronts) -> None:
    memory = shared_memory.SharedMemory(f"{PREFIX}ids", create=True, size=8 * ROWS)
    try:
        memory.buf[: 8 * ROWS] = np.arange(ROWS).tobytes()
        fronts.ask("/v2/systemsharedmemory/region/ids/register", {"key": memory.name, "byte_size": 8 * ROWS})
        ids = over_grpc.InferInput("user", [ROWS], "INT64")
        ids.set_shared_memory("ids", 8 * ROWS)
        expected = fronts.group.lookup({"user": range(ROWS)})["user"].numpy()
        for _ in range(8):
            with over_grpc.InferenceServerClient(f"127.0.0.1:{fronts.server.grpc_port}") as client:
                np.testing.assert_array_equal(client.infer("tables", [ids]).as_numpy("user"), expected)
        fronts.ask("/v2/systemsharedmemory/unregister", {})
        assert {len(fronts.ask("/v2/systemsharedmemory/status")) for _ in range(8)} == {0}
    finally:
        memory.close()
        memory.unlink()


def constant(group: Any, value: float) -> dict[str, RowDelta]:
    codes, meta = quantize_rows(torch.full((ROWS, DIM), value), group.current.layout.tables[0].table.format, None, None)
    return {"user": RowDelta(np.arange(ROWS), codes.numpy(), meta.numpy())}


def test_publishes_reach_all_fronts_and_are_never_mixed(fronts: Fronts) -> None:
    done, faults = threading.Event(), list[str]()
    fronts.group.apply_deltas("1+1", constant(fronts.group, 1.0))

    def read() -> None:
        (own,), last = connections_to(fronts, 1), 0.0
        while not done.is_set():
            version, rows = fronts.rows(own)
            value = float(rows[0, 0])
            if not (rows == value).all() or value < last or version != f"1+{int(value)}":
                faults.append(f"{version}: {np.unique(rows)} after {last}")
            last = value

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for number in range(2, 40):
        fronts.group.apply_deltas(f"1+{number}", constant(fronts.group, float(number)))
        for _ in range(3):
            assert fronts.rows()[0] == f"1+{number}", "a front serves an older publish than the one that was acknowledged"
    done.set()
    for reader in readers:
        reader.join()
    assert not faults, faults[:3]
    until(fronts.group.settle, "the publishes were not written in place")
    assert fronts.group.current.overlay is None
    assert (fronts.rows()[1] == 39).all()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_front_that_dies_or_hangs_is_replaced(fronts: Fronts, how: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_processes, "ORDER_S", 1.0)
    counted = fronts.counter('thermocline_ids_total{model="tables"}')
    front = fronts.running[1]
    os.kill(front.process.pid, how)
    fronts.group.apply_deltas(f"{how}", constant(fronts.group, float(how)))
    until(lambda: fronts.running[1] is not front, "the front is not replaced")
    connections = connections_to(fronts, 20)
    for each in connections:
        version, rows = fronts.rows(each)
        assert version == f"{how}" and (rows == float(how)).all()
        each.close()
    until(lambda: fronts.counter('thermocline_ids_total{model="tables"}') >= counted + 20 * ROWS, "counts were lost")


def test_a_version_that_cannot_be_sent_to_fronts_is_served_nowhere(fronts: Fronts, monkeypatch: pytest.MonkeyPatch) -> None:
    fronts.group.apply_deltas("before", constant(fronts.group, 5.0))

    def no_memory(values: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr("thermocline.serve.fronts.front_processes.pack", no_memory)
        fronts.group.apply_deltas("after", constant(fronts.group, 6.0))
    assert fronts.group.version == "before" and (fronts.group.lookup({"user": [3]})["user"] == 5.0).all()
    for connection in connections_to(fronts, 12):
        version, rows = fronts.rows(connection)
        assert version == "before" and (rows == 5.0).all()
        connection.close()
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr("thermocline.serve.fronts.front_processes.pack", no_memory)
        fronts.group.load(fronts.folder)
    assert fronts.group.version == "before" and (fronts.group.lookup({"user": [3]})["user"] == 5.0).all()
    fronts.group.apply_deltas("after", constant(fronts.group, 6.0))
    assert {fronts.rows()[0] for _ in range(6)} == {"after"}


def test_loads_and_unloads_concern_all_fronts(fronts: Fronts) -> None:
    thermocline.save(fronts.model, fronts.folder)
    assert fronts.ask("/v2/repository/models/tables/load", {}) == ""
    version = fronts.group.version
    assert {fronts.rows()[0] for _ in range(12)} == {version}
    assert "there is no model" in fronts.ask("/v2/repository/models/nothing/load", {})["error"]
    assert fronts.ask("/v2/repository/models/tables/unload", {}) == ""
    for _ in range(6):
        assert "error" in fronts.ask("/v2/models/tables") and "error" in fronts.ask("/v2/models/rank")
    assert fronts.ask("/v2/repository/index", {})[0]["state"] == "UNAVAILABLE"
    assert fronts.ask("/v2/repository/models/tables/load", {}) == ""
    for _ in range(6):
        assert fronts.rows()[0] == version and fronts.ask("/v2/models/rank")["versions"] == [version]


def test_a_port_is_shared_by_the_fronts_of_one_server_only(fronts: Fronts) -> None:
    with pytest.raises(BadInput) as caught:
        reserve_port("127.0.0.1", fronts.server.grpc_port, "grpc_port")
    assert caught.value.parameter == "grpc_port"


def test_sigterm_ends_the_server_and_its_fronts(tmp_path: Path) -> None:
    thermocline.save(thermocline.EmbeddingBag(63, 8, mode="sum"), tmp_path)
    command = [sys.executable, "-c", "from thermocline.cli import main; main()", "serve", "run", tmp_path, "--shards", "1"]
    command += ["--fronts", "2", "--http-port", "0", "--grpc-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdout.readline().startswith("ready: ")
            below = [pid for each in Path(f"/proc/{server.pid}/task").glob("*/children") for pid in each.read_text().split()]
            server.terminate()
            _, logged = server.communicate(timeout=PATIENCE_S)
        finally:
            server.kill()
    assert server.returncode == 0 and len(below) >= 2
    assert [json.loads(line)["event"] for line in logged.splitlines() if line[:1] == "{"][-2:] == ["draining", "stopped"]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in below)
