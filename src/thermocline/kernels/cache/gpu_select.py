"""Selection from buckets and their histograms on a GPU, for admission and for promotion.

The buckets of `count` candidates precede those of `slots` victims; bucket 0 of a candidate means "no candidate". The scratch
begins with both histograms and has two numbers for each tile from TILES on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .reference import BUCKETS

_BUCKETS = tl.constexpr(BUCKETS)
SCRATCH = 2 * BUCKETS + 16  # words before the numbers of tiles: histograms and sums
_TILES = tl.constexpr(SCRATCH)


@triton.jit
def thresholds(work):
    """(number of swaps, cut, low, candidates of bucket cut - 1, victims of bucket low), as `reference.thresholds`."""
    bin = tl.arange(0, _BUCKETS)
    candidates, victims = tl.load(work + bin), tl.load(work + _BUCKETS + bin)
    coming = tl.sum(candidates, 0) - tl.cumsum(candidates, 0) + candidates
    below = tl.cumsum(victims, 0) - victims
    cut = tl.sum((coming > below).to(tl.int32), 0)
    selected = tl.sum(tl.where(bin >= cut, candidates, 0), 0)
    under = tl.sum(tl.where(bin < cut - 1, victims, 0), 0)
    at_cut = tl.sum(tl.where(bin == cut - 1, candidates, 0), 0)
    from_tied = tl.minimum(at_cut, tl.maximum(under - selected, 0))
    needed = selected + from_tied
    low = tl.sum((tl.cumsum(victims, 0) < needed).to(tl.int32), 0)
    left = tl.sum(tl.where(bin < low, victims, 0), 0)
    return needed, cut, low, from_tied, needed - left


@triton.jit
def _flags(buckets, program, count, slots, tiles, cut, low, TILE: tl.constexpr):
    """(index, always selected, selected while there is room) of a tile of candidates or of victims."""
    of_slots = program >= tiles
    at_T = tl.where(of_slots, program - tiles, program).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside_T = at_T < tl.where(of_slots, slots, count)
    bucket_T = tl.load(buckets + tl.where(of_slots, count, 0) + at_T, mask=inside_T, other=0).to(tl.int32)
    # Bucket 0 of a candidate means "no candidate".
    always_T = tl.where(of_slots, bucket_T < low, (bucket_T >= cut) & (bucket_T > 0))
    tied_T = tl.where(of_slots, bucket_T == low, (bucket_T == cut - 1) & (bucket_T > 0))
    return at_T, always_T & inside_T, tied_T & inside_T


@triton.jit
def count_selected(work, buckets, count, slots, tiles, TILE: tl.constexpr):
    program = tl.program_id(0)
    needed, cut, low, _, _ = thresholds(work)
    if needed > 0:
        _at_T, always_T, tied_T = _flags(buckets, program, count, slots, tiles, cut, low, TILE)
        tl.store(work + _TILES + 2 * program, tl.sum(always_T.to(tl.int32), 0))
        tl.store(work + _TILES + 2 * program + 1, tl.sum(tied_T.to(tl.int32), 0))


@triton.jit
def list_selected(
    work, buckets, count, slots, tiles, lists, capacity, needed, cut, low, from_tied, victims_of_low, TILE: tl.constexpr
):  # fmt: skip
    """List the selected candidates from `lists` on, and the victims from `lists + capacity` on."""
    program = tl.program_id(0)
    if needed > 0:
        at_T, always_T, tied_T = _flags(buckets, program, count, slots, tiles, cut, low, TILE)
        if tl.max((always_T | tied_T).to(tl.int32), 0) > 0:
            start = tl.where(program < tiles, 0, tiles)
            always, tied = 0, 0
            for first in range(start, program, TILE):
                tile_T = first + tl.arange(0, TILE)
                always += tl.sum(tl.load(work + _TILES + 2 * tile_T, mask=tile_T < program, other=0), 0)
                tied += tl.sum(tl.load(work + _TILES + 2 * tile_T + 1, mask=tile_T < program, other=0), 0)
            room = tl.where(program < tiles, from_tied, victims_of_low)
            always_before_T = always + tl.cumsum(always_T.to(tl.int32), 0) - always_T.to(tl.int32)
            tied_before_T = tied + tl.cumsum(tied_T.to(tl.int32), 0) - tied_T.to(tl.int32)
            place_T = always_before_T + tl.minimum(tied_before_T, room)
            taken_T = always_T | (tied_T & (tied_before_T < room))
            selected = work + lists + tl.where(program < tiles, 0, capacity)
            tl.store(selected + place_T, at_T.to(tl.int32), mask=taken_T)
