"""Staged rows on a GPU: a few small launches between two training steps, and one beside them that moves the codes."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gpu.graphs import Recorder
from thermocline.kernels.gpu.launch import Array, ScratchArray, ceil_div, launch, power_of_two, scratch
from thermocline.kernels.gpu.sort import without_sort_graphs
from thermocline.kernels.gpu.staged import AREA, ARRIVING, LEAVING, PLACE_BITS, SHIFT_CODES, SHIFT_META, STAGED, is_staged
from thermocline.kernels.layout import Layout, Staging

from .gpu_evict import TILE, before, choose, opened, pool_places, send, to_send

__all__ = ["choose", "claim", "commit", "copy", "recorder", "repetition_key", "send"]

_EMPTY = tl.constexpr(F.EMPTY)
_COUNTS, _NUMBER = tl.constexpr(F.COUNT_FIELDS), tl.constexpr(F.NUMBER)
_FREE, _TAKEN, _OPEN, _OPENED = (tl.constexpr(k) for k in (F.FREE, F.TAKEN, F.OPEN, F.OPENED))
_LEFT, _END, _WISH = (tl.constexpr(k) for k in (F.LEFT, F.END, F.WISH))
_ROWS_IN, _ROWS_OUT = tl.constexpr(F.ROWS_IN), tl.constexpr(F.ROWS_OUT)
_ROWS_THERE, _NO_ROOM = tl.constexpr(F.ROWS_THERE), tl.constexpr(F.NO_ROOM)

COPIERS = 12  # programs
_PIECES = 1024  # in flight for each program and direction, of 8 bytes where rows allow


@triton.jit
def _tally(counts, came):
    tl.store(counts + _ROWS_IN, tl.load(counts + _ROWS_IN) + came)
    tl.store(counts + _NO_ROOM, tl.load(counts + _NO_ROOM) + tl.load(counts + _TAKEN) - came)
    tl.store(counts + _ROWS_OUT, tl.load(counts + _ROWS_OUT) + tl.load(counts + _LEFT))


@triton.jit
def _commit(
    meta, area, rows, free, leaving, chosen, counts, empty, turn, first, listed, low, meta_at, pool,
    BATCH: tl.constexpr, SLICES: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Apply the lists of the last decision, and count the open places of each tile.

    With a batch, empty places that are sent next are open too: tiles of their own, after the others. `turn` keeps their place
    in the list, because `_list` changes the number of the batch.
    """
    meta, rows, free, leaving, counts = meta + meta_at, rows + first, free + listed, leaving + listed, counts + pool * _COUNTS
    turn_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if BATCH:
        begin, size = to_send(counts, tl.load(counts + _NUMBER) + 1, SLICES)
        bare_T = turn_T < size
        place_T = tl.load(chosen + SLICES * listed + begin + turn_T, mask=bare_T, other=0)
        bare_T = bare_T & (tl.load(rows + place_T, mask=bare_T, other=0) == _EMPTY)
        tl.store(empty + tl.num_programs(0) + tl.program_id(0), tl.sum(bare_T.to(tl.int32), 0))
        if tl.program_id(0) == 0:
            tl.store(turn, begin)
            tl.store(turn + 1, size)
    came = tl.minimum(tl.load(counts + _FREE), tl.load(counts + _TAKEN))
    if tl.program_id(0) == 0:
        _tally(counts, came)
    nothing_T = tl.full((TILE,), _EMPTY, tl.int64)
    come_T = turn_T < came
    place_T = tl.load(free + turn_T, mask=come_T, other=0)
    at_T = tl.load(rows + place_T, mask=come_T, other=low) - low
    mine_T = come_T & (tl.load(meta + WORDS * at_T, mask=come_T, other=0) == (place_T | (STAGED | ARRIVING)))
    tl.store(meta + WORDS * at_T, place_T | STAGED, mask=mine_T)
    tl.store(rows + place_T, nothing_T, mask=come_T & (mine_T == 0))
    place_T, open_T, _ = opened(leaving, turn_T, turn_T < tl.load(counts + _OPEN))
    row_T = tl.load(rows + place_T, mask=open_T, other=_EMPTY)
    held_T = row_T != _EMPTY
    at_T = tl.where(held_T, row_T - low, 0)
    word_T = tl.load(meta + WORDS * at_T, mask=held_T, other=0)
    left_T = held_T & (word_T == (place_T | (STAGED | LEAVING)))
    stored_T = tl.load(area + pool * AREA + SHIFT_META) + place_T
    for k in tl.static_range(WORDS):
        saved_T = tl.load(meta + WORDS * stored_T + k, mask=left_T, other=0)
        tl.store(meta + WORDS * at_T + k, saved_T, mask=left_T)
    stays_T = held_T & (word_T == (place_T | STAGED))
    tl.store(rows + place_T, nothing_T, mask=held_T & (stays_T == 0))
    tl.store(empty + tl.program_id(0), tl.sum((open_T & (stays_T == 0)).to(tl.int32), 0))


@triton.jit
def _list(
    rows, free, leaving, chosen, counts, empty, turn, tiles, first, listed, most, pool,
    BATCH: tl.constexpr, SLICES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List the open places that are empty."""
    rows, free, leaving, counts = rows + first, free + listed, leaving + listed, counts + pool * _COUNTS
    tile = tl.program_id(0)
    if tile < tiles:
        turn_T = tile * TILE + tl.arange(0, TILE)
        place_T, open_T, _ = opened(leaving, turn_T, turn_T < tl.load(counts + _OPEN))
    else:
        turn_T = (tile - tiles) * TILE + tl.arange(0, TILE)
        place_T, open_T, _ = opened(chosen + SLICES * listed + tl.load(turn), turn_T, turn_T < tl.load(turn + 1))
    open_T = open_T & (tl.load(rows + place_T, mask=open_T, other=0) == _EMPTY)
    begin = before(empty, tile, TILE)
    rank_T = begin + tl.cumsum(open_T.to(tl.int32), 0)
    tl.store(free + rank_T - 1, place_T, mask=open_T & (rank_T <= most))
    if tile == tl.num_programs(0) - 1:
        many = tl.minimum(begin + tl.sum(open_T.to(tl.int32), 0), most)
        tl.store(counts + _NUMBER, tl.load(counts + _NUMBER) + BATCH)
        tl.store(counts + _FREE, many.to(tl.int64))
        tl.store(counts + _TAKEN, (many * 0).to(tl.int64))
        tl.store(counts + _OPENED, (many * 0).to(tl.int64))
        tl.store(counts + _LEFT, (many * 0).to(tl.int64))
        tl.store(counts + _END, (many * 0).to(tl.int64))


@triton.jit
def _wanted(keys, meta, count, low, high, WORDS: tl.constexpr, TILE: tl.constexpr):
    """(key, is the first of its run and of this pool, row, first meta word) of a tile of sorted lookups."""
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    key_T = tl.load(keys + at_T, mask=at_T < count, other=-1).to(tl.int64)
    before_T = tl.load(keys + at_T - 1, mask=(at_T > 0) & (at_T < count), other=-1).to(tl.int64)
    mine_T = (key_T >= low) & (key_T < high) & (key_T != before_T)
    row_T = tl.where(mine_T, key_T - low, 0)
    return key_T, mine_T, row_T, tl.load(meta + WORDS * row_T, mask=mine_T, other=-1)


@triton.jit
def _count(
    keys, meta, until, counts, wishes, count, first, low, high, meta_at, pool, WORDS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Count the rows of each tile that need a place; staged rows keep theirs."""
    _, mine_T, _, word_T = _wanted(keys, meta + meta_at, count, low, high, WORDS, TILE)
    counts += pool * _COUNTS
    there_T = mine_T & is_staged(word_T)
    number = tl.load(counts + _NUMBER).to(tl.int32)
    tl.store(until + first + (word_T & PLACE_BITS), number + 0 * word_T, mask=there_T)
    there = tl.sum(there_T.to(tl.int32), 0)
    if there > 0:
        tl.atomic_add(counts + _ROWS_THERE, there.to(tl.int64), sem="relaxed")
    tl.store(wishes + tl.program_id(0), tl.sum((mine_T & (word_T >= 0)).to(tl.int32), 0))


@triton.jit
def _claim(
    keys, meta, area, rows, until, free, counts, wishes, count, first, listed, low, high, meta_at, pool,
    WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Give places in the order of rows, after those of earlier tiles."""
    meta, rows, until, free = meta + meta_at, rows + first, until + first, free + listed
    counts += pool * _COUNTS
    key_T, mine_T, row_T, word_T = _wanted(keys, meta, count, low, high, WORDS, TILE)
    plain_T = mine_T & (word_T >= 0)
    tile = tl.program_id(0)
    begin = before(wishes, tile, TILE)
    many = tl.sum(plain_T.to(tl.int32), 0)
    if tile == tl.num_programs(0) - 1:
        taken, wish = (begin + many).to(tl.int64), tl.load(counts + _WISH)
        tl.store(counts + _TAKEN, taken)
        tl.store(counts + _WISH, tl.maximum(taken + (taken + 3) // 4, wish - (wish + 7) // 8))
    if many > 0:
        number = tl.load(counts + _NUMBER).to(tl.int32)
        turn_T = begin + tl.cumsum(plain_T.to(tl.int32), 0) - 1
        fits_T = plain_T & (turn_T < tl.load(counts + _FREE))
        given_T = tl.load(free + turn_T, mask=fits_T, other=0)
        tl.store(rows + given_T, key_T, mask=fits_T)
        tl.store(until + given_T, number + 0 * given_T, mask=fits_T)
        word_at_T = WORDS * (tl.load(area + pool * AREA + SHIFT_META) + given_T)
        tl.store(meta + word_at_T, word_T, mask=fits_T)
        if WORDS == 2:
            tl.store(meta + word_at_T + 1, tl.load(meta + 2 * row_T + 1, mask=fits_T, other=0), mask=fits_T)
        tl.store(meta + WORDS * row_T, given_T | (STAGED | ARRIVING), mask=fits_T)


@triton.jit
def _pair(rows, list, begin, many, shift, low, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """(pieces of rows in their table, in their places, mask) of a tile of a list of places."""
    turn_T = begin + tl.arange(0, TILE)
    place_T, mask_T, leaves_T = opened(list, turn_T, turn_T < many)
    mask_T = mask_T & leaves_T
    row_T = tl.load(rows + place_T, mask=mask_T, other=0) - low
    piece = tl.arange(0, BLOCK)[None, :]
    return row_T[:, None] * WIDTH + piece, (shift + place_T)[:, None] * WIDTH + piece, mask_T[:, None] & (piece < WIDTH)


@triton.jit(do_not_specialize=["codes_at"])
def _copy(
    area, codes, rows, free, leaving, counts, first, listed, low, codes_at, pool,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Copy rows of WIDTH pieces of UNIT bytes, in and out by turns.

    A program loads its next rows before it stores the present ones, to overlap address translation with the link.
    """
    counts += pool * _COUNTS
    came = tl.minimum(tl.load(counts + _FREE), tl.load(counts + _TAKEN)).to(tl.int32)
    gone = tl.load(counts + _END).to(tl.int32)
    shift = tl.load(area + pool * AREA + SHIFT_CODES)
    rows, free, leaving = rows + first, free + listed, leaving + listed
    codes += codes_at // 16 * 16
    if UNIT == 8:
        base = codes.to(tl.pointer_type(tl.int64))
    elif UNIT == 4:
        base = codes.to(tl.pointer_type(tl.int32))
    elif UNIT == 2:
        base = codes.to(tl.pointer_type(tl.int16))
    else:
        base = codes
    begin, stride = tl.program_id(0) * TILE, PROGRAMS * TILE
    source, in_to, in_mask = _pair(rows, free, begin, came, shift, low, WIDTH, BLOCK, TILE)
    coming = tl.load(base + source, mask=in_mask, other=0)
    out_to, source, out_mask = _pair(rows, leaving, begin, gone, shift, low, WIDTH, BLOCK, TILE)
    going = tl.load(base + source, mask=out_mask, other=0)
    for begin in range(tl.program_id(0) * TILE, tl.maximum(came, gone), stride):
        source, next_in_to, next_in_mask = _pair(rows, free, begin + stride, came, shift, low, WIDTH, BLOCK, TILE)
        next_coming = tl.load(base + source, mask=next_in_mask, other=0)
        next_out_to, source, next_out_mask = _pair(rows, leaving, begin + stride, gone, shift, low, WIDTH, BLOCK, TILE)
        next_going = tl.load(base + source, mask=next_out_mask, other=0)
        tl.store(base + out_to, going, mask=out_mask)
        tl.store(base + in_to, coming, mask=in_mask)
        in_to, in_mask, coming = next_in_to, next_in_mask, next_coming
        out_to, out_mask, going = next_out_to, next_out_mask, next_going


def commit(meta: Tensor, staging: Staging, layout: Layout, codes: Tensor, batch: bool) -> None:
    """End the last copies; `batch`: a new batch is about to be prefetched."""
    lists = (staging.free, staging.leaving, staging.chosen, staging.counts)
    for number, pool, first, _, listed, most in pool_places(staging, layout):
        tiles = ceil_div(most, TILE)
        empty, turn = scratch(meta.device, (2 * tiles, torch.int32), (2, torch.int64))
        launch(
            _commit, tiles, (meta, staging.area, staging.rows, *lists, empty, turn),
            (first, listed, pool.row, pool.meta, number), (int(batch), staging.slices, F.META_WORDS[pool.format], TILE),
            exact=True,
        )  # fmt: skip
        launch(
            _list, 2 * tiles if batch else tiles, (staging.rows, *lists, empty, turn), (tiles, first, listed, most, number),
            (int(batch), staging.slices, TILE), exact=True,
        )  # fmt: skip


def claim(meta: Tensor, staging: Staging, layout: Layout, keys: Array) -> None:
    """Let rows that are in their tables arrive, as far as there is room; `keys` are the sorted rows of a batch."""
    count = keys.numel()
    tiles = ceil_div(count, TILE)
    (wishes,) = scratch(meta.device, (tiles, torch.int32))
    for number, pool, first, _, listed, _ in pool_places(staging, layout):
        where = (pool.row, pool.row + pool.rows, pool.meta, number)
        constants = (F.META_WORDS[pool.format], TILE)
        launch(
            _count, tiles, (keys, meta, staging.until, staging.counts, wishes), (count, first, *where), constants, exact=True
        )
        arrays = (staging.area, staging.rows, staging.until, staging.free, staging.counts)
        launch(_claim, tiles, (keys, meta, *arrays, wishes), (count, first, listed, *where), constants, exact=True)


def copy(
    meta: Tensor, staging: Staging, layout: Layout, codes: Tensor, stream: torch.cuda.Stream | None = None
) -> None:  # fmt: skip
    """Copy the codes of arriving and leaving rows, at any time before the next commit, beside anything else."""
    for number, pool, first, _, listed, most in pool_places(staging, layout):
        bytes = F.row_bytes(pool.format, pool.dim)
        unit = math.gcd(bytes, 8)
        block = power_of_two(bytes // unit)
        rows = max(1, _PIECES // block)
        programs = min(COPIERS, ceil_div(most, rows))
        launch(
            _copy, programs, (staging.area, codes, staging.rows, staging.free, staging.leaving, staging.counts),
            (first, listed, pool.row, pool.codes, number), (bytes // unit, unit, block, rows, programs), exact=True,
            stream=stream,
        )  # fmt: skip


def recorder() -> Recorder:
    """A recorder for the decisions of one staging area."""
    return Recorder(without_sort_graphs)


def repetition_key(keys: Array | None) -> tuple[int, int] | None:
    """The key of a decision's launches for the recorder; None where the same launches will not come again."""
    # Recorded sorts leave keys where the last ones were.
    return (keys.pointer, keys.length) if isinstance(keys, ScratchArray) else None
