"""Modules with elastic ids on a GPU: the rows and ids of a CPU, without a wait, also with rows in host memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thermocline as tc
from thermocline import IdMap, RowConfig, Table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
EXACT = tc.SGD(lr=0.5)


def _bag(device: str = "cpu", grow_from: int | None = None, **config: Any) -> tc.EmbeddingBag:
    rows = RowConfig(**{"precision": "fp32", "optimizer": EXACT, **config})
    ids = IdMap.elastic(2000, half_life=3, grow_from=grow_from)
    return tc.EmbeddingBag(2000, 16, mode="sum", rows=rows, ids=ids, device=device)


def _batches(count: int, seed: int = 0) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    for step in range(count):
        yield torch.randint(300 * step, 300 * step + 3000, (500, 4), generator=draw) * 7919


def _train(module: Any, batches: Iterator[Tensor], device: str) -> None:
    for batch in batches:
        module(batch.to(device)).sum().backward()


def _same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[name].cpu(), other[name].cpu()) for name in mine)


def test_a_bag_trains_as_on_a_cpu_and_moves_with_its_ids():
    bags = [_bag(), _bag().cuda()]
    for bag, device in zip(bags, ("cpu", "cuda"), strict=True):
        _train(bag, _batches(12), device)
    assert _same(*bags) and bags[1].elastic().state()["evicted"] > 500
    back = copy.deepcopy(bags[1]).cpu()
    _train(back, _batches(4, seed=1), "cpu")
    _train(bags[1], _batches(4, seed=1), "cuda")
    assert _same(back, bags[1])


def test_a_step_never_waits_for_the_gpu():
    bag = _bag("cuda", precision="int8", cache=0.1)
    batches = [batch.cuda() for batch in _batches(14)]
    for number, batch in enumerate(batches):
        torch.cuda.set_sync_debug_mode("error" if number >= 10 else "default")
        bag(batch).sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    assert bag.elastic().state()["steps"] == 14


@pytest.mark.parametrize("cache", [0.0, 0.1])
def test_rows_in_host_memory_train_as_on_the_gpu(cache: float):
    bags = [_bag("cuda", precision="int8", cache=cache), _bag("cuda", precision="int8", cache=cache, residency="host")]
    bags[1].load_state_dict(bags[0].state_dict())
    _train(bags[0], _batches(12), "cuda")
    for _, rows in bags[1].prefetched([batch.cuda() for batch in _batches(12)]):
        bags[1](rows).sum().backward()
    assert _same(*bags) and bags[1].elastic().state()["evicted"] > 500


def test_features_share_ids_pins_and_reports():
    tables = [Table("item", 700, 8, features=("seen", "bought"), ids=IdMap.elastic(700, evict="lru", ttl=8))]
    tables += [Table("hour", 24, 8), Table("user", 300, 8, ids=IdMap.elastic(300, salt=3, admit_after=2))]
    modules, reports = [], []
    for device in ("cpu", "cuda"):
        rows, gone = tc.EmbeddingCollection(tables, rows=RowConfig("fp32", optimizer=EXACT), device=device), []
        rows.elastic("seen").on_evict(
            lambda ids, values, gone=gone: gone.extend(zip(ids.tolist(), values.tolist(), strict=True))
        )
        rows.elastic("seen").pin(torch.tensor([-5, 6]))
        for batch in _batches(12):
            batch[:, 2] %= 24
            rows(batch.to(device)).values().sum().backward()
        rows.elastic("seen").unpin(torch.tensor([6]))
        modules.append(rows)
        reports.append(sorted(gone))
    assert _same(*modules) and reports[0] == reports[1] and reports[0]
    ids = torch.tensor([-5, 6, 1 << 50])
    assert torch.equal(*(each.elastic("bought").rows_of(ids) for each in modules))


@pytest.mark.filterwarnings("ignore:elastic table")
def test_ids_are_published_pinned_and_loaded_into_fewer_rows(tmp_path: Path):
    bags, moves = [_bag(), _bag("cuda")], []
    bags[1].load_state_dict(bags[0].state_dict())
    for bag, device in zip(bags, ("cpu", "cuda"), strict=True):
        bag.maps.record_moves(True)
        _train(bag, _batches(6), device)
        moves.append(bag.maps.take_moved())
        bag.elastic().pin(torch.tensor([-5, 6]))
        moves.append(bag.maps.take_moved())
        bag.maps.give_back_moved(moves[-1])
        bag.load_state_dict(copy.deepcopy(bag.state_dict()))
        _train(bag, _batches(2, seed=1), device)
        moves.append(bag.maps.take_moved())
        tc.save(bag, tmp_path / device)
    assert _same(*bags)
    for (cpu,), (cuda,) in zip(moves[:3], moves[3:], strict=True):
        assert cpu[0] == cuda[0] and all(torch.equal(*each) for each in zip(cpu[1], cuda[1], strict=True))
    smaller = [
        tc.EmbeddingBag(900, 16, mode="sum", rows=RowConfig("fp32", optimizer=EXACT), ids=IdMap.elastic(900, half_life=3))
        for _ in bags
    ]
    smaller[1].cuda()
    for bag in smaller:
        tc.load_into(bag, tmp_path / "cuda")
    assert _same(*smaller) and smaller[1].elastic().state()["dropped"] > 0


def test_a_collection_that_reads_zeros_never_waits_for_the_gpu():
    tables = [Table("item", 700, 8, features=("seen", "bought"), ids=IdMap.elastic(700, shared=0)), Table("hour", 24, 8)]
    rows = tc.EmbeddingCollection(tables, rows=RowConfig("fp32", optimizer=EXACT), mode="sum", device="cuda")
    batches = [batch[:, :3].clone() for batch in _batches(14)]
    for batch in batches:
        batch[:, 2] %= 24
    for number, batch in enumerate([batch.cuda() for batch in batches]):
        torch.cuda.set_sync_debug_mode("error" if number >= 10 else "default")
        rows(batch).values().sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    assert rows.elastic("seen").state()["shared_lookups"] > 0 and not rows.get_rows("item", torch.tensor([699])).any()


@pytest.mark.parametrize("grow_from", [None, 100])
def test_a_recorded_graph_gives_rows_to_new_ids(grow_from: int | None):
    bags, ids = [_bag("cuda", grow_from), _bag("cuda", grow_from)], torch.zeros(500, 4, dtype=torch.int64, device="cuda")
    bags[1].load_state_dict(bags[0].state_dict())
    for _ in range(3):
        for bag in bags:
            bag(ids).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bags[1](ids).sum().backward()
    for batch in _batches(8):
        ids.copy_(batch)
        graph.replay()
        bags[0](ids).sum().backward()
    assert _same(*bags) and bags[1].elastic().state()["evicted"] > 0
    assert grow_from is None or bags[1].elastic().state()["rows"] > 1000


def test_rows_that_were_prefetched_train_while_the_table_grows():
    bags = [_bag("cuda", 100, precision="int8", cache=0.1, residency=where) for where in ("device", "host")]
    bags[1].load_state_dict(bags[0].state_dict())
    _train(bags[0], _batches(12), "cuda")
    for _, rows in bags[1].prefetched([batch.cuda() for batch in _batches(12)]):
        bags[1](rows).sum().backward()
    assert _same(*bags) and bags[1].elastic().state()["rows"] > 1000


def test_times_and_chances_are_those_of_a_cpu():
    ids, bags = IdMap.elastic(2000, max_age=3.0, admit_chance=0.5, shared=0), []
    for device in ("cpu", "cuda"):
        bags.append(tc.EmbeddingBag(2000, 16, mode="sum", rows=RowConfig("fp32", optimizer=EXACT), ids=ids).to(device))
        for step, batch in enumerate(_batches(12)):
            bags[-1].elastic().advance(float(step))
            bags[-1](batch.to(device)).sum().backward()
    assert _same(*bags) and bags[1].elastic().state()["expired"] > 100
