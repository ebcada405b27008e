"""Promotion on the CPU: after rows came and went, rows of near slots change places with colder ones of full slots.

What `_promote` of `cache/reference.py` defines, bit for bit: all slots into buckets once more, their counts or ages being new,
then who changes places, then the exchange. An empty near slot is a candidate of bucket 0, which nothing is colder than.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np

from thermocline import formats as F
from thermocline.kernels.cache.reference import BUCKETS, MARGIN, TICK_BITS
from thermocline.kernels.layout import Cache, Pool

from . import cache_buckets as C
from . import threads
from .compile import inlined, kernel
from .rows import CACHED, NEAR, PAD, copy_floats, meta_bytes, near_bytes, read_row, row_key, step_key
from .select import cuts, pick, total
from .vectors import get_i64, get_u32, put_i64, put_u8, put_u32
from .write_row import measure_row, write_row

_CHUNK = 1 << 15  # slots a task puts into buckets
_EXCHANGES = 256  # a task
_CLEAN = ~F.DIRTY


@inlined
def _standing(score, policy, step):
    """`standing` of the reference."""
    if policy == F.LRU:
        return max(BUCKETS - 1 - C._bucket(step - score), 1)
    return C._bucket(score if policy == F.LFU else score >> TICK_BITS)


@kernel("void(" + ", ".join(["int64"] * 9) + ")")
def _score(scores, owners, policy, step, margin, buckets, histogram, first, last):
    """Buckets of slots first to last - 1, and their histogram; empty ones are 0."""
    for k in range(BUCKETS):
        put_i64(histogram, k, 0)
    for s in range(first, last):
        bucket = min(_standing(get_u32(scores, s), policy, step) + margin, BUCKETS - 1)
        if get_i64(owners, s) == F.EMPTY:
            bucket = 0
        put_u8(buckets, s, bucket)
        put_i64(histogram, bucket, get_i64(histogram, bucket) + 1)


@kernel("int64(" + ", ".join(["int64"] * 9) + ")")
def _choose(buckets, full, slots, of_full, full_chunks, of_near, near_chunks, rising, falling):
    """Near slots whose rows rise and full slots they take; returns how many."""
    total(of_full, full_chunks, BUCKETS)
    total(of_near, near_chunks, BUCKETS)
    cut, from_below, low, of_low, needed = cuts(of_near, of_full)
    if needed > 0:
        pick(buckets, full, slots, cut - 1, BUCKETS, cut - 1, from_below, rising, 0)
        pick(buckets, 0, full, 0, low, low, of_low, falling, 0)
    return needed


@kernel("void(" + ", ".join(["int64"] * 15) + ")")
def _exchange(
    meta, values, near, owners, scores, displaced, pool, seed, step, stochastic, rising, falling, scratch, first, last
):
    """Exchanges first to last - 1: the row of a near slot goes to a full one, and the row that was there, if any, back."""
    dim, row0, words = get_i64(pool, C.DIM), get_i64(pool, C.ROW), meta_bytes(get_i64(pool, C.FORMAT))
    base, near_base, slot0 = get_i64(pool, C.BASE), get_i64(pool, C.NEAR_BASE), get_i64(pool, C.SLOT)
    full = get_i64(pool, C.SLOTS) - get_i64(pool, C.NEAR)
    meta, shared = meta + 4 * get_i64(pool, C.META), step_key(seed, step)
    owners, scores, displaced = owners + 8 * slot0, scores + 4 * slot0, displaced + 4 * slot0
    for k in range(first, last):
        low, high = get_i64(rising, k), get_i64(falling, k)
        number = near_base + low - full
        floats, about = values + 4 * dim * (base + high), near + near_bytes(dim) * number
        up, down = get_i64(owners, low), get_i64(owners, high)
        copy_floats(floats, scratch, dim)
        read_row(F.INT8, about + 4, about, dim, floats)
        put_u32(meta + ((up & _CLEAN) - row0) * words, 0, CACHED + base + high)
        if down != F.EMPTY:
            row = down & _CLEAN
            small, large, size = measure_row(scratch, dim)
            write_row(F.INT8, scratch, dim, small, large, size, about + 4, about, row_key(shared, row), stochastic)
            put_u32(meta + (row - row0) * words, 0, NEAR + number)
        put_i64(owners, low, down)
        put_i64(owners, high, up)
        for kept in (scores, displaced):
            word = get_u32(kept, low)
            put_u32(kept, low, get_u32(kept, high))
            put_u32(kept, high, word)


def promote(meta: int, cache: Cache, pool: Pool, policy: int, stochastic: bool) -> int:
    """Let rows of near slots of one pool change places with colder ones of full slots; returns how many."""
    if not pool.full:
        return 0
    fields, buckets = np.array(pool, dtype=np.int64), np.empty(pool.slots, dtype=np.uint8)
    seed, step = cache.clock.tolist()[: F.CLOCK_FIELDS]
    values, near, owners, scores, words = (t.data_ptr() for t in cache[:5])
    chunks = [
        (first, min(first + _CHUNK, last), margin)
        for begin, last, margin in ((0, pool.full, MARGIN), (pool.full, pool.slots, 0))
        for first in range(begin, last, _CHUNK)
    ]
    histograms, of_full = np.empty((len(chunks), BUCKETS), dtype=np.int64), -(-pool.full // _CHUNK)

    def score(number: int) -> None:
        first, last, margin = chunks[number]
        slots = (scores + 4 * pool.slot, owners + 8 * pool.slot, policy, step, margin)
        _score(*slots, buckets.ctypes.data, histograms[number].ctypes.data, first, last)

    threads.run(score, len(chunks))
    rising, falling = (np.empty(min(pool.full, pool.near), dtype=np.int64) for _ in range(2))
    of_slots = (histograms.ctypes.data, of_full, histograms[of_full].ctypes.data, len(chunks) - of_full)
    lists = (rising.ctypes.data, falling.ctypes.data)
    count: int = _choose(buckets.ctypes.data, pool.full, pool.slots, *of_slots, *lists)

    def exchange(number: int) -> None:
        scratch, first = np.empty(F.MAX_DIM + PAD, dtype=np.float32), number * _EXCHANGES
        where = (meta, values, near, owners, scores, words, fields.ctypes.data, seed, step, stochastic)
        _exchange(*where, *lists, scratch.ctypes.data, first, min(first + _EXCHANGES, count))

    threads.run(exchange, -(-count // _EXCHANGES))
    return count
