"""The cache on the CPU: rows come and go as `reference.py` defines, bit for bit.

Passes, each cut into tasks. The lookups come sorted, so a row is one run of keys; they are cut into pieces between
rows (`cpu_sort`), so a row, and with it its slot, belongs to one task:

    hits      for each piece: rows that are cached get their count and are dirty; the others are listed as candidates
    count     candidates into the sketch. Adding commutes, so tasks may share it, with atomic additions
    score     candidates by their estimate, and slots by their score, into buckets; a histogram of each
    choose    from the histograms, where candidates end to come in and slots to give way; then who they are, in order
    swap      candidate k takes slot k: the row there is put back, the new one comes in
    promote   where there are near slots, their hottest rows change places with colder ones of full slots

The first three are in `cpu_cache`, the last in `cpu_promote`. Costs grow with the distinct rows of a batch but for `score`,
`choose` and `promote`, which walk over all slots: 12 bytes a slot, vectors of 16, then bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.cpu import cache_buckets as C
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.compile import inlined, kernel
from thermocline.kernels.cpu.promote import promote
from thermocline.kernels.cpu.rows import (
    CACHED,
    NEAR,
    PAD,
    ask_for,
    meta_bytes,
    near_bytes,
    read_row,
    row_bytes,
    row_key,
    step_key,
)
from thermocline.kernels.cpu.select import cuts, pick, total
from thermocline.kernels.cpu.vectors import get_i64, get_u32, prefetch, put_i64, put_u32
from thermocline.kernels.cpu.write_row import measure_row, write_row
from thermocline.kernels.layout import Cache, Layout, Pool

from .reference import BUCKETS, COUNTERS, HALF, LINE, OCTAVE, PERIOD, TICK_BITS, steer, tick

_SWAP_AHEAD = 4
_CHUNK = 1 << 15  # slots a task puts into buckets
_SWAPS = 256  # a task
_CLEAN = ~F.DIRTY


# -- choose -----------------------------------------------------------------------------------------------------------


@kernel("int64(" + ", ".join(["int64"] * 12) + ")")
def _choose(pool, number, slots, notes, buckets, victims, histograms, of_slots, chunks, chosen, taken, pieces):
    """Candidates (as places in the list) that come in and slots they take; returns how many."""
    notes, histograms = notes + 8 * C.NOTES * pool, histograms + 8 * BUCKETS * pool
    total(histograms, pieces, BUCKETS * number)
    total(of_slots, chunks, BUCKETS)
    cut, from_below, low, of_low, needed = cuts(histograms, of_slots)
    if needed == 0:
        return 0
    count = 0
    for piece in range(pieces):
        first = get_i64(notes, piece * C.NOTES * number + C.FIRST)
        last = first + get_i64(notes, piece * C.NOTES * number + C.COUNT)
        count, from_below = pick(buckets, first, last, cut - 1, BUCKETS, cut - 1, from_below, chosen, count)
    pick(victims, 0, slots, 0, low, low, of_low, taken, 0)
    return needed


# -- swap -------------------------------------------------------------------------------------------------------------


@inlined
def _place(slot, full, values, near, dim):
    """(format, address, address of metadata) of a slot of a pool."""
    if slot < full:
        return F.FP32, values + 4 * dim * slot, values
    about = near + near_bytes(dim) * (slot - full)
    return F.INT8, about + 4, about


@inlined
def _put_back(codes, meta, width, words, format, dim, found, place, about, owner, word, at, key, stochastic, scratch):
    """Put a row back into its table; returns whether it had to be rounded."""
    if owner & F.DIRTY == 0:
        put_u32(meta + at * words, 0, word)
        return 0
    read_row(found, place, about, dim, scratch)
    low, high, size = measure_row(scratch, dim)
    write_row(format, scratch, dim, low, high, size, codes + at * width, meta + at * words, key, stochastic)
    return 1


@kernel("void(" + ", ".join(["int64"] * 20) + ")")
def _swap(
    codes, meta, values, near, owners, scores, displaced, pool, seed, step, stochastic, rows, counts, chosen, taken,
    scratch, moved, task, first, last,
):  # fmt: skip
    """Swaps first to last - 1; `moved` gets how many rows left, and how many of them were rounded."""
    dim, format, row0 = get_i64(pool, C.DIM), get_i64(pool, C.FORMAT), get_i64(pool, C.ROW)
    width, words, base = row_bytes(format, dim), meta_bytes(format), get_i64(pool, C.BASE)
    codes, meta, values = codes + get_i64(pool, C.CODES), meta + 4 * get_i64(pool, C.META), values + 4 * dim * base
    full, near_base = get_i64(pool, C.SLOTS) - get_i64(pool, C.NEAR), get_i64(pool, C.NEAR_BASE)
    near += near_bytes(dim) * near_base
    owners, scores = owners + 8 * get_i64(pool, C.SLOT), scores + 4 * get_i64(pool, C.SLOT)
    displaced += 4 * get_i64(pool, C.SLOT)
    shared, left, rounded = step_key(seed, step), 0, 0
    for k in range(first, last):
        later = min(k + _SWAP_AHEAD, last - 1)
        slot, at = get_i64(taken, later), get_i64(rows, get_i64(chosen, later)) - row0
        found, place, about = _place(slot, full, values, near, dim)
        ask_for(place, 4 * dim if slot < full else dim)
        ask_for(codes + at * width, width)
        at = max((get_i64(owners, slot) & _CLEAN) - row0, 0)
        ask_for(codes + at * width, width)
        prefetch(meta + at * words)
        slot, owner = get_i64(taken, k), get_i64(owners, get_i64(taken, k))
        found, place, about = _place(slot, full, values, near, dim)
        if owner != F.EMPTY:
            row = owner & _CLEAN
            rounded += _put_back(
                codes, meta, width, words, format, dim, found, place, about, owner, get_u32(displaced, slot), row - row0,
                row_key(shared, row), stochastic, scratch,
            )  # fmt: skip
            left += 1
        miss = get_i64(chosen, k)
        row = get_i64(rows, miss)
        at = row - row0
        put_u32(displaced, slot, get_u32(meta + at * words, 0))
        if slot < full:
            read_row(format, codes + at * width, meta + at * words, dim, place)
            put_u32(meta + at * words, 0, CACHED + base + slot)
        else:
            read_row(format, codes + at * width, meta + at * words, dim, scratch)
            low, high, size = measure_row(scratch, dim)
            write_row(F.INT8, scratch, dim, low, high, size, place, about, row_key(shared, row), stochastic)
            put_u32(meta + at * words, 0, NEAR + near_base + slot - full)
        put_i64(owners, slot, row | F.DIRTY)
        put_u32(scores, slot, get_u32(counts, miss))
    put_i64(moved, 2 * task, left)
    put_i64(moved, 2 * task + 1, rounded)


# -- all passes -------------------------------------------------------------------------------------------------------


def refresh(
    codes: Tensor, meta: Tensor, cache: Cache, layout: Layout, keys_N: Tensor, bits: int, pieces: int, stochastic: bool
) -> None:
    """Count a batch, and let rows come and go. Keys are arena row << bits, those of a row and of a pool together."""
    cache.clock.numpy()[F.STEP] += 1
    tables, ledger = layout.tables, cache.ledger.numpy()
    if tables.policy != F.LRU:
        for index, pool in enumerate(tables.pools):
            if ledger[index, F.SINCE] >= HALF * pool.slots:
                _halve(cache, pool, ledger[index], tables.policy)
    if keys_N.numel() == 0:
        return
    batch = _Batch(cache, layout, keys_N.numel(), pieces)
    batch.count_hits(meta, keys_N, bits)
    batch.score()
    lookups, hits = batch.notes[:, :, C.LOOKUPS].sum(0), batch.notes[:, :, C.HITS].sum(0)
    for index, pool in enumerate(tables.pools):
        moved = batch.swap(codes, meta, index, stochastic)
        if tables.policy == F.ADAPTIVE and lookups[index]:
            ledger[index, F.WINDOW :] = batch.steer(index, ledger[index].tolist(), moved[0])
        promoted = promote(meta.data_ptr(), cache, pool, tables.policy, stochastic) if pool.near and lookups[index] else 0
        ledger[index, : F.WINDOW] += (lookups[index], lookups[index], hits[index], *moved, promoted)


def _halve(cache: Cache, pool: Pool, ledger: Any, policy: int) -> None:
    """Forget half of all counts, and with them half of the time."""
    words = COUNTERS // 2
    scores = cache.scores.numpy()[pool.slot : pool.slot + pool.slots]
    sketch = cache.sketch.numpy()[words * pool.slot : words * (pool.slot + pool.slots)].view(np.uint32)
    if policy == F.ADAPTIVE:
        ticks = np.maximum((scores & (2 * PERIOD - 1)) - PERIOD, 0)
        np.bitwise_or(scores >> (TICK_BITS + 1) << TICK_BITS, ticks, out=scores)
        ledger[F.LINE] = max(ledger[F.LINE] - OCTAVE, 1 - LINE)
    else:
        np.right_shift(scores, 1, out=scores)
    ledger[F.SINCE] = 0
    np.right_shift(sketch, 1, out=sketch)
    np.bitwise_and(sketch, 0x7FFF7FFF, out=sketch)


class _Batch:
    """One refresh: the arrays that its passes share (`cpu_cache` says what is in them)."""

    def __init__(self, cache: Cache, layout: Layout, count: int, pieces: int) -> None:
        self.pools, self.policy, self.pieces = layout.tables.pools, layout.tables.policy, pieces
        self.seed, self.step = cache.clock.tolist()[: F.CLOCK_FIELDS]
        self.fields = np.array([(*pool, *self._now(cache, k)) for k, pool in enumerate(self.pools)], dtype=np.int64)
        self.rows, self.places, self.chosen, self.taken = (np.empty(count, dtype=np.int64) for _ in range(4))
        self.counts, self.buckets = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.uint8)
        self.victims = [np.empty(pool.slots, dtype=np.uint8) for pool in self.pools]
        self.notes = np.empty((pieces, len(self.pools), C.NOTES), dtype=np.int64)
        self.histograms = np.empty((pieces, len(self.pools), BUCKETS), dtype=np.int64)
        self.of_slots = [np.empty((-(-pool.slots // _CHUNK), BUCKETS), dtype=np.int64) for pool in self.pools]
        self.sizes = [np.empty((len(chunks), 3), dtype=np.int64) for chunks in self.of_slots]
        self.values, self.near, self.owners, self.scores, self.words, self.sketch = (t.data_ptr() for t in cache[:6])

    def _now(self, cache: Cache, index: int) -> tuple[int, int, int]:
        """The time for one pool, and where its window ends."""
        ledger = cache.ledger[index].tolist()
        now = tick(ledger[F.SINCE], self.pools[index].slots) if self.policy == F.ADAPTIVE else self.step
        return now, LINE + ledger[F.LINE], ledger[F.EDGE]

    def count_hits(self, meta: Tensor, keys_N: Tensor, bits: int) -> None:
        """Count the rows that are cached and list the others."""
        slots = (meta.data_ptr(), self.owners, self.scores, *_at(self.fields), len(self.pools), self.policy)
        lists = (keys_N.data_ptr(), bits, keys_N.numel(), *_at(self.rows, self.counts, self.places, self.notes))
        threads.run(lambda piece: C.count_hits(*slots, *lists, piece, self.pieces), self.pieces)

    def score(self) -> None:
        """Count the candidates; then buckets of candidates and slots, and their histograms."""
        sketch = (self.sketch, *_at(self.fields), len(self.pools))
        if self.policy != F.LRU:
            lists = _at(self.counts, self.places, self.notes)
            shared = threads.thread_count() > 1
            threads.run(lambda piece: C.count_candidates(*sketch, *lists, piece, shared), self.pieces)
        lists = _at(self.counts, self.places, self.buckets, self.notes, self.histograms)
        chunks = [(index, first) for index, pool in enumerate(self.pools) for first in range(0, pool.slots, _CHUNK)]

        def task(number: int) -> None:
            if number < self.pieces:
                C.score_candidates(*sketch, self.policy, *lists, number)
                return
            index, first = chunks[number - self.pieces]
            results = (self.victims[index], self.of_slots[index][first // _CHUNK], self.sizes[index][first // _CHUNK])
            slots = (self.scores, self.owners, *_at(self.fields[index]), self.policy)
            C.score_slots(*slots, *_at(*results), first, min(first + _CHUNK, self.pools[index].slots))

        threads.run(task, self.pieces + len(chunks))

    def swap(self, codes: Tensor, meta: Tensor, index: int, stochastic: bool) -> tuple[int, int, int]:
        """Let candidates of one pool in; returns how many, how many rows they drove out, how many of those were rounded."""
        pool, of_slots = self.pools[index], self.of_slots[index]
        lists = _at(self.notes, self.buckets, self.victims[index], self.histograms, of_slots)
        chosen = _at(self.chosen, self.taken)
        count = _choose(index, len(self.pools), pool.slots, *lists, len(of_slots), *chosen, self.pieces)
        tasks = -(-count // _SWAPS)
        moved = np.empty((tasks, 2), dtype=np.int64)
        slots = (self.values, self.near, self.owners, self.scores, self.words, *_at(self.fields[index]))
        where = (codes.data_ptr(), meta.data_ptr(), *slots)
        how = (self.seed, self.step, stochastic, *_at(self.rows, self.counts), *chosen)

        def task(number: int) -> None:
            scratch, first = np.empty(F.MAX_DIM + PAD, dtype=np.float32), number * _SWAPS
            _swap(*where, *how, *_at(scratch, moved), number, first, min(first + _SWAPS, count))

        threads.run(task, tasks)
        left, rounded = moved.sum(0).tolist()
        return count, left, rounded

    def steer(self, index: int, ledger: list[int], came: int) -> list[int]:
        """What the adaptive policy does next, after a swap: see the reference."""
        low = int(self.victims[index][self.taken[:came]].max()) if came else 0
        window, *sizes = self.sizes[index].sum(0).tolist()
        hits = self.notes[:, index, C.OLDEST :].sum(0).tolist()
        return steer(ledger, self.pools[index].slots, window, hits, sizes, low)


def _at(*arrays: np.ndarray[Any, Any]) -> list[int]:
    """Addresses."""
    return [array.ctypes.data for array in arrays]
