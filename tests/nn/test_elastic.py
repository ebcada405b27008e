"""Modules whose ids come and go: what ids read and train, who keeps a row, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thermocline as tc
from support import has
from thermocline import BadInput, IdMap, RowConfig, Table
from thermocline.checkpoint import export_rows, import_rows
from thermocline.ids.elastic import KeyTable
from thermocline.kernels.elastic import gpu
from thermocline.kernels.gpu.launch import INTERPRETED
from thermocline.kernels.layout import Cache

EXACT = RowConfig("fp32", optimizer=tc.SGD(lr=0.5))


def _bag(rows: int = 65, config: RowConfig = EXACT, **rule: Any) -> tc.EmbeddingBag:
    return tc.EmbeddingBag(rows, 4, mode="sum", rows=config, ids=IdMap.elastic(rows, **{"shared": 1, **rule}))


def _one(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)[:, None]


def _row(module: tc.EmbeddingBag, id: int) -> Tensor:
    return module.get_rows(module.elastic().rows_of(torch.tensor([id])))[0]


def _same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def _batches(count: int, seed: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for step in range(count):
        yield torch.randint(9 * step, 9 * step + 150, (40, 3), generator=generator) * 7919


def _train(module: Any, batches: Iterator[Tensor]) -> None:
    for batch in batches:
        module(batch).square().sum().backward()
        if module.rows.update == "step":
            module.fused_optimizer.step()
            module.fused_optimizer.zero_grad()


def test_an_id_trains_a_row_of_its_own_from_its_first_lookup():
    bag = _bag()
    begin = bag(_one(7, -3))
    assert not torch.equal(begin[0], begin[1])
    begin.sum().backward()
    assert torch.equal(bag(_one(7, -3)), begin.detach() - 0.5) and bag.elastic().state()["used"] == 2


def test_an_id_reads_and_trains_a_shared_row_until_it_is_admitted():
    bag = _bag(admit_after=3)
    shared = bag.get_rows(torch.tensor([64]))[0]
    for lookups in (1, 2):
        out = bag(_one(7))
        assert torch.equal(out[0], shared)
        out.sum().backward()
        shared = shared - 0.5
        assert bag.stats()["shared_lookups"] == lookups
    assert not torch.equal(bag(_one(7))[0], shared) and bag.elastic().state()["shared_lookups"] == 2


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("optimizer", [tc.SGD(lr=0.5), tc.Adam(lr=0.1), tc.RowwiseAdagrad(lr=0.1, weight_decay=0.1)])
@pytest.mark.parametrize("kind", ["sum", "none"])
def test_ids_without_a_row_read_zeros_and_train_nothing_if_asked(kind: str, optimizer: Any, update: str):
    config = RowConfig("int8", cache=0.1, optimizer=optimizer, update=update)
    rule = IdMap.elastic(65, shared=0, admit_after=3)
    bag: Any = tc.EmbeddingBag(65, 4, mode="sum", rows=config, ids=rule) if kind == "sum" else None
    bag = bag or tc.Embedding(65, 4, rows=config, ids=rule)
    bag.elastic().pin(torch.tensor([1]))
    before, weights = _row(bag, 1).clone(), {}
    for step in range(2):
        ids = torch.tensor([[1, 7 + step]])
        if kind == "sum":
            weights = {"per_sample_weights": torch.tensor([[1.0, 2.0]])} if step else {}
        out = bag(ids, **weights)
        assert torch.equal(out if kind == "sum" else out[0, :1], _row(bag, 1)[None])
        assert kind == "sum" or not out[0, 1].any()
        (out * torch.arange(1.0, 5.0)).sum().backward()
        if update == "step":
            bag.fused_optimizer.step()
            bag.fused_optimizer.zero_grad()
    assert not torch.equal(_row(bag, 1), before) and bag.stats()["shared_lookups"] == 2
    assert not bag.get_rows(torch.tensor([64])).any()
    bag.eval()
    assert not bag(torch.tensor([[9]])).any()


def test_zeros_are_refused_where_they_would_be_pooled_otherwise():
    bag = tc.EmbeddingBag(65, 4, mode="mean", rows=EXACT, ids=IdMap.elastic(65, shared=0))
    with pytest.raises(BadInput, check=has(parameter="shared", mode="mean")):
        bag(_one(7))


def test_rows_expire_in_the_time_of_the_log():
    bag, gone = _bag(max_age=8.0), []
    bag.elastic().on_evict(lambda ids, rows: gone.append((ids.tolist(), rows.clone())))
    with pytest.raises(BadInput, check=has(parameter="max_age")):
        bag(_one(7))
    bag.elastic().advance(100.0)
    bag(_one(7)).sum().backward()
    row = _row(bag, 7).clone()
    for now in (101.0, 104.5, 108.0):
        bag.elastic().advance(now)
        bag(_one(8)).sum().backward()
    bag.elastic().advance(110.0)
    assert [ids for ids, _ in gone] == [[7]] and torch.equal(gone[0][1][0], row)
    assert bag.elastic().ids().tolist() == [8] and bag.elastic().state()["expired"] == 1
    with pytest.raises(BadInput, check=has(parameter="max_age")):
        _bag().elastic().advance(1.0)


def test_a_module_in_eval_reads_without_a_trace():
    bag = _bag()
    bag(_one(1, 2)).sum().backward()
    before = bag.elastic().ids()
    bag.eval()
    out = bag(_one(1, 99))
    assert torch.equal(out[0], _row(bag, 1)) and torch.equal(out[1], bag.get_rows(torch.tensor([64]))[0])
    state = bag.elastic().state()
    assert torch.equal(bag.elastic().ids(), before) and (state["steps"], state["shared_eval_lookups"]) == (1, 1)


def test_a_frozen_module_gives_no_rows():
    bag = _bag()
    bag.requires_grad_(False)
    bag(_one(1, 2))
    assert bag.elastic().state()["used"] == 0


def test_first_values_depend_on_id_and_salt_not_on_the_order_of_arrival():
    first, second = _bag(config=RowConfig("int8")), _bag(config=RowConfig("int8"))
    for ids in ((1, 2, 3), (4, 5)):
        first(_one(*ids))
    second(_one(5, 3, 1, 2, 4))
    assert all(torch.equal(_row(first, id), _row(second, id)) for id in range(1, 6))
    other = _bag(config=RowConfig("int8"), salt=1)
    other(_one(1))
    assert not torch.equal(_row(first, 1), _row(other, 1))


@pytest.mark.parametrize("cache", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", [tc.RowwiseAdagrad(lr=0.1), tc.Adam(lr=0.1)])
def test_the_next_id_of_a_row_begins_with_first_values_and_no_state(cache: float, optimizer: Any):
    bag = _bag(config=RowConfig("int8", cache=cache, optimizer=optimizer), evict="lru", half_life=1)
    for _ in range(3):
        bag(_one(*range(64))).square().sum().backward()
    assert bag.trainer.states[0].any()
    bag(_one(*range(100, 164)))
    fresh = _bag(config=RowConfig("int8", cache=cache, optimizer=optimizer), evict="lru", half_life=1)
    fresh(_one(*range(100, 164)))
    assert all(torch.equal(_row(bag, id), _row(fresh, id)) for id in range(100, 164))
    assert not any(state[: 64 * (state.numel() // 65)].any() for state in bag.trainer.states)


def test_evicted_ids_leave_the_cache():
    bag = _bag(config=RowConfig("int8", cache=0.5), evict="lru")
    for _ in range(4):
        bag(_one(*range(64))).square().sum().backward()
    cache = Cache(*bag.arena.cache)
    assert (cache.rows >= 0).sum() > 20
    bag(_one(*range(100, 164)))  # all 64 rows change hands, and no backward admits any
    held = cache.rows[cache.rows >= 0] & ~(1 << 62)
    assert bool((held == 64).all()) and bool((bag.arena.meta[:64] >= 0).all())


def test_rows_that_wait_for_their_backward_are_not_given_away():
    bag = _bag(evict="lru")
    early = bag(_one(*range(64)))
    values = bag.get_rows(torch.arange(64))
    late = bag(_one(*range(100, 164)))
    assert bag.elastic().state()["evicted"] == 0
    (early.sum() + 0 * late.sum()).backward()
    assert torch.equal(bag.get_rows(torch.arange(64)), values - 0.5)
    bag(_one(*range(100, 164)))
    assert bag.elastic().state()["evicted"] == 64


def test_rows_with_pending_gradients_are_not_given_away():
    bag = _bag(config=RowConfig("fp32", optimizer=tc.SGD(lr=0.5), update="step"), evict="lru")
    out = bag(_one(*range(64)))
    values = bag.get_rows(torch.arange(64))
    bag(_one(*range(100, 164)))
    out.sum().backward()
    bag(_one(*range(200, 264)))
    assert bag.elastic().state()["evicted"] == 0
    bag.fused_optimizer.step()
    bag.fused_optimizer.zero_grad()
    assert torch.equal(bag.get_rows(torch.arange(64)), values - 0.5)
    del out
    bag(_one(*range(200, 264)))
    assert bag.elastic().state()["evicted"] == 64


def test_a_second_backward_after_a_step_is_refused():
    bag = _bag(config=RowConfig("fp32", update="step"))
    out = bag(_one(1, 2)).sum()
    out.backward(retain_graph=True)
    out.backward(retain_graph=True)
    bag.fused_optimizer.step()
    with pytest.raises(BadInput, check=has(parameter="retain_graph")):
        out.backward()


def test_more_distinct_ids_than_rows_share_and_say_so():
    bag = _bag()
    bag(_one(*range(1000))).sum().backward()
    state = bag.elastic().state()
    assert (state["used"], state["shared_lookups"], state["waiting"], state["refused"]) == (64, 936, 936, 936)


def test_evicted_ids_are_reported_with_their_rows():
    bag, seen = _bag(evict="lru"), {}
    bag.elastic().on_evict(lambda ids, rows: seen.update(zip(ids.tolist(), rows.clone(), strict=True)))
    bag(_one(*range(64))).sum().backward()
    values = {id: _row(bag, id) for id in range(64)}
    bag(_one(*range(100, 110))).sum().backward()
    assert len(seen) == 10 and all(torch.equal(seen[id], values[id]) for id in seen)


def test_pinned_ids_have_rows_before_they_are_seen():
    bag = _bag(evict="lru", admit_after=9)
    bag.elastic().pin(torch.tensor([5, -6]))
    value = _row(bag, 5)
    for step in range(9):
        bag(_one(*range(100 * step, 100 * step + 64))).sum()
    assert torch.equal(_row(bag, 5), value) and bag.elastic().state()["pinned"] == 2


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "state_dict"])
def test_copies_train_on_bit_for_bit(kind: str, update: str):
    config = RowConfig("int8", cache=0.1, update=update)
    bag = _bag(130, config, admit_after=2, half_life=5)
    _train(bag, _batches(12))
    if kind == "state_dict":
        other = _bag(130, config, admit_after=2, half_life=5)
        other.load_state_dict(bag.state_dict())
    else:
        other = copy.deepcopy(bag) if kind == "deepcopy" else pickle.loads(pickle.dumps(bag))
    assert _same(bag, other)
    for module in (bag, other):
        _train(module, _batches(8, seed=5))
    assert _same(bag, other) and bag.elastic().state()["evicted"] > 0


@pytest.mark.parametrize("count", [2, 5])
def test_threads_change_no_bit_of_a_training(count: int, threads_of_torch: Callable[[int], None]):
    bags = []
    for number in (1, count):
        threads_of_torch(number)
        bags.append(_bag(130, RowConfig("int4", cache=0.1), half_life=5))
        _train(bags[-1], _batches(12))
    assert _same(*bags)


@pytest.fixture
def threads_of_torch() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_features_of_a_collection_share_ids_and_others_keep_theirs():
    ids = IdMap.elastic(100, shared=1)
    tables = [Table("item", 100, 4, features=("seen", "bought"), ids=ids), Table("hour", 24, 4)]
    tables.append(Table("user", 65, 4, ids=IdMap.elastic(65, shared=1, salt=3)))
    rows = tc.EmbeddingCollection(tables, rows=EXACT)
    batch = torch.tensor([[-9, 5, 3, 1 << 60], [5, -9, 23, 4]])
    out = rows(batch)
    assert torch.equal(out["seen"], out["bought"].flip(0)) and torch.equal(out["hour"], rows.get_rows("hour", batch[:, 2]))
    assert sorted(rows.elastic("bought").ids().tolist()) == [-9, 5] and rows.elastic("user").state()["used"] == 2
    assert torch.equal(out["user"], rows.get_rows("user", rows.elastic("user").rows_of(batch[:, 3])))
    out.values().sum().backward()
    assert torch.equal(rows(batch)["seen"], out["seen"].detach() - 2 * 0.5)
    with pytest.raises(BadInput, check=has(parameter="feature", available=["seen", "bought", "user"])):
        rows.elastic()


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # Triton's interpreter
@pytest.mark.skipif(not INTERPRETED, reason="tests/nn/test_gpu_elastic.py runs on the GPU")
def test_modules_train_with_the_kernels_of_a_gpu_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    ids = IdMap.elastic(100, shared=1, half_life=3, ttl=2)
    tables = [Table("item", 100, 4, features=("seen", "bought"), ids=ids), Table("hour", 24, 4)]
    tables.append(Table("user", 65, 4, ids=IdMap.elastic(65, shared=1, salt=3, evict="lru", admit_after=2)))
    modules = [tc.EmbeddingCollection(tables, rows=RowConfig("int8", cache=0.1)) for _ in range(3)]
    modules[1].load_state_dict(modules[0].state_dict())
    modules[2].load_state_dict(modules[0].state_dict())
    reported: list[list[int]] = [[], []]
    for number, rows in enumerate(modules):
        if number:
            monkeypatch.setattr(KeyTable, "on_gpu", True)
            monkeypatch.setattr(KeyTable, "kernels", gpu)
        if number != 1:
            rows.elastic("seen").on_evict(lambda ids, _, number=number: reported[number // 2].extend(ids.tolist()))
        for batch in _batches(5):
            batch = torch.cat([batch, batch[:, :1]], dim=1)
            batch[:, 2] %= 24
            rows(batch).values().square().sum().backward()
        rows(batch)
        rows.eval()(batch)
    assert _same(modules[0], modules[1]) and _same(modules[0], modules[2])
    assert sorted(reported[0]) == sorted(reported[1]) and modules[1].elastic("seen").state()["expired"] > 0


def test_ids_that_are_pinned_through_a_copy_of_the_keys_are_recorded_for_publishes(monkeypatch: pytest.MonkeyPatch):
    bag = _bag()
    bag.maps.record_moves(True)
    monkeypatch.setattr(KeyTable, "on_gpu", True)
    bag.elastic().pin(torch.tensor([7, -3]))
    ((table, moved),) = bag.maps.take_moved()
    assert table == 0 and sorted(moved.ids_K.tolist()) == [-3, 7] and moved.used_K.all()


def test_recorded_rows_are_on_the_device_of_the_keys():
    bag = tc.EmbeddingBag(65, 4, mode="sum", rows=EXACT, ids=IdMap.elastic(65), device="meta")
    bag.maps.record_moves(True)
    bag.maps.replaced()  # by a state dict
    assert [each.device.type for each in bag.maps.keys[0].moved] == ["meta"]


def test_the_row_that_reads_zeros_takes_no_other_values(tmp_path: Path):
    bag, values = _bag(shared=0), torch.ones(65, 4)
    export_rows(tc.EmbeddingBag(65, 4, mode="sum", rows=EXACT), tmp_path / "rows")
    for write in (partial(bag.set_rows, torch.tensor([3, 64]), values[:2]), partial(import_rows, bag, tmp_path / "rows")):
        with pytest.raises(BadInput, check=has(parameter="values", value=64)):
            write()
    with pytest.raises(RuntimeError, match="row 64"):
        bag.load_state_dict({"weight": values})
    bag.set_rows(torch.tensor([3, 64]), torch.diag(torch.tensor([1.0, 0.0])) @ values[:2])
    assert bag.get_rows(torch.tensor([3])).any() and not bag.get_rows(torch.tensor([64])).any()


def test_features_read_zeros_beside_others_that_share_rows():
    tables = [Table("item", 65, 4, features=("seen", "bought"), ids=IdMap.elastic(65, shared=0, admit_after=2))]
    tables += [Table("hour", 24, 4), Table("user", 65, 4, ids=IdMap.elastic(65, shared=1, admit_after=2))]
    rows = tc.EmbeddingCollection(tables, mode="sum", rows=EXACT)
    shared = rows.get_rows("user", torch.tensor([64]))
    out = rows(torch.tensor([[5, 6, 3, 9]]))
    assert not out["seen"].any() and not out["bought"].any() and torch.equal(out["user"], shared) and out["hour"].any()
    out.values().sum().backward()
    assert not rows.get_rows("item", torch.tensor([64])).any()
    assert torch.equal(rows.get_rows("user", torch.tensor([64])), shared - 0.5)


def test_a_part_of_a_shared_table_may_be_elastic():
    parts = [Table("hour", 24, 4), Table("user", 65, 4, ids=IdMap.elastic(65, shared=1))]
    rows = tc.EmbeddingCollection([tc.unify("all", parts)], rows=EXACT)
    out = rows(torch.tensor([[3, -8]]))
    at = rows.elastic("user").rows_of(torch.tensor([-8]))
    assert int(at) >= 24 and torch.equal(out["user"], rows.get_rows("all", at))
    assert torch.equal(out["hour"], rows.get_rows("all", torch.tensor([3])))


def test_weights_and_padding_work_by_raw_id():
    bag = tc.EmbeddingBag(65, 4, mode="sum", padding_idx=-1, rows=EXACT, ids=IdMap.elastic(65, shared=1))
    weights = torch.tensor([[2.0, 3.0]], requires_grad=True)
    out = bag(torch.tensor([[7, -1]]), per_sample_weights=weights)
    assert torch.allclose(out[0], 2 * _row(bag, 7)) and bag.elastic().ids().tolist() == [7]
    out.sum().backward()
    assert weights.grad is not None and float(weights.grad[0, 1]) == 0
    words = tc.Embedding(65, 4, padding_idx=1 << 40, rows=EXACT, ids=IdMap.elastic(65, shared=1))
    found = words(torch.tensor([[7, 1 << 40]]))
    assert not found[0, 1].any() and found[0, 0].any() and words.elastic().state()["used"] == 1


def test_a_compiled_model_looks_up_elastic_ids_outside_of_its_graph():
    bag, plain = _bag(), _bag()
    compiled = torch.compile(bag, backend="eager")
    for module in (compiled, plain):
        for batch in ((1, 2, 3), (2, 9)):
            module(_one(*batch)).sum().backward()
    assert _same(bag, plain)
