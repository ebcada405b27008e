"""The cache on the CPU, first half: what a batch looked up, and a bucket for every candidate and every slot.

`cache/cpu.py` tells the whole story. Arrays that its passes share, by place in the list of keys:

    rows      distinct arena rows of a piece, then in their place those of its candidates
    counts    lookups of a row, then of candidates the weight, then the score
    places    where the keys of a row end, then the two counters of a candidate in the sketch, the first in the low half
    buckets   of candidates, a byte each
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline import formats as F
from thermocline.kernels.cache.reference import (
    AGES,
    BUCKETS,
    COUNTERS,
    HEAVIEST,
    MARGIN,
    MOST,
    OCTAVE,
    PERIOD,
    SALTS,
    TICK_BITS,
    UNIT,
)
from thermocline.kernels.layout import Pool

from .compile import helper, inlined, kernel
from .rows import CACHED, meta_bytes, mix
from .rows import NEAR as NEAR_POINTER
from .sort import piece_start, row_ends
from .vectors import WIDTH, Emit, add_u32, bits_of, block, get_i64, get_u8, get_u32, prefetch, put_i64, put_u8, put_u32

AHEAD = 16  # rows
_FIRST_SALT, _SECOND_SALT = SALTS
_MASK = 0xFFFFFFFF

# Fields of a pool, as `Pool` has them; then what this step needs to know: the time (LRU's or the adaptive policy's), and of
# the adaptive policy where the window ends in counts, and in age.
DIM, FORMAT, ROW, ROWS, CODES, META, SLOTS, SLOT, BASE, NEAR, NEAR_BASE, NOW, LINE, EDGE = range(len(Pool._fields) + 3)
FIELDS = len(Pool._fields) + 3

# What a piece knows of its rows in a pool: lookups, those of cached rows, where its candidates begin, how many they are; and
# for the adaptive policy hits of the oldest in the window, and of the coldest outside of it.
LOOKUPS, HITS, FIRST, COUNT, OLDEST, COLDEST = range(6)
NOTES = 6


# -- hits -------------------------------------------------------------------------------------------------------------


@inlined
def _pool_of(pools, number, row):
    """The pool of an arena row, or -1."""
    found = -1
    for p in range(number):
        first = get_i64(pools, p * FIELDS + ROW)
        if first <= row < first + get_i64(pools, p * FIELDS + ROWS):
            found = p
    return found


@inlined
def _weight(count):
    """The largest power of two in a count, HEAVIEST at most."""
    return 1 << ((bits_of(np.float32(min(count, HEAVIEST))) >> 23) - 127)


@inlined
def _counters(row, half):
    """The two counters of a row, in one number."""
    low, high = row & _MASK, (row >> 32) & _MASK
    first, second = mix(low ^ mix(high ^ _FIRST_SALT)), mix(low ^ mix(high ^ _SECOND_SALT))
    return ((first * half) >> 32) | ((half + ((second * half) >> 32)) << 32)


@inlined
def _distinct(keys, bits, first, last, rows, counts, ends):
    """Distinct rows of keys first to last - 1 and their counts, from place `first` on; returns where they end."""
    end, begin = row_ends(keys, bits, first, last, ends), first
    for u in range(first, end):
        put_i64(rows, u, get_i64(keys, begin) >> bits)
        put_u32(counts, u, get_i64(ends, u) - begin)
        begin = get_i64(ends, u)
    return end


@inlined
def _slot_of(word, shift, near_shift):
    """The slot that a first meta word points at; any for words that are no pointers."""
    return word - NEAR_POINTER + near_shift if word >= NEAR_POINTER else max(word - CACHED, 0) + shift


@inlined
def _bucket(score):
    """Bucket of a count that is not negative."""
    return max((bits_of(np.float32(score)) >> 20) - 1015, 0)


@inlined
def _parts(pool, score):
    """Buckets of the count and of the age in a score of the adaptive policy, and `parts` of the reference."""
    count, age = _bucket(score >> TICK_BITS), _bucket(get_i64(pool, NOW) - (score & (2 * PERIOD - 1)))
    line, edge = get_i64(pool, LINE), get_i64(pool, EDGE)
    window = count < line
    return count, age, window, window and age > edge - 2 * OCTAVE, not window and count < line + OCTAVE and age > edge


@inlined
def _used(pool, policy, score, weight):
    """The score of a row that was looked up once more."""
    if policy == F.LRU:
        return get_i64(pool, NOW)
    if policy == F.LFU:
        return score + UNIT * weight
    return (min((score >> TICK_BITS) + UNIT * weight, MOST) << TICK_BITS) | get_i64(pool, NOW)


@helper
def _hits(meta, owners, scores, pool, policy, rows, counts, places, at, last, miss, notes):
    """Rows of one pool from `at` on: count those that are cached, list the others from `miss` on; returns their ends."""
    first, words = get_i64(pool, ROW), meta_bytes(get_i64(pool, FORMAT))
    end, meta = first + get_i64(pool, ROWS), meta + 4 * get_i64(pool, META)
    shift, half = get_i64(pool, SLOT) - get_i64(pool, BASE), get_i64(pool, SLOTS) * (COUNTERS // 2)
    near_shift = get_i64(pool, SLOT) + get_i64(pool, SLOTS) - get_i64(pool, NEAR) - get_i64(pool, NEAR_BASE)
    lookups, hits, begin, of_oldest, of_coldest = 0, 0, miss, 0, 0
    while at < last:
        row = get_i64(rows, at)
        if row < first or row >= end:
            break
        if at + 2 * AHEAD < last:
            prefetch(meta + (get_i64(rows, at + 2 * AHEAD) - first) * words)
        later = get_i64(rows, min(at + AHEAD, last - 1))
        if first <= later < end:
            word = get_u32(meta + (later - first) * words, 0)
            slot = _slot_of(word, shift, near_shift)  # slot 0 for rows that are not cached: cheaper than a branch
            prefetch(scores + 4 * slot)
            prefetch(owners + 8 * slot)
        word, count = get_u32(meta + (row - first) * words, 0), get_u32(counts, at)
        lookups += count
        if word >= CACHED:
            slot = _slot_of(word, shift, near_shift)
            score, weight = get_u32(scores, slot), _weight(count)
            put_u32(scores, slot, _used(pool, policy, score, weight))
            if policy == F.ADAPTIVE:
                _, _, _, oldest, coldest = _parts(pool, score)
                of_oldest += weight * oldest
                of_coldest += weight * coldest
            put_i64(owners, slot, get_i64(owners, slot) | F.DIRTY)
            hits += count
        else:
            put_i64(rows, miss, row)
            put_u32(counts, miss, _weight(count))
            put_i64(places, miss, _counters(row, half))
            miss += 1
        at += 1
    put_i64(notes, LOOKUPS, lookups)
    put_i64(notes, HITS, hits)
    put_i64(notes, FIRST, begin)
    put_i64(notes, COUNT, miss - begin)
    put_i64(notes, OLDEST, of_oldest)
    put_i64(notes, COLDEST, of_coldest)
    return at, miss


@kernel("void(" + ", ".join(["int64"] * 15) + ")")
def count_hits(meta, owners, scores, pools, number, policy, keys, bits, count, rows, counts, places, notes, piece, pieces):
    """One piece: its distinct rows and their counts, then `_hits` of each pool. Rows of a pool must lie together."""
    at, last = piece_start(keys, bits, count, piece, pieces), piece_start(keys, bits, count, piece + 1, pieces)
    last = _distinct(keys, bits, at, last, rows, counts, places)
    notes += 8 * NOTES * number * piece
    for k in range(NOTES * number):
        put_i64(notes, k, 0)
    miss = at
    while at < last:
        pool = _pool_of(pools, number, get_i64(rows, at))
        if pool < 0:
            at += 1
            continue
        here, note = pools + 8 * FIELDS * pool, notes + 8 * NOTES * pool
        at, miss = _hits(meta, owners, scores, here, policy, rows, counts, places, at, last, miss, note)


# -- count and score --------------------------------------------------------------------------------------------------


@inlined
def _sketch(sketch, pools, pool):
    """Where the sketch of a pool begins."""
    return sketch + 4 * (COUNTERS // 2) * get_i64(pools, pool * FIELDS + SLOT)


@kernel("void(" + ", ".join(["int64"] * 8) + ")")
def count_candidates(sketch, pools, number, counts, places, notes, piece, shared):
    """Add the candidates of one piece to the sketch. `shared`: other threads add as well."""
    notes += 8 * NOTES * number * piece
    for pool in range(number):
        here, first = _sketch(sketch, pools, pool), get_i64(notes, pool * NOTES + FIRST)
        last = first + get_i64(notes, pool * NOTES + COUNT)
        for m in range(first, last):
            later = get_i64(places, min(m + AHEAD, last - 1))
            prefetch(here + 2 * (later & _MASK))
            prefetch(here + 2 * (later >> 32))
            both, weight = get_i64(places, m), get_u32(counts, m)
            for place in (both & _MASK, both >> 32):
                word, more = place >> 1, weight << (16 * (place & 1))
                if shared:
                    add_u32(here, word, more)
                else:
                    put_u32(here, word, get_u32(here, word) + more)


@inlined
def _counter(sketch, place):
    return (get_u32(sketch, place >> 1) >> (16 * (place & 1))) & 0xFFFF


@kernel("void(" + ", ".join(["int64"] * 10) + ")")
def score_candidates(sketch, pools, number, policy, counts, places, buckets, notes, histograms, piece):
    """Scores (in the place of weights) and buckets of the candidates of one piece, and a histogram for each pool."""
    notes, histograms = notes + 8 * NOTES * number * piece, histograms + 8 * BUCKETS * number * piece
    for k in range(BUCKETS * number):
        put_i64(histograms, k, 0)
    for pool in range(number):
        here, first = _sketch(sketch, pools, pool), get_i64(notes, pool * NOTES + FIRST)
        last, now = first + get_i64(notes, pool * NOTES + COUNT), get_i64(pools, pool * FIELDS + NOW)
        for m in range(first, last):
            score, bucket = now, BUCKETS - 1
            if policy != F.LRU:
                later = get_i64(places, min(m + AHEAD, last - 1))
                prefetch(here + 2 * (later & _MASK))
                prefetch(here + 2 * (later >> 32))
                both = get_i64(places, m)
                score = UNIT * min(_counter(here, both & _MASK), _counter(here, both >> 32))
                bucket = _bucket(score)
            if policy == F.ADAPTIVE:
                score = min(score, MOST)
                bucket = AGES + _bucket(score)
                score = (score << TICK_BITS) | now
            put_u32(counts, m, score)
            put_u8(buckets, m, bucket)
            at = pool * BUCKETS + bucket
            put_i64(histograms, at, get_i64(histograms, at) + 1)


def _victims(policy: int) -> Any:
    @block("i64 i64 i64 i64 i64 -> none")
    def victims(e: Emit, scores: Any, owners: Any, step: Any, out: Any, left: Any) -> None:
        """Buckets of 16 slots."""
        score = e.load_unsigned(scores, 32, left)
        if policy == F.LRU:
            score = e.splat(step) - score
        bucket = (score.to_float().bits() >> 20) - 1015
        bucket = bucket.where(bucket.compare(">", 0), 0).where(score.compare(">", 0), 0)
        if policy == F.LRU:
            bucket = e.constant([BUCKETS - 1] * WIDTH) - bucket
            bucket = bucket.where(bucket.compare(">", 1), 1)
        else:
            bucket = bucket + MARGIN
            bucket = bucket.where(bucket.compare("<", BUCKETS - 1), BUCKETS - 1)
        # The upper half of the row that a slot remembers says whether it is empty.
        low, high = (e.load_unsigned(e.at(owners, 4 * WIDTH * k), 32, _words(e, left, k)) for k in range(2))
        empty = low.shuffle(high, range(1, 2 * WIDTH, 2)).compare("==", -1)
        e.store(out, bucket.where(e.builder.not_(empty), 0), bits=8, count=left)

    return victims


def _words(e: Emit, left: Any, half: int) -> Any:
    """Words that are left for one half of 16 numbers of 64 bits."""
    return e.builder.sub(e.builder.mul(left, e.number(2)), e.number(WIDTH * half))


_victims_lru, _victims_lfu = _victims(F.LRU), _victims(F.LFU)


@inlined
def _adaptive_victims(scores, owners, pool, victims, sizes, first, last):
    """Buckets of slots first to last - 1; `sizes` gets how many are in the window, and at both sides of its end."""
    in_window, of_oldest, of_coldest = 0, 0, 0
    for s in range(first, last):
        count, age, window, oldest, coldest = _parts(pool, get_u32(scores, s))
        if get_i64(owners, s) == F.EMPTY:
            put_u8(victims, s, 0)
            continue
        put_u8(victims, s, AGES - (age >> 1) if window and age > 0 else AGES + count + MARGIN)
        in_window += window
        of_oldest += oldest
        of_coldest += coldest
    put_i64(sizes, 0, in_window)
    put_i64(sizes, 1, of_oldest)
    put_i64(sizes, 2, of_coldest)


@kernel("void(" + ", ".join(["int64"] * 9) + ")")
def score_slots(scores, owners, pool, policy, victims, histogram, sizes, first, last):
    """Buckets of slots first to last - 1 of a pool, and their histogram."""
    scores, owners = scores + 4 * get_i64(pool, SLOT), owners + 8 * get_i64(pool, SLOT)
    if policy == F.ADAPTIVE:
        _adaptive_victims(scores, owners, pool, victims, sizes, first, last)
    else:
        for s in range(first, last, WIDTH):
            if policy == F.LRU:
                _victims_lru(scores + 4 * s, owners + 8 * s, get_i64(pool, NOW), victims + s, last - s)
            else:
                _victims_lfu(scores + 4 * s, owners + 8 * s, 0, victims + s, last - s)
    for k in range(BUCKETS):
        put_i64(histogram, k, 0)
    for s in range(first, last):
        bucket = get_u8(victims, s)
        put_i64(histogram, bucket, get_i64(histogram, bucket) + 1)
