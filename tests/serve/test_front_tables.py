"""Tables of front processes, in this process: rows written in place, counts, and what is sent to fronts."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch

import thermocline
from serve.test_fronts import DIM, IDS, ROWS, constant, until
from thermocline.serve.fronts import front_processes
from thermocline.serve.fronts.front import FrontRepository
from thermocline.serve.fronts.front_tables import FrontLookups, FrontTables
from thermocline.serve.fronts.fronts_server import FrontsServer
from thermocline.serve.fronts.messages import pack, receive_message, send_message, unpack
from thermocline.serve.protocol.shared_memory import SharedRegion
from thermocline.serve.server.config import ServerConfig, ServerLimits
from thermocline.serve.server.metrics import ModelMetrics, ServerMetrics, subtract_counts
from thermocline.serve.server.model_loader import ShardConfig
from thermocline.serve.server.model_repository import ModelRepository
from thermocline.serve.tables.lookup import look_up_alone
from thermocline.serve.tables.requests import parse_request
from thermocline.serve.tables.segments import SharedSegment
from thermocline.serve.tables.shard_group import ShardGroup
from thermocline.serve.tables.shard_server import socket_pair


class OneFront:
    """A front in this process."""

    def __init__(self) -> None:
        self.lookups = FrontLookups()
        self.tables = FrontTables("tables", self.lookups)

    def show(self, group: Any, version: Any, held: int, segments: Any) -> None:
        own = [SharedSegment(each.size, descriptor=os.dup(each.descriptor)) for each in segments]
        packed = pack(front_processes._values_of(version))
        values = unpack(os.dup(packed.descriptor))
        self.tables.show(self.tables.prepare(values, [] if self.tables.version else own))

    def settle(self, group: Any, seconds: float) -> bool:
        return self.tables.settle(0.0)

    def hide(self, group: Any) -> None:
        self.tables.close()


def test_rows_are_written_in_place_only_when_no_front_reads_them(tmp_path: Path) -> None:
    rows = thermocline.RowConfig("fp32", cache=0.0)
    thermocline.save(thermocline.EmbeddingCollection([thermocline.Table("user", ROWS, DIM)], rows=rows), tmp_path)

    with ShardGroup(tmp_path, 2) as group:
        readers = OneFront()
        group.share(readers)
        before = group.lookup({"user": range(ROWS)})["user"]
        reading = readers.tables.current  # a lookup that does not end
        group.apply_deltas("1+1", constant(group, 7.0))
        assert not group.settle() and group.current.overlay is not None
        assert torch.equal(readers.tables.lookup({"user": range(ROWS)})["user"], torch.full((ROWS, DIM), 7.0))
        assert torch.equal(torch.from_numpy(look_up_alone(reading, parse_request(reading, IDS))["user"]), before)
        del reading
        until(group.settle, "the rows were not written in place")
        assert group.current.overlay is None
        assert torch.equal(readers.tables.lookup({"user": range(ROWS)})["user"], torch.full((ROWS, DIM), 7.0))


def test_lookups_of_elastic_ids_in_fronts_are_counted_through_publishes(tmp_path: Path) -> None:
    torch.manual_seed(3)
    table = thermocline.Table("user", ROWS, DIM, ids=thermocline.IdMap.elastic(ROWS, admit_after=1))
    module = thermocline.EmbeddingCollection([table], rows=thermocline.RowConfig("fp32", cache=0.0))
    born = torch.arange(100) * 7919 + 13
    module(born[:, None]).values().sum().backward()
    module.flush()
    thermocline.save(module, tmp_path)
    ids = torch.cat([born, -1 - torch.arange(63)])
    with ShardGroup(tmp_path, 2) as group:
        fronts, sent = [OneFront(), OneFront()], [dict[str, Any](), dict[str, Any]()]
        for each in fronts:
            group.share(each)

        def tell() -> tuple[int, ...]:
            for number, front in enumerate(fronts):
                now = front.lookups.counts()
                group.count_lookups(**json.loads(json.dumps(subtract_counts(now, sent[number]))))
                sent[number] = now
            return tuple(group.current.id_counts["user"])

        (before, unknown, used), lookups = tell(), sum(shard.lookups for shard in group.shards())
        assert used == 100
        expected = group.lookup({"user": ids})["user"]  # counted in this process, once
        for each in fronts:
            assert torch.equal(each.tables.lookup({"user": ids})["user"], expected)
        assert tell() == (before + 3 * 163, unknown + 3 * 63, 100)
        maps = group.current.maps
        group.apply_deltas("1+1", {"user": constant(group, 7.0)["user"]})
        assert group.current.maps is maps, "ids that stayed would be sent to fronts again"
        for each in fronts:
            group.share(each)  # the version of the publish
            assert (each.tables.lookup({"user": born})["user"] == 7).all()
        assert tell() == (before + 3 * 163 + 200, unknown + 3 * 63, 100)
        assert sum(shard.lookups for shard in group.shards()) <= lookups + 3 * 163 + 200


def test_lookups_of_a_model_that_is_loaded_again_are_not_taken_back(tmp_path: Path) -> None:
    rows = thermocline.RowConfig("fp32", cache=0.0)
    thermocline.save(thermocline.EmbeddingCollection([thermocline.Table("user", ROWS, DIM)], rows=rows), tmp_path)

    async def load_twice() -> None:
        repository = FrontRepository(ServerConfig())
        with ShardGroup(tmp_path, 2) as group:
            assert group._supervisor is not None
            told: dict[str, Any] = {}
            for ids in (range(ROWS), range(63)):
                packed = pack(front_processes._values_of(group.current))
                values = unpack(os.dup(packed.descriptor))
                memory = group._supervisor.segments(str(group._held))
                own = [SharedSegment(each.size, descriptor=os.dup(each.descriptor)) for each in memory]
                tables, version = repository.prepare("tables", values, own)
                repository.show(tables, version)
                began = sum(repository.counts()["lookups"]["tables"]["shards"])
                tables.lookup({"user": ids})
                repository.hide("tables")
                found = repository.counts()
                since, told = subtract_counts(found, told)["lookups"]["tables"]["shards"], found
                assert min(since) >= 0 and sum(found["lookups"]["tables"]["shards"]) == began + len(ids)
            await asyncio.gather(*repository._closing)

    asyncio.run(load_twice())


def test_packed_values_come_back_in_every_bit() -> None:
    tensors = [
        torch.arange(63, dtype=torch.bfloat16)[::2],
        torch.tensor(3.5),
        torch.zeros(0, 7),
        torch.ones(3, dtype=torch.bool),
    ]
    ids = np.arange(1001) * 7
    segment = pack({"tensors": tensors, "ids": ids, "same": [ids, ids], "empty": np.zeros((0, 3))})
    found = unpack(os.dup(segment.descriptor))
    del segment
    for one, other in zip(found["tensors"], tensors, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype and one.shape == other.shape
    np.testing.assert_array_equal(found["ids"], ids)
    assert found["same"][0] is found["same"][1] and found["empty"].shape == (0, 3)


@pytest.mark.parametrize("length", [0, 1, 70_000, 1_000_003])
def test_messages_have_any_length(length: int) -> None:
    mine, theirs = socket_pair()
    reading, writing = os.pipe()
    with mine, theirs:
        send_message(mine, {"text": "x" * length, "apart!": 1}, [writing])
        message, (copy,) = receive_message(theirs)
    assert message == {"text": "x" * length, "apart!": 1}
    os.write(copy, b"1")
    assert os.read(reading, 2) == b"1"
    for each in (reading, writing, copy):
        os.close(each)


def test_counts_of_processes_add_up_to_those_of_one() -> None:
    parts, whole, added = [ModelMetrics("a"), ModelMetrics("a")], ModelMetrics("a"), ModelMetrics("a")
    sent: list[dict[str, Any]] = [{}, {}]
    random = np.random.default_rng(1)
    for number in range(63):
        part, seconds = parts[number % 2], random.exponential(1e-3, 4)
        for one in (part, whole):
            one.record(*seconds, 3)
            one.failed["NOT_FOUND"] += number % 3
            one.batches[number % 5] += 1
        now = part.counts()
        added.add(json.loads(json.dumps(subtract_counts(now, sent[number % 2]))))
        sent[number % 2] = now
    found, expected = added.counts(), whole.counts()
    for stage, counts in found["stages"].items():
        assert counts.pop("total") == pytest.approx(expected["stages"][stage].pop("total"))
    assert found == expected


# -- supervision --


class FakeFront:
    """A front process without a process, which obeys every order."""

    def __init__(self, number: int) -> None:
        self.number, self.process = number, Mock(pid=7)
        (self.asks, self.theirs), (self.orders, _) = socket_pair(), socket_pair()
        self.has, self.gauges, self.answers = dict[str, Any](), dict[str, Any](), True
        self.killed = threading.Event()
        self.order = self.close = Mock()

    def reply(self) -> dict[str, Any]:
        return {}

    def kill(self) -> None:
        self.killed.set()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The supervision of one front."""
    monkeypatch.setattr(front_processes, "FrontProcess", FakeFront)
    processes = front_processes.FrontProcesses(ServerConfig(fronts=1), Mock())
    processes.start()
    yield processes
    processes._closing = True
    processes.running[0].theirs.close()


def test_a_front_is_replaced_after_starting_another_one_failed(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, other = watched.running[0], FakeFront(0)
    monkeypatch.setattr(front_processes, "FrontProcess", Mock(side_effect=[OSError(errno.EAGAIN, "no process"), other]))
    before.theirs.close()
    until(lambda: watched.running[0] is other, "the front is not replaced")


def test_a_silent_front_is_killed_while_an_order_waits_for_it(watched: Any) -> None:
    front = watched.running[0]
    with watched._lock:  # as an order that waits for a reply has it
        front.theirs.close()
        assert front.killed.wait(10)
    until(lambda: watched.running[0] is not front, "the front is not replaced")


def make_server(folder: Path) -> FrontsServer:
    return FrontsServer(ModelRepository(folder, ShardConfig(), ServerLimits(), ServerMetrics()), ServerConfig(fronts=2))


def test_states_reach_fronts_in_their_order(tmp_path: Path) -> None:
    async def show_two() -> None:
        server, told = make_server(tmp_path), list[tuple[Any, asyncio.Future[None]]]()
        loop, server._fronts = server._loop, Mock()

        def run_later(_: None, work: Any, state: Any) -> asyncio.Future[None]:
            told.append((state["regions"], loop.create_future()))
            return told[-1][1]

        server._loop = Mock(run_in_executor=run_later)
        first = loop.create_task(server._show_state())
        await asyncio.sleep(0)
        server._service.regions.regions["r"] = SharedRegion("r", "key", 0, 8)
        second = loop.create_task(server._show_state())
        await asyncio.sleep(0)
        assert [state for state, _ in told] == [[]], "a later state may overtake an earlier one"
        told[0][1].set_result(None)
        await first
        await asyncio.sleep(0)
        told[1][1].set_result(None)
        await second
        assert [len(state) for state, _ in told] == [0, 1]

    asyncio.run(show_two())


def test_the_state_is_sampled_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sample() -> None:
        server = make_server(tmp_path)
        server._fronts, server._state = Mock(), Mock(side_effect=OSError(errno.ESTALE, "stale"))  # type: ignore[method-assign]
        seconds = AsyncMock(side_effect=[None, None, asyncio.CancelledError])
        monkeypatch.setattr(asyncio, "sleep", seconds)
        with pytest.raises(asyncio.CancelledError):
            await server._sample()
        assert seconds.await_count == 3 and server._state.call_count == 2

    asyncio.run(sample())
