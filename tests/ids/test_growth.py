"""Tables that grow: chunks of rows open when they are needed, and nothing that holds rows notices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import thermocline as tc
from support import has
from thermocline import BadInput, IdMap, RowConfig, Table
from thermocline.ids.capacity import take_over
from thermocline.ids.elastic import KeyTable
from thermocline.ids.elastic_rows import ElasticRows
from thermocline.ids.growth import PlaceOrder
from thermocline.kernels.elastic import gpu
from thermocline.kernels.gpu.launch import INTERPRETED

EXACT = RowConfig("fp32", optimizer=tc.SGD(lr=0.5))


def _bag(rows: int = 1281, config: RowConfig = EXACT, **rule: Any) -> tc.EmbeddingBag:
    return tc.EmbeddingBag(rows, 4, mode="sum", rows=config, ids=IdMap.elastic(rows, **{"shared": 1, **rule}))


def _batches(count: int, born: int = 40) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(0)
    for step in range(count):
        yield torch.randint(born * step // 2, born * (step + 1), (60, 3), generator=draw) * 7919


@pytest.mark.parametrize("buckets", [0, 1, 3, 20])
def test_every_row_is_that_of_one_place(buckets: int):
    order, places = PlaceOrder(buckets), torch.arange(1283)
    rows = order.rows(places)
    assert torch.equal(rows.sort().values, places) and torch.equal(order.of(rows), places)
    assert torch.equal(rows[64 * buckets :], places[64 * buckets :])


def test_a_table_grows_with_its_ids_up_to_its_rows():
    table = KeyTable(ElasticRows(1281, 1, 1, grow_from=129), 1)
    rows = [table.state()["rows"]]
    for first in range(0, 4000, 40):
        table.step(torch.arange(first, first + 40), protect=False)
        rows.append(table.state()["rows"])
        assert table.state()["used"] <= rows[-1]
    assert rows[0] == 140 and rows == sorted(rows) and rows[-1] == 1280 and len(set(rows)) > 20
    assert table.state()["most_rows"] == 1280


def test_growth_moves_no_row_and_no_array():
    bag, places = _bag(config=RowConfig("int8", cache=0.1), grow_from=129), {}
    arrays = [bag.arena.codes.data_ptr(), bag.arena.meta.data_ptr(), *(state.data_ptr() for state in bag.trainer.states)]
    bag.elastic().pin(first := torch.arange(30) * 7919)
    for batch in _batches(30):
        bag(batch).square().sum().backward()
        places.setdefault("first", bag.elastic().rows_of(first))
    assert torch.equal(bag.elastic().rows_of(first), places["first"]) and bag.elastic().state()["rows"] > 600
    assert arrays[:2] == [bag.arena.codes.data_ptr(), bag.arena.meta.data_ptr()]
    assert arrays[2:] == [state.data_ptr() for state in bag.trainer.states]


def test_rows_are_those_of_a_table_that_begins_with_all():
    small, whole = _bag(grow_from=641), _bag()
    for batch in _batches(12):
        outs = [bag(batch) for bag in (small, whole)]
        if small.elastic().state()["evicted"] == 0 == small.elastic().state()["shared_lookups"]:
            assert torch.equal(*outs)
        for out in outs:
            out.square().sum().backward()
    assert small.elastic().state()["evicted"] == 0 and small.elastic().state()["rows"] < 1280
    assert torch.equal(small.elastic().ids().sort().values, whole.elastic().ids().sort().values)


def test_a_lookup_that_waits_for_its_backward_trains_its_rows_while_the_table_grows():
    bag = _bag(grow_from=129)
    early = bag(torch.arange(60)[:, None])
    before = bag.get_rows(bag.elastic().rows_of(torch.arange(60)))
    for first in range(1000, 2000, 50):
        bag(torch.arange(first, first + 50)[:, None])
    assert bag.elastic().state()["rows"] > 400
    early.sum().backward()
    assert torch.equal(bag.get_rows(bag.elastic().rows_of(torch.arange(60))), before - 0.5)


def test_memory_counts_the_rows_to_which_a_table_has_grown():
    bag, whole = _bag(grow_from=129, config=RowConfig("int8", cache=0.0)), _bag(config=RowConfig("int8", cache=0.0))
    begin, most = bag.memory(), whole.memory()
    closed = 1280 - int(bag.elastic().state()["rows"])
    row = bag.arena.codes.numel() // 1281 + 4 + 4  # codes, scale, optimizer state
    assert most.total - begin.total == closed * row - 8  # and how far it has grown
    for batch in _batches(60):
        bag(batch).sum().backward()
    assert bag.memory().total == most.total + 8


@pytest.mark.parametrize("grow_from", [None, 129])
def test_another_capacity_takes_the_ids_over_and_grows_on(grow_from: int | None):
    saved = KeyTable(ElasticRows(1281, 1, 1, grow_from=300), 5)
    for first in range(0, 500, 50):
        saved.step(torch.arange(first, first + 50), protect=False)
    table = KeyTable(ElasticRows(2561, 1, 1, grow_from=grow_from), 5)
    remap, ids = take_over(table, saved), saved.keys[saved.occupied()]
    assert torch.equal(remap[saved.find(ids)[0]], table.find(ids)[0]) and table.state()["dropped"] == 0
    before = table.state()["rows"]
    for first in range(5000, 7000, 100):
        table.step(torch.arange(first, first + 100), protect=False)
    assert table.state()["rows"] == 2560 and (before == 2560) == (grow_from is None)


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # Triton's interpreter
@pytest.mark.skipif(not INTERPRETED, reason="tests/nn/test_gpu_elastic.py runs on the GPU")
@pytest.mark.parametrize("rule", [{"ttl": 4, "grow_from": 20}, {"max_age": 4.0, "admit_chance": 0.5}], ids=str)
def test_kernels_of_a_gpu_do_what_those_of_a_cpu_do(monkeypatch: pytest.MonkeyPatch, rule: dict[str, Any]):
    ids = IdMap.elastic(299, shared=1, half_life=3, **rule)
    tables = [Table("item", 299, 4, features=("seen", "bought"), ids=ids), Table("hour", 24, 4)]
    modules = [tc.EmbeddingCollection(tables, rows=RowConfig("int8", cache=0.1)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    for number, rows in enumerate(modules):
        if number:
            monkeypatch.setattr(KeyTable, "on_gpu", True)
            monkeypatch.setattr(KeyTable, "kernels", gpu)
        if "max_age" in rule:
            with pytest.raises(BadInput, check=has(parameter="max_age")):
                rows(torch.zeros(1, 3, dtype=torch.int64))
        for step, batch in enumerate(_batches(7)):
            if "max_age" in rule:
                rows.elastic("seen").advance(100.0 + 2 * step)
            batch[:, 2] %= 24
            rows(batch).values().square().sum().backward()
            with torch.no_grad():
                rows.eval()(batch)
            rows.train()
    states = [rows.state_dict() for rows in modules]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert "grow_from" not in rule or states[0]["elastic0_open"] > 10
    assert modules[0].elastic("seen").state()["expired"] > 0
