"""Which staged rows leave, on a GPU: the oldest, if later batches need their places."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gpu.launch import as_tensor, ceil_div, launch, scratch
from thermocline.kernels.gpu.sort import KeySort, key_type
from thermocline.kernels.gpu.staged import LEAVING, PLACE_BITS, STAGED
from thermocline.kernels.layout import Layout, Pool, Staging

_EMPTY, _COUNTS, _NUMBER = (tl.constexpr(k) for k in (F.EMPTY, F.COUNT_FIELDS, F.NUMBER))
_OPEN, _OPENED, _LEFT, _END = (tl.constexpr(k) for k in (F.OPEN, F.OPENED, F.LEFT, F.END))
_WISH, _HAND = tl.constexpr(F.WISH), tl.constexpr(F.HAND)
_CHOSEN, _SINCE, _NO_ROW, _KEPT = (tl.constexpr(k) for k in (F.CHOSEN, F.SINCE_CHOSEN, F.NO_ROW, F.KEPT))
_AGE_SHIFT, _AGE_ONE, _AGE_TWO, _AGE_MOST = (tl.constexpr(k) for k in (F.AGE_SHIFT, F.AGE_ONE, F.AGE_TWO, F.AGE_MOST))
_SWEPT, _AGE_ALL, _AGE_EMPTY, _AGES = (tl.constexpr(k) for k in (F.SWEPT, F.AGE_ALL, F.AGE_EMPTY, F.AGES))

TILE = 1024  # places of a list that a program takes
SCAN = 4096  # places that it looks at, of all


@triton.jit
def before(tallies, tile, TILE: tl.constexpr):
    """The sum of the counts of earlier tiles."""
    begin = 0
    for earlier in range(0, tile, TILE):
        tile_T = earlier + tl.arange(0, TILE)
        begin += tl.sum(tl.load(tallies + tile_T, mask=tile_T < tile, other=0), 0)
    return begin


@triton.jit
def _swept(wish, places, pool_rows):
    """Number of rows from the hand on that leave first."""
    return tl.minimum(4 * wish * pool_rows // places + 1, pool_rows)


@triton.jit
def _look(
    rows, until, ages, bins, counts, first, places, low, pool_rows, pool,
    EVERYTHING: tl.constexpr, SLICES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The age of each place, and a histogram of ages."""
    rows, until, ages, counts = rows + first, until + first, ages + first, counts + pool * _COUNTS
    place_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside_T = place_T < places
    row_T = tl.load(rows + place_T, mask=inside_T, other=_EMPTY)
    if EVERYTHING:
        age_T = tl.where(row_T != _EMPTY, _AGE_ALL, 0)
    else:
        until_T = tl.load(until + place_T, mask=inside_T, other=0)
        age_T = (tl.load(counts + _NUMBER).to(tl.int32) + 1 - until_T).to(tl.float32).to(tl.int32, bitcast=True)
        age_T = tl.minimum(tl.maximum((age_T >> _AGE_SHIFT) - _AGE_ONE, 0), _AGE_MOST)
        ahead_T = row_T - low - tl.load(counts + _HAND)
        ahead_T = tl.where(ahead_T < 0, ahead_T + pool_rows, ahead_T)
        empty_T = tl.where(age_T >= _AGE_TWO, _AGE_EMPTY, 0)
        age_T = tl.where(ahead_T < _swept(SLICES * tl.load(counts + _WISH), places, pool_rows), age_T + _SWEPT, age_T)
        age_T = tl.where(row_T != _EMPTY, age_T, empty_T)
    tl.store(ages + place_T, age_T.to(tl.uint8), mask=inside_T)
    many_A = tl.histogram(age_T, _AGES, mask=inside_T)
    tl.atomic_add(bins + tl.arange(0, _AGES), many_A, mask=many_A > 0, sem="relaxed")


@triton.jit
def _edge(bins, counts, most, EVERYTHING: tl.constexpr, SLICES: tl.constexpr):
    """(the age whose rows leave in part, how many of them, how many places are open then, whether rows leave)."""
    age_A = tl.arange(0, _AGES)
    old_A = (age_A % _SWEPT) >= _AGE_TWO
    many_A = tl.where(old_A, tl.load(bins + age_A), 0)
    total, empty = tl.sum(many_A, 0), tl.sum(tl.where(age_A == _AGE_EMPTY, many_A, 0), 0)
    wanted = empty * 0 + most
    if not EVERYTHING:
        later = (SLICES + 1) * tl.load(counts + _WISH) - tl.load(counts + _OPENED)
        wanted = tl.minimum(tl.maximum(later, empty), SLICES * most).to(tl.int32)
    from_A = total - tl.cumsum(many_A, 0) + many_A
    edge = tl.max(tl.where(old_A & (from_A >= wanted), age_A, 0), 0)
    above = tl.sum(tl.where(age_A > edge, many_A, 0), 0)
    return edge, wanted - above, tl.minimum(wanted, total), wanted > empty


@triton.jit
def _choose(
    ages, bins, counts, sure, tied, first, places, most, pool,
    EVERYTHING: tl.constexpr, SLICES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count the places of each tile that are older than the edge, and those at the edge."""
    edge, _, _, _ = _edge(bins, counts + pool * _COUNTS, most, EVERYTHING, SLICES)
    place_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    age_T = tl.load(ages + first + place_T, mask=place_T < places, other=0).to(tl.int32)
    sure_T = (age_T > edge) & ((age_T % _SWEPT) >= _AGE_TWO)
    tl.store(sure + tl.program_id(0), tl.sum(sure_T.to(tl.int32), 0))
    tl.store(tied + tl.program_id(0), tl.sum(((age_T == edge) & (edge > 0)).to(tl.int32), 0))


@triton.jit
def _pick(
    rows, ages, bins, sure, tied, picked, keys, counts, first, places, most, pool_rows, pool,
    EVERYTHING: tl.constexpr, SLICES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List the places to open, in their order, with their rows as sort keys."""
    counts += pool * _COUNTS
    edge, quota, chosen, moves = _edge(bins, counts, most, EVERYTHING, SLICES)
    tile = tl.program_id(0)
    if tile == 0:
        tl.store(counts + _CHOSEN, chosen.to(tl.int64))
        tl.store(counts + _SINCE, tl.load(counts + _NUMBER))
        if not EVERYTHING:
            hand = tl.load(counts + _HAND) + tl.where(moves, _swept(SLICES * tl.load(counts + _WISH), places, pool_rows), 0)
            tl.store(counts + _HAND, tl.where(hand >= pool_rows, hand - pool_rows, hand))
    place_T = tile * TILE + tl.arange(0, TILE)
    age_T = tl.load(ages + first + place_T, mask=place_T < places, other=0).to(tl.int32)
    tied_T = (age_T == edge) & (edge > 0)
    earlier = before(tied, tile, TILE)
    tied_T = tied_T & (earlier + tl.cumsum(tied_T.to(tl.int32), 0) <= quota)
    pick_T = tied_T | ((age_T > edge) & ((age_T % _SWEPT) >= _AGE_TWO))
    turn_T = before(sure, tile, TILE) + tl.minimum(earlier, quota) + tl.cumsum(pick_T.to(tl.int32), 0) - 1
    tl.store(picked + turn_T, place_T, mask=pick_T)
    row_T = tl.load(rows + first + place_T, mask=pick_T, other=_EMPTY)
    tl.store(keys + turn_T, row_T.to(keys.dtype.element_ty), mask=row_T != _EMPTY)


@triton.jit
def to_send(counts, number, SLICES: tl.constexpr):
    """(begin, length) of the slice of chosen places that is sent with this batch."""
    chosen = tl.load(counts + _CHOSEN)
    size = (chosen + SLICES - 1) // SLICES
    begin = tl.maximum(number - tl.load(counts + _SINCE) - 1, 0) * size
    return begin, tl.maximum(tl.minimum(size, chosen - begin), 0)


@triton.jit
def _send(
    meta, rows, until, chosen, leaving, counts, first, listed, low, meta_at, pool,
    EVERYTHING: tl.constexpr, SLICES: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List the next slice of chosen places and mark their rows as leaving."""
    meta, rows, until, counts = meta + meta_at, rows + first, until + first, counts + pool * _COUNTS
    chosen, leaving = chosen + SLICES * listed, leaving + listed
    since, number = tl.load(counts + _SINCE), tl.load(counts + _NUMBER)
    begin, size = to_send(counts, number, 1 if EVERYTHING else SLICES)
    turn_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    listed_T = turn_T < size
    place_T = tl.load(chosen + begin + turn_T, mask=listed_T, other=0)
    row_T = tl.load(rows + place_T, mask=listed_T, other=_EMPTY)
    held_T = row_T != _EMPTY
    open_T = listed_T
    if not EVERYTHING:
        open_T = open_T & ((held_T == 0) | (tl.load(until + place_T, mask=listed_T, other=0) < since))
    held_T = held_T & open_T
    at_T = tl.where(held_T, row_T - low, 0)
    mine_T = held_T & (tl.load(meta + WORDS * at_T, mask=held_T, other=0) == (place_T | STAGED))
    tl.store(meta + WORDS * at_T, place_T | (STAGED | LEAVING), mask=mine_T)
    tl.store(rows + place_T, tl.full((TILE,), _EMPTY, tl.int64), mask=held_T & (mine_T == 0))
    tl.store(until + place_T, number.to(tl.int32) + 0 * place_T, mask=open_T)
    tl.store(leaving + turn_T, tl.where(open_T, tl.where(mine_T, place_T, place_T | _NO_ROW), _KEPT), mask=listed_T)
    if tl.program_id(0) == 0:
        tl.store(counts + _OPEN, size)
    many, left = tl.sum(open_T.to(tl.int32), 0), tl.sum(mine_T.to(tl.int32), 0)
    if many > 0:
        tl.atomic_add(counts + _OPENED, many.to(tl.int64), sem="relaxed")
    if left > 0:
        tl.atomic_add(counts + _LEFT, left.to(tl.int64), sem="relaxed")
        tl.atomic_max(counts + _END, tl.max(tl.where(mine_T, turn_T + 1, 0), 0).to(tl.int64), sem="relaxed")


@triton.jit
def opened(leaving, turn_T, mask_T):
    """(places, are open, have a row that leaves) of a tile of the places that were opened last."""
    place_T = tl.load(leaving + turn_T, mask=mask_T, other=_KEPT)
    return place_T & PLACE_BITS, place_T != _KEPT, (place_T & _NO_ROW) == 0  # of those that are kept all bits are set


class PoolPlaces(NamedTuple):
    """The places of one pool, as launches take them."""

    number: int
    pool: Pool
    first: int
    places: int
    listed: int
    most: int


def pool_places(staging: Staging, layout: Layout) -> list[PoolPlaces]:
    """The pools that have places."""
    each = zip(layout.tables.pools, staging.first, staging.places, staging.listed, staging.most, strict=True)
    return [PoolPlaces(number, *part) for number, part in enumerate(each) if part[2]]


def choose(meta: Tensor, staging: Staging, layout: Layout, codes: Tensor, everything: bool = False) -> None:
    """Choose the places to open next; `everything`: all places with a row, of which none is arriving."""
    rows, ages, counts, device, slices = staging.rows, staging.ages, staging.counts, meta.device, staging.slices
    for number, pool, first, places, listed, most in pool_places(staging, layout):
        tiles, bins = ceil_div(places, SCAN), torch.zeros(F.AGES, dtype=torch.int32, device=device)
        room = most if everything else slices * most
        sorting = KeySort(room, key_type(layout.tables.rows), device)
        sure, tied, picked = scratch(device, (tiles, torch.int32), (tiles, torch.int32), (room, torch.int32))
        constants = (everything, slices, SCAN)
        launch(
            _look, tiles, (rows, staging.until, ages, bins, counts), (first, places, pool.row, pool.rows, number), constants,
            exact=True, warps=8,
        )  # fmt: skip
        launch(_choose, tiles, (ages, bins, counts, sure, tied), (first, places, most, number), constants, exact=True, warps=8)
        launch(
            _pick, tiles, (rows, ages, bins, sure, tied, picked, sorting.keys, counts),
            (first, places, most, pool.rows, number), constants, exact=True, warps=8,
        )  # fmt: skip
        order = as_tensor(sorting.sort()[1])
        torch.index_select(as_tensor(picked), 0, order, out=staging.chosen[slices * listed : slices * listed + room])


def send(meta: Tensor, staging: Staging, layout: Layout, codes: Tensor, everything: bool = False) -> None:
    """Open the next slice of the chosen places; `everything`: all of them, even if a batch used their rows since."""
    for number, pool, first, _, listed, most in pool_places(staging, layout):
        launch(
            _send, ceil_div(most, TILE), (meta, staging.rows, staging.until, staging.chosen, staging.leaving, staging.counts),
            (first, listed, pool.row, pool.meta, number), (everything, staging.slices, F.META_WORDS[pool.format], TILE),
            exact=True,
        )  # fmt: skip
