"""Slots of two kinds on the CPU: after every step the bits of the reference, in every array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.sum_gradients import reference as sums
from thermocline.kernels.update import cpu, reference
from thermocline.rows.arena import Arena

pytestmark = pytest.mark.usefixtures("poisoned_scratch")

Make = Callable[..., Any]
DIMS = (1, 3, 15, 16, 17, 48, 64, 67, 128, 200)
# rows, dimension, precision, full slots and near slots
TIERED = st.tuples(
    st.sampled_from([2, 33, 300]), st.sampled_from(DIMS), st.sampled_from(["int4", "int2"]),
    st.sampled_from([0, 1, 5, 40]), st.sampled_from([1, 7, 90]),
)  # fmt: skip
CACHED = st.tuples(
    st.sampled_from([5, 70]), st.sampled_from(DIMS), st.sampled_from(["int8", "int2", "fp32"]), st.just(0), st.just(0)
)


def _same(got: Any, wanted: Any) -> None:
    for a, b in zip(got.changed(), wanted.changed(), strict=True):
        assert torch.equal(a, b)


def _skewed(arena: Arena, count: int, seed: int) -> Tensor:
    """Ids of one table, small ones often."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator) ** 3 * arena.tables[0].rows).long()


def _step(wanted: Any, got: Any, lookup: Any, mode: int, optimizer: int, stochastic: bool = True) -> None:
    """One step of the reference, of sums and counts, and one of the kernel."""
    place = (wanted.codes, wanted.meta, wanted.layout)
    out, winners = flat.gather_pool(gather, *place, *lookup, mode, torch.float32, cache=wanted.cache)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(int(wanted.clock[F.STEP])))
    rows_U, grads_UW = flat.sum_row_gradients(sums, wanted.layout, *lookup, mode, winners, grad)
    first = torch.tensor([f[F.ROW] for f in wanted.layout.tables.features])
    bags = 1 if mode == F.NONE else max(1, (lookup.offsets.numel() - 1) // len(first))
    feature_N = gather.bag_of_each(lookup.offsets.long(), lookup.ids.numel()) // bags
    counts_U = torch.unique(first[feature_N] + lookup.ids, return_counts=True)[1]
    place = (wanted.codes, wanted.meta, wanted.states, wanted.layout, rows_U, grads_UW, wanted.hyper, wanted.clock)
    flat.update_rows(reference, *place, optimizer, stochastic, wanted.cache, counts_U)
    place = (got.codes, got.meta, got.states, got.layout, *lookup, mode, winners, grad, got.hyper, got.clock)
    flat.update_bags(cpu, *place, optimizer, stochastic, got.cache)
    _same(got, wanted)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40, deadline=None)
@given(
    tables=st.lists(st.one_of(TIERED, TIERED, CACHED), min_size=1, max_size=4),
    policy=st.sampled_from(F.POLICIES),
    batch=st.sampled_from([0, 1, 13]),
    longest=st.integers(0, 9),
    mode=st.sampled_from(range(len(F.MODES))),
    optimizer=st.sampled_from(range(len(F.OPTIMIZERS))),
    stochastic=st.booleans(),
    count=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_any_arena_over_many_steps(
    tables: Any, policy: str, batch: int, longest: int, mode: int, optimizer: int, stochastic: bool, count: int, seed: int,
    make_arena: Make, make_lookup: Make, make_training: Make, threads: Make, lookups_agree: Make,
) -> None:  # fmt: skip
    threads(count)
    shapes, slots, near = [t[:3] for t in tables], [t[3] for t in tables], [t[4] for t in tables]
    arena = make_arena(shapes, [*range(len(tables)), 0], seed=seed, slots=slots, near=near, policy=policy)
    wanted, got = (make_training(arena, optimizer, seed) for _ in range(2))
    for step in range(6):
        weighted = mode == F.SUM and step % 2 == 1
        lookup = make_lookup(arena, None if mode == F.NONE else batch, longest, seed=seed + step, weighted=weighted)
        _step(wanted, got, lookup, mode, optimizer, stochastic)
        lookups_agree(got, lookup, mode)


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
@pytest.mark.parametrize("base", ["int4", "int2"])
def test_every_dimension_while_tiny_pools_thrash(
    base: str, policy: str, make_arena: Make, make_lookup: Make, make_training: Make, lookups_agree: Make
) -> None:
    promoted = 0
    for dim in DIMS:
        for full, near in ((0, 3), (1, 1), (3, 10), (10, 2), (20, 21)):
            arena = make_arena([(41, dim, base)], seed=dim, slots=[full], near=[near], policy=policy)
            wanted, got = (make_training(arena, F.ROWWISE_ADAGRAD) for _ in range(2))
            for step in range(6):
                size = (40, 3, 11)[step % 3]
                lookup = make_lookup(arena, 1, size, seed=step, full=True)._replace(ids=_skewed(arena, size, step))
                _step(wanted, got, lookup, F.SUM, F.ROWWISE_ADAGRAD)
            lookups_agree(got, lookup, F.SUM)
            promoted += int(got.cache.ledger[0, F.PROMOTIONS])
    assert promoted > 50


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
def test_many_slots_and_promotions_are_cut_into_tasks(
    policy: str, make_arena: Make, make_lookup: Make, make_training: Make, monkeypatch: pytest.MonkeyPatch, threads: Make
) -> None:
    from thermocline.kernels.cpu import promote as cpu_promote

    monkeypatch.setattr(cpu_promote, "_CHUNK", 64)
    monkeypatch.setattr(cpu_promote, "_EXCHANGES", 16)
    threads(2)
    arena = make_arena([(9000, 6, "int2"), (500, 6, "int2")], slots=[300, 7], near=[800, 23], policy=policy)
    wanted, got = (make_training(arena, F.SGD) for _ in range(2))
    for step in range(8):
        batch = 700 if step % 4 == 0 else 40
        lookup = make_lookup(arena, batch, 3, seed=step, full=True)
        lookup.ids[: 3 * batch] = _skewed(arena, 3 * batch, step)
        _step(wanted, got, lookup, F.SUM, F.SGD)
    assert got.cache.ledger[0, F.PROMOTIONS] > 60


def test_a_clean_near_row_leaves_as_it_came(make_arena: Make, make_training: Make) -> None:
    arena = make_arena([(40, 7, "int4")], slots=[2], near=[3], policy="lru")
    before = (arena.codes.clone(), arena.meta.clone())
    heat = torch.zeros(40)
    heat[[3, 9, 20, 21, 39]] = torch.tensor([5.0, 9.0, 2.0, 7.0, 1.0])
    arena.warm([heat])
    assert (arena.meta[[9, 21]] & F.INT8_SLOT == 0).all() and (arena.meta[[3, 20, 39]] & F.INT8_SLOT != 0).all()
    wanted, got = (make_training(arena, F.SGD) for _ in range(2))
    rows_U = torch.arange(10, 15)
    for module, made in ((reference, wanted), (cpu, got)):
        place = (made.codes, made.meta, made.states, made.layout, rows_U, torch.ones(5, 7), made.hyper, made.clock)
        flat.update_rows(module, *place, F.SGD, True, made.cache)
    _same(got, wanted)
    left = torch.tensor([3, 9, 20, 21, 39])
    assert torch.equal(got.meta[left], before[1][left])
    assert torch.equal(got.codes[: 40 * 4].view(40, 4)[left], before[0][: 40 * 4].view(40, 4)[left])


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
def test_rows_by_row_in_any_order_and_batches_that_pass_a_pool_by(policy: str, make_arena: Make, make_training: Make) -> None:
    arena = make_arena([(60, 5, "int4"), (30, 9, "int2"), (20, 4, "fp32")], slots=[3, 2, 0], near=[6, 5, 0], policy=policy)
    wanted, got = (make_training(arena, F.ADAM) for _ in range(2))
    for step in range(24):
        generator = torch.Generator().manual_seed(step)
        low, high = ((0, 110), (90, 110), (60, 90), (0, 20))[step % 4]
        rows_U = torch.randperm(high - low, generator=generator)[:12] + low
        grads_UW = torch.randn(rows_U.numel(), 9, generator=generator)
        for module, made in ((reference, wanted), (cpu, got)):
            place = (made.codes, made.meta, made.states, made.layout, rows_U, grads_UW, made.hyper, made.clock)
            flat.update_rows(module, *place, F.ADAM, True, made.cache)
        _same(got, wanted)
    assert got.cache.ledger[:, F.PROMOTIONS].min() > 0
