"""The adaptive policy on a GPU: packed scores, the window, and its adaptation (definition: `reference.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline import formats as F

from . import reference as R

_SINCE, _WINDOW, _LINE, _EDGE = (tl.constexpr(k) for k in (F.SINCE, F.WINDOW, F.LINE, F.EDGE))
_AGE_BUCKETS, _MARGIN, _COUNT_UNIT, _OCTAVE = (tl.constexpr(k) for k in (R.AGE_BUCKETS, R.MARGIN, R.COUNT_UNIT, R.OCTAVE))
_TICK_BITS, _HALVING_TICKS, _MAX_COUNT = (tl.constexpr(k) for k in (R.TICK_BITS, R.HALVING_TICKS, R.MAX_COUNT))
_TICKS_PER_LOOKUP = tl.constexpr(R.HALVING_TICKS // R.HALVING_LOOKUPS)
_MIN_WINDOW_SHARE, _WINDOW_PARTS, _WINDOW_STEP = (tl.constexpr(k) for k in (R.MIN_WINDOW_SHARE, R.WINDOW_PARTS, R.WINDOW_STEP))
_FIRST_LINE, _LAST_LINE = tl.constexpr(R.FIRST_LINE), tl.constexpr(R.BUCKETS - R.FIRST_LINE)

# Scratch indices: hits of the oldest and the coldest; slots of the window, of the oldest, of the coldest; and a copy of ledger
# fields, which one program may change before others have read them.
_OLD_HITS, _COLD_HITS, _IN_WINDOW, _OLDEST, _COLDEST = (tl.constexpr(2 * R.BUCKETS + k) for k in range(3, 8))
_NOW, _LINE_NOW, _EDGE_NOW = (tl.constexpr(2 * R.BUCKETS + k) for k in range(8, 11))


@triton.jit
def bucket_of(count):
    return tl.maximum((count.to(tl.float32).to(tl.int32, bitcast=True) >> 20) - 1015, 0)


@triton.jit
def begin_step(ledger, work, slots, halve):
    """Clear the counts of this step; store the time and the end of the window."""
    for k in tl.static_range(5):
        tl.store(work + _OLD_HITS + k, 0)
    since = tl.where(halve, 0, tl.load(ledger + _SINCE))
    line = tl.load(ledger + _LINE)
    line = tl.where(halve, tl.maximum(line - _OCTAVE, 1 - _FIRST_LINE), line)
    tl.store(work + _NOW, tl.minimum(_HALVING_TICKS + _TICKS_PER_LOOKUP * since // slots, 2 * _HALVING_TICKS - 1).to(tl.int32))
    tl.store(work + _LINE_NOW, line.to(tl.int32))
    tl.store(work + _EDGE_NOW, tl.load(ledger + _EDGE).to(tl.int32))


@triton.jit
def halve(score):
    """A score after halving."""
    ticks = tl.maximum((score & (2 * _HALVING_TICKS - 1)) - _HALVING_TICKS, 0)
    return ((score >> (_TICK_BITS + 1)) << _TICK_BITS) | ticks


@triton.jit
def pack_score(count, work):
    """Pack a count and the time of this step into a score."""
    return (tl.minimum(count, _MAX_COUNT) << _TICK_BITS) | tl.load(work + _NOW)


@triton.jit
def score_after_hit(score, weight, work):
    """The score of a row after another lookup."""
    return pack_score((score >> _TICK_BITS) + _COUNT_UNIT * weight, work)


@triton.jit
def _window_parts(score, work):
    """(bucket of the count, bucket of the age, in the window, oldest of the window, coldest outside)."""
    now, line, edge = tl.load(work + _NOW), tl.load(work + _LINE_NOW) + _FIRST_LINE, tl.load(work + _EDGE_NOW)
    count, age = bucket_of(score >> _TICK_BITS), bucket_of(now - (score & (2 * _HALVING_TICKS - 1)))
    window = count < line
    return count, age, window, window & (age > edge - 2 * _OCTAVE), (count >= line) & (count < line + _OCTAVE) & (age > edge)


@triton.jit
def count_hits(score_T, weight_T, hit_T, work):
    """Add to the hits of the oldest and coldest slots."""
    _, _, _, oldest_T, coldest_T = _window_parts(score_T, work)
    tl.atomic_add(work + _OLD_HITS, tl.sum(tl.where(oldest_T & hit_T, weight_T, 0), 0), sem="relaxed")
    tl.atomic_add(work + _COLD_HITS, tl.sum(tl.where(coldest_T & hit_T, weight_T, 0), 0), sem="relaxed")


@triton.jit
def slot_buckets(score_T, occupied_T, work):
    """Buckets of slots; adds to the sizes of the window and its parts."""
    count_T, age_T, window_T, oldest_T, coldest_T = _window_parts(score_T, work)
    tl.atomic_add(work + _IN_WINDOW, tl.sum((window_T & occupied_T).to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(work + _OLDEST, tl.sum((oldest_T & occupied_T).to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(work + _COLDEST, tl.sum((coldest_T & occupied_T).to(tl.int32), 0), sem="relaxed")
    return tl.where(window_T & (age_T > 0), _AGE_BUCKETS - (age_T >> 1), count_T + (_AGE_BUCKETS + _MARGIN))


@triton.jit
def candidate_buckets(score_T):
    """Buckets of candidates."""
    return bucket_of(tl.minimum(score_T, _MAX_COUNT)) + _AGE_BUCKETS


@triton.jit
def adapt_window(ledger, work, slots, seen, low):
    """Update WINDOW, LINE and EDGE after a step of `seen` lookups; `low` is the last evicted bucket, 0 for none."""
    line, size = tl.load(work + _LINE_NOW), tl.load(ledger + _WINDOW)
    window, wanted = tl.load(work + _IN_WINDOW).to(tl.int64), 1 + slots // _MIN_WINDOW_SHARE + size // _WINDOW_PARTS
    move = (window < wanted).to(tl.int32) - (window > wanted).to(tl.int32)
    line += tl.where(seen > 0, move, 0)
    oldest, coldest = tl.load(work + _OLDEST).to(tl.int64), tl.load(work + _COLDEST).to(tl.int64)
    old_hits, cold_hits = tl.load(work + _OLD_HITS).to(tl.int64), tl.load(work + _COLD_HITS).to(tl.int64)
    size += _WINDOW_STEP * _WINDOW_PARTS * (old_hits * coldest) // (oldest + coldest + 1)
    size -= _WINDOW_STEP * _WINDOW_PARTS * (cold_hits * oldest) // (oldest + coldest + 1)
    widest = (0 * size + slots - slots // 8) * _WINDOW_PARTS
    tl.store(ledger + _WINDOW, tl.minimum(tl.maximum(size, 0), widest))
    tl.store(ledger + _LINE, tl.minimum(tl.maximum(line, 1 - _FIRST_LINE), _LAST_LINE).to(tl.int64))
    if low > 0:
        tl.store(ledger + _EDGE, tl.maximum(_AGE_BUCKETS - low, 0).to(tl.int64) * 2)
