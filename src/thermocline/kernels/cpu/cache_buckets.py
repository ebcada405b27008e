"""First passes of a cache refresh on the CPU. Arrays that they share, indexed by position in the list of keys:

rows      distinct arena rows of a piece; later, in place, the rows of its candidates
counts    lookups of a row; later the weight and then the score of a candidate
places    end of the keys of a row; later the two sketch counters of a candidate, the first in the low half
buckets   bucket of a candidate, one byte
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline import formats as F
from thermocline.kernels.cache import reference as K
from thermocline.kernels.layout import Pool

from . import vectors as V
from .compile import helper, inlined
from .rows import CACHED, CACHED_INT8, fmix32, meta_bytes
from .sort import piece_start, row_ends
from .vectors import WIDTH, Emit, bits_of, block, get_i64, get_u8, get_u32, prefetch, put_i64, put_u8, put_u32

PREFETCH_DISTANCE = 16  # rows
_FIRST_SALT, _SECOND_SALT = K.SALTS
_MASK = 0xFFFFFFFF

# Fields of a pool, as in `Pool`; then the time of this step (of LRU or the adaptive policy), and the end of the adaptive
# policy's window in counts and in age.
DIM, FORMAT, ROW, ROWS, CODES, META, SLOTS, SLOT, BASE, INT8_SLOTS, INT8_BASE, NOW, LINE, EDGE = range(len(Pool._fields) + 3)
FIELDS = len(Pool._fields) + 3

# Statistics of a piece for one pool: lookups, hits, first candidate, number of candidates; for the adaptive policy also the
# hits of the oldest slots of the window and of the coldest slots outside it; the highest bucket of a candidate, or 0.
LOOKUPS, HITS, FIRST, COUNT, OLDEST, COLDEST, MOST = range(7)
STATS = 7


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
    """The largest power of two in a count, at most MAX_WEIGHT."""
    return 1 << ((bits_of(np.float32(min(count, K.MAX_WEIGHT))) >> 23) - 127)


@inlined
def _counters(row, half):
    """The two sketch counters of a row, in one integer."""
    low, high = row & _MASK, (row >> 32) & _MASK
    first, second = fmix32(low ^ fmix32(high ^ _FIRST_SALT)), fmix32(low ^ fmix32(high ^ _SECOND_SALT))
    return ((first * half) >> 32) | ((half + ((second * half) >> 32)) << 32)


@inlined
def _distinct_rows(keys, bits, first, last, rows, counts, ends):
    """Write the distinct rows of keys first to last - 1 and their counts from index `first` on; returns the end."""
    end, begin = row_ends(keys, bits, first, last, ends), first
    for u in range(first, end):
        put_i64(rows, u, get_i64(keys, begin) >> bits)
        put_u32(counts, u, get_i64(ends, u) - begin)
        begin = get_i64(ends, u)
    return end


@inlined
def _slot_of(word, shift, int8_shift):
    """The slot that a first meta word points at; an arbitrary slot if the word is no pointer."""
    return word - CACHED_INT8 + int8_shift if word >= CACHED_INT8 else max(word - CACHED, 0) + shift


@inlined
def bucket_of(score):
    """Bucket of a count >= 0."""
    return max((bits_of(np.float32(score)) >> 20) - 1015, 0)


@inlined
def _window_parts(pool, score):
    """Buckets of count and age of a score of the adaptive policy, then `window_parts` of the reference."""
    count, age = bucket_of(score >> K.TICK_BITS), bucket_of(get_i64(pool, NOW) - (score & (2 * K.HALVING_TICKS - 1)))
    line, edge = get_i64(pool, LINE), get_i64(pool, EDGE)
    window = count < line
    return count, age, window, window and age > edge - 2 * K.OCTAVE, not window and count < line + K.OCTAVE and age > edge


@inlined
def _score_after_hit(pool, policy, score, weight):
    """The score of a row after another lookup."""
    if policy == F.LRU:
        return get_i64(pool, NOW)
    if policy == F.LFU:
        return score + K.COUNT_UNIT * weight
    return (min((score >> K.TICK_BITS) + K.COUNT_UNIT * weight, K.MAX_COUNT) << K.TICK_BITS) | get_i64(pool, NOW)


@helper
def _hits(meta, owners, scores, pool, policy, rows, counts, places, at, last, miss, stats):
    """Count the cached rows of one pool from `at` on, list the others from `miss` on; returns both ends."""
    first, words = get_i64(pool, ROW), meta_bytes(get_i64(pool, FORMAT))
    end, meta = first + get_i64(pool, ROWS), meta + 4 * get_i64(pool, META)
    shift, half = get_i64(pool, SLOT) - get_i64(pool, BASE), get_i64(pool, SLOTS) * (K.COUNTERS // 2)
    int8_shift = get_i64(pool, SLOT) + get_i64(pool, SLOTS) - get_i64(pool, INT8_SLOTS) - get_i64(pool, INT8_BASE)
    lookups, hits, begin, of_oldest, of_coldest = 0, 0, miss, 0, 0
    while at < last:
        row = get_i64(rows, at)
        if row < first or row >= end:
            break
        if at + 2 * PREFETCH_DISTANCE < last:
            prefetch(meta + (get_i64(rows, at + 2 * PREFETCH_DISTANCE) - first) * words)
        later = get_i64(rows, min(at + PREFETCH_DISTANCE, last - 1))
        if first <= later < end:
            word = get_u32(meta + (later - first) * words, 0)
            slot = _slot_of(word, shift, int8_shift)  # slot 0 for uncached rows: cheaper than a branch
            prefetch(scores + 4 * slot)
            prefetch(owners + 8 * slot)
        word, count = get_u32(meta + (row - first) * words, 0), get_u32(counts, at)
        lookups += count
        if word >= CACHED:
            slot = _slot_of(word, shift, int8_shift)
            score, weight = get_u32(scores, slot), _weight(count)
            put_u32(scores, slot, _score_after_hit(pool, policy, score, weight))
            if policy == F.ADAPTIVE:
                _, _, _, oldest, coldest = _window_parts(pool, score)
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
    put_i64(stats, LOOKUPS, lookups)
    put_i64(stats, HITS, hits)
    put_i64(stats, FIRST, begin)
    put_i64(stats, COUNT, miss - begin)
    put_i64(stats, OLDEST, of_oldest)
    put_i64(stats, COLDEST, of_coldest)
    return at, miss


@helper
def count_hits(meta, owners, scores, pools, number, policy, keys, bits, count, rows, counts, places, stats, piece, pieces):
    """Distinct rows and counts of one piece, then `_hits` of each pool. The rows of a pool must be contiguous."""
    at, last = piece_start(keys, bits, count, piece, pieces), piece_start(keys, bits, count, piece + 1, pieces)
    last = _distinct_rows(keys, bits, at, last, rows, counts, places)
    stats += 8 * STATS * number * piece
    for k in range(STATS * number):
        put_i64(stats, k, 0)
    miss = at
    while at < last:
        pool = _pool_of(pools, number, get_i64(rows, at))
        if pool < 0:
            at += 1
            continue
        here, pool_stats = pools + 8 * FIELDS * pool, stats + 8 * STATS * pool
        at, miss = _hits(meta, owners, scores, here, policy, rows, counts, places, at, last, miss, pool_stats)


# -- count and score --------------------------------------------------------------------------------------------------


@inlined
def _sketch_of_pool(sketch, pools, pool):
    """Address of the sketch of a pool."""
    return sketch + 4 * (K.COUNTERS // 2) * get_i64(pools, pool * FIELDS + SLOT)


@helper
def count_candidates(sketch, pools, number, counts, places, stats, piece, shared):
    """Add the candidates of one piece to the sketch, atomically if other threads share it."""
    stats += 8 * STATS * number * piece
    for pool in range(number):
        here, first = _sketch_of_pool(sketch, pools, pool), get_i64(stats, pool * STATS + FIRST)
        last = first + get_i64(stats, pool * STATS + COUNT)
        for m in range(first, last):
            later = get_i64(places, min(m + PREFETCH_DISTANCE, last - 1))
            prefetch(here + 2 * (later & _MASK))
            prefetch(here + 2 * (later >> 32))
            both, weight = get_i64(places, m), get_u32(counts, m)
            for place in (both & _MASK, both >> 32):
                word, more = place >> 1, weight << (16 * (place & 1))
                if shared:
                    V.add_u32(here, word, more)
                else:
                    put_u32(here, word, get_u32(here, word) + more)


@inlined
def _counter(sketch, place):
    return (get_u32(sketch, place >> 1) >> (16 * (place & 1))) & 0xFFFF


@helper
def score_candidates(sketch, pools, number, policy, counts, places, buckets, stats, histograms, piece):
    """Scores (over the weights) and buckets of the candidates of one piece, and a histogram for each pool."""
    stats, histograms = stats + 8 * STATS * number * piece, histograms + 8 * K.BUCKETS * number * piece
    for k in range(K.BUCKETS * number):
        put_i64(histograms, k, 0)
    for pool in range(number):
        here, first = _sketch_of_pool(sketch, pools, pool), get_i64(stats, pool * STATS + FIRST)
        last, now, most = first + get_i64(stats, pool * STATS + COUNT), get_i64(pools, pool * FIELDS + NOW), 0
        for m in range(first, last):
            score, bucket = now, K.BUCKETS - 1
            if policy != F.LRU:
                later = get_i64(places, min(m + PREFETCH_DISTANCE, last - 1))
                prefetch(here + 2 * (later & _MASK))
                prefetch(here + 2 * (later >> 32))
                both = get_i64(places, m)
                score = K.COUNT_UNIT * min(_counter(here, both & _MASK), _counter(here, both >> 32))
                bucket = bucket_of(score)
            if policy == F.ADAPTIVE:
                score = min(score, K.MAX_COUNT)
                bucket = K.AGE_BUCKETS + bucket_of(score)
                score = (score << K.TICK_BITS) | now
            put_u32(counts, m, score)
            put_u8(buckets, m, bucket)
            at = pool * K.BUCKETS + bucket
            put_i64(histograms, at, get_i64(histograms, at) + 1)
            most = max(most, bucket)
        put_i64(stats, pool * STATS + MOST, most)


def _slot_buckets_of(policy: int) -> Any:
    @block("i64 i64 i64 i64 i64 -> none")
    def victims(e: Emit, scores: Any, owners: Any, step: Any, out: Any, left: Any) -> None:
        """Buckets of 16 slots."""
        score = e.load_unsigned(scores, 32, left)
        if policy == F.LRU:
            score = e.splat(step) - score
        bucket = (score.to_float().bits() >> 20) - 1015
        bucket = bucket.where(bucket.compare(">", 0), 0).where(score.compare(">", 0), 0)
        if policy == F.LRU:
            bucket = e.constant([K.BUCKETS - 1] * WIDTH) - bucket
            bucket = bucket.where(bucket.compare(">", 1), 1)
        else:
            bucket = bucket + K.MARGIN
            bucket = bucket.where(bucket.compare("<", K.BUCKETS - 1), K.BUCKETS - 1)
        # The upper half of a slot's row tells whether the slot is empty.
        low, high = (e.load_unsigned(e.at(owners, 4 * WIDTH * k), 32, _words(e, left, k)) for k in range(2))
        empty = low.shuffle(high, range(1, 2 * WIDTH, 2)).compare("==", -1)
        e.store(out, bucket.where(e.builder.not_(empty), 0), bits=8, count=left)

    return victims


def _words(e: Emit, left: Any, half: int) -> Any:
    """Words left in one half of 16 64-bit numbers."""
    return e.builder.sub(e.builder.mul(left, e.number(2)), e.number(WIDTH * half))


_slot_buckets_lru, _slot_buckets_lfu = _slot_buckets_of(F.LRU), _slot_buckets_of(F.LFU)


@inlined
def _slot_buckets_adaptive(scores, owners, pool, victims, sizes, first, last):
    """Buckets of slots first to last - 1; `sizes` receives the slots in the window, the oldest and the coldest."""
    in_window, of_oldest, of_coldest = 0, 0, 0
    for s in range(first, last):
        count, age, window, oldest, coldest = _window_parts(pool, get_u32(scores, s))
        if get_i64(owners, s) == F.EMPTY:
            put_u8(victims, s, 0)
            continue
        put_u8(victims, s, K.AGE_BUCKETS - (age >> 1) if window and age > 0 else K.AGE_BUCKETS + count + K.MARGIN)
        in_window += window
        of_oldest += oldest
        of_coldest += coldest
    put_i64(sizes, 0, in_window)
    put_i64(sizes, 1, of_oldest)
    put_i64(sizes, 2, of_coldest)


@block("i64 i64 i64 i64 -> i64")
def _within(e: Emit, buckets: Any, low: Any, high: Any, left: Any) -> Any:
    """Bits of those of 16 buckets that lie between low and high, both included."""
    bucket = e.load_unsigned(buckets, 8, left)
    inside = e.builder.and_(bucket.compare(">", e.splat(low) - 1), bucket.compare("<", e.splat(high) + 1))
    return e.mask_bits(e.builder.and_(inside, e.first(left)))


@helper
def score_slots(scores, owners, pool, policy, most, victims, histogram, sizes, first, last):
    """Buckets of slots first to last - 1 of a pool, and the histogram of buckets up to `most`."""
    scores, owners = scores + 4 * get_i64(pool, SLOT), owners + 8 * get_i64(pool, SLOT)
    if policy == F.ADAPTIVE:
        _slot_buckets_adaptive(scores, owners, pool, victims, sizes, first, last)
    else:
        for s in range(first, last, WIDTH):
            if policy == F.LRU:
                _slot_buckets_lru(scores + 4 * s, owners + 8 * s, get_i64(pool, NOW), victims + s, last - s)
            else:
                _slot_buckets_lfu(scores + 4 * s, owners + 8 * s, 0, victims + s, last - s)
    for k in range(K.BUCKETS):
        put_i64(histogram, k, 0)
    for at in range(first, last, WIDTH):
        bits = _within(victims + at, 0, most, last - at)
        while bits != 0:
            bucket = get_u8(victims, at + V.lowest_bit(bits))
            put_i64(histogram, bucket, get_i64(histogram, bucket) + 1)
            bits &= bits - 1


# -- select -----------------------------------------------------------------------------------------------------------


@inlined
def select_places(buckets, first, last, low, high, tied, ties, selected, count):
    """Append places with a bucket from low to high to `selected`, of bucket `tied` only the first `ties`.

    Returns the new length of `selected`, and how many tied places are left to take.
    """
    for at in range(first, last, WIDTH):
        bits = _within(buckets + at, low, high, last - at)
        while bits != 0:
            place = at + V.lowest_bit(bits)
            bits &= bits - 1
            if get_u8(buckets, place) == tied:
                if ties == 0:
                    continue
                ties -= 1
            put_i64(selected, count, place)
            count += 1
    return count, ties


@inlined
def thresholds(candidates, victims):
    """`thresholds` of the reference, and the number of admitted candidates."""
    coming, below, cut = 0, 0, 0
    for k in range(K.BUCKETS):
        coming += get_i64(candidates, k)
    while coming > below:
        coming -= get_i64(candidates, cut)
        below += get_i64(victims, cut)
        cut += 1
    from_tied = 0
    if cut > 0:
        from_tied = min(get_i64(candidates, cut - 1), max(0, below - get_i64(victims, cut - 1) - coming))
    needed, evicted, low = coming + from_tied, 0, 0
    while evicted + get_i64(victims, low) < needed:
        evicted += get_i64(victims, low)
        low += 1
    return cut, from_tied, low, needed - evicted, needed


@inlined
def sum_histograms(histograms, number, stride):
    """Add histograms 1 to number - 1 to histogram 0."""
    for n in range(1, number):
        for k in range(K.BUCKETS):
            put_i64(histograms, k, get_i64(histograms, k) + get_i64(histograms, n * stride + k))
