"""Cache refresh on the CPU: hits, count, score, select, swap, promote (docs/decisions/kernel_notes.md)."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.cpu import cache_buckets as C
from thermocline.kernels.cpu import rows as R
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.cache_buckets import select_places, sum_histograms, thresholds
from thermocline.kernels.cpu.compile import addresses, inlined, kernel
from thermocline.kernels.cpu.promote import promote
from thermocline.kernels.cpu.vectors import get_i64, get_u32, prefetch, put_i64, put_u32
from thermocline.kernels.cpu.write_row import measure_row, write_row
from thermocline.kernels.layout import Cache, Layout, Pool, TableLayout

from .reference import BUCKETS, COUNTERS, FIRST_LINE, HALVING_LOOKUPS, HALVING_TICKS, OCTAVE, TICK_BITS, adapt_window, tick

_PREFETCH_DISTANCE = 4
_CHUNK = 1 << 15  # slots of a scoring task
_SWAPS = 256  # of a task
_CLEAN = ~F.DIRTY


# -- select -----------------------------------------------------------------------------------------------------------


@kernel("int64(" + ", ".join(["int64"] * 12) + ")")
def _select(pool, number, slots, stats, buckets, victims, histograms, slot_histograms, chunks, selected, slots_taken, pieces):
    """Admitted candidates (as list positions) and the slots they take; returns the number of admissions."""
    stats, histograms = stats + 8 * C.STATS * pool, histograms + 8 * BUCKETS * pool
    sum_histograms(histograms, pieces, BUCKETS * number)
    sum_histograms(slot_histograms, chunks, BUCKETS)
    cut, from_tied, low, victims_of_low, needed = thresholds(histograms, slot_histograms)
    if needed == 0:
        return 0
    count = 0
    for piece in range(pieces):
        first = get_i64(stats, piece * C.STATS * number + C.FIRST)
        last = first + get_i64(stats, piece * C.STATS * number + C.COUNT)
        count, from_tied = select_places(buckets, first, last, cut - 1, BUCKETS, cut - 1, from_tied, selected, count)
    select_places(victims, 0, slots, 0, low, low, victims_of_low, slots_taken, 0)
    return needed


# -- swap -------------------------------------------------------------------------------------------------------------


@inlined
def _slot_address(slot, fp32, values, int8_slots, dim):
    """(format, address, address of metadata) of a slot of a pool."""
    if slot < fp32:
        return F.FP32, values + 4 * dim * slot, values
    slot_meta = int8_slots + R.int8_slot_bytes(dim) * (slot - fp32)
    return F.INT8, slot_meta + 4, slot_meta


@inlined
def _write_back(codes, meta, width, words, format, dim, stored, place, slot_meta, owner, word, at, key, stochastic, scratch):
    """Write a row back to its table; returns whether the row was rounded."""
    if owner & F.DIRTY == 0:
        put_u32(meta + at * words, 0, word)
        return 0
    R.read_row(stored, place, slot_meta, dim, scratch)
    low, high, size = measure_row(scratch, dim)
    write_row(format, scratch, dim, low, high, size, codes + at * width, meta + at * words, key, stochastic)
    return 1


@kernel("void(" + ", ".join(["int64"] * 20) + ")")
def _swap(
    codes, meta, values, int8_slots, owners, scores, displaced, pool, seed, step, stochastic, rows, counts, selected,
    slots_taken, scratch, moved, task, first, last,
):  # fmt: skip
    """Swaps first to last - 1; `moved` receives the number of evicted rows and of rounded rows."""
    dim, format, row0 = get_i64(pool, C.DIM), get_i64(pool, C.FORMAT), get_i64(pool, C.ROW)
    width, words, base = R.row_bytes(format, dim), R.meta_bytes(format), get_i64(pool, C.BASE)
    codes, meta, values = codes + get_i64(pool, C.CODES), meta + 4 * get_i64(pool, C.META), values + 4 * dim * base
    fp32, int8_base = get_i64(pool, C.SLOTS) - get_i64(pool, C.INT8_SLOTS), get_i64(pool, C.INT8_BASE)
    int8_slots += R.int8_slot_bytes(dim) * int8_base
    owners, scores = owners + 8 * get_i64(pool, C.SLOT), scores + 4 * get_i64(pool, C.SLOT)
    displaced += 4 * get_i64(pool, C.SLOT)
    shared, left, rounded = R.step_key(seed, step), 0, 0
    for k in range(first, last):
        later = min(k + _PREFETCH_DISTANCE, last - 1)
        slot, at = get_i64(slots_taken, later), get_i64(rows, get_i64(selected, later)) - row0
        stored, place, slot_meta = _slot_address(slot, fp32, values, int8_slots, dim)
        R.prefetch_lines(place, 4 * dim if slot < fp32 else dim)
        R.prefetch_lines(codes + at * width, width)
        at = max((get_i64(owners, slot) & _CLEAN) - row0, 0)
        R.prefetch_lines(codes + at * width, width)
        prefetch(meta + at * words)
        slot, owner = get_i64(slots_taken, k), get_i64(owners, get_i64(slots_taken, k))
        stored, place, slot_meta = _slot_address(slot, fp32, values, int8_slots, dim)
        if owner != F.EMPTY:
            row = owner & _CLEAN
            rounded += _write_back(
                codes, meta, width, words, format, dim, stored, place, slot_meta, owner, get_u32(displaced, slot), row - row0,
                R.row_key(shared, row), stochastic, scratch,
            )  # fmt: skip
            left += 1
        miss = get_i64(selected, k)
        row = get_i64(rows, miss)
        at = row - row0
        put_u32(displaced, slot, get_u32(meta + at * words, 0))
        if slot < fp32:
            R.read_row(format, codes + at * width, meta + at * words, dim, place)
            put_u32(meta + at * words, 0, R.CACHED + base + slot)
        else:
            R.read_row(format, codes + at * width, meta + at * words, dim, scratch)
            low, high, size = measure_row(scratch, dim)
            write_row(F.INT8, scratch, dim, low, high, size, place, slot_meta, R.row_key(shared, row), stochastic)
            put_u32(meta + at * words, 0, R.CACHED_INT8 + int8_base + slot - fp32)
        put_i64(owners, slot, row | F.DIRTY)
        put_u32(scores, slot, get_u32(counts, miss))
    put_i64(moved, 2 * task, left)
    put_i64(moved, 2 * task + 1, rounded)


# -- all passes -------------------------------------------------------------------------------------------------------


def refresh(
    codes: Tensor, meta: Tensor, cache: Cache, layout: Layout, keys_N: Tensor, bits: int, pieces: int, stochastic: bool
) -> None:
    """Count a batch; admit and evict rows. Keys are arena row << bits; keys of a row, and of a pool, are contiguous."""
    cache.clock.numpy()[F.STEP] += 1
    tables, ledger = layout.tables, cache.ledger.numpy()
    if tables.policy != F.LRU:
        for index, pool in enumerate(tables.pools):
            if ledger[index, F.SINCE] >= HALVING_LOOKUPS * pool.slots:
                _halve(cache, pool, ledger[index], tables.policy)
    if keys_N.numel() == 0:
        return
    batch = _Refresh(cache, layout, keys_N.numel(), pieces)
    batch.count_hits(meta, keys_N, bits)
    batch.score_candidates()
    totals = batch.stats.sum(0).tolist()
    # Rows of higher buckets than any candidate stay: most refreshes look at few slots, and at none without candidates.
    most = batch.stats[:, :, C.MOST].max(0).tolist()
    if tables.policy == F.ADAPTIVE:
        most = [BUCKETS - 1] * len(most)
    batch.score_slots(most)
    for index, pool in enumerate(tables.pools):
        lookups, hits = totals[index][: C.FIRST]
        if not lookups:
            continue
        moved = batch.swap(codes, meta, index, stochastic) if most[index] else (0, 0, 0)
        if tables.policy == F.ADAPTIVE:
            ledger[index, F.WINDOW :] = batch.adapt_window(index, ledger[index].tolist(), moved[0])
        promoted = promote(meta.data_ptr(), cache, pool, tables.policy, stochastic) if pool.int8_slots else 0
        ledger[index, : F.WINDOW] += (lookups, lookups, hits, *moved, promoted)


def _halve(cache: Cache, pool: Pool, ledger: Any, policy: int) -> None:
    """Halve all counts, and drop the older half of the time."""
    words = COUNTERS // 2
    scores = cache.scores.numpy()[pool.slot : pool.slot + pool.slots]
    sketch = cache.sketch.numpy()[words * pool.slot : words * (pool.slot + pool.slots)].view(np.uint32)
    if policy == F.ADAPTIVE:
        ticks = np.maximum((scores & (2 * HALVING_TICKS - 1)) - HALVING_TICKS, 0)
        np.bitwise_or(scores >> (TICK_BITS + 1) << TICK_BITS, ticks, out=scores)
        ledger[F.LINE] = max(ledger[F.LINE] - OCTAVE, 1 - FIRST_LINE)
    else:
        np.right_shift(scores, 1, out=scores)
    ledger[F.SINCE] = 0
    np.right_shift(sketch, 1, out=sketch)
    np.bitwise_and(sketch, 0x7FFF7FFF, out=sketch)


@lru_cache(maxsize=256)
def _fields_of(tables: TableLayout) -> Any:
    """Fields of the pools, as kernels take them."""
    return np.array([(*pool, 0, 0, 0) for pool in tables.pools], dtype=np.int64)


class _Refresh:
    """One refresh: the arrays that its passes share (see `cpu/cache_buckets.py`), by address in one piece of memory."""

    def __init__(self, cache: Cache, layout: Layout, count: int, pieces: int) -> None:
        self.pools, self.policy, self.pieces = layout.tables.pools, layout.tables.policy, pieces
        self.seed, self.step = cache.clock.tolist()[: F.CLOCK_FIELDS]
        self.fields = _fields_of(layout.tables).copy()
        self.fields[:, C.NOW] = self.step
        if self.policy == F.ADAPTIVE:
            self.fields[:, C.NOW :] = [self._now(cache, index) for index in range(len(self.pools))]
        number, slots = len(self.pools), self.pools[-1].slot + self.pools[-1].slots
        self.chunks = list(accumulate((-(-pool.slots // _CHUNK) for pool in self.pools), initial=0))  # first of each pool
        sizes = [pieces * number * C.STATS, pieces * number * BUCKETS, 3 * self.chunks[-1], self.chunks[-1] * BUCKETS]
        sizes += [count, count, count, count, -(-count // 2), -(-count // 8), -(-slots // 8)]
        begins = list(accumulate(sizes, initial=0))
        held = np.empty(begins[-1], dtype=np.int64)
        self.stats = held[: begins[1]].reshape(pieces, number, C.STATS)
        self.histograms = held[begins[1] : begins[2]].reshape(pieces, number, BUCKETS)
        self.sizes = held[begins[2] : begins[3]].reshape(-1, 3)
        self.taken, self.victims = held[begins[7] : begins[8]], held[begins[-2] :].view(np.uint8)
        (start,) = addresses("q", held)
        at = [start + 8 * begin for begin in begins]
        self.at_stats, self.at_histograms, self.at_sizes, self.at_slot_histograms = at[:4]
        self.rows, self.places, self.admitted, self.victims_taken, self.counts, self.buckets, self.at_victims = at[4:-1]
        self.values, self.int8_slots, self.owners, self.scores, self.words, self.sketch = addresses("fiqiii", *cache[:6])
        (self.at_fields,) = addresses("q", self.fields)

    def _now(self, cache: Cache, index: int) -> tuple[int, int, int]:
        """Time of one pool with the adaptive policy, and the end of its window."""
        ledger = cache.ledger[index].tolist()
        return tick(ledger[F.SINCE], self.pools[index].slots), FIRST_LINE + ledger[F.LINE], ledger[F.EDGE]

    def _pool_fields(self, index: int) -> int:
        return self.at_fields + 8 * C.FIELDS * index

    def count_hits(self, meta: Tensor, keys_N: Tensor, bits: int) -> None:
        """Count cached rows and list the candidates."""
        slots = (*addresses("i", meta), self.owners, self.scores, self.at_fields, len(self.pools), self.policy)
        lookups = (*addresses("q", keys_N), bits, keys_N.numel(), self.rows, self.counts, self.places, self.at_stats)
        threads.run(lambda piece: C.count_hits(*slots, *lookups, piece, self.pieces), self.pieces)

    def score_candidates(self) -> None:
        """Count the candidates, and bucket them, with histograms."""
        sketch, lists = (self.sketch, self.at_fields, len(self.pools)), (self.counts, self.places)
        if self.policy != F.LRU:
            shared = self.pieces > 1
            threads.run(lambda piece: C.count_candidates(*sketch, *lists, self.at_stats, piece, shared), self.pieces)
        found = (self.policy, *lists, self.buckets, self.at_stats, self.at_histograms)
        threads.run(lambda piece: C.score_candidates(*sketch, *found, piece), self.pieces)

    def score_slots(self, most: list[int]) -> None:
        """Bucket the slots of pools with candidates, with histograms."""
        tasks = [
            (index, chunk)
            for index in range(len(self.pools))
            if most[index]
            for chunk in range(self.chunks[index + 1] - self.chunks[index])
        ]

        def task(number: int) -> None:
            index, chunk = tasks[number]
            pool, at = self.pools[index], self.chunks[index] + chunk
            slots = (self.scores, self.owners, self._pool_fields(index), self.policy, most[index])
            results = (self.at_victims + pool.slot, self.at_slot_histograms + 8 * BUCKETS * at, self.at_sizes + 24 * at)
            C.score_slots(*slots, *results, chunk * _CHUNK, min((chunk + 1) * _CHUNK, pool.slots))

        threads.run(task, len(tasks))

    def swap(self, codes: Tensor, meta: Tensor, index: int, stochastic: bool) -> tuple[int, int, int]:
        """Admit candidates of one pool; returns the numbers of admitted, evicted and rounded rows."""
        pool, first = self.pools[index], self.chunks[index]
        slot_histograms, chunks = self.at_slot_histograms + 8 * BUCKETS * first, self.chunks[index + 1] - first
        lists = (self.at_stats, self.buckets, self.at_victims + pool.slot, self.at_histograms, slot_histograms)
        selected = (self.admitted, self.victims_taken)
        count = _select(index, len(self.pools), pool.slots, *lists, chunks, *selected, self.pieces)
        if count == 0:
            return 0, 0, 0
        moved = np.empty((-(-count // _SWAPS), 2), dtype=np.int64)
        slots = (self.values, self.int8_slots, self.owners, self.scores, self.words)
        where = (*addresses("Bi", codes, meta), *slots, self._pool_fields(index))
        how = (self.seed, self.step, stochastic, self.rows, self.counts, *selected)

        def task(first: int, last: int) -> None:
            scratch = np.empty(F.MAX_DIM + R.PAD, dtype=np.float32)
            _swap(*where, *how, *addresses("fq", scratch, moved), first // _SWAPS, first, last)

        threads.run_chunks(task, count, _SWAPS)
        left, rounded = moved.sum(0).tolist()
        return count, left, rounded

    def adapt_window(self, index: int, ledger: list[int], came: int) -> list[int]:
        """`adapt_window` of the reference, after a swap."""
        pool = self.pools[index]
        low = int(self.victims[pool.slot + self.taken[:came]].max()) if came else 0
        window, *sizes = self.sizes[self.chunks[index] : self.chunks[index + 1]].sum(0).tolist()
        hits = self.stats[:, index, C.OLDEST : C.MOST].sum(0).tolist()
        return adapt_window(ledger, pool.slots, window, hits, sizes, low)
