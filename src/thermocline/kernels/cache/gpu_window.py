"""The adaptive policy on a GPU: scores of two parts, the window, and how it is steered (see `reference.py`).

Counts of a batch are left in the scratch of `gpu.py`, by programs that add in any order; the program that closes the books of
a pool steers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline import formats as F

from .reference import AGES, BUCKETS, FINE, HALF, LINE, MARGIN, MOST, NARROWEST, OCTAVE, PERIOD, SPEED, TICK_BITS, UNIT

_SINCE, _WINDOW, _LINE, _EDGE = (tl.constexpr(k) for k in (F.SINCE, F.WINDOW, F.LINE, F.EDGE))
_AGES, _MARGIN, _UNIT, _OCTAVE, _START = (tl.constexpr(k) for k in (AGES, MARGIN, UNIT, OCTAVE, LINE))
_TICK_BITS, _PERIOD, _MOST, _TICKS = (tl.constexpr(k) for k in (TICK_BITS, PERIOD, MOST, PERIOD // HALF))
_NARROWEST, _FINE, _SPEED, _LAST_LINE = (tl.constexpr(k) for k in (NARROWEST, FINE, SPEED, BUCKETS - LINE))

# Places in the scratch: hits of the oldest and the coldest; slots of the window, of the oldest, of the coldest; and what this
# step needs of the ledger, which the program that steers may change before others have read it.
_OLD_HITS, _COLD_HITS, _IN_WINDOW, _OLDEST, _COLDEST = (tl.constexpr(2 * BUCKETS + k) for k in range(3, 8))
_NOW, _LINE_NOW, _EDGE_NOW = (tl.constexpr(2 * BUCKETS + k) for k in range(8, 11))


@triton.jit
def bucket_of(count):
    return tl.maximum((count.to(tl.float32).to(tl.int32, bitcast=True) >> 20) - 1015, 0)


@triton.jit
def begin(ledger, work, slots, halved):
    """Clear what is counted in this step, and note the time and where the window ends."""
    for k in tl.static_range(5):
        tl.store(work + _OLD_HITS + k, 0)
    since = tl.where(halved, 0, tl.load(ledger + _SINCE))
    line = tl.load(ledger + _LINE)
    line = tl.where(halved, tl.maximum(line - _OCTAVE, 1 - _START), line)
    tl.store(work + _NOW, tl.minimum(_PERIOD + _TICKS * since // slots, 2 * _PERIOD - 1).to(tl.int32))
    tl.store(work + _LINE_NOW, line.to(tl.int32))
    tl.store(work + _EDGE_NOW, tl.load(ledger + _EDGE).to(tl.int32))


@triton.jit
def halved(score):
    """A score after a halving."""
    ticks = tl.maximum((score & (2 * _PERIOD - 1)) - _PERIOD, 0)
    return ((score >> (_TICK_BITS + 1)) << _TICK_BITS) | ticks


@triton.jit
def packed(count, work):
    """The score of a row that was looked up in this step."""
    return (tl.minimum(count, _MOST) << _TICK_BITS) | tl.load(work + _NOW)


@triton.jit
def used(score, weight, work):
    """The score of a row that was looked up once more."""
    return packed((score >> _TICK_BITS) + _UNIT * weight, work)


@triton.jit
def _parts(score, work):
    """(bucket of the count, bucket of the age, in the window, of its oldest, of the coldest outside)"""
    now, line, edge = tl.load(work + _NOW), tl.load(work + _LINE_NOW) + _START, tl.load(work + _EDGE_NOW)
    count, age = bucket_of(score >> _TICK_BITS), bucket_of(now - (score & (2 * _PERIOD - 1)))
    window = count < line
    return count, age, window, window & (age > edge - 2 * _OCTAVE), (count >= line) & (count < line + _OCTAVE) & (age > edge)


@triton.jit
def note_hits(score_T, weight_T, hit_T, work):
    """Add to the hits of the oldest and the coldest."""
    _, _, _, oldest_T, coldest_T = _parts(score_T, work)
    tl.atomic_add(work + _OLD_HITS, tl.sum(tl.where(oldest_T & hit_T, weight_T, 0), 0), sem="relaxed")
    tl.atomic_add(work + _COLD_HITS, tl.sum(tl.where(coldest_T & hit_T, weight_T, 0), 0), sem="relaxed")


@triton.jit
def victims(score_T, occupied_T, work):
    """Buckets of slots; adds to the sizes of the parts."""
    count_T, age_T, window_T, oldest_T, coldest_T = _parts(score_T, work)
    tl.atomic_add(work + _IN_WINDOW, tl.sum((window_T & occupied_T).to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(work + _OLDEST, tl.sum((oldest_T & occupied_T).to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(work + _COLDEST, tl.sum((coldest_T & occupied_T).to(tl.int32), 0), sem="relaxed")
    return tl.where(window_T & (age_T > 0), _AGES - (age_T >> 1), count_T + (_AGES + _MARGIN))


@triton.jit
def candidates(score_T):
    """Buckets of candidates with such counts."""
    return bucket_of(tl.minimum(score_T, _MOST)) + _AGES


@triton.jit
def steer(ledger, work, slots, seen, low):
    """WINDOW, LINE and EDGE after a step with `seen` lookups; `low` is the last bucket to leave, 0 if none left."""
    line, size = tl.load(work + _LINE_NOW), tl.load(ledger + _WINDOW)
    window, wanted = tl.load(work + _IN_WINDOW).to(tl.int64), 1 + slots // _NARROWEST + size // _FINE
    move = (window < wanted).to(tl.int32) - (window > wanted).to(tl.int32)
    line += tl.where(seen > 0, move, 0)
    oldest, coldest = tl.load(work + _OLDEST).to(tl.int64), tl.load(work + _COLDEST).to(tl.int64)
    old_hits, cold_hits = tl.load(work + _OLD_HITS).to(tl.int64), tl.load(work + _COLD_HITS).to(tl.int64)
    size += _SPEED * _FINE * (old_hits * coldest) // (oldest + coldest + 1)
    size -= _SPEED * _FINE * (cold_hits * oldest) // (oldest + coldest + 1)
    widest = (0 * size + slots - slots // 8) * _FINE
    tl.store(ledger + _WINDOW, tl.minimum(tl.maximum(size, 0), widest))
    tl.store(ledger + _LINE, tl.minimum(tl.maximum(line, 1 - _START), _LAST_LINE).to(tl.int64))
    if low > 0:
        tl.store(ledger + _EDGE, tl.maximum(_AGES - low, 0).to(tl.int64) * 2)
