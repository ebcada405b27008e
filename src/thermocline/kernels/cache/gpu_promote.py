"""Promotion on a GPU: after rows came and went, rows of near slots change places with colder ones of full slots.

    stand       buckets of all slots, their counts or ages being new, and two histograms
    count, list as for rows that come (`gpu_choose`)
    exchange    pair by pair: the row of a near slot goes to a full one, and the row that was there, if any, back

What `_promote` of `reference.py` defines, bit for bit. Nothing is promoted in a step that passes the pool by.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gpu.launch import ceil_div, launch
from thermocline.kernels.gpu.row_tiles import FP32, columns, extent, tile_shape
from thermocline.kernels.gpu.slots import load_cached, load_near_rows, near_pointers, store_cached, store_near
from thermocline.kernels.layout import Cache, Pool

from .gpu_select import SCRATCH, count_chosen, cuts, list_chosen
from .gpu_window import bucket_of
from .reference import BUCKETS, MARGIN, TICK_BITS

_LRU, _ADAPTIVE, _EMPTY, _DIRTY = (tl.constexpr(k) for k in (F.LRU, F.ADAPTIVE, F.EMPTY, F.DIRTY))
_STEP, _LEDGER, _PROMOTIONS = (tl.constexpr(k) for k in (F.STEP, F.LEDGER_FIELDS, F.PROMOTIONS))
_BUCKETS, _MARGIN, _TICK_BITS = (tl.constexpr(k) for k in (BUCKETS, MARGIN, TICK_BITS))

EXCHANGES = 1024  # programs that exchange; each takes every EXCHANGES-th group of pairs


@triton.jit
def _stand(
    rows, scores, work, buckets, clock, seen, slot, near, full, tiles, POLICY: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Programs below `tiles` take near slots, the others full ones. An empty near slot is no candidate."""
    program = tl.program_id(0)
    of_full = program >= tiles
    at_T = tl.where(of_full, program - tiles, program).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask_T = at_T < tl.where(of_full, full, near)
    slot_T = slot + at_T + tl.where(of_full, 0, full)
    score_T = tl.load(scores + slot_T, mask=mask_T, other=0)
    empty_T = tl.load(rows + slot_T, mask=mask_T, other=_EMPTY) == _EMPTY
    if POLICY == _LRU:
        age_T = tl.load(clock + _STEP).to(tl.int32) - score_T
        bucket_T = tl.maximum(-bucket_of(age_T) + (_BUCKETS - 1), 1)
    elif POLICY == _ADAPTIVE:
        bucket_T = bucket_of(score_T >> _TICK_BITS)
    else:
        bucket_T = bucket_of(score_T)
    bucket_T = tl.minimum(bucket_T + tl.where(of_full, _MARGIN, 0), _BUCKETS - 1)
    bucket_T = tl.where(empty_T, 0, bucket_T)
    tl.store(buckets + tl.where(of_full, near, 0) + at_T, bucket_T.to(tl.uint8), mask=mask_T)
    if tl.load(seen) > 0:
        bin = tl.arange(0, _BUCKETS)
        tally = tl.histogram(bucket_T, _BUCKETS)
        outside = TILE - tl.sum(mask_T.to(tl.int32), 0)
        tally -= tl.where(bin == 0, outside, 0)  # places past the last slot were counted as empty
        histogram = work + tl.where(of_full, _BUCKETS, 0)
        tl.atomic_add(histogram + bin, tally, mask=(tally > 0) & (of_full | (bin > 0)), sem="relaxed")


@triton.jit
def _list_exchanges(work, buckets, ledger, near, full, tiles, lists, most, pool, TILE: tl.constexpr):
    needed, cut, low, from_below, of_low = cuts(work)
    list_chosen(work, buckets, near, full, tiles, lists, most, needed, cut, low, from_below, of_low, TILE)
    if tl.program_id(0) == 0:
        ledger += pool * _LEDGER + _PROMOTIONS
        tl.store(ledger, tl.load(ledger) + needed.to(tl.int64))


@triton.jit
def _trade(kept, low_P, high_P, mask_P):
    """Exchange what is kept for each slot; returns what was there."""
    up_P, down_P = tl.load(kept + low_P, mask=mask_P, other=0), tl.load(kept + high_P, mask=mask_P, other=0)
    tl.debug_barrier()  # every thread has read before one writes
    tl.store(kept + low_P, down_P, mask=mask_P)
    tl.store(kept + high_P, up_P, mask=mask_P)
    return up_P, down_P


@triton.jit
def _exchange(
    meta, values, near, rows, scores, words, work, clock, lists, most, first_row, meta_at, slot, base, near_base, full,
    STOCHASTIC: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, WORDS: tl.constexpr,
    PAIRS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    needed, _, _, _, _ = cuts(work)
    meta, rows, scores, words, chosen = meta + meta_at, rows + slot, scores + slot, words + slot, work + lists
    _, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    for first in range(tl.program_id(0) * PAIRS, needed, PROGRAMS * PAIRS):
        pair_P = first + tl.arange(0, PAIRS)
        mask_P = pair_P < needed
        low_P = tl.load(chosen + pair_P, mask=mask_P, other=0).to(tl.int64) + full
        high_P = tl.load(chosen + most + pair_P, mask=mask_P, other=0).to(tl.int64)
        low_pointer_P, high_pointer_P = near_pointers(near_base + low_P), (base + high_P).to(tl.int32) | -2147483648
        up_P, down_P = _trade(rows, low_P, high_P, mask_P)
        _trade(scores, low_P, high_P, mask_P)
        _trade(words, low_P, high_P, mask_P)
        falls_P = mask_P & (down_P != _EMPTY)
        up_P, down_P = tl.where(mask_P, up_P & ~_DIRTY, first_row), tl.where(falls_P, down_P & ~_DIRTY, first_row)
        rising = load_near_rows(near, low_pointer_P, mask_P, DIM, BLOCK, BLOCK_H)
        falling = load_cached(values, high_pointer_P, falls_P, DIM, BLOCK, BLOCK_H)
        size_P, _size_P, _good_P = extent(falling, inside_D, FP32)
        tl.debug_barrier()
        store_cached(values, high_pointer_P, mask_P, rising, DIM, BLOCK, BLOCK_H)
        store_near(near, low_pointer_P, falls_P, falling, size_P, down_P, clock, DIM, BLOCK, BLOCK_H, STOCHASTIC)
        tl.store(meta + WORDS * (up_P - first_row), high_pointer_P, mask=mask_P)
        tl.store(meta + WORDS * (down_P - first_row), low_pointer_P, mask=falls_P)


def promote(
    meta: Tensor, cache: Cache, index: int, pool: Pool, policy: int, admitted: Tensor, stochastic: bool, tile: int
) -> None:
    """Let rows of near slots of one pool change places with colder ones of full slots; `admitted`: the scratch of `gpu.py`."""
    near, full, device = pool.near, pool.full, meta.device
    tiles, all_tiles, most = ceil_div(near, tile), ceil_div(near, tile) + ceil_div(full, tile), min(near, full)
    lists = SCRATCH + 2 * all_tiles
    work = torch.zeros(lists + 2 * most, dtype=torch.int32, device=device)
    buckets = torch.empty(near + full, dtype=torch.uint8, device=device)
    values, near_words, rows, scores, words, _, ledger, clock = cache[:8]
    launch(
        _stand, all_tiles, (rows, scores, work, buckets, clock, admitted[2 * BUCKETS :]), (pool.slot, near, full, tiles),
        (policy, tile), exact=True, warps=8,
    )  # fmt: skip
    launch(count_chosen, all_tiles, (work, buckets), (near, full, tiles), (tile,), exact=True, warps=8)
    chosen = (near, full, tiles, lists, most, index)
    launch(_list_exchanges, all_tiles, (work, buckets, ledger), chosen, (tile,), exact=True)
    block, block_h = tile_shape(pool.format, pool.dim)
    pairs = max(1, min(8, 512 // block))
    programs = min(EXCHANGES, ceil_div(most, pairs))
    launch(
        _exchange, programs, (meta, values, near_words, rows, scores, words, work, clock),
        (lists, most, pool.row, pool.meta, pool.slot, pool.base, pool.near_base - full, full),
        (stochastic, pool.dim, block, block_h, F.META_WORDS[pool.format], pairs, programs),
        exact=True, warps=max(1, min(4, block * pairs // 512)),
    )  # fmt: skip
