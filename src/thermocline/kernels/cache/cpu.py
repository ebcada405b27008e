"""Cache refresh on the CPU: hits, count, score, select, swap, promote (docs/decisions/kernel_notes.md)."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.cpu import cache_buckets as C
from thermocline.kernels.cpu import rows as R
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.cache_buckets import select_places, sum_histograms, thresholds
from thermocline.kernels.cpu.compile import addresses, helper, inlined, kernel
from thermocline.kernels.cpu.promote import promote
from thermocline.kernels.cpu.vectors import Emit, block, get_i64, get_u32, prefetch, put_i64, put_u32
from thermocline.kernels.cpu.write_row import measure_row, write_row
from thermocline.kernels.layout import Cache, Layout, Pool, TableLayout

from .reference import BUCKETS, COUNTERS, FIRST_LINE, HALVING_LOOKUPS, HALVING_TICKS, OCTAVE, TICK_BITS, adapt_window, tick

_PREFETCH_DISTANCE = 4
_CHUNK = 1 << 15  # slots of a scoring task
_SWAPS = 256  # of a task
_CLEAN = ~F.DIRTY


# -- select -----------------------------------------------------------------------------------------------------------


@helper
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


@helper
def _swap(
    codes, meta, values, int8_slots, owners, scores, displaced, pool, seed, step, stochastic, rows, counts, selected,
    slots_taken, first, last,
):  # fmt: skip
    """Swaps first to last - 1; returns the numbers of evicted rows and of rounded rows."""
    scratch = _new_row()
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
    return left, rounded


# -- all passes -------------------------------------------------------------------------------------------------------

# Fields of a job: what the passes of one refresh share, mostly addresses (see `cpu/cache_buckets.py`).
(
    _CODES, _META, _VALUES, _INT8, _OWNERS, _SCORES, _WORDS, _SKETCH, _POOLS, _NUMBER, _POLICY, _KEYS, _BITS, _COUNT, _PIECES,
    _SEED, _STEP, _STOCHASTIC, _LEDGER, _STATS, _HISTOGRAMS, _SIZES, _SLOT_HISTOGRAMS, _ROWS, _PLACES, _ADMITTED, _TAKEN,
    _COUNTS, _BUCKETS, _VICTIMS, _MOVED,
) = range(31)  # fmt: skip
_FIRST_SHARED = _STATS  # the fields from here on are parts of one piece of memory

_COUNT_HITS, _COUNT_CANDIDATES, _SCORE_CANDIDATES, _SCORE_SLOTS, _SELECT_ROWS, _SWAP_ROWS, _ALL = range(7)  # passes


@block("-> i64")
def _new_row(e: Emit) -> Any:
    """A scratch row on the stack."""
    return e.stack((F.MAX_DIM + R.PAD) // 2)


@inlined
def _candidates(which, job, piece):
    """Passes over the lookups and candidates of one piece."""
    pools, number, policy = get_i64(job, _POOLS), get_i64(job, _NUMBER), get_i64(job, _POLICY)
    counts, places, stats, sketch = get_i64(job, _COUNTS), get_i64(job, _PLACES), get_i64(job, _STATS), get_i64(job, _SKETCH)
    if which == _COUNT_HITS or which == _ALL:
        C.count_hits(
            get_i64(job, _META), get_i64(job, _OWNERS), get_i64(job, _SCORES), pools, number, policy, get_i64(job, _KEYS),
            get_i64(job, _BITS), get_i64(job, _COUNT), get_i64(job, _ROWS), counts, places, stats, piece, get_i64(job, _PIECES),
        )  # fmt: skip
    if policy != F.LRU and (which == _COUNT_CANDIDATES or which == _ALL):
        C.count_candidates(sketch, pools, number, counts, places, stats, piece, get_i64(job, _PIECES) > 1)
    if which == _SCORE_CANDIDATES or which == _ALL:
        buckets, histograms = get_i64(job, _BUCKETS), get_i64(job, _HISTOGRAMS)
        C.score_candidates(sketch, pools, number, policy, counts, places, buckets, stats, histograms, piece)


@inlined
def _slots(job, pool, chunk, first, last):
    """Score slots of a pool. Rows of higher buckets than any candidate stay: most refreshes look at few slots."""
    most, policy, here = 0, get_i64(job, _POLICY), get_i64(job, _POOLS) + 8 * C.FIELDS * pool
    for piece in range(get_i64(job, _PIECES)):
        most = max(most, get_i64(get_i64(job, _STATS), (piece * get_i64(job, _NUMBER) + pool) * C.STATS + C.MOST))
    C.score_slots(
        get_i64(job, _SCORES), get_i64(job, _OWNERS), here, policy, BUCKETS - 1 if policy == F.ADAPTIVE else most,
        get_i64(job, _VICTIMS) + get_i64(here, C.SLOT), get_i64(job, _SLOT_HISTOGRAMS) + 8 * BUCKETS * chunk,
        get_i64(job, _SIZES) + 24 * chunk, first, last,
    )  # fmt: skip


@inlined
def _select_of(job, pool, chunk, chunks):
    """`_select` of a pool whose slots were scored in `chunks` chunks."""
    here = get_i64(job, _POOLS) + 8 * C.FIELDS * pool
    return _select(
        pool, get_i64(job, _NUMBER), get_i64(here, C.SLOTS), get_i64(job, _STATS), get_i64(job, _BUCKETS),
        get_i64(job, _VICTIMS) + get_i64(here, C.SLOT), get_i64(job, _HISTOGRAMS),
        get_i64(job, _SLOT_HISTOGRAMS) + 8 * BUCKETS * chunk, chunks, get_i64(job, _ADMITTED), get_i64(job, _TAKEN),
        get_i64(job, _PIECES),
    )  # fmt: skip


@inlined
def _swap_of(job, pool, first, last):
    """`_swap` of a pool."""
    return _swap(
        get_i64(job, _CODES), get_i64(job, _META), get_i64(job, _VALUES), get_i64(job, _INT8), get_i64(job, _OWNERS),
        get_i64(job, _SCORES), get_i64(job, _WORDS), get_i64(job, _POOLS) + 8 * C.FIELDS * pool, get_i64(job, _SEED),
        get_i64(job, _STEP), get_i64(job, _STOCHASTIC), get_i64(job, _ROWS), get_i64(job, _COUNTS), get_i64(job, _ADMITTED),
        get_i64(job, _TAKEN), first, last,
    )  # fmt: skip


@inlined
def _add(ledger, field, count):
    put_i64(ledger, field, get_i64(ledger, field) + count)


@inlined
def _refresh_pools(job):
    """Score, select and swap the slots of each pool whose rows were looked up, in one task; counts go to the ledger."""
    for pool in range(get_i64(job, _NUMBER)):
        stats, ledger = get_i64(job, _STATS) + 8 * C.STATS * pool, get_i64(job, _LEDGER) + 8 * F.LEDGER_FIELDS * pool
        _add(ledger, F.SINCE, get_i64(stats, C.LOOKUPS))
        _add(ledger, F.LOOKUPS, get_i64(stats, C.LOOKUPS))
        _add(ledger, F.HITS, get_i64(stats, C.HITS))
        if get_i64(stats, C.MOST) == 0:
            continue
        _slots(job, pool, 0, 0, get_i64(get_i64(job, _POOLS) + 8 * C.FIELDS * pool, C.SLOTS))
        count = _select_of(job, pool, 0, 1)
        left, rounded = _swap_of(job, pool, 0, count)
        _add(ledger, F.ADMISSIONS, count)
        _add(ledger, F.EVICTIONS, left)
        _add(ledger, F.WRITE_BACKS, rounded)


@kernel("int64(" + ", ".join(["int64"] * 6) + ")")
def _run_pass(which, job, pool, number, first, last):
    """A pass for one piece, chunk of slots (`number`) or range of swaps, or all of one task; `_SELECT`: admitted rows."""
    if which <= _SCORE_CANDIDATES or which == _ALL:
        _candidates(which, job, number)
    if which == _ALL:
        _refresh_pools(job)
    elif which == _SCORE_SLOTS:
        _slots(job, pool, number, first, last)
    elif which == _SELECT_ROWS:
        return _select_of(job, pool, first, last)
    elif which == _SWAP_ROWS:
        left, rounded = _swap_of(job, pool, first, last)
        put_i64(get_i64(job, _MOVED), 2 * number, left)
        put_i64(get_i64(job, _MOVED), 2 * number + 1, rounded)
    return np.int64(0)


def refresh(
    codes: Tensor, meta: Tensor, cache: Cache, layout: Layout, keys_N: Tensor, bits: int, pieces: int, stochastic: bool
) -> None:
    """Count a batch; admit and evict rows. Keys are arena row << bits; keys of a row, and of a pool, are contiguous."""
    cache.clock.numpy()[F.STEP] += 1
    tables, ledger = layout.tables, cache.ledger.numpy()
    if tables.policy != F.LRU:
        for index, since in enumerate(ledger[:, F.SINCE].tolist()):
            if since >= HALVING_LOOKUPS * tables.pools[index].slots:
                _halve(cache, tables.pools[index], ledger[index], tables.policy)
    if keys_N.numel() == 0:
        return
    batch = _Refresh(codes, meta, cache, layout, keys_N, bits, pieces, stochastic)
    if pieces == 1 and tables.policy != F.ADAPTIVE and not batch.sizes.int8_slots:
        batch.run(_ALL, 1)
        return
    for which in (_COUNT_HITS, _COUNT_CANDIDATES, _SCORE_CANDIDATES):
        batch.run(which, pieces)
    totals, most = batch.stats.sum(0).tolist(), batch.stats[:, :, C.MOST].max(0).tolist()
    batch.score_slots([tables.policy == F.ADAPTIVE or bucket > 0 for bucket in most])
    for index, pool in enumerate(tables.pools):
        lookups, hits = totals[index][: C.FIRST]
        if not lookups:
            continue
        moved = batch.swap(index) if most[index] or tables.policy == F.ADAPTIVE else (0, 0, 0)
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


class _Sizes(NamedTuple):
    """What all refreshes of a layout share."""

    fields: Any  # int64 [pools, C.FIELDS], without what changes
    chunks: list[int]  # the first of each pool, and their number
    slots: int
    int8_slots: int


@lru_cache(maxsize=256)
def _sizes_of(tables: TableLayout) -> _Sizes:
    pools = tables.pools
    chunks = list(accumulate((-(-pool.slots // _CHUNK) for pool in pools), initial=0))
    fields = np.array([(*pool, 0, 0, 0) for pool in pools], dtype=np.int64)
    return _Sizes(fields, chunks, pools[-1].slot + pools[-1].slots, sum(pool.int8_slots for pool in pools))


class _Refresh:
    """One refresh: the job that its passes share, with their arrays in one piece of memory."""

    def __init__(
        self, codes: Tensor, meta: Tensor, cache: Cache, layout: Layout, keys_N: Tensor, bits: int, pieces: int,
        stochastic: bool,
    ) -> None:  # fmt: skip
        self.pools, self.policy, self.pieces, count = layout.tables.pools, layout.tables.policy, pieces, keys_N.numel()
        self.sizes = _sizes_of(layout.tables)
        seed, step = cache.clock.tolist()[: F.CLOCK_FIELDS]
        self.fields = self.sizes.fields
        if self.policy != F.LFU:
            self.fields = self.fields.copy()
            self.fields[:, C.NOW] = step
        if self.policy == F.ADAPTIVE:
            self.fields[:, C.NOW :] = [self._now(cache, index) for index in range(len(self.pools))]
        number, chunks = len(self.pools), self.sizes.chunks[-1]
        parts = [pieces * number * C.STATS, pieces * number * BUCKETS, 3 * chunks, chunks * BUCKETS]
        parts += [count] * 4 + [-(-count // 2), -(-count // 8), -(-self.sizes.slots // 8), 2 * -(-count // _SWAPS)]
        self.begins = list(accumulate(parts, initial=0))
        self.held = np.empty(self.begins[-1], dtype=np.int64)
        arrays = addresses("Bifiqiiiq", codes, meta, *cache[:6], self.fields)
        keys, ledger, held = addresses("qqq", keys_N, cache.ledger, self.held)
        fixed = (*arrays, number, self.policy, keys, bits, count, pieces, seed, step, stochastic, ledger)
        self.job = np.array([*fixed, *(held + 8 * begin for begin in self.begins[:-1])], dtype=np.int64)
        (self.at_job,) = addresses("q", self.job)

    def _now(self, cache: Cache, index: int) -> tuple[int, int, int]:
        """Time of one pool with the adaptive policy, and the end of its window."""
        ledger = cache.ledger[index].tolist()
        return tick(ledger[F.SINCE], self.pools[index].slots), FIRST_LINE + ledger[F.LINE], ledger[F.EDGE]

    def _part(self, field: int) -> Any:
        """One of the arrays in the memory of the refresh."""
        at = field - _FIRST_SHARED
        return self.held[self.begins[at] : self.begins[at + 1]]

    @property
    def stats(self) -> Any:
        return self._part(_STATS).reshape(self.pieces, len(self.pools), C.STATS)

    def run(self, which: int, tasks: int) -> None:
        """A pass over the lookups or candidates."""
        threads.run(lambda piece: _run_pass(which, self.at_job, 0, piece, 0, 0), tasks)

    def score_slots(self, wanted: list[bool]) -> None:
        """Bucket the slots of pools with candidates, with histograms."""
        chunks = self.sizes.chunks
        tasks = [(i, chunk) for i, is_wanted in enumerate(wanted) if is_wanted for chunk in range(chunks[i + 1] - chunks[i])]

        def task(number: int) -> None:
            index, chunk = tasks[number]
            span = (chunk * _CHUNK, min((chunk + 1) * _CHUNK, self.pools[index].slots))
            _run_pass(_SCORE_SLOTS, self.at_job, index, chunks[index] + chunk, *span)

        threads.run(task, len(tasks))

    def swap(self, index: int) -> tuple[int, int, int]:
        """Admit candidates of one pool; returns the numbers of admitted, evicted and rounded rows."""
        first, end = self.sizes.chunks[index : index + 2]
        count: int = _run_pass(_SELECT_ROWS, self.at_job, index, 0, first, end - first)
        if count == 0:
            return 0, 0, 0

        def task(first: int, last: int) -> None:
            _run_pass(_SWAP_ROWS, self.at_job, index, first // _SWAPS, first, last)

        threads.run_chunks(task, count, _SWAPS)
        left, rounded = self._part(_MOVED).reshape(-1, 2)[: -(-count // _SWAPS)].sum(0).tolist()
        return count, left, rounded

    def adapt_window(self, index: int, ledger: list[int], came: int) -> list[int]:
        """`adapt_window` of the reference, after a swap."""
        pool, victims = self.pools[index], self._part(_VICTIMS).view(np.uint8)
        low = int(victims[pool.slot + self._part(_TAKEN)[:came]].max()) if came else 0
        chunks = self._part(_SIZES).reshape(-1, 3)[self.sizes.chunks[index] : self.sizes.chunks[index + 1]]
        window, *sizes = chunks.sum(0).tolist()
        hits = self.stats[:, index, C.OLDEST : C.MOST].sum(0).tolist()
        return adapt_window(ledger, pool.slots, window, hits, sizes, low)
