"""Slots of two kinds in Triton: after every step the bits of the reference, in every array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat
import pytest
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.cache import gpu as gpu_cache
from thermocline.kernels.cache import reference as caching
from thermocline.kernels.gather import gpu as gpu_gather
from thermocline.kernels.gather import reference as gather
from thermocline.kernels.sum_gradients import gpu as gpu_sums
from thermocline.kernels.update import gpu, reference

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

On = Callable[[Any], Any]
Make = Callable[..., Any]
# Pools of several dimensions, one of two tables, one with full slots only, one with near slots only, and an fp32 table.
TABLES = [(300, 5, "int4"), (90, 9, "int2"), (70, 5, "int4"), (20, 8, "fp32"), (60, 4, "int8"), (50, 3, "int4")]
FULL, NEAR = [7, 3, 4, 0, 6, 0], [12, 9, 5, 0, 0, 8]


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.changed(), b.changed(), strict=True))


def _lookups(rows: int, count: int, seed: int) -> Tensor:
    """Sorted arena rows, a few of them often."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator) ** 3 * rows).long().sort()[0]


def _wave(arena: Any, step: int) -> Tensor:
    """Fill all slots, in order, then look up again and again what came last: those rows are in near slots and will rise."""
    keys = []
    for pool in arena.pools:
        first = pool.row + step // 3 * 7 % (pool.rows - pool.slots)
        keys.append(torch.arange(first, first + pool.slots)[-2 if step % 3 else 0 :].repeat_interleave(8 if step % 3 else 1))
    return torch.cat(keys).sort()[0]


def _refresh_both(ours: Any, wanted: Any, keys_N: Tensor, on: On, stochastic: bool = True) -> None:
    gpu_cache.refresh(ours.codes, ours.meta, ours.cache, ours.layout, on(keys_N), stochastic)
    rows_U, counts_U = torch.unique(keys_N, return_counts=True)
    caching.refresh(wanted.codes, wanted.meta, wanted.cache, wanted.layout, rows_U, counts_U, stochastic)
    assert _same(ours, wanted)


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
@pytest.mark.parametrize("base", ["int4", "int2"])
def test_tiny_pools_that_thrash(base: str, policy: str, make_arena: Make, make_training: Make, on: On) -> None:
    promoted = 0
    for dim, full, near in ((1, 0, 3), (5, 1, 1), (17, 3, 10)):
        arena = make_arena([(40, dim, base)], seed=dim, slots=[full], near=[near], policy=policy)
        wanted = make_training(arena, F.SGD)
        ours = on(wanted)
        for step in range(8):
            keys_N = _wave(arena, step) if step < 6 else _lookups(40, 30, step)
            _refresh_both(ours, wanted, keys_N, on, stochastic=step != 1)
        promoted += int(wanted.cache.ledger[0, F.PROMOTIONS])
    assert promoted > 1


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
def test_many_steps_over_several_pools_and_a_halving(policy: str, make_arena: Make, make_training: Make, on: On) -> None:
    arena = make_arena(TABLES, slots=FULL, near=NEAR, policy=policy)
    wanted = make_training(arena, F.SGD)
    ours = on(wanted)
    for step in range(15):
        # Waves, batches over all pools, and batches of the first table only.
        keys_N = _wave(arena, step) if step % 6 < 3 else _lookups(300 if step % 6 == 3 else arena.rows, 150, step)
        _refresh_both(ours, wanted, keys_N, on)
    assert ((wanted.cache.ledger[:, F.PROMOTIONS] > 0).tolist()) == [
        pool.int8_slots * pool.fp32_slots > 0 for pool in arena.pools
    ]
    if policy != "lru":
        assert (wanted.cache.ledger[:, F.SINCE] < wanted.cache.ledger[:, F.LOOKUPS]).any(), "nothing was halved"


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
def test_more_slots_and_exchanges_than_one_tile(
    policy: str, monkeypatch: pytest.MonkeyPatch, make_arena: Make, make_training: Make, on: On
) -> None:
    monkeypatch.setattr(gpu_cache, "TILE", 64)
    arena = make_arena([(900, 2, "int2")], slots=[150], near=[210], policy=policy)
    wanted = make_training(arena, F.SGD)
    ours = on(wanted)
    for step in range(6):
        _refresh_both(ours, wanted, _lookups(900, 400 if step < 2 else 60, step), on)
    assert wanted.cache.ledger[0, F.PROMOTIONS] > 10


@pytest.mark.parametrize("optimizer", range(len(F.OPTIMIZERS)), ids=F.OPTIMIZERS)
def test_rows_are_updated_where_they_live(optimizer: int, make_arena: Make, make_training: Make, on: On) -> None:
    arena = make_arena(TABLES, slots=FULL, near=NEAR)
    wanted = make_training(arena, optimizer)
    ours = on(wanted)
    for step in range(4):
        seen_N = _lookups(arena.rows, 90, step)
        rows_U, counts_U = torch.unique(seen_N, return_counts=True)
        grads_UW = torch.randn(rows_U.numel(), 9, generator=torch.Generator().manual_seed(step))
        counted = step % 2 == 0
        for module, made, place in ((gpu, ours, on), (reference, wanted, lambda x: x)):
            table = (made.codes, made.meta, made.states, made.layout, place(rows_U), place(grads_UW), made.hyper, made.clock)
            counts = (place(seen_N) if module is gpu else counts_U) if counted else None
            flat.update_rows(module, *table, optimizer, step != 3, made.cache, counts)
        assert _same(ours, wanted)
    near_R = (wanted.meta < 0) & (wanted.meta & F.INT8_SLOT != 0)
    assert int(near_R.sum()) > 9 and int((wanted.meta < 0).sum() - near_R.sum()) > 5


@pytest.mark.parametrize("base", ["int4", "int2"])
@pytest.mark.parametrize("dim", [1, 3, 48, 100, 128, 200])
def test_every_dimension_is_updated_where_it_lives(base: str, dim: int, make_arena: Make, make_training: Make, on: On) -> None:
    """Row-wise Adagrad sums over columns in the order of the table's format, whichever the slot."""
    arena = make_arena([(33, dim, base)], seed=dim, slots=[4], near=[7], policy="lru")
    wanted = make_training(arena, F.ROWWISE_ADAGRAD)
    ours = on(wanted)
    for step in range(2):
        rows_U = torch.arange(step, 33, 3 - step)
        grads_UW = torch.randn(rows_U.numel(), dim, generator=torch.Generator().manual_seed(step))
        for module, made, place in ((gpu, ours, on), (reference, wanted, lambda x: x)):
            table = (made.codes, made.meta, made.states, made.layout, place(rows_U), place(grads_UW), made.hyper, made.clock)
            flat.update_rows(module, *table, F.ROWWISE_ADAGRAD, dim % 2 == 0, made.cache)
        assert _same(ours, wanted)


def test_updating_bags_is_summing_and_updating_rows(make_arena: Make, make_lookup: Make, make_training: Make, on: On) -> None:
    arena = make_arena(TABLES[:2], slots=FULL[:2], near=NEAR[:2], policy="lru")
    first_row = torch.tensor([f[F.ROW] for f in arena.layout.tables.features])
    apart, fused = (on(make_training(arena, F.ADAM)) for _ in range(2))
    none = on(torch.zeros(0, dtype=torch.int32))
    for step in range(2):
        lookup = make_lookup(arena, 9, 4, full=True, seed=step)
        seen_N = on((first_row.repeat_interleave(36) + lookup.ids).sort()[0])
        lookup, grad = on(lookup), on(torch.randn(9, 14, generator=torch.Generator().manual_seed(step)))
        rows_U, grads_UW = flat.sum_row_gradients(gpu_sums, apart.layout, *lookup, F.SUM, none, grad)
        t = apart
        table = (t.codes, t.meta, t.states, t.layout)
        flat.update_rows(gpu, *table, rows_U, grads_UW, t.hyper, t.clock, F.ADAM, True, t.cache, seen_N)
        t = fused
        table = (t.codes, t.meta, t.states, t.layout)
        flat.update_bags(gpu, *table, *lookup, F.SUM, none, grad, t.hyper, t.clock, F.ADAM, True, t.cache)
        assert _same(fused, apart)


@pytest.mark.parametrize("mode, longest", [(0, 6), (0, 24), (1, 6), (2, 6), (3, 40)])
def test_lookups_find_rows_where_they_live(
    mode: int, longest: int, make_arena: Make, make_lookup: Make, make_training: Make, on: On
) -> None:
    arena = make_arena([*TABLES, (33, 130, "int2")], slots=[*FULL, 4], near=[*NEAR, 9])
    made = make_training(arena, F.SGD)
    for rows_U in (torch.arange(0, arena.rows, 3), torch.arange(0, arena.rows, 6)):
        caching.refresh(made.codes, made.meta, made.cache, made.layout, rows_U, torch.ones_like(rows_U), True)
    made.cache.values.add_(1.0)  # a stale copy of a cached row would be told from it
    scale = made.cache.near[:: F.int8_slot_words(5)][: NEAR[0] + NEAR[2]]
    scale.copy_((scale.view(torch.float32) * 3).view(torch.int32))
    ours = on(made)
    batch = None if mode == F.NONE else 7
    lookup = make_lookup(arena, batch, longest, weighted=mode == F.SUM and longest < 9, full=longest > 9)
    wanted, winners = flat.gather_pool(
        gather, made.codes, made.meta, made.layout, *lookup, mode, torch.float32, cache=made.cache
    )
    table = (ours.codes, ours.meta, ours.layout)
    got, won = flat.gather_pool(gpu_gather, *table, *on(lookup), mode, torch.float32, True, ours.cache)
    if mode >= F.MAX:
        assert torch.equal(got.cpu(), wanted)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(won.cpu(), winners)
    if mode == F.SUM:
        grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
        place = (made.codes, made.meta, made.layout, lookup.ids, lookup.offsets, grad, made.cache)
        weights = flat.weight_gradient(gpu_gather, *table, on(lookup.ids), on(lookup.offsets), on(grad), ours.cache)
        torch.testing.assert_close(weights.cpu(), flat.weight_gradient(gather, *place), rtol=1e-5, atol=1e-4)
