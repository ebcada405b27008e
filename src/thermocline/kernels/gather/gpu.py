"""Look up, dequantize and pool rows on a GPU: all features, dimensions and precisions in one launch."""

from __future__ import annotations

import functools
import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.gpu import row_tiles as R
from thermocline.kernels.gpu import slots as S
from thermocline.kernels.gpu.bags import NO_POSITION, bag_bounds, check_feature_offsets, check_ids, locate_bags
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.gpu.launch import ceil_div, launch, power_of_two
from thermocline.kernels.gpu.staged import cache_tensors, is_staged, locate_staged
from thermocline.kernels.layout import TableLayout, output_shape, per_feature

from .gpu_cached import pool_cached

_FIELDS = tl.constexpr(F.LAYOUT_FIELDS)
_CODES, _META, _ROW, _ROWS = (tl.constexpr(k) for k in (F.CODES, F.META, F.ROW, F.ROWS))
_DIM, _FORMAT, _COLUMN = tl.constexpr(F.DIM), tl.constexpr(F.FORMAT), tl.constexpr(F.COLUMN)
_MEAN, _MAX, _NONE = tl.constexpr(F.MEAN), tl.constexpr(F.MAX), tl.constexpr(F.NONE)

LONG_BAG = 8  # mean ids of a bag from which bags are processed one at a time


@triton.jit
def row_codes(codes, id_S, mask_S, DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    if BLOCK == BLOCK_H:
        return R.load_codes(codes, id_S, mask_S, DIM, FORMAT, BLOCK, BLOCK_H, True)
    else:
        return R.load_planes(codes, id_S, mask_S, DIM, BLOCK_H, BLOCK // BLOCK_H)


@triton.jit
def weighted_rows(
    codes, meta, values, area, weights, place_S, id_S, mask_S, row, WEIGHTED: tl.constexpr,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, CACHED: tl.constexpr,
    POOL: tl.constexpr,
):  # fmt: skip
    """(rows without bias, biases), weighted. Biases are summed separately, one number a row, and added at the end of a bag."""
    weight_S = tl.full(mask_S.shape, 1.0, tl.float32)
    if WEIGHTED:
        weight_S = tl.load(weights + place_S, mask=mask_S, other=0.0).to(tl.float32)
    if FORMAT == R.FP32 or FORMAT == R.FP16 or FORMAT == R.BF16:
        value = R.load_codes(codes, id_S, mask_S, DIM, FORMAT, BLOCK, BLOCK_H, True)
        if WEIGHTED:
            value = value * R.over_rows(weight_S, value)
        return value, weight_S
    else:
        if CACHED:
            word_S = R.first_words(meta, id_S, mask_S, FORMAT)
            hit_S = mask_S & (word_S < 0)
            at_S = word_S
            if POOL >= 0:  # decided before the words of staged rows arrive, so that their codes are loaded as well
                hit_S = hit_S & (is_staged(word_S) == 0)
                id_S, meta, word_S = locate_staged(area, POOL, meta, word_S, id_S, mask_S, row, FORMAT)
            value = row_codes(codes, id_S, mask_S & (hit_S == 0), DIM, FORMAT, BLOCK, BLOCK_H)
            fp32_S = hit_S
            if CACHED == S.BOTH_SLOTS:
                fp32_S = hit_S & (S.is_int8_slot(at_S) == 0)
            cached = S.load_fp32_tile(values, at_S, fp32_S, DIM, BLOCK, BLOCK_H)
            scale_S, bias_S = R.scale_and_bias(word_S, meta, id_S, mask_S, FORMAT)
            scale_S, bias_S = tl.where(hit_S, 1.0, scale_S), tl.where(hit_S, 0.0, bias_S)
            value += cached  # one of the two is zero
            if CACHED == S.BOTH_SLOTS:
                int8_S = hit_S & S.is_int8_slot(at_S)
                value += S.load_int8_tile(area, at_S, int8_S, DIM, BLOCK, BLOCK_H)
                scale_S = tl.where(int8_S, S.int8_scales(area, at_S, int8_S, DIM), scale_S)
        else:
            value = row_codes(codes, id_S, mask_S, DIM, FORMAT, BLOCK, BLOCK_H)
            scale_S, bias_S = R.scale_and_bias(R.first_words(meta, id_S, mask_S, FORMAT), meta, id_S, mask_S, FORMAT)
        if WEIGHTED:
            scale_S, bias_S = scale_S * weight_S, bias_S * weight_S
        return value * R.over_rows(scale_S, value), bias_S


@triton.jit
def _load_rows_anywhere(
    codes, meta, values, area, id_S, mask_S, row,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, CACHED: tl.constexpr,
    POOL: tl.constexpr,
):  # fmt: skip
    """A flat tile of rows as fp32, from table, slots or staging area."""
    word_S = R.first_words(meta, id_S, mask_S & (CACHED > 0), FORMAT)
    if POOL >= 0:
        id_S, meta, word_S = locate_staged(area, POOL, meta, word_S, id_S, mask_S, row, FORMAT)
    if CACHED:
        hit_S = mask_S & (word_S < 0)
        value = R.load_codes(codes, id_S, mask_S & (word_S >= 0), DIM, FORMAT, BLOCK, BLOCK_H, True)
        cached = S.load_slots(values, area, word_S, hit_S, DIM, BLOCK, BLOCK_H, CACHED, True)
        value = R.dequantized(value, word_S, meta, id_S, mask_S, FORMAT)
        return tl.where(hit_S[:, None], cached, value)
    else:
        return R.load_rows(codes, meta, id_S, mask_S, DIM, FORMAT, BLOCK, BLOCK_H, True)


@triton.jit
def _next_ids(
    ids, first_T, last_T, rows, first_bad, k, CHECKED: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """(positions, ids, mask of valid ids, first bad positions) of the next STRIDE ids of each bag."""
    place = first_T + k + tl.arange(0, STRIDE)
    mask = place < last_T
    id = tl.load(ids + place, mask=mask, other=0).to(tl.int64)
    if CHECKED:
        good = (id >= 0) & (id < rows)
        first_bad = tl.minimum(first_bad, tl.where(mask & (good == 0), place, NO_POSITION))
        mask = mask & good
    return place, id, mask, first_bad


@triton.jit
def _zero_padding(out, row_T, mask_T, width, DIM: tl.constexpr, OUT_BLOCK: tl.constexpr):
    """Zero the output after the dimension of a row, if other rows are wider."""
    column = tl.arange(0, OUT_BLOCK)[None, :]
    mask = mask_T[:, None] & (column >= DIM) & (column < width)
    blank = tl.zeros(mask.shape, tl.float32).to(out.dtype.element_ty)
    tl.store(out + row_T[:, None] * width + column, blank, mask=mask)


@triton.jit
def _pool(
    codes, meta, values, area, fields, ids, offsets, weights, out, winners, flag, record, ids_count, batch, width,
    feature, first, MODE: tl.constexpr, WEIGHTED: tl.constexpr, CHECKED: tl.constexpr, TILE: tl.constexpr, STRIDE: tl.constexpr,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, OUT_BLOCK: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, CACHED: tl.constexpr, POOL: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """TILE bags of one feature, STRIDE ids of each at a time (one of the two is 1)."""
    UNPOOLED: tl.constexpr = MODE == _NONE
    FLAT: tl.constexpr = BLOCK == BLOCK_H or MODE == _MAX
    field = fields + feature * _FIELDS
    codes += tl.multiple_of(tl.load(field + _CODES), ROW_ALIGN)
    meta += tl.load(field + _META)
    row, rows = tl.load(field + _ROW), tl.load(field + _ROWS)
    bag_T = first + tl.arange(0, TILE)
    first_T, last_T = bag_bounds(offsets, ids_count, feature, bag_T, batch, flag, record, FEATURES, UNPOOLED)
    if FLAT:
        acc = tl.full((TILE, BLOCK), float("-inf") if MODE == _MAX else 0.0, tl.float32)
        column, _, _, inside = R.columns(DIM, BLOCK, BLOCK_H, True)
    else:
        acc = tl.zeros((TILE, BLOCK_H, BLOCK // BLOCK_H), tl.float32)
        column, inside = R.plane_columns(DIM, BLOCK_H, BLOCK // BLOCK_H)
    winner = tl.full((TILE, BLOCK), -1, tl.int32)
    bias_T = tl.zeros((TILE,), tl.float32)
    first_bad = tl.full((TILE * STRIDE,), NO_POSITION, tl.int64)
    longest = 1 if UNPOOLED else tl.max(last_T - first_T, 0).to(tl.int32)
    for k in range(0, longest, STRIDE):
        place, id, mask, first_bad = _next_ids(ids, first_T, last_T, rows, first_bad, k, CHECKED, STRIDE)
        if MODE == _MAX:
            value = _load_rows_anywhere(codes, meta, values, area, id, mask, row, DIM, FORMAT, BLOCK, BLOCK_H, CACHED, POOL)
            better = mask[:, None] & (value > acc)
            acc = tl.where(better, value, acc)
            winner = tl.where(better, k, winner)
        else:
            value, bias = weighted_rows(
                codes, meta, values, area, weights, place, id, mask, row, WEIGHTED, DIM, FORMAT, BLOCK, BLOCK_H, CACHED, POOL
            )
            if STRIDE > 1:
                acc += tl.sum(value, 0)[None]
                bias_T += tl.sum(bias, 0)
            else:
                acc += value
                bias_T += bias
    if CHECKED:
        check_ids(ids, fields, feature, rows, first_bad, flag, record)
    if MODE == _MAX:
        acc = tl.where(winner >= 0, acc, 0.0)
    elif FORMAT >= R.INT4:
        acc += R.over_rows(bias_T, acc)
    if MODE == _MEAN:
        acc = acc * R.over_rows(tl.div_rn(1.0, tl.maximum(last_T - first_T, 1).to(tl.float32)), acc)
    mask_T = bag_T < last_T if UNPOOLED else bag_T < batch
    start = 0 if UNPOOLED else tl.multiple_of(tl.load(field + _COLUMN), ALIGN)
    at = R.over_rows(bag_T, acc) * width + start + column[None]
    mask = R.over_rows(mask_T, acc) & inside[None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask, cache_modifier=".cs")  # not read again here
    if MODE == _MAX:
        tl.store(winners + at, winner, mask=mask)
    if UNPOOLED and OUT_BLOCK > 0:
        _zero_padding(out, bag_T, mask_T, width, DIM, OUT_BLOCK)


@triton.jit
def _gather(
    meta, codes, values, area, fields, ids, offsets, weights, out, winners, flag, record, ids_count, batch, width,
    MODE: tl.constexpr, WEIGHTED: tl.constexpr, CHECKED: tl.constexpr, TILE: tl.constexpr, STRIDE: tl.constexpr,
    FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, GROUPS: tl.constexpr, OUT_BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """GROUPS: `_groups` of the tables of this launch."""
    if MODE == _NONE and tl.program_id(0) == 0:
        check_feature_offsets(offsets, ids_count, flag, record, FEATURES, BLOCK_F)
    feature, first = locate_bags(offsets, tl.program_id(0), ids_count, batch, FEATURES, BLOCK_F, MODE == _NONE, TILE)
    if feature >= FEATURES:
        return
    dim = tl.load(fields + feature * _FIELDS + _DIM)
    format = tl.load(fields + feature * _FIELDS + _FORMAT)
    for g in tl.static_range(len(GROUPS)):
        if len(GROUPS) == 1 or ((dim == GROUPS[g][0]) & (format == GROUPS[g][1])):
            if GROUPS[g][7] and STRIDE >= 4:
                pool_cached(
                    codes, meta, values, area, fields, ids, offsets, weights, out, flag, record, ids_count, batch, width,
                    feature, first, MODE, WEIGHTED, CHECKED, STRIDE // 4,
                    GROUPS[g][0], GROUPS[g][1], GROUPS[g][2], GROUPS[g][3], ALIGN, 4 if GROUPS[g][4] > 4 else GROUPS[g][4],
                    GROUPS[g][5], FEATURES,
                )  # fmt: skip
            else:
                _pool(
                    codes, meta, values, area, fields, ids, offsets, weights, out, winners, flag, record, ids_count, batch,
                    width, feature, first, MODE, WEIGHTED, CHECKED, TILE, STRIDE,
                    GROUPS[g][0], GROUPS[g][1], GROUPS[g][2], GROUPS[g][3], OUT_BLOCK, ALIGN, GROUPS[g][4], GROUPS[g][5],
                    GROUPS[g][6], FEATURES,
                )  # fmt: skip


def row_align(format: int, dim: int, long: bool) -> int:
    """Alignment of rows in bytes, a power of two: the width of a thread's load.

    At most 16, the widest load; 8 for sub-byte codes of long bags, whose columns would otherwise fill too many registers (int4
    pooled over 32 ids on an H200: 0.111 ms with 8, 0.163 with 16, 0.195 with 4).
    """
    return math.gcd(F.row_bytes(format, dim), 8 if long and F.planes(format) > 1 else 16)


@lru_cache(maxsize=1024)
def out_align(tables: TableLayout) -> int:
    """Alignment of features in a pooled output, in elements: a power of two."""
    return math.gcd(tables.width, 16, *(f[F.COLUMN] for f in tables.features))


@lru_cache(maxsize=1024)
def _groups(
    tables: TableLayout, long: bool, staged: bool, wide: bool
) -> tuple[tuple[int, int, int, int, int, int, int, bool], ...]:
    """(dimension, format, BLOCK, BLOCK_H, row alignment, CACHED, pool of staged rows or -1, wide) of each kind of table."""
    pools = {(pool.dim, pool.format): number for number, pool in enumerate(tables.pools)}
    groups = []
    for dim, format in tables.groups:
        number = pools.get((dim, format), -1)
        cached = S.slot_kinds(*(pool for pool in tables.pools if (pool.dim, pool.format) == (dim, format)))
        shape = (*R.tile_shape(format, dim), row_align(format, dim, long))
        groups.append((dim, format, *shape, cached, number if staged else -1, bool(cached) and wide))
    return tuple(groups)


def tiling(block: int, long: bool) -> tuple[int, int, int]:
    """(bags of a program, ids of a bag processed at once, warps)."""
    tile, stride = (1, max(1, min(16, 2048 // block))) if long else (max(1, min(8, 2048 // block)), 1)
    return tile, stride, max(1, min(8, block * max(tile, stride) // 2048))


def gather_pool(rows: RowArrays, call: LookupCall) -> tuple[Tensor, Tensor]:
    """(pooled output, for max pooling the winners, else an empty tensor)."""
    codes, meta, layout, cache = rows
    ids_N, offsets, weights_N, mode, dtype, checked = call
    tables, count = layout.tables, ids_N.numel()
    ids_N, offsets = ids_N.contiguous(), offsets.contiguous()
    weights_N = None if weights_N is None else weights_N.contiguous()
    errors = error_buffer(meta)
    errors.open(layout.fields_F8, tables)
    features, batch = len(tables.features), per_feature(layout, offsets)
    unpooled = mode == F.NONE
    shape = output_shape(tables, ids_N, offsets, mode)
    out = torch.empty(shape, dtype=dtype, device=meta.device)
    winners = torch.empty(shape, dtype=torch.int32, device=meta.device) if mode == F.MAX else _none(meta.device)
    if batch == 0:
        return out, winners
    long = mode <= F.MEAN and count >= LONG_BAG * batch * features
    staged = cache is not None and cache.staged
    # TableLayout in host memory use one order of additions, so that no bit depends on whether rows were prefetched.
    wide = not staged and codes.device == meta.device
    tile, warps, constants = _constants(tables, unpooled, long, staged, wide)
    programs = max(1, ceil_div(count, tile) + features - 1) if unpooled else features * ceil_div(batch, tile)
    launch(
        _gather, programs,
        (meta, codes, *cache_tensors(cache, codes, meta), layout.fields_F8, ids_N, offsets,
         meta if weights_N is None else weights_N, out, winners, errors.flag, errors.record),
        (count, batch, shape[1]), (mode, weights_N is not None, checked, *constants), exact=False, warps=warps,
    )  # fmt: skip
    return out, winners


@functools.cache
def _none(device: torch.device) -> Tensor:
    """Placeholder for the winners of sum, mean and unpooled lookups."""
    return torch.empty(0, dtype=torch.int32, device=device)


@lru_cache(maxsize=4096)
def _constants(
    tables: TableLayout, unpooled: bool, long: bool, staged: bool, wide: bool
) -> tuple[int, int, tuple[object, ...]]:
    """(bags of a program, warps, constants of `_gather`)."""
    groups, features = _groups(tables, long, staged, wide), len(tables.features)
    tile, stride, warps = tiling(max(g[2] for g in groups), long)
    mixed = unpooled and len({dim for dim, _ in tables.groups}) > 1
    out_block = power_of_two(tables.max_dim) if mixed else 0
    return tile, warps, (tile, stride, features, power_of_two(features), groups, out_block, out_align(tables))


@triton.jit
def _weight_gradient_tile(
    codes, meta, values, area, fields, ids, offsets, grad, out, flag, record, ids_count, batch, width, feature, first,
    TILE: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    CACHED: tl.constexpr, POOL: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    field = fields + feature * _FIELDS
    codes += tl.load(field + _CODES)
    meta += tl.load(field + _META)
    row, rows = tl.load(field + _ROW), tl.load(field + _ROWS)
    bag_T = first + tl.arange(0, TILE)
    first_T, last_T = bag_bounds(offsets, ids_count, feature, bag_T, batch, flag, record, FEATURES, False)
    column, _, _, inside_D = R.columns(DIM, BLOCK, BLOCK_H, True)
    at = bag_T[:, None] * width + tl.load(field + _COLUMN) + column[None, :]
    mask = (bag_T < batch)[:, None] & inside_D[None, :]
    grad_TD = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    longest = tl.max(last_T - first_T, 0).to(tl.int32)
    for k in range(0, longest):
        place = first_T + k
        inside = place < last_T
        id = tl.load(ids + place, mask=inside, other=0).to(tl.int64)
        good = inside & (id >= 0) & (id < rows)
        value = _load_rows_anywhere(codes, meta, values, area, id, good, row, DIM, FORMAT, BLOCK, BLOCK_H, CACHED, POOL)
        tl.store(out + place, tl.sum(value * grad_TD, 1), mask=inside)


@triton.jit
def _weight_gradient(
    meta, codes, values, area, fields, ids, offsets, grad, out, flag, record, ids_count, batch, width,
    TILE: tl.constexpr, FEATURES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    feature, first = locate_bags(offsets, tl.program_id(0), ids_count, batch, FEATURES, 1, False, TILE)
    dim = tl.load(fields + feature * _FIELDS + _DIM)
    format = tl.load(fields + feature * _FIELDS + _FORMAT)
    for g in tl.static_range(len(GROUPS)):
        if len(GROUPS) == 1 or ((dim == GROUPS[g][0]) & (format == GROUPS[g][1])):
            _weight_gradient_tile(
                codes, meta, values, area, fields, ids, offsets, grad, out, flag, record, ids_count, batch, width, feature,
                first, TILE, GROUPS[g][0], GROUPS[g][1], GROUPS[g][2], GROUPS[g][3], GROUPS[g][5], GROUPS[g][6], FEATURES,
            )  # fmt: skip


def weight_gradient(rows: RowArrays, call: LookupCall, grad_out: Tensor) -> Tensor:
    """Gradient of per-sample weights (sum pooling): each id's row times the gradient of its bag."""
    (codes, meta, layout, cache), (ids_N, offsets) = rows, call[:2]
    tables, count, batch = layout.tables, ids_N.numel(), per_feature(layout, offsets)
    ids_N, offsets, grad_out = ids_N.contiguous(), offsets.contiguous(), grad_out.contiguous()
    errors = error_buffer(meta)
    result_N = torch.zeros(count, dtype=torch.float32, device=meta.device)
    if count == 0:
        return result_N
    groups = _groups(tables, False, cache is not None and cache.staged, False)
    tile = max(1, min(4, 2048 // max(g[2] for g in groups)))
    launch(
        _weight_gradient, len(tables.features) * ceil_div(batch, tile),
        (meta, codes, *cache_tensors(cache, codes, meta), layout.fields_F8, ids_N, offsets, grad_out, result_N,
         errors.flag, errors.record),
        (count, batch, tables.width), (tile, len(tables.features), groups), exact=False, warps=1,
    )  # fmt: skip
    return result_N
