"""Slots of two kinds in the reference: where rows are, that they survive every move, and who is promoted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat
import pytest
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels import slots
from thermocline.kernels.cache import reference as caching
from thermocline.kernels.gather.reference import read_rows
from thermocline.kernels.layout import Layout, Pool, parse, write_spec
from thermocline.kernels.update import reference as update

Make = Callable[..., Any]
BASES = ("int4", "int2")


def _values(made: Any) -> Tensor:
    """All rows of an arena of one table, wherever they live."""
    field = made.layout.tables.distinct[0]
    return read_rows(made.codes, made.meta, field, torch.arange(field[F.ROWS]), made.cache)


def _tier(made: Any) -> Tensor:
    """0 for rows that are not cached, 1 for near ones, 2 for full ones."""
    return torch.where(made.meta < 0, torch.where(made.meta & F.INT8_SLOT != 0, 1, 2), 0)


def _refresh(made: Any, rows_U: Tensor, counts_U: Tensor | None = None, stochastic: bool = True) -> None:
    counts_U = torch.ones_like(rows_U) if counts_U is None else counts_U
    caching.refresh(made.codes, made.meta, made.cache, made.layout, rows_U, counts_U, stochastic)


def _check_pointers(made: Any, pool: Pool) -> None:
    """Every slot that is taken has a row that points at it, and every pointer is that of a slot."""
    owner_S = made.cache.rows[pool.slot : pool.slot + pool.slots]
    taken_K = (owner_S != F.EMPTY).nonzero()[:, 0]
    row_K = owner_S[taken_K] & ~F.DIRTY
    assert torch.equal(made.meta[pool.meta + row_K - pool.row], slots.pointers(pool, taken_K))
    assert torch.equal(slots.slots_of(pool, slots.pointers(pool, taken_K)), taken_K)
    assert row_K.unique().numel() == taken_K.numel() == int((made.meta[pool.meta : pool.meta + pool.rows] < 0).sum())


@pytest.mark.parametrize("policy", F.POLICIES[: F.FIXED])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dim", [1, 7, 64])
@pytest.mark.parametrize("full, near", [(3, 8), (0, 5), (5, 1), (20, 41)])
def test_rows_survive_every_move(base: str, policy: str, dim: int, full: int, near: int, make_arena: Make, make_training: Make):
    arena = make_arena([(61, dim, base)], seed=dim, slots=[full], near=[near], policy=policy)
    made = make_training(arena, F.SGD)
    pool, moves = arena.pools[0], torch.zeros(3, 3, dtype=torch.int64)
    generator = torch.Generator().manual_seed(full)
    for step in range(24):
        before_RD, was_R = _values(made), _tier(made)
        rows_U = (torch.rand(25 if step % 6 == 0 else 5, generator=generator) ** 2 * 61).long().unique()
        _refresh(made, rows_U, torch.randint(1, 9, rows_U.shape, generator=generator))
        after_RD, is_R = _values(made), _tier(made)
        _check_pointers(made, pool)
        error_R = (after_RD - before_RD).abs().amax(1)
        largest_R, extent_R = before_RD.abs().amax(1), before_RD.amax(1) - before_RD.amin(1)
        assert (error_R[(was_R == is_R) | ((was_R == 1) & (is_R == 2))] == 0).all()
        assert (error_R[is_R > 0] <= 1.001 * largest_R[is_R > 0] / 127).all()  # a newcomer may pass through a near slot
        step_R = extent_R / F.levels(F.NAMES.index(base)) + largest_R / 64  # metadata is bf16
        assert (error_R[is_R == 0] <= step_R[is_R == 0]).all()
        moves += torch.bincount(3 * was_R + is_R, minlength=9).view(3, 3)
    assert made.cache.ledger[0, F.PROMOTIONS] >= moves[1, 2]
    if 0 < full < near < 20:
        moves[2, 0] += policy != "lru"  # hot rows cool down for longer than this
        assert (moves > 0).all(), "some kind of move was never made"


def test_the_hottest_rows_are_full_and_the_warm_ones_near(make_arena: Make, make_training: Make) -> None:
    arena = make_arena([(100, 5, "int2")], slots=[4], near=[10])
    made = make_training(arena, F.SGD)
    for step in range(40):
        warm = torch.arange(4, 14)
        cold = 14 + (torch.arange(5) + 5 * step) % 86
        rows_U = torch.cat([torch.arange(4), warm, cold]).sort()[0]
        counts_U = torch.where(rows_U < 4, 16, torch.where(rows_U < 14, 4, 1))
        _refresh(made, rows_U, counts_U)
    assert (_tier(made)[:4] == 2).all() and (_tier(made)[4:14] == 1).all() and (_tier(made)[14:] == 0).all()
    assert made.cache.ledger[0, F.HITS] > 0


def test_lru_keeps_what_was_used_last_in_full_slots(make_arena: Make, make_training: Make) -> None:
    arena = make_arena([(30, 3, "int4")], slots=[2], near=[4], policy="lru")
    made = make_training(arena, F.SGD)
    for first in (0, 2, 4, 20, 22, 6):
        _refresh(made, torch.arange(first, first + 2))
    assert _tier(made).nonzero()[:, 0].tolist() == [6, 7, 20, 21, 22, 23]
    for _ in range(2):
        _refresh(made, torch.tensor([20, 21]))
    assert (_tier(made) == 2).nonzero()[:, 0].tolist() == [20, 21]


def test_a_near_row_takes_its_step_in_fp32_and_is_rounded_without_bias(make_arena: Make, make_training: Make) -> None:
    arena = make_arena([(9, 200, "int2")], slots=[0], near=[9])
    made = make_training(arena, F.SGD)
    rows_U = torch.arange(9)
    _refresh(made, rows_U)
    before_RD = _values(made)
    made.hyper[F.LR] = 1e-4
    for _ in range(400):
        place = (made.codes, made.meta, made.states, made.layout, rows_U, torch.ones(9, 200), made.hyper, made.clock)
        flat.update_rows(update, *place, F.SGD, True, made.cache)
    moved_RD = before_RD - _values(made)
    assert (made.meta & F.INT8_SLOT != 0).all() and made.meta.max() < 0
    assert moved_RD.mean() == pytest.approx(0.04, rel=0.05)  # to nearest it would not have moved at all


def test_pools_do_not_share_near_words(make_arena: Make) -> None:
    arena = make_arena(
        [(50, 5, "int4"), (40, 8, "int2"), (30, 3, "int4"), (20, 8, "int8")], slots=[2, 0, 3, 4], near=[7, 9, 1, 0]
    )
    ends = 0
    for pool in sorted((p for p in arena.pools if p.int8_slots), key=lambda p: p.int8_base * F.int8_slot_words(p.dim)):
        assert pool.int8_base * F.int8_slot_words(pool.dim) >= ends
        ends = (pool.int8_base + pool.int8_slots) * F.int8_slot_words(pool.dim)
    assert arena.cache[1].numel() == ends
    assert [(p.fp32_slots, p.int8_slots) for p in arena.pools] == [(3, 1), (2, 7), (4, 0), (0, 9)]


def test_a_layout_as_text_keeps_near_slots(make_arena: Make) -> None:
    arena = make_arena([(50, 5, "int4")], slots=[2], near=[7])
    assert parse(arena.spec).pools == arena.pools
    assert Layout.of(arena.layout.fields_F8, write_spec(arena.layout.tables.features, arena.pools)).tables.pools == arena.pools
