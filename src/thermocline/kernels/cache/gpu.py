"""Cache refresh on a GPU: tick, observe, measure, count, list, swap, without a sort or a synchronization."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gpu import row_tiles as R
from thermocline.kernels.gpu import slots as S
from thermocline.kernels.gpu.launch import Array, as_tensor, ceil_div, launch, scratch
from thermocline.kernels.gpu.sort import outside
from thermocline.kernels.gpu.staged import cache_tensors, is_staged, locate_staged
from thermocline.kernels.layout import Cache, Layout, Pool
from thermocline.kernels.stage import area_of

from . import gpu_window as window
from .gpu_promote import promote
from .gpu_select import SCRATCH, count_selected, list_selected, thresholds
from .gpu_window import bucket_of
from .reference import BUCKETS, COUNT_UNIT, HALVING_LOOKUPS, MARGIN, MAX_WEIGHT, SALTS, refresh_due

_LRU, _ADAPTIVE, _EMPTY, _DIRTY = (tl.constexpr(k) for k in (F.LRU, F.ADAPTIVE, F.EMPTY, F.DIRTY))
_STEP = tl.constexpr(F.STEP)
_SINCE, _LOOKUPS, _HITS = (tl.constexpr(k) for k in (F.SINCE, F.LOOKUPS, F.HITS))
_ADMISSIONS, _EVICTIONS, _WRITE_BACKS = (tl.constexpr(k) for k in (F.ADMISSIONS, F.EVICTIONS, F.WRITE_BACKS))
_BUCKETS, _HALF, _MARGIN, _UNIT = (tl.constexpr(k) for k in (BUCKETS, HALVING_LOOKUPS, MARGIN, COUNT_UNIT))
_SALT_0, _SALT_1 = (tl.constexpr(k) for k in SALTS)
_LEDGER = tl.constexpr(F.LEDGER_FIELDS)
_WEIGHT_PROBES = tl.constexpr(MAX_WEIGHT.bit_length() - 1)  # powers of two up to the largest weight

# Scratch: histograms of candidates and of slots, sums of this batch (some of `gpu_window.py`), two numbers for each tile.
_BATCH_LOOKUPS, _BATCH_HITS, _HALVED = (tl.constexpr(2 * BUCKETS + k) for k in range(3))

TILE = 2048
SWAPS = 1024  # most programs of a swap


@triton.jit
def _tick(
    scores, sketch, ledger, work, clock, slot, slots, pool,
    FIRST: tl.constexpr, POLICY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    scores, sketch, ledger = scores + slot, sketch + 4 * slot, ledger + pool * _LEDGER
    program = tl.program_id(0)
    halve = (tl.load(ledger + _SINCE) // _HALF >= slots) & (POLICY != _LRU)
    if program == 0:
        if FIRST:
            tl.store(clock + _STEP, tl.load(clock + _STEP) + 1)
        bin = tl.arange(0, _BUCKETS)
        tl.store(work + bin, bin * 0)
        tl.store(work + _BUCKETS + bin, bin * 0)
        tl.store(work + _BATCH_LOOKUPS, 0)
        tl.store(work + _BATCH_HITS, 0)
        tl.store(work + _HALVED, halve.to(tl.int32))
        if POLICY == _ADAPTIVE:
            window.begin_step(ledger, work, slots, halve)
    if halve:
        at = program.to(tl.int64) * TILE + tl.arange(0, TILE)
        score = tl.load(scores + at, mask=at < slots, other=0)
        if POLICY == _ADAPTIVE:
            less = window.halve(score)
        else:
            less = score >> 1
        tl.store(scores + at, less, mask=at < slots)
        for k in tl.static_range(4):
            at = (program.to(tl.int64) * 4 + k) * TILE + tl.arange(0, TILE)
            mask = at < 4 * slots
            tl.store(sketch + at, (tl.load(sketch + at, mask=mask, other=0) >> 1) & 0x7FFF7FFF, mask=mask)


@triton.jit
def _lookups(
    keys, meta, begin, count, low, high, DISTINCT: tl.constexpr, FORMAT: tl.constexpr, STAGED: tl.constexpr, TILE: tl.constexpr
):
    """(position, key, in this pool, begins a run, first meta word) of a tile of sorted lookups."""
    at_T = begin + tl.arange(0, TILE)
    key_T = tl.load(keys + at_T, mask=at_T < count, other=-1).to(tl.int64)
    mine_T = (key_T >= low) & (key_T < high)
    if DISTINCT:
        head_T = mine_T
    else:
        before_T = tl.load(keys + at_T - 1, mask=(at_T > 0) & (at_T < count), other=-1).to(tl.int64)
        head_T = mine_T & (key_T != before_T)
    word_T = R.first_words(meta, tl.where(mine_T, key_T - low, 0), mine_T, FORMAT)
    if STAGED:  # not cached
        word_T = tl.where(is_staged(word_T), 0, word_T)
    return at_T, key_T, mine_T, head_T, word_T


@triton.jit
def _counter(key_T, half, SALT: tl.constexpr):
    low_T, high_T = (key_T & 0xFFFFFFFF).to(tl.uint32), ((key_T >> 32) & 0xFFFFFFFF).to(tl.uint32)
    hash_T = R.fmix32(low_T ^ R.fmix32(high_T ^ SALT))
    return (hash_T.to(tl.int64) * half) >> 32


@triton.jit
def _count_in(sketch, counter_T, weight_T, mask_T):
    tl.atomic_add(sketch + (counter_T >> 1), weight_T << (16 * (counter_T & 1)).to(tl.int32), mask=mask_T, sem="relaxed")


@triton.jit
def _observe(
    keys, meta, rows, scores, sketch, work, buckets, clock, count, low, high, meta_at, slot, slots, base, int8_base,
    POLICY: tl.constexpr, DISTINCT: tl.constexpr, FORMAT: tl.constexpr, STAGED: tl.constexpr, CACHED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Count hits and misses of a tile; writes 1 to `buckets` for each candidate."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    if not DISTINCT and outside(keys, begin, count, low, high, TILE):
        at_T = begin + tl.arange(0, TILE)
        tl.store(buckets + at_T, tl.zeros((TILE,), tl.uint8), mask=at_T < count)
        return
    meta, rows, scores, sketch = meta + meta_at, rows + slot, scores + slot, sketch + 4 * slot
    at_T, key_T, mine_T, head_T, word_T = _lookups(keys, meta, begin, count, low, high, DISTINCT, FORMAT, STAGED, TILE)
    hit_T = mine_T & (word_T < 0)
    tl.atomic_add(work + _BATCH_LOOKUPS, tl.sum(mine_T.to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(work + _BATCH_HITS, tl.sum(hit_T.to(tl.int32), 0), sem="relaxed")
    slot_T = (word_T & 0x7FFFFFFF).to(tl.int64) - base
    if CACHED == S.BOTH_SLOTS:
        slot_T = tl.where(S.is_int8_slot(word_T), (word_T & S.SLOT_BITS).to(tl.int64) - int8_base, slot_T)
    hit_T = hit_T & head_T
    miss_T = head_T & (word_T >= 0)
    tl.store(buckets + at_T, miss_T.to(tl.uint8), mask=at_T < count)
    tl.store(rows + slot_T, key_T | _DIRTY, mask=hit_T)
    if POLICY != _LRU:
        weight_T = tl.full((TILE,), 1, tl.int32)
        if not DISTINCT:
            for p in tl.static_range(_WEIGHT_PROBES):
                later_T = at_T + (2 << p) - 1
                same_T = tl.load(keys + later_T, mask=head_T & (later_T < count), other=-1).to(tl.int64) == key_T
                weight_T = tl.where(same_T & head_T, 2 << p, weight_T)
        score_T = tl.load(scores + slot_T, mask=hit_T, other=0)
        if POLICY == _ADAPTIVE:
            window.count_hits(score_T, weight_T, hit_T, work)
            more_T = window.score_after_hit(score_T, weight_T, work)
        else:
            more_T = score_T + weight_T * _UNIT
        tl.store(scores + slot_T, more_T, mask=hit_T)
        half = slots * 4
        _count_in(sketch, _counter(key_T, half, _SALT_0), weight_T, miss_T)
        _count_in(sketch, half + _counter(key_T, half, _SALT_1), weight_T, miss_T)
    else:
        step = tl.load(clock + _STEP).to(tl.int32)
        tl.store(scores + slot_T, step + 0 * word_T, mask=hit_T)


@triton.jit
def _estimate(sketch, key_T, slots, mask_T):
    """Scores of uncached rows, estimated from the sketch."""
    half = slots * 4
    first_T, second_T = _counter(key_T, half, _SALT_0), half + _counter(key_T, half, _SALT_1)
    first = tl.load(sketch + (first_T >> 1), mask=mask_T, other=0) >> (16 * (first_T & 1)).to(tl.int32)
    second = tl.load(sketch + (second_T >> 1), mask=mask_T, other=0) >> (16 * (second_T & 1)).to(tl.int32)
    return tl.minimum(first & 0xFFFF, second & 0xFFFF) * _UNIT


@triton.jit
def _measure(
    keys, rows, scores, sketch, work, buckets, clock, count, slot, slots, tiles,
    POLICY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Bucket lookups (programs below `tiles`) and slots (the others). Bucket 0 of a lookup means "no candidate"."""
    program = tl.program_id(0)
    bin = tl.arange(0, _BUCKETS)
    rows, scores, sketch = rows + slot, scores + slot, sketch + 4 * slot
    if program < tiles:
        at_T = program.to(tl.int64) * TILE + tl.arange(0, TILE)
        miss_T = tl.load(buckets + at_T, mask=at_T < count, other=0) > 0
        if tl.max(miss_T.to(tl.int32), 0) > 0:
            if POLICY == _LRU:
                bucket_T = tl.where(miss_T, 255, 0)
            else:
                key_T = tl.load(keys + at_T, mask=miss_T, other=0).to(tl.int64)
                score_T = _estimate(sketch, key_T, slots, miss_T)
                if POLICY == _ADAPTIVE:
                    bucket_T = tl.where(miss_T, window.candidate_buckets(score_T), 0)
                else:
                    bucket_T = tl.where(miss_T, bucket_of(score_T), 0)
            tl.store(buckets + at_T, bucket_T.to(tl.uint8), mask=miss_T)
            counts = tl.histogram(bucket_T, _BUCKETS)
            tl.atomic_add(work + bin, counts, mask=(counts > 0) & (bin > 0), sem="relaxed")
    else:
        at_T = (program - tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
        mask_T = at_T < slots
        score_T = tl.load(scores + at_T, mask=mask_T, other=0)
        empty_T = tl.load(rows + at_T, mask=mask_T, other=_EMPTY) == _EMPTY
        if POLICY == _LRU:
            age_T = tl.load(clock + _STEP).to(tl.int32) - score_T
            bucket_T = tl.maximum(-bucket_of(age_T) + (_BUCKETS - 1), 1)
        elif POLICY == _ADAPTIVE:
            bucket_T = window.slot_buckets(score_T, empty_T == 0, work)
        else:
            bucket_T = tl.minimum(bucket_of(score_T) + _MARGIN, _BUCKETS - 1)
        bucket_T = tl.where(empty_T, 0, bucket_T)
        tl.store(buckets + count + at_T, bucket_T.to(tl.uint8), mask=mask_T)
        counts = tl.histogram(bucket_T, _BUCKETS)
        outside = TILE - tl.sum(mask_T.to(tl.int32), 0)
        counts -= tl.where(bin == 0, outside, 0)  # entries past the last slot were counted as empty
        tl.atomic_add(work + _BUCKETS + bin, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _list(work, buckets, ledger, count, slots, tiles, lists, capacity, pool, POLICY: tl.constexpr, TILE: tl.constexpr):
    """List the admitted candidates and the slots they take, and update the ledger."""
    program = tl.program_id(0)
    ledger += pool * _LEDGER
    needed, cut, low, from_tied, victims_of_low = thresholds(work)
    if program == 0:
        seen = tl.load(work + _BATCH_LOOKUPS).to(tl.int64)
        since = tl.where(tl.load(work + _HALVED) > 0, 0, tl.load(ledger + _SINCE))
        if POLICY == _ADAPTIVE:
            window.adapt_window(ledger, work, slots, seen, low)
        tl.store(ledger + _SINCE, since + seen)
        tl.store(ledger + _LOOKUPS, tl.load(ledger + _LOOKUPS) + seen)
        tl.store(ledger + _HITS, tl.load(ledger + _HITS) + tl.load(work + _BATCH_HITS).to(tl.int64))
        tl.store(ledger + _ADMISSIONS, tl.load(ledger + _ADMISSIONS) + needed.to(tl.int64))
    list_selected(work, buckets, count, slots, tiles, lists, capacity, needed, cut, low, from_tied, victims_of_low, TILE)


@triton.jit
def _first_score(sketch, key_P, slots, mask_P, clock, work, POLICY: tl.constexpr):
    """Scores of admitted rows."""
    if POLICY == _LRU:
        return tl.load(clock + _STEP).to(tl.int32) + tl.zeros_like(key_P).to(tl.int32)
    elif POLICY == _ADAPTIVE:
        return window.pack_score(_estimate(sketch, key_P, slots, mask_P), work)
    else:
        return _estimate(sketch, key_P, slots, mask_P)


@triton.jit
def _swap(
    keys, codes, meta, values, area, rows, scores, words, sketch, ledger, work, clock,
    lists, capacity, low, codes_at, meta_at, slot, slots, base, int8_base, fp32_count, pool,
    POLICY: tl.constexpr, STOCHASTIC: tl.constexpr, STAGED: tl.constexpr, CACHED: tl.constexpr, DIM: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, ROW_ALIGN: tl.constexpr, WORDS: tl.constexpr,
    PAIRS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    needed, _, _, _, _ = thresholds(work)
    codes, meta = codes + codes_at // ROW_ALIGN * ROW_ALIGN, meta + meta_at
    rows, scores, words, sketch = rows + slot, scores + slot, words + slot, sketch + 4 * slot
    selected, ledger = work + lists, ledger + pool * _LEDGER
    column, _, _, inside_D = R.columns(DIM, BLOCK, BLOCK_H)
    evicted, rounded = 0, 0
    for first in range(tl.program_id(0) * PAIRS, needed, PROGRAMS * PAIRS):
        pair_P = first + tl.arange(0, PAIRS)
        mask_P = pair_P < needed
        key_P = tl.load(keys + tl.load(selected + pair_P, mask=mask_P, other=0), mask=mask_P, other=0).to(tl.int64)
        slot_P = tl.load(selected + capacity + pair_P, mask=mask_P, other=0).to(tl.int64)
        old_P = tl.load(rows + slot_P, mask=mask_P, other=_EMPTY)
        word_P = tl.load(words + slot_P, mask=mask_P, other=0)
        pointer_P = (base + slot_P).to(tl.int32) | -2147483648
        if CACHED == S.BOTH_SLOTS:
            pointer_P = tl.where(slot_P < fp32_count, pointer_P, S.int8_pointers(int8_base + slot_P))
        # The evicted row.
        occupied_P = mask_P & (old_P != _EMPTY)
        dirty_P = occupied_P & ((old_P & _DIRTY) != 0)
        old_P = tl.where(occupied_P, old_P & ~_DIRTY, low)
        tl.store(meta + WORDS * (old_P - low), word_P, mask=occupied_P & (dirty_P == 0))
        value = S.load_slots(values, area, pointer_P, dirty_P, DIM, BLOCK, BLOCK_H, CACHED)
        low_P, high_P, _good_P = R.extent(value, inside_D, FORMAT)
        R.store_rows(
            codes, meta, old_P - low, dirty_P, value, low_P, high_P, old_P, clock, DIM, FORMAT, BLOCK, BLOCK_H, STOCHASTIC
        )
        evicted += tl.sum(occupied_P.to(tl.int32), 0)
        rounded += tl.sum(dirty_P.to(tl.int32), 0)
        # The admitted row.
        at_P = tl.where(mask_P, key_P - low, 0)
        word_P = R.first_words(meta, at_P, mask_P, FORMAT)
        stored_P, meta_P = at_P, meta
        if STAGED:
            stored_P, meta_P, word_P = locate_staged(area, pool, meta, word_P, at_P, mask_P, low, FORMAT)
        value = R.load_codes(codes, stored_P, mask_P, DIM, FORMAT, BLOCK, BLOCK_H)
        value = R.dequantized(value, word_P, meta_P, stored_P, mask_P, FORMAT)
        if CACHED == S.BOTH_SLOTS:
            size_P, _size_P, _good_P = R.extent(value, inside_D, R.FP32)
            S.store_slots(
                values, area, pointer_P, mask_P, value, size_P, key_P, clock, DIM, BLOCK, BLOCK_H, CACHED, STOCHASTIC
            )  # fmt: skip
        else:
            place = R.over_rows(base + slot_P, value) * DIM + R.over_columns(column)
            tl.store(values + place, value, mask=R.over_rows(mask_P, value) & R.over_columns(inside_D))
        tl.debug_barrier()  # every warp has read the row's word before one of them writes the pointer
        tl.store(words + slot_P, word_P, mask=mask_P)
        tl.store(meta + WORDS * at_P, pointer_P, mask=mask_P)
        tl.store(rows + slot_P, key_P | _DIRTY, mask=mask_P)
        tl.store(scores + slot_P, _first_score(sketch, key_P, slots, mask_P, clock, work, POLICY), mask=mask_P)
    if evicted > 0:
        tl.atomic_add(ledger + _EVICTIONS, tl.cast(evicted, tl.int64), sem="relaxed")
        tl.atomic_add(ledger + _WRITE_BACKS, tl.cast(rounded, tl.int64), sem="relaxed")


def _is_captured(meta: Tensor) -> bool:
    """Whether a user captures the step. The host counts no replays of it, so each of them refreshes the cache."""
    return meta.is_cuda and torch.cuda.is_current_stream_capturing()


def refresh(
    codes: Tensor, meta: Tensor, cache: Cache, layout: Layout, keys: Array, stochastic: bool, distinct: bool = False,
    expected: bool = False,
) -> None:  # fmt: skip
    """Count a batch of lookups, sorted by arena row; admit and evict rows.

    Args:
        distinct: every row occurs once.
        expected: the batch was one of the last two prefetched batches.
    """
    due = refresh_due(cache, layout.tables.policy, keys.numel())
    if not due and (layout.tables.policy == F.FIXED or not _is_captured(meta)):
        return
    area = area_of(cache)
    if area is not None:
        area.before_refresh(expected)
    for index, pool in enumerate(layout.tables.pools):
        _refresh_pool(codes, meta, cache, index, pool, layout.tables.policy, keys, stochastic, distinct)


def _refresh_pool(
    codes: Tensor, meta: Tensor, cache: Cache, index: int, pool: Pool, policy: int, keys: Array, stochastic: bool,
    distinct: bool,
) -> None:  # fmt: skip
    count, slots, where, cached = keys.numel(), pool.slots, (pool.slot, pool.slots), S.slot_kinds(pool)
    tiles, slot_tiles, capacity = ceil_div(count, TILE), ceil_div(slots, TILE), min(count, slots)
    lists = SCRATCH + 2 * (tiles + slot_tiles)
    work, buckets = scratch(meta.device, (lists + 2 * capacity, torch.int32), (count + slots, torch.uint8))
    (values, area), (rows, scores, words, sketch, ledger, clock) = cache_tensors(cache, codes, meta), cache[2:8]
    launch(_tick, slot_tiles, (scores, sketch, ledger, work, clock), (*where, index), (index == 0, policy, TILE), exact=True)
    launch(
        _observe, tiles, (keys, meta, rows, scores, sketch, work, buckets, clock),
        (count, pool.row, pool.row + pool.rows, pool.meta, *where, pool.base, pool.int8_base - pool.fp32_slots),
        (policy, distinct, pool.format, cache.staged, cached, TILE), exact=True, warps=8,
    )  # fmt: skip
    launch(
        _measure, tiles + slot_tiles, (keys, rows, scores, sketch, work, buckets, clock), (count, *where, tiles),
        (policy, TILE), exact=True, warps=8,
    )  # fmt: skip
    launch(count_selected, tiles + slot_tiles, (work, buckets), (count, slots, tiles), (TILE,), exact=True, warps=8)
    selected = (count, slots, tiles, lists, capacity, index)
    launch(_list, tiles + slot_tiles, (work, buckets, ledger), selected, (policy, TILE), exact=True)
    block, block_h = R.tile_shape(pool.format, pool.dim)
    pairs = max(1, min(8, 512 // block))
    programs = min(SWAPS, ceil_div(capacity, pairs))
    launch(
        _swap, programs,
        (keys, codes, meta, values, area, rows, scores, words, sketch, ledger, work, clock),
        (lists, capacity, pool.row, pool.codes, pool.meta, *where, pool.base,
         pool.int8_base - pool.fp32_slots, pool.fp32_slots, index),
        (policy, stochastic, cache.staged, cached, pool.dim, pool.format, block, block_h,
         math.gcd(F.row_bytes(pool.format, pool.dim), 16), F.META_WORDS[pool.format], pairs, programs),
        exact=True, warps=max(1, min(4, block * pairs // 512)),
    )  # fmt: skip
    if pool.int8_slots and pool.fp32_slots:
        promote(meta, cache, index, pool, policy, as_tensor(work), stochastic, TILE)
