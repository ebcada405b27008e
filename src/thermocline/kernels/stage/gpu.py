"""Staged rows on a GPU: four small launches between two training steps, and one beside them that moves the codes.

Lookups are claimed as they come, not sorted: the sign bit of a row's first word, set by an atomic operation, tells which of
its lookups was first. So the order of places depends on timing, but nothing else does: which place a row has, and whether it
has one at all, never shows in a result.

`copy` reads and writes host memory 16 bytes a thread at a time, 8 KiB a program in flight: a few programs fill the link, and
the rest of the card is left to training. Half of the programs move codes in, half out, because the link has two directions.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import formats as F
from ..gpu_launch import ceil_div, launch, power_of_two
from ..gpu_staged import AREA, ARRIVING, LEAVING, PLACE_BITS, SHIFT_CODES, SHIFT_META, STAGED, is_staged
from ..layout import Layout, Pool, Staging, per_feature

_EMPTY, _FIELDS = tl.constexpr(F.EMPTY), tl.constexpr(F.LAYOUT_FIELDS)
_ROW, _ROWS = tl.constexpr(F.ROW), tl.constexpr(F.ROWS)
_COUNTS, _NUMBER = tl.constexpr(F.COUNT_FIELDS), tl.constexpr(F.NUMBER)
_FREE, _TAKEN, _LEFT = (tl.constexpr(k) for k in (F.FREE, F.TAKEN, F.LEFT))
_ROWS_IN, _ROWS_OUT, _NO_ROOM = (tl.constexpr(k) for k in (F.ROWS_IN, F.ROWS_OUT, F.NO_ROOM))

TILE = 1024
COPIERS = 64  # programs for each direction
_PIECES = 1024  # that a program has in flight, of 8 bytes where rows allow


@triton.jit
def _tally(counts, BATCH: tl.constexpr):
    """One program for each pool."""
    counts += tl.program_id(0) * _COUNTS
    free, taken = tl.load(counts + _FREE), tl.load(counts + _TAKEN)
    came = tl.minimum(free, taken)
    tl.store(counts + _ROWS_IN, tl.load(counts + _ROWS_IN) + came)
    tl.store(counts + _NO_ROOM, tl.load(counts + _NO_ROOM) + taken - came)
    tl.store(counts + _ROWS_OUT, tl.load(counts + _ROWS_OUT) + tl.load(counts + _LEFT))
    tl.store(counts + _NUMBER, tl.load(counts + _NUMBER) + BATCH)
    tl.store(counts + _FREE, free * 0)
    tl.store(counts + _TAKEN, free * 0)
    tl.store(counts + _LEFT, free * 0)


@triton.jit
def _append(list, count, place_T, mask_T):
    """Put places at the end of a list, in any order among programs."""
    rank_T = tl.cumsum(mask_T.to(tl.int32), 0)
    many = tl.sum(mask_T.to(tl.int32), 0)
    if many > 0:
        begin = tl.atomic_add(count, many.to(tl.int64), sem="relaxed")
        tl.store(list + begin + rank_T - 1, place_T, mask=mask_T)


@triton.jit
def _commit(
    meta, area, rows, free, counts, first, places, low, meta_at, pool, WORDS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    meta, rows, free, counts = meta + meta_at, rows + first, free + first, counts + pool * _COUNTS
    place_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside_T = place_T < places
    row_T = tl.load(rows + place_T, mask=inside_T, other=_EMPTY)
    held_T = inside_T & (row_T != _EMPTY)
    at_T = tl.where(held_T, row_T - low, 0)
    word_T = tl.load(meta + WORDS * at_T, mask=held_T, other=0)
    mine_T = held_T & ((word_T & ~(ARRIVING | LEAVING)) == (place_T | STAGED))
    tl.store(meta + WORDS * at_T, place_T | STAGED, mask=mine_T & ((word_T & ARRIVING) != 0))
    leaving_T = mine_T & ((word_T & LEAVING) != 0)
    stored_T = tl.load(area + pool * AREA + SHIFT_META) + place_T
    for k in tl.static_range(WORDS):
        saved_T = tl.load(meta + WORDS * stored_T + k, mask=leaving_T, other=0)
        tl.store(meta + WORDS * at_T + k, saved_T, mask=leaving_T)
    gone_T = held_T & (leaving_T | (mine_T == 0))
    tl.store(rows + place_T, tl.full((TILE,), _EMPTY, tl.int64), mask=gone_T)
    _append(free, counts + _FREE, place_T, inside_T & (gone_T | (held_T == 0)))


@triton.jit
def _claim(
    fields, ids, offsets, meta, area, rows, until, free, counts, count, stride, first, places, low, high, meta_at, pool,
    FEATURES: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    meta, rows, until, free = meta + meta_at, rows + first, until + first, free + first
    counts += pool * _COUNTS
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside_T = at_T < count
    feature_T = tl.zeros((TILE,), tl.int32)  # the last one that does not begin after the lookup
    for bit in tl.static_range(BITS):
        probe_T = feature_T + (1 << (BITS - 1 - bit))
        known_T = probe_T < FEATURES
        begins_T = tl.load(offsets + probe_T.to(tl.int64) * stride, mask=known_T, other=0).to(tl.int64)
        feature_T = tl.where(known_T & (begins_T <= at_T), probe_T, feature_T)
    id_T = tl.load(ids + at_T, mask=inside_T, other=-1).to(tl.int64)
    key_T = tl.load(fields + feature_T * _FIELDS + _ROW) + id_T
    mine_T = inside_T & (id_T >= 0) & (id_T < tl.load(fields + feature_T * _FIELDS + _ROWS))
    mine_T = mine_T & (key_T >= low) & (key_T < high)
    row_T = tl.where(mine_T, key_T - low, 0)
    word_T = tl.load(meta + WORDS * row_T, mask=mine_T, other=-1)
    number = tl.load(counts + _NUMBER).to(tl.int32)
    # A word that another program has just marked may look like a pointer; then some place stays a batch longer.
    place_T = word_T & PLACE_BITS
    tl.store(until + place_T, number + 0 * word_T, mask=mine_T & is_staged(word_T) & (place_T < places))
    plain_T = mine_T & (word_T >= 0)
    if tl.max(plain_T.to(tl.int32), 0) > 0:
        stored_T = tl.atomic_or(meta + WORDS * row_T, tl.full((TILE,), -2147483648, tl.int32), mask=plain_T, sem="relaxed")
        won_T = plain_T & (stored_T >= 0)
        rank_T = tl.cumsum(won_T.to(tl.int32), 0)
        begin = tl.atomic_add(counts + _TAKEN, tl.sum(won_T.to(tl.int32), 0).to(tl.int64), sem="relaxed")
        turn_T = begin + rank_T - 1
        fits_T = won_T & (turn_T < tl.load(counts + _FREE))
        given_T = tl.load(free + turn_T, mask=fits_T, other=0)
        tl.store(rows + given_T, key_T, mask=fits_T)
        tl.store(until + given_T, number + 0 * given_T, mask=fits_T)
        word_at_T = WORDS * (tl.load(area + pool * AREA + SHIFT_META) + given_T)
        tl.store(meta + word_at_T, stored_T, mask=fits_T)
        if WORDS == 2:
            tl.store(meta + word_at_T + 1, tl.load(meta + 2 * row_T + 1, mask=fits_T, other=0), mask=fits_T)
        tl.store(meta + WORDS * row_T, tl.where(fits_T, given_T | (STAGED | ARRIVING), stored_T), mask=won_T)


@triton.jit
def _leave(
    meta, rows, until, leaving, counts, first, places, low, meta_at, pool,
    EVERYTHING: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    meta, rows, until, leaving = meta + meta_at, rows + first, until + first, leaving + first
    counts += pool * _COUNTS
    place_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside_T = place_T < places
    old_T = inside_T
    if not EVERYTHING:
        old_T = inside_T & (tl.load(until + place_T, mask=inside_T, other=0) < tl.load(counts + _NUMBER).to(tl.int32) - 1)
    row_T = tl.load(rows + place_T, mask=old_T, other=_EMPTY)
    old_T = old_T & (row_T != _EMPTY)
    tl.store(meta + WORDS * tl.where(old_T, row_T - low, 0), place_T | (STAGED | LEAVING), mask=old_T)
    _append(leaving, counts + _LEFT, place_T, old_T)


@triton.jit(do_not_specialize=["codes_at"])
def _copy(
    area, codes, rows, free, leaving, counts, first, low, codes_at, pool,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Rows are WIDTH pieces of UNIT bytes. Programs from PROGRAMS on copy out."""
    counts += pool * _COUNTS
    out = tl.program_id(0) >= PROGRAMS
    here = tl.program_id(0) % PROGRAMS
    came = tl.minimum(tl.load(counts + _FREE), tl.load(counts + _TAKEN))
    many = tl.where(out, tl.load(counts + _LEFT), came).to(tl.int32)
    shift = tl.load(area + pool * AREA + SHIFT_CODES)
    codes += codes_at // 16 * 16
    if UNIT == 8:
        base = codes.to(tl.pointer_type(tl.int64))
    elif UNIT == 4:
        base = codes.to(tl.pointer_type(tl.int32))
    elif UNIT == 2:
        base = codes.to(tl.pointer_type(tl.int16))
    else:
        base = codes
    piece = tl.arange(0, BLOCK)
    for begin in range(here * TILE, many, PROGRAMS * TILE):
        turn_T = begin + tl.arange(0, TILE)
        mask_T = turn_T < many
        given_T = tl.load(free + first + turn_T, mask=mask_T & (out == 0), other=0)
        place_T = given_T + tl.load(leaving + first + turn_T, mask=mask_T & out, other=0)
        row_T = tl.load(rows + first + place_T, mask=mask_T, other=0) - low
        stored_T = shift + place_T
        mask = mask_T[:, None] & (piece < WIDTH)[None, :]
        from_T, to_T = tl.where(out, stored_T, row_T), tl.where(out, row_T, stored_T)
        moved = tl.load(base + from_T[:, None] * WIDTH + piece[None, :], mask=mask, other=0)
        tl.store(base + to_T[:, None] * WIDTH + piece[None, :], moved, mask=mask)


def _pools(staging: Staging, layout: Layout) -> list[tuple[int, Pool, int, int]]:
    """(number, pool, first place, places) of each pool that has any."""
    parts = zip(layout.tables.pools, staging.first, staging.places, strict=True)
    return [(number, *part) for number, part in enumerate(parts) if part[2]]


def commit(meta: Tensor, staging: Staging, layout: Layout, codes: Tensor, batch: bool) -> None:
    """Take note of what was copied; `batch`: a new batch is about to be prefetched."""
    launch(_tally, len(staging.places), (staging.counts,), (), (int(batch),), exact=True, warps=1)
    for number, pool, first, places in _pools(staging, layout):
        launch(
            _commit, ceil_div(places, TILE), (meta, staging.area, staging.rows, staging.free, staging.counts),
            (first, places, pool.row, pool.meta, number), (F.META_WORDS[pool.format], TILE), exact=True,
        )  # fmt: skip


def claim(meta: Tensor, staging: Staging, layout: Layout, codes: Tensor, ids_N: Tensor, offsets: Tensor) -> None:
    """Let the rows of a batch arrive that are in their tables, as far as there is room."""
    count, features = ids_N.numel(), len(layout.tables.features)
    ids_N, offsets = ids_N.contiguous(), offsets.contiguous()
    if count == 0:
        return
    for number, pool, first, places in _pools(staging, layout):
        launch(
            _claim, ceil_div(count, TILE),
            (layout.fields_F8, ids_N, offsets, meta, staging.area, staging.rows, staging.until, staging.free, staging.counts),
            (count, per_feature(layout, offsets), first, places, pool.row, pool.row + pool.rows, pool.meta, number),
            (features, (features - 1).bit_length(), F.META_WORDS[pool.format], TILE), exact=True,
        )  # fmt: skip


def leave(meta: Tensor, staging: Staging, layout: Layout, codes: Tensor, everything: bool = False) -> None:
    """Let rows leave that neither this batch nor the one before has; or all of them, of which none may be arriving."""
    for number, pool, first, places in _pools(staging, layout):
        launch(
            _leave, ceil_div(places, TILE), (meta, staging.rows, staging.until, staging.leaving, staging.counts),
            (first, places, pool.row, pool.meta, number), (everything, F.META_WORDS[pool.format], TILE), exact=True,
        )  # fmt: skip


def copy(meta: Tensor, staging: Staging, layout: Layout, codes: Tensor) -> None:
    """Move the codes of arriving and leaving rows. May run at any time before the next commit, beside anything else."""
    for number, pool, first, places in _pools(staging, layout):
        bytes = F.row_bytes(pool.format, pool.dim)
        unit = math.gcd(bytes, 8)
        block = power_of_two(bytes // unit)
        rows = max(1, _PIECES // block)
        programs = min(COPIERS, ceil_div(places, rows))
        launch(
            _copy, 2 * programs, (staging.area, codes, staging.rows, staging.free, staging.leaving, staging.counts),
            (first, pool.row, pool.codes, number), (bytes // unit, unit, block, rows, programs), exact=True,
        )  # fmt: skip


class _Journey:
    """Copies under way: how many refreshes of the cache began beside them."""

    __slots__ = ("ended", "refreshes")

    def __init__(self, ended: torch.cuda.Event) -> None:
        self.ended, self.refreshes = ended, 0


_journeys: dict[int, _Journey] = {}  # by the address of the staging area


def set_out(area: Tensor, ended: torch.cuda.Event) -> None:
    """Copies of this area are under way; `ended` comes after them."""
    _journeys[area.data_ptr()] = _Journey(ended)


def arrived(area: Tensor) -> None:
    """Let the current stream wait for the copies of this area."""
    journey = _journeys.pop(area.data_ptr(), None)
    if journey is not None:
        torch.cuda.current_stream(area.device).wait_event(journey.ended)


def refreshed(area: Tensor) -> None:
    """The cache is about to be refreshed. The second time beside the same copies waits for them (see `reference.py`)."""
    journey = _journeys.get(area.data_ptr())
    if journey is not None:
        journey.refreshes += 1
        if journey.refreshes > 1:
            arrived(area)
