"""Update rows on a GPU: sum, dequantize, step and quantize in one pass over the rows.

A program sums its runs (`sum_gradients/gpu.py`) in registers, so neither the gradient of a lookup nor the sum of a row is
written to memory. One launch updates the rows of one run of tables (one dimension and format).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.arguments import LookupCall, OptimizerArrays, RowArrays
from thermocline.kernels.cache.gpu import refresh
from thermocline.kernels.gpu import row_tiles as R
from thermocline.kernels.gpu.errors import GRADIENT, error_buffer, report
from thermocline.kernels.gpu.launch import launch
from thermocline.kernels.gpu.slots import load_slots, slot_kinds, store_slots
from thermocline.kernels.gpu.sort import SortedLookups, advance, sort_lookups
from thermocline.kernels.gpu.staged import cache_tensors, cancel_leaving, locate_staged
from thermocline.kernels.stage import area_of
from thermocline.kernels.sum_gradients.gpu import (
    CHUNK,
    PARTS,
    REST_TILE,
    SHORT_RUN,
    TILE,
    load_heads,
    prepare,
    sum_runs,
    warps_for,
)

_SGD, _ADAGRAD, _ROWWISE = (tl.constexpr(k) for k in (F.SGD, F.ADAGRAD, F.ROWWISE_ADAGRAD))
_LR, _EPS, _BETA1, _BETA2 = (tl.constexpr(k) for k in (F.LR, F.EPS, F.BETA1, F.BETA2))
_DECAY, _POWER1, _POWER2 = (tl.constexpr(k) for k in (F.WEIGHT_DECAY, F.BETA1_POWER, F.BETA2_POWER))
_STEP = tl.constexpr(F.STEP)


@triton.jit
def _step(
    weight, grad, first_state, second_state, row_T, at, owned_T, mask, hyper,
    OPTIMIZER: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """(new weights, two new states) of a tile; the weights stand in for states that the optimizer lacks."""
    lr = tl.load(hyper + _LR).to(tl.float32)
    eps = tl.load(hyper + _EPS).to(tl.float32)
    if OPTIMIZER == _SGD or OPTIMIZER == _ADAGRAD or OPTIMIZER == _ROWWISE:
        grad = grad + tl.where(mask, weight, 0.0) * tl.load(hyper + _DECAY).to(tl.float32)  # padding of a row stays 0
    if OPTIMIZER == _SGD:
        return weight - lr * grad, weight, weight
    elif OPTIMIZER == _ROWWISE:
        sum_T = tl.load(first_state + row_T, mask=owned_T, other=0.0)
        if DIM & (DIM - 1) == 0:
            mean_T = R.tree_sum(grad * grad) * (1.0 / DIM)  # exact, without a division
        else:
            mean_T = tl.div_rn(R.tree_sum(grad * grad), DIM * 1.0)
        sum_T = sum_T + mean_T
        factor_T = tl.div_rn(lr, tl.sqrt_rn(sum_T) + eps)
        return weight - R.over_rows(factor_T, grad) * grad, sum_T, weight
    elif OPTIMIZER == _ADAGRAD:
        sums = tl.load(first_state + at, mask=mask, other=0.0) + grad * grad
        return weight - lr * tl.div_rn(grad, tl.sqrt_rn(sums) + eps), sums, weight
    else:
        lr64 = tl.load(hyper + _LR)
        beta1, beta2 = tl.load(hyper + _BETA1), tl.load(hyper + _BETA2)
        first = tl.load(first_state + at, mask=mask, other=0.0) * beta1.to(tl.float32) + grad * (1.0 - beta1).to(tl.float32)
        second = tl.load(second_state + at, mask=mask, other=0.0) * beta2.to(tl.float32)
        second = second + (grad * grad) * (1.0 - beta2).to(tl.float32)
        size = (lr64 * tl.sqrt(1.0 - tl.load(hyper + _POWER2)) / (1.0 - tl.load(hyper + _POWER1))).to(tl.float32)
        kept = weight * (1.0 - lr64 * tl.load(hyper + _DECAY)).to(tl.float32)
        return kept - size * tl.div_rn(first, tl.sqrt_rn(second) + eps), first, second


@triton.jit
def _all_columns(good):
    return tl.min(tl.min(good.to(tl.int32), axis=1), axis=1) > 0


@triton.jit
def _update_tile(
    key_T, name_T, owned_T, word_T, grad_TD, codes, meta, values, area, first_state, second_state, hyper, clock, flag, record,
    low, element_at,
    OPTIMIZER: tl.constexpr, STOCHASTIC: tl.constexpr,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, CACHED: tl.constexpr,
    POOL: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row_T = tl.where(owned_T, key_T - low, 0)
    column_D, _, _, inside_D = R.columns(DIM, BLOCK, BLOCK_H)
    column, inside = R.over_columns(column_D), R.over_columns(inside_D)
    mask = R.over_rows(owned_T, column) & inside
    at = element_at + R.over_rows(row_T, column) * DIM + column
    stored_T, stored_meta, found_T = row_T, meta, row_T
    if CACHED:
        weight = load_slots(values, area, word_T, owned_T, DIM, BLOCK, BLOCK_H, CACHED)
    elif POOL >= 0:
        found_T = R.first_words(meta, row_T, owned_T, FORMAT)
        stored_T, stored_meta, first_T = locate_staged(area, POOL, meta, found_T, row_T, owned_T, low, FORMAT)
        weight = R.load_codes(codes, stored_T, owned_T, DIM, FORMAT, BLOCK, BLOCK_H)
        weight = R.dequantized(weight, first_T, stored_meta, stored_T, owned_T, FORMAT)
    else:
        weight = R.load_rows(codes, meta, row_T, owned_T, DIM, FORMAT, BLOCK, BLOCK_H)
    weight, first, second = _step(weight, grad_TD, first_state, second_state, key_T, at, owned_T, mask, hyper, OPTIMIZER, DIM)
    weight = tl.where(inside, weight, 0.0)
    # A NaN or infinite gradient shows in the state of a row-wise optimizer; a NaN factor shows in every column.
    low_T, high_T, good_T = R.extent(weight, inside_D, R.FP32 if CACHED else FORMAT, OPTIMIZER == _ROWWISE)
    if OPTIMIZER == _ROWWISE:
        good_T = good_T & (first < float("inf"))
    elif OPTIMIZER != _SGD:
        good_T = good_T & (_all_columns((tl.abs(first) < float("inf")) | (mask == 0)))
        if OPTIMIZER != _ADAGRAD:
            good_T = good_T & (_all_columns((second < float("inf")) | (mask == 0)))
    bad_T = owned_T & (good_T == 0)
    if tl.max(bad_T.to(tl.int32), 0) > 0:
        worst = tl.min(tl.where(bad_T, name_T, 0x7FFFFFFFFFFFFFFF), 0)
        report(flag, record, clock, GRADIENT, worst, worst, tl.load(clock + _STEP), worst)
    owned_T = owned_T & good_T
    mask = R.over_rows(owned_T, column) & inside
    if OPTIMIZER == _ROWWISE:
        tl.store(first_state + key_T, first, mask=owned_T)
    elif OPTIMIZER != _SGD:
        tl.store(first_state + at, first, mask=mask)
        if OPTIMIZER != _ADAGRAD:
            tl.store(second_state + at, second, mask=mask)
    if CACHED:
        store_slots(
            values, area, word_T, owned_T, weight, high_T, name_T, clock, DIM, BLOCK, BLOCK_H, CACHED, STOCHASTIC
        )  # fmt: skip
    else:
        R.store_rows(
            codes, stored_meta, stored_T, owned_T, weight, low_T, high_T, name_T, clock, DIM, FORMAT, BLOCK, BLOCK_H, STOCHASTIC
        )
        if POOL >= 0:
            cancel_leaving(meta + WORDS * row_T, found_T, owned_T)


@triton.jit
def _update_runs(
    keys, names, grad, order, sorted_places, factors, in_bag, winners, partial, heads, words, codes, meta, values, area,
    first_state, second_state, hyper, clock, flag, record, count, stride, low, element_at, begin, part, number,
    DISTINCT: tl.constexpr, NAMED: tl.constexpr, UNPOOLED: tl.constexpr, FACTORS: tl.constexpr, IN_BAG: tl.constexpr,
    ALIGN: tl.constexpr, OPTIMIZER: tl.constexpr, STOCHASTIC: tl.constexpr,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, CACHED: tl.constexpr,
    POOL: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, SHORT_RUN: tl.constexpr, REST_TILE: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """This program's part of the `number` runs, of cached or of uncached rows, that begin in a chunk."""
    for first in range(part * TILE, number, PARTS * TILE):
        at_T, key_T, length_T, owned_T, word_T = load_heads(keys, heads, words, begin, first, number, CACHED, TILE, CHUNK)
        grad_TD = sum_runs(
            keys, grad, order, sorted_places, factors, in_bag, winners, partial, count, stride, at_T, key_T, length_T, owned_T,
            DISTINCT, UNPOOLED, FACTORS, IN_BAG, ALIGN, DIM, BLOCK, BLOCK_H, TILE, SHORT_RUN, REST_TILE, CHUNK,
        )  # fmt: skip
        name_T = key_T
        if NAMED:
            name_T = tl.load(names + at_T, mask=owned_T, other=0)
        _update_tile(
            key_T, name_T, owned_T, word_T, grad_TD, codes, meta, values, area, first_state, second_state, hyper, clock, flag,
            record, low, element_at, OPTIMIZER, STOCHASTIC, DIM, FORMAT, BLOCK, BLOCK_H, CACHED, POOL, WORDS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["codes_at"])
def _update(
    keys, names, grad, order, places, sorted_places, factors, in_bag, winners, partial, heads, words, run_counts, codes, meta,
    values, area, first_state, second_state, hyper, clock, flag, record, count, stride, low, codes_at, meta_at, element_at,
    DISTINCT: tl.constexpr, NAMED: tl.constexpr, UNPOOLED: tl.constexpr, FACTORS: tl.constexpr, IN_BAG: tl.constexpr,
    ALIGN: tl.constexpr, OPTIMIZER: tl.constexpr, STOCHASTIC: tl.constexpr,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, ROW_ALIGN: tl.constexpr,
    CACHED: tl.constexpr, POOL: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, SHORT_RUN: tl.constexpr,
    REST_TILE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    codes += codes_at // ROW_ALIGN * ROW_ALIGN  # tells the compiler how far rows are aligned
    meta += meta_at
    chunk, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    begin, run_count = chunk.to(tl.int64) * CHUNK, tl.load(run_counts + chunk)
    _update_runs(
        keys, names, grad, order, sorted_places, factors, in_bag, winners, partial, heads, words, codes, meta, values, area,
        first_state, second_state, hyper, clock, flag, record, count, stride, low, element_at, begin, part,
        run_count & 0xFFFF, DISTINCT, NAMED, UNPOOLED, FACTORS, IN_BAG, ALIGN, OPTIMIZER, STOCHASTIC, DIM, FORMAT, BLOCK,
        BLOCK_H, 0, POOL, WORDS, TILE, SHORT_RUN, REST_TILE, CHUNK, PARTS,
    )  # fmt: skip
    if CACHED:
        _update_runs(
            keys, names, grad, order, sorted_places, factors, in_bag, winners, partial, heads, words, codes, meta, values, area,
            first_state, second_state, hyper, clock, flag, record, count, stride, low, element_at, begin, part,
            run_count >> 16, DISTINCT, NAMED, UNPOOLED, FACTORS, IN_BAG, ALIGN, OPTIMIZER, STOCHASTIC, DIM, FORMAT, BLOCK,
            BLOCK_H, CACHED, POOL, WORDS, TILE, SHORT_RUN, REST_TILE, CHUNK, PARTS,
        )  # fmt: skip


def _align(format: int, dim: int) -> int:
    """Alignment of rows in bytes, at most 4 columns: the width of a thread's load in a wide tile."""
    return math.gcd(F.row_bytes(format, dim), max(4, F.BITS[format] // 2))


def _launch_updates(
    lookups: SortedLookups, arrays: RowArrays, optimizer: OptimizerArrays, grad: Tensor, names: Tensor | None = None,
    tick: bool = False,
) -> None:  # fmt: skip
    """Launch the updates of all tables. `tick`: advance the clock first."""
    codes, meta, layout, cache = arrays
    states, hyper, clock, kind, stochastic = optimizer
    count, errors = lookups.keys.numel(), error_buffer(meta)
    errors.open(clock, layout.tables)
    first, second = (*states, meta, meta)[:2]
    pools = {(pool.dim, pool.format): number for number, pool in enumerate(layout.tables.pools)}
    values, area = cache_tensors(cache, codes, meta)
    for turn, run in enumerate(layout.tables.runs):
        number = pools.get((run.dim, run.format), -1)
        cached = slot_kinds(*(pool for pool in layout.tables.pools if (pool.dim, pool.format) == (run.dim, run.format)))
        pool = number if cache is not None and cache.staged else -1
        times = (clock, hyper) if tick and turn == 0 else (None, None)
        runs = prepare(lookups, grad, run, meta, cached > 0, pool >= 0, *times)
        block, block_h = R.tile_shape(run.format, run.dim)
        launch(
            _update, PARTS * runs.run_counts.numel(),
            (lookups.keys, lookups.keys if names is None else names, grad, *lookups[1:7], *runs, codes, meta, values, area,
             first, second, hyper, clock, errors.flag, errors.record),
            (count, grad.shape[1], run.row, run.codes, run.meta, run.element),
            (lookups.order.numel() == 0, names is not None, *lookups.flags, kind, stochastic, run.dim, run.format, block,
             block_h, _align(run.format, run.dim), cached, pool, F.META_WORDS[run.format], TILE, SHORT_RUN, REST_TILE, CHUNK,
             PARTS), exact=True, warps=warps_for(block),
        )  # fmt: skip


def update_rows(
    rows: RowArrays, optimizer: OptimizerArrays, rows_U: Tensor, grads_UW: Tensor, seen_N: Tensor | None = None,
    names_U: Tensor | None = None,
) -> None:  # fmt: skip
    """Advance the clock and update distinct arena rows in place."""
    codes, meta, layout, cache = rows
    launch(advance, 1, (optimizer.clock, optimizer.hyper), (), (), exact=True, warps=1)
    if rows_U.numel() == 0:
        return
    none = rows_U[:0]
    lookups = SortedLookups(rows_U, none, none, none, none, none, none, 1)
    if cache is not None:
        keys_N = rows_U if seen_N is None else seen_N.contiguous()
        if keys_N.numel():
            refresh(codes, meta, cache, layout, keys_N, optimizer.stochastic, seen_N is None)
    names_U = None if names_U is None else names_U.contiguous()
    _launch_updates(lookups, rows, optimizer, grads_UW.contiguous(), names_U)


def update_bags(rows: RowArrays, optimizer: OptimizerArrays, call: LookupCall, winners: Tensor, grad_out: Tensor) -> None:
    """Advance the clock and update every row that a lookup read, in place."""
    codes, meta, layout, cache = rows
    ids_N, offsets, weights_N, mode, _, _ = call
    hyper, clock = optimizer.hyper, optimizer.clock
    if ids_N.numel() == 0:
        launch(advance, 1, (clock, hyper), (), (), exact=True, warps=1)
        return
    lookups, known = None, False
    area = None if cache is None else area_of(cache)
    if area is not None:
        known = area.was_prefetched(ids_N, offsets)
        lookups = area.take_sorted(ids_N, offsets, mode, winners) if weights_N is None else None
    ahead = lookups is not None
    if lookups is None:
        lookups = sort_lookups(layout, ids_N, offsets, weights_N, mode, winners, clock, hyper)
    if cache is not None:
        refresh(codes, meta, cache, layout, lookups.keys, optimizer.stochastic, expected=known)
    _launch_updates(lookups, rows, optimizer, grad_out.contiguous(), tick=ahead)
