"""Promotion on a GPU: rows of int8 slots are exchanged with colder rows of fp32 slots, as `reference.py` defines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gpu.launch import ceil_div, launch
from thermocline.kernels.gpu.row_tiles import FP32, columns, extent, tile_shape
from thermocline.kernels.gpu.slots import int8_pointers, load_fp32_slots, load_int8_slots, store_fp32_slots, store_int8_slots
from thermocline.kernels.layout import Cache, Pool

from .gpu_select import SCRATCH, count_selected, list_selected, thresholds
from .gpu_window import bucket_of
from .reference import BUCKETS, MARGIN, TICK_BITS

_LRU, _ADAPTIVE, _EMPTY, _DIRTY = (tl.constexpr(k) for k in (F.LRU, F.ADAPTIVE, F.EMPTY, F.DIRTY))
_STEP, _LEDGER, _PROMOTIONS = (tl.constexpr(k) for k in (F.STEP, F.LEDGER_FIELDS, F.PROMOTIONS))
_BUCKETS, _MARGIN, _TICK_BITS = (tl.constexpr(k) for k in (BUCKETS, MARGIN, TICK_BITS))

EXCHANGES = 1024  # most programs of an exchange


@triton.jit
def _bucket_slots(
    rows, scores, work, buckets, clock, seen, slot, int8_slots, fp32_slots, tiles, POLICY: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Bucket int8 slots (programs below `tiles`) and fp32 slots (the others). An empty int8 slot is no candidate."""
    program = tl.program_id(0)
    is_fp32 = program >= tiles
    at_T = tl.where(is_fp32, program - tiles, program).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask_T = at_T < tl.where(is_fp32, fp32_slots, int8_slots)
    slot_T = slot + at_T + tl.where(is_fp32, 0, fp32_slots)
    score_T = tl.load(scores + slot_T, mask=mask_T, other=0)
    empty_T = tl.load(rows + slot_T, mask=mask_T, other=_EMPTY) == _EMPTY
    if POLICY == _LRU:
        age_T = tl.load(clock + _STEP).to(tl.int32) - score_T
        bucket_T = tl.maximum(-bucket_of(age_T) + (_BUCKETS - 1), 1)
    elif POLICY == _ADAPTIVE:
        bucket_T = bucket_of(score_T >> _TICK_BITS)
    else:
        bucket_T = bucket_of(score_T)
    bucket_T = tl.minimum(bucket_T + tl.where(is_fp32, _MARGIN, 0), _BUCKETS - 1)
    bucket_T = tl.where(empty_T, 0, bucket_T)
    tl.store(buckets + tl.where(is_fp32, int8_slots, 0) + at_T, bucket_T.to(tl.uint8), mask=mask_T)
    if tl.load(seen) > 0:
        bin = tl.arange(0, _BUCKETS)
        counts = tl.histogram(bucket_T, _BUCKETS)
        outside = TILE - tl.sum(mask_T.to(tl.int32), 0)
        counts -= tl.where(bin == 0, outside, 0)  # entries past the last slot were counted as empty
        histogram = work + tl.where(is_fp32, _BUCKETS, 0)
        tl.atomic_add(histogram + bin, counts, mask=(counts > 0) & (is_fp32 | (bin > 0)), sem="relaxed")


@triton.jit
def _list_exchanges(work, buckets, ledger, int8_slots, fp32_slots, tiles, lists, capacity, pool, TILE: tl.constexpr):
    needed, cut, low, from_tied, victims_of_low = thresholds(work)
    list_selected(
        work, buckets, int8_slots, fp32_slots, tiles, lists, capacity, needed, cut, low, from_tied, victims_of_low, TILE
    )
    if tl.program_id(0) == 0:
        ledger += pool * _LEDGER + _PROMOTIONS
        tl.store(ledger, tl.load(ledger) + needed.to(tl.int64))


@triton.jit
def _exchange_values(kept, low_P, high_P, mask_P):
    """Exchange the values of two slots; returns the old values."""
    up_P, down_P = tl.load(kept + low_P, mask=mask_P, other=0), tl.load(kept + high_P, mask=mask_P, other=0)
    tl.debug_barrier()  # all threads have read before one writes
    tl.store(kept + low_P, down_P, mask=mask_P)
    tl.store(kept + high_P, up_P, mask=mask_P)
    return up_P, down_P


@triton.jit
def _exchange(
    meta, values, int8_slots, rows, scores, words, work, clock, lists, capacity, first_row, meta_at, slot, base, int8_base,
    fp32_slots,
    STOCHASTIC: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, WORDS: tl.constexpr,
    PAIRS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    needed, _, _, _, _ = thresholds(work)
    meta, rows, scores, words, selected = meta + meta_at, rows + slot, scores + slot, words + slot, work + lists
    _, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    for first in range(tl.program_id(0) * PAIRS, needed, PROGRAMS * PAIRS):
        pair_P = first + tl.arange(0, PAIRS)
        mask_P = pair_P < needed
        low_P = tl.load(selected + pair_P, mask=mask_P, other=0).to(tl.int64) + fp32_slots
        high_P = tl.load(selected + capacity + pair_P, mask=mask_P, other=0).to(tl.int64)
        low_pointer_P, high_pointer_P = int8_pointers(int8_base + low_P), (base + high_P).to(tl.int32) | -2147483648
        up_P, down_P = _exchange_values(rows, low_P, high_P, mask_P)
        _exchange_values(scores, low_P, high_P, mask_P)
        _exchange_values(words, low_P, high_P, mask_P)
        demoted_P = mask_P & (down_P != _EMPTY)
        up_P, down_P = tl.where(mask_P, up_P & ~_DIRTY, first_row), tl.where(demoted_P, down_P & ~_DIRTY, first_row)
        promoted = load_int8_slots(int8_slots, low_pointer_P, mask_P, DIM, BLOCK, BLOCK_H)
        demoted = load_fp32_slots(values, high_pointer_P, demoted_P, DIM, BLOCK, BLOCK_H)
        size_P, _size_P, _good_P = extent(demoted, inside_D, FP32)
        tl.debug_barrier()
        store_fp32_slots(values, high_pointer_P, mask_P, promoted, DIM, BLOCK, BLOCK_H)
        store_int8_slots(int8_slots, low_pointer_P, demoted_P, demoted, size_P, down_P, clock, DIM, BLOCK, BLOCK_H, STOCHASTIC)
        tl.store(meta + WORDS * (up_P - first_row), high_pointer_P, mask=mask_P)
        tl.store(meta + WORDS * (down_P - first_row), low_pointer_P, mask=demoted_P)


def promote(
    meta: Tensor, cache: Cache, index: int, pool: Pool, policy: int, admitted: Tensor, stochastic: bool, tile: int
) -> None:
    """Exchange rows of int8 slots of one pool with colder rows of fp32 slots; `admitted`: the scratch of `gpu.py`."""
    int8_slots, fp32_slots, device = pool.int8_slots, pool.fp32_slots, meta.device
    capacity = min(int8_slots, fp32_slots)
    tiles = ceil_div(int8_slots, tile)
    all_tiles = tiles + ceil_div(fp32_slots, tile)
    lists = SCRATCH + 2 * all_tiles
    work = torch.zeros(lists + 2 * capacity, dtype=torch.int32, device=device)
    buckets = torch.empty(int8_slots + fp32_slots, dtype=torch.uint8, device=device)
    values, int8_words, rows, scores, words, _, ledger, clock = cache[:8]
    launch(
        _bucket_slots, all_tiles, (rows, scores, work, buckets, clock, admitted[2 * BUCKETS :]),
        (pool.slot, int8_slots, fp32_slots, tiles), (policy, tile), exact=True, warps=8,
    )  # fmt: skip
    launch(count_selected, all_tiles, (work, buckets), (int8_slots, fp32_slots, tiles), (tile,), exact=True, warps=8)
    selected = (int8_slots, fp32_slots, tiles, lists, capacity, index)
    launch(_list_exchanges, all_tiles, (work, buckets, ledger), selected, (tile,), exact=True)
    block, block_h = tile_shape(pool.format, pool.dim)
    pairs = max(1, min(8, 512 // block))
    programs = min(EXCHANGES, ceil_div(capacity, pairs))
    launch(
        _exchange, programs, (meta, values, int8_words, rows, scores, words, work, clock),
        (lists, capacity, pool.row, pool.meta, pool.slot, pool.base, pool.int8_base - fp32_slots, fp32_slots),
        (stochastic, pool.dim, block, block_h, F.META_WORDS[pool.format], pairs, programs),
        exact=True, warps=max(1, min(4, block * pairs // 512)),
    )  # fmt: skip
