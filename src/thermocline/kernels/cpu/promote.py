"""Promotion on the CPU: rows of int8 slots are exchanged with colder rows of fp32 slots, as `cache/reference.py` defines."""

from __future__ import annotations

import numpy as np

from thermocline import formats as F
from thermocline.kernels.cache.reference import BUCKETS, MARGIN, TICK_BITS
from thermocline.kernels.layout import Cache, Pool

from . import cache_buckets as C
from . import threads
from .cache_buckets import select_places, sum_histograms, thresholds
from .compile import addresses, inlined, kernel
from .rows import CACHED, CACHED_INT8, PAD, copy_floats, int8_slot_bytes, meta_bytes, read_row, row_key, step_key
from .vectors import get_i64, get_u32, put_i64, put_u8, put_u32
from .write_row import measure_row, write_row

_CHUNK = 1 << 15  # slots of a task
_EXCHANGES = 256  # of a task
_CLEAN = ~F.DIRTY


@inlined
def _slot_bucket(score, policy, step):
    """`slot_buckets` of the reference."""
    if policy == F.LRU:
        return max(BUCKETS - 1 - C.bucket_of(step - score), 1)
    return C.bucket_of(score if policy == F.LFU else score >> TICK_BITS)


@kernel("void(" + ", ".join(["int64"] * 9) + ")")
def _score(scores, owners, policy, step, margin, buckets, histogram, first, last):
    """Buckets of slots first to last - 1 (0 for empty slots), and their histogram."""
    for k in range(BUCKETS):
        put_i64(histogram, k, 0)
    for s in range(first, last):
        bucket = min(_slot_bucket(get_u32(scores, s), policy, step) + margin, BUCKETS - 1)
        if get_i64(owners, s) == F.EMPTY:
            bucket = 0
        put_u8(buckets, s, bucket)
        put_i64(histogram, bucket, get_i64(histogram, bucket) + 1)


@kernel("int64(" + ", ".join(["int64"] * 9) + ")")
def _select(buckets, fp32_count, slots, fp32_histogram, fp32_chunks, int8_histogram, int8_chunks, promoted, demoted):
    """int8 slots whose rows are promoted and the fp32 slots they take; returns the number of exchanges."""
    sum_histograms(fp32_histogram, fp32_chunks, BUCKETS)
    sum_histograms(int8_histogram, int8_chunks, BUCKETS)
    cut, from_tied, low, victims_of_low, needed = thresholds(int8_histogram, fp32_histogram)
    if needed > 0:
        select_places(buckets, fp32_count, slots, cut - 1, BUCKETS, cut - 1, from_tied, promoted, 0)
        select_places(buckets, 0, fp32_count, 0, low, low, victims_of_low, demoted, 0)
    return needed


@kernel("void(" + ", ".join(["int64"] * 15) + ")")
def _exchange(
    meta, values, int8_slots, owners, scores, displaced, pool, seed, step, stochastic, promoted, demoted, scratch, first, last
):
    """Exchanges first to last - 1: the row of an int8 slot moves to an fp32 slot, whose row, if any, moves to the int8 slot."""
    dim, row0, words = get_i64(pool, C.DIM), get_i64(pool, C.ROW), meta_bytes(get_i64(pool, C.FORMAT))
    base, int8_base, slot0 = get_i64(pool, C.BASE), get_i64(pool, C.INT8_BASE), get_i64(pool, C.SLOT)
    fp32_count = get_i64(pool, C.SLOTS) - get_i64(pool, C.INT8_SLOTS)
    meta, shared = meta + 4 * get_i64(pool, C.META), step_key(seed, step)
    owners, scores, displaced = owners + 8 * slot0, scores + 4 * slot0, displaced + 4 * slot0
    for k in range(first, last):
        low, high = get_i64(promoted, k), get_i64(demoted, k)
        number = int8_base + low - fp32_count
        floats, slot_meta = values + 4 * dim * (base + high), int8_slots + int8_slot_bytes(dim) * number
        up, down = get_i64(owners, low), get_i64(owners, high)
        copy_floats(floats, scratch, dim)
        read_row(F.INT8, slot_meta + 4, slot_meta, dim, floats)
        put_u32(meta + ((up & _CLEAN) - row0) * words, 0, CACHED + base + high)
        if down != F.EMPTY:
            row = down & _CLEAN
            small, large, size = measure_row(scratch, dim)
            write_row(F.INT8, scratch, dim, small, large, size, slot_meta + 4, slot_meta, row_key(shared, row), stochastic)
            put_u32(meta + (row - row0) * words, 0, CACHED_INT8 + number)
        put_i64(owners, low, down)
        put_i64(owners, high, up)
        for array in (scores, displaced):
            word = get_u32(array, low)
            put_u32(array, low, get_u32(array, high))
            put_u32(array, high, word)


def promote(meta: int, cache: Cache, pool: Pool, policy: int, stochastic: bool) -> int:
    """Exchange rows of int8 slots of one pool with colder rows of fp32 slots; returns the number of exchanges."""
    if not pool.fp32_slots:
        return 0
    fields, buckets = np.array(pool, dtype=np.int64), np.empty(pool.slots, dtype=np.uint8)
    seed, step = cache.clock.tolist()[: F.CLOCK_FIELDS]
    values, int8_slots, owners, scores, words = addresses("fiqii", *cache[:5])
    chunks = [
        (first, min(first + _CHUNK, last), margin)
        for begin, last, margin in ((0, pool.fp32_slots, MARGIN), (pool.fp32_slots, pool.slots, 0))
        for first in range(begin, last, _CHUNK)
    ]
    histograms, fp32_chunks = np.empty((len(chunks), BUCKETS), dtype=np.int64), -(-pool.fp32_slots // _CHUNK)

    def score(number: int) -> None:
        first, last, margin = chunks[number]
        slots = (scores + 4 * pool.slot, owners + 8 * pool.slot, policy, step, margin)
        _score(*slots, *addresses("Bq", buckets, histograms[number]), first, last)

    threads.run(score, len(chunks))
    lists = [np.empty(min(pool.fp32_slots, pool.int8_slots), dtype=np.int64) for _ in range(2)]
    fp32, int8 = histograms[:fp32_chunks], histograms[fp32_chunks:]
    sums = (*addresses("q", fp32), len(fp32), *addresses("q", int8), len(int8))
    count: int = _select(*addresses("B", buckets), pool.fp32_slots, pool.slots, *sums, *addresses("qq", *lists))

    def exchange(first: int, last: int) -> None:
        scratch = np.empty(F.MAX_DIM + PAD, dtype=np.float32)
        where = (meta, values, int8_slots, owners, scores, words, *addresses("q", fields), seed, step, stochastic)
        _exchange(*where, *addresses("qqf", *lists, scratch), first, last)

    threads.run_chunks(exchange, count, _EXCHANGES)
    return count
