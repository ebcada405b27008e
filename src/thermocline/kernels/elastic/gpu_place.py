"""Give rows to ids of one bucket after another, a program a bucket (definition: `reference.py`).

A bucket has 64 rows, and a row that is given away stays for the rest of the step. So the 64 best ids of a bucket, best first,
meet its rows, best first: free ones, then the coldest. An id is given its row unless that is hotter; then none after it is.
All ids read the sketch before any of them writes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline.kernels.gpu.launch import launch
from thermocline.kernels.ids.gpu import hash_id

from . import fields as K
from .fields import GpuMoves, KeyArrays
from .gpu import (
    ADMIT_AFTER,
    ADMITTED,
    BARRIER,
    BUCKET,
    CAME,
    CHANCES,
    EVICTED,
    HALF_LIFE,
    KEY,
    LRU,
    MOST,
    PINNED,
    REFUSED,
    ROWS,
    STEPS,
    TOUCHED,
    WAITING,
    tag_of,
)

MOST_PROGRAMS = 2112  # 16 on each multiprocessor of an H200
IDS = tl.constexpr(16)  # of a bucket, looked at together: most batches have one or two
_DEPTH, _CELLS = tl.constexpr(K.DEPTH), tl.constexpr(K.CELLS)
_CHANCE_KEY, _READY = tl.constexpr(K.CHANCE_KEY), tl.constexpr(1 << 16)  # above all estimates


@triton.jit
def _cell(hash_T, line):
    """Counter of each id in a line of its bucket."""
    z = hash_T + (line + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 59).to(tl.int32)  # of 32


@triton.jit
def _ids(listed, ids, begin, end, key):
    """`IDS` ids of the list: (lookup, id, hash, whether it is there)."""
    k = begin + tl.arange(0, IDS)
    lookup_K = tl.load(listed + k, mask=k < end, other=0)
    id_K = tl.load(ids + lookup_K, mask=k < end, other=0)
    return lookup_K, id_K, hash_id(id_K, key), k < end


@triton.jit
def _estimate(listed, ids, times, cells, begin, end, rule, counts):
    """Replace the lookups of ids by estimates of all of their lookups, of ids that may come with `_READY`; returns how many."""
    ready = tl.zeros((), tl.int32)
    key, after = tl.load(rule + KEY), tl.load(rule + ADMIT_AFTER).to(tl.int32)
    chance_key = tl.load(counts + STEPS) ^ _CHANCE_KEY
    for first in range(begin, end, IDS):
        lookup_K, _, hash_K, mask_K = _ids(listed, ids, first, end, key)
        least_K = tl.zeros_like(lookup_K) + MOST
        for line in range(_DEPTH):
            at_K = line * _CELLS + _cell(hash_K, tl.zeros_like(lookup_K) + line)
            least_K = tl.minimum(least_K, tl.load(cells + at_K, mask=mask_K, other=0).to(tl.int32))
        times_K = tl.load(times + lookup_K, mask=mask_K, other=0)
        heat_K = tl.minimum(least_K + times_K, MOST)
        draw_K = (hash_id(hash_K.to(tl.int64, bitcast=True), chance_key) >> 32).to(tl.int64)
        drawn_K = draw_K >= tl.load(rule + CHANCES + tl.minimum(times_K, MOST))
        ready_K = mask_K & (heat_K >= after) & drawn_K
        tl.store(times + lookup_K, heat_K + tl.where(ready_K, _READY, 0), mask=mask_K)
        ready += tl.sum(ready_K.to(tl.int32), 0)
    return ready


@triton.jit
def _count(listed, ids, times, cells, begin, end, key):
    """Raise the counters of ids to their estimates."""
    cell = tl.arange(0, _CELLS)
    for line in range(_DEPTH):
        most_C = tl.load(cells + line * _CELLS + cell).to(tl.int32)
        for first in range(begin, end, IDS):
            lookup_K, _, hash_K, mask_K = _ids(listed, ids, first, end, key)
            heat_K = tl.load(times + lookup_K, mask=mask_K, other=0) & MOST
            mine = _cell(hash_K, tl.zeros_like(lookup_K) + line)[:, None] == cell[None, :]
            most_C = tl.maximum(most_C, tl.max(tl.where(mine & mask_K[:, None], heat_K[:, None], 0), 0))
        tl.store(cells + line * _CELLS + cell, most_C.to(tl.uint8))


@triton.jit
def _precedes(heat, order, heat2, order2):
    """Whether ids take rows before others: most lookups first, then by hash."""
    return (heat > heat2) | ((heat == heat2) & (order < order2))


@triton.jit
def _moved(x_A, to_AB, y_C, to_CB, nothing):
    """Elements at their new places."""
    return tl.maximum(
        tl.max(tl.where(to_AB, x_A[:, None], nothing), 0), tl.max(tl.where(to_CB, y_C[:, None], nothing), 0)
    )  # fmt: skip


@triton.jit
def _best(listed, ids, times, begin, end, key):
    """The 64 ids that take rows first, best first: (lookups, -1 for none; the lookup of each)."""
    k = tl.arange(0, BUCKET)
    heat_B = tl.zeros((BUCKET,), tl.int32) - 1
    lookup_B = tl.zeros((BUCKET,), tl.int32)
    order_B = tl.zeros((BUCKET,), tl.int64)
    for first in range(begin, end, IDS):
        lookup_K, _, hash_K, mask_K = _ids(listed, ids, first, end, key)
        order_K = (hash_K ^ 0x8000000000000000).to(tl.int64, bitcast=True)
        heat_K = tl.load(times + lookup_K, mask=mask_K, other=0)
        heat_K = tl.where(heat_K >= _READY, heat_K & MOST, -1)
        before = _precedes(heat_B[:, None], order_B[:, None], heat_K[None, :], order_K[None, :]).to(tl.int32)
        among = _precedes(heat_K[:, None], order_K[:, None], heat_K[None, :], order_K[None, :]).to(tl.int32)
        after_B = tl.sum(_precedes(heat_K[:, None], order_K[:, None], heat_B[None, :], order_B[None, :]).to(tl.int32), 0)
        to_new = ((tl.sum(before, 0) + tl.sum(among, 0))[:, None] == k[None, :]) & (heat_K >= 0)[:, None]
        to_old = ((k + after_B)[:, None] == k[None, :]) & (heat_B >= 0)[:, None]
        lookup_B = _moved(lookup_K, to_new, lookup_B, to_old, 0)
        order_B = _moved(order_K, to_new, order_B, to_old, -0x8000000000000000)
        heat_B = _moved(heat_K, to_new, heat_B, to_old, -1)
    return heat_B, lookup_B


@triton.jit
def _rows(last, tags, heat, first, rule, counts, open):
    """Rows of a bucket in the order in which they are given away: (row, score, whether it is free, whether it can go)."""
    row_R = first + tl.arange(0, BUCKET)
    mask_R = (row_R < tl.load(rule + ROWS)) & (row_R < first + tl.load(open))
    free_R = mask_R & (tl.load(tags + row_R, mask=mask_R, other=0) == 0)
    last_R = tl.load(last + row_R, mask=mask_R, other=PINNED).to(tl.int64)
    cold_R = mask_R & (free_R == 0) & (last_R != PINNED) & (last_R < tl.load(counts + BARRIER))
    half_life = tl.load(rule + HALF_LIFE)
    halvings_R = tl.minimum(tl.load(counts + STEPS) // half_life - last_R // half_life, 8)
    score_R = tl.load(heat + row_R, mask=mask_R, other=0).to(tl.int64) >> tl.maximum(halvings_R, 0)
    score_R = tl.where(tl.load(rule + LRU) != 0, 0, score_R)
    key_R = (1 << 50) + (score_R << 38) + (last_R << 6)
    key_R = tl.where(free_R, 0, tl.where(cold_R, key_R, 1 << 60)) + tl.arange(0, BUCKET)
    key_R = tl.sort(key_R)
    free_R = key_R < BUCKET
    return first + (key_R & (BUCKET - 1)), tl.where(free_R, 0, (key_R >> 38) & 255).to(tl.int32), free_R, key_R < (1 << 60)


@triton.jit
def _place(
    keys, last, tags, heat, sketch, rule, ids, listed, times, buckets, in_bucket, starts, placed, counts, open,
    came_ids, came_rows, before, left, numbers,
):  # fmt: skip
    key = tl.load(rule + KEY)
    for t in range(tl.program_id(0), tl.load(numbers + TOUCHED), tl.num_programs(0)):
        bucket = tl.load(buckets + t).to(tl.int64)
        begin = tl.load(starts + bucket)
        end = begin + tl.load(in_bucket + bucket)
        cells = sketch + bucket * (_DEPTH * _CELLS)
        ready = _estimate(listed, ids, times, cells, begin, end, rule, counts)
        tl.debug_barrier()
        _count(listed, ids, times, cells, begin, end, key)
        heat_R, lookup_R = _best(listed, ids, times, begin, end, key)
        row_R, score_R, free_R, can_R = _rows(last, tags, heat, bucket * BUCKET, rule, counts, open)
        given_R = can_R & (heat_R >= 0) & (score_R <= heat_R)
        id_R = tl.load(ids + lookup_R, mask=given_R, other=0)
        number = tl.sum(given_R.to(tl.int32), 0)
        at_R = tl.atomic_add(numbers + CAME, number) + tl.cumsum(given_R.to(tl.int32), 0) - 1
        left_R = given_R & (free_R == 0)
        tl.store(came_ids + at_R, id_R, mask=given_R)
        tl.store(came_rows + at_R, row_R, mask=given_R)
        tl.store(before + at_R, tl.load(keys + row_R, mask=left_R, other=0), mask=given_R)
        tl.store(left + at_R, left_R.to(tl.int32), mask=given_R)
        tl.store(placed + lookup_R, (row_R + 1).to(placed.dtype.element_ty), mask=given_R)
        tl.debug_barrier()
        tl.store(keys + row_R, id_R, mask=given_R)
        tl.store(last + row_R, tl.zeros_like(heat_R) + tl.load(counts + STEPS).to(tl.int32), mask=given_R)
        tl.store(tags + row_R, tag_of(hash_id(id_R, key)).to(tl.uint8), mask=given_R)
        tl.store(heat + row_R, heat_R.to(tl.uint8), mask=given_R)
        tl.atomic_add(counts + ADMITTED, number.to(tl.int64))
        tl.atomic_add(counts + REFUSED, (ready - number).to(tl.int64))
        tl.atomic_add(counts + WAITING, -number.to(tl.int64))
        tl.atomic_add(counts + EVICTED, tl.sum(left_R.to(tl.int64), 0))


def place(arrays: KeyArrays, rule: Tensor, ids_N: Tensor, lists: tuple[Tensor, ...], moves: GpuMoves) -> None:
    """Give rows to the listed ids of all buckets that have any."""
    keys, last, *rest = arrays
    programs = max(1, min(MOST_PROGRAMS, lists[2].numel()))
    state = (keys, last, *(each.view(torch.uint8) for each in rest), rule, ids_N)
    launch(_place, programs, (*state, *lists, *moves[:5]), (), (), exact=True)
