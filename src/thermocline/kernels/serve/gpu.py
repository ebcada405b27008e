"""Look up rows of tables that are split over shards on a GPU: one launch that reads the memory of all shards."""

from __future__ import annotations

import functools
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gather.gpu import LONG_BAG, row_align, tiling
from thermocline.kernels.gpu import row_tiles as R
from thermocline.kernels.gpu.bags import NO_POSITION, check_ids, ids_of_program, locate_bags
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.gpu.launch import ceil_div, launch, power_of_two
from thermocline.kernels.ids.gpu import rank_in_bitmap, rank_in_sorted

from . import fields as S
from .fields import ServedBags, ShardedTables
from .gpu_rows import EXPONENT, NO_ROW, add_coded, add_plain

TILE_IDS = 512
REGISTERS = 64  # for long bags: enough for the loads of 16 rows, few enough for occupancy
HANDLE_BITS = 44  # bits of the place in a handle; the shard is above

_FIELDS, _ROWS, _DIM, _FORMAT = (tl.constexpr(k) for k in (S.FIELDS, S.ROWS, S.DIM, S.FORMAT))
_SCHEME, _FIRST, _PER, _ROTATIONS, _KEY = (tl.constexpr(k) for k in (S.SCHEME, S.FIRST, S.PER, S.ROTATIONS, S.KEY))
_COPY_PLACE, _COPIED, _OVERLAY = (tl.constexpr(k) for k in (S.COPY_PLACE, S.COPIED, S.OVERLAY))
_KIND, _COUNT, _WORDS, _BLOCK, _LOW, _HIGH = (tl.constexpr(k) for k in (S.KIND, S.COUNT, S.WORDS, S.BLOCK, S.LOW, S.HIGH))
_RANGES, _HASHED_ROTATION = tl.constexpr(S.RANGES), tl.constexpr(S.HASHED)
_ALL_RANGES, _ALL_HASHED, _ALL_ROTATED = (tl.constexpr(k) for k in (S.ALL_RANGES, S.ALL_HASHED, S.ALL_ROTATED))
_NOTHING, _SORTED = tl.constexpr(S.NOTHING), tl.constexpr(S.SORTED)
_MEAN, _HANDLE, _PLACE = (tl.constexpr(k) for k in (F.MEAN, HANDLE_BITS, (1 << HANDLE_BITS) - 1))


@triton.jit
def _range_owners(field, row_T):
    """(shard, place) of rows in ranges. The quotient comes from a reciprocal, at most one too small: division is slow."""
    per = tl.load(field + _PER)
    reciprocal = (tl.zeros_like(per) - 1).to(tl.uint64, bitcast=True) // per.to(tl.uint64)
    quotient_T = tl.umulhi(row_T.to(tl.uint64), tl.zeros_like(row_T).to(tl.uint64) + reciprocal).to(tl.int64)
    quotient_T += (row_T - quotient_T * per >= per).to(tl.int64)
    return (tl.load(field + _FIRST) + quotient_T).to(tl.int32), row_T - quotient_T * per


@triton.jit
def _block_owners(field, rotations, row_T, mask_T, SHARDS: tl.constexpr, HASHED: tl.constexpr):
    """(shard, place) of rows in rotated blocks."""
    place_T = (row_T.to(tl.uint64) // SHARDS).to(tl.int64)
    if HASHED:
        low_T = ((place_T ^ tl.load(field + _KEY)) & 0xFFFFFFFF).to(tl.uint32)
        rotation_T = tl.umulhi(R.fmix32(low_T), tl.full(low_T.shape, SHARDS, tl.uint32)).to(tl.int32)
    else:
        rotation_T = tl.load(rotations + tl.load(field + _ROTATIONS) + place_T, mask=mask_T, other=0).to(tl.int32)
    shard_T = row_T.to(tl.int32) - place_T.to(tl.int32) * SHARDS + rotation_T
    return tl.where(shard_T >= SHARDS, shard_T - SHARDS, shard_T), place_T


@triton.jit
def _owners(field, rotations, row_T, mask_T, SHARDS: tl.constexpr, SCHEME: tl.constexpr):
    """(shard, place) of the owners of rows. SCHEME: of all tables of this launch."""
    if SHARDS == 1:
        return (row_T * 0).to(tl.int32), row_T
    elif SCHEME == _ALL_RANGES:
        return _range_owners(field, row_T)
    elif SCHEME == _ALL_HASHED:
        return _block_owners(field, rotations, row_T, mask_T, SHARDS, True)
    elif SCHEME == _ALL_ROTATED:
        return _block_owners(field, rotations, row_T, mask_T, SHARDS, False)
    else:
        if tl.load(field + _SCHEME) == _RANGES:
            shard_T, place_T = _range_owners(field, row_T)
        elif tl.load(field + _ROTATIONS) == _HASHED_ROTATION:
            shard_T, place_T = _block_owners(field, rotations, row_T, mask_T, SHARDS, True)
        else:
            shard_T, place_T = _block_owners(field, rotations, row_T, mask_T, SHARDS, False)
        return shard_T, place_T


@triton.jit
def _ranks(row_set, words, counts, row_T, mask_T):
    """(whether rows are in a set, their rank in it)."""
    words += tl.load(row_set + _WORDS)
    if tl.load(row_set + _KIND) == _SORTED:
        in_T, rank_T = rank_in_sorted(words, tl.load(row_set + _COUNT), row_T, mask_T)
    else:
        counts += tl.load(row_set + _BLOCK)
        in_T, rank_T = rank_in_bitmap(words, counts, tl.load(row_set + _LOW), tl.load(row_set + _HIGH), row_T, mask_T)
    return in_T, rank_T


@triton.jit
def _find(
    fields, rotations, words, counts, rows, starts, handles, flag, record, ids_count,
    SHARDS: tl.constexpr, SCHEME: tl.constexpr, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Handle of every lookup, copies and overlay included; -1 for a row out of range."""
    feature, first, last = ids_of_program(starts, tl.program_id(0), ids_count, 1, FEATURES, BLOCK_F, TILE)
    if feature >= FEATURES:
        return
    field = fields + feature * _FIELDS
    at_T = first + tl.arange(0, TILE)
    mask_T = at_T < last
    row_T = tl.load(rows + at_T, mask=mask_T, other=0).to(tl.int64)
    limit = tl.load(field + _ROWS)
    good_T = mask_T & (row_T >= 0) & (row_T < limit)
    shard_T, place_T = _owners(field, rotations, row_T, good_T, SHARDS, SCHEME)
    shard_T = shard_T.to(tl.int64)
    if tl.load(field + _COPIED + _KIND) != _NOTHING:
        copied_T, rank_T = _ranks(field + _COPIED, words, counts, row_T, good_T)
        shard_T = tl.where(copied_T, at_T % SHARDS, shard_T)
        place_T = tl.where(copied_T, tl.load(field + _COPY_PLACE) + rank_T, place_T)
    if tl.load(field + _OVERLAY + _KIND) != _NOTHING:
        over_T, rank_T = _ranks(field + _OVERLAY, words, counts, row_T, good_T)
        shard_T = tl.where(over_T, SHARDS, shard_T)
        place_T = tl.where(over_T, rank_T, place_T)
    tl.store(handles + at_T, tl.where(good_T, (shard_T << _HANDLE) + place_T, -1), mask=mask_T)
    check_ids(rows, fields, feature, limit, tl.where(mask_T & (good_T == 0), at_T, NO_POSITION), flag, record)


@triton.jit
def _lanes(
    meta, bases, meta_bases, field, rotations, rows, weights, base, at_L, last_L, limit,
    WEIGHTED: tl.constexpr, SHARDS: tl.constexpr, SCHEME: tl.constexpr, FOUND: tl.constexpr, FORMAT: tl.constexpr,
    WIDTH: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """One lookup a lane: (distance of the row in bytes, weighted scale, weighted bias, whether the row is out of range).

    Missing float rows have the distance NO_ROW. Missing rows of codes are read from place 0 and scaled by 0, except with
    handles, where place 0 may not exist.
    """
    mask_L = at_L < last_L
    row_L = tl.load(rows + at_L, mask=mask_L, other=0).to(tl.int64)
    if FOUND:
        good_L = mask_L & (row_L >= 0)
        row_L = tl.where(good_L, row_L, 0)
        shard_L, place_L = row_L >> _HANDLE, row_L & _PLACE
    else:
        good_L = mask_L & (row_L >= 0) & (row_L < limit)
        shard_L, place_L = _owners(field, rotations, tl.where(good_L, row_L, 0), good_L, SHARDS, SCHEME)
    distance_L = tl.load(bases + base + shard_L) + place_L * WIDTH
    if PLAIN or FOUND:
        distance_L = tl.where(good_L, distance_L, NO_ROW)
    scale_L, bias_L = tl.full(at_L.shape, 1.0, tl.float32), tl.full(at_L.shape, 0.0, tl.float32)
    if not PLAIN:
        meta_L = meta + (tl.load(meta_bases + base + shard_L) >> 2)
        scale_L, bias_L = R.scale_and_bias(R.first_words(meta_L, place_L, good_L, FORMAT), meta_L, place_L, good_L, FORMAT)
    if WEIGHTED:
        weight_L = tl.load(weights + at_L, mask=good_L, other=0.0).to(tl.float32)
        scale_L, bias_L = scale_L * weight_L, bias_L * weight_L
    return distance_L, scale_L, bias_L, mask_L & (good_L == 0)


@triton.jit
def _bounds(offsets, bag_T, end, UNPOOLED: tl.constexpr):
    """First and last row of each bag."""
    if UNPOOLED:
        return bag_T, tl.minimum(bag_T + 1, end)
    else:
        mask_T = bag_T < end
        first_T = tl.load(offsets + bag_T, mask=mask_T, other=0).to(tl.int64)
        return first_T, tl.load(offsets + bag_T + 1, mask=mask_T, other=0).to(tl.int64)


@triton.jit
def _sum(
    codes, meta, bases, meta_bases, field, rotations, rows, offsets, weights, flag, record, fields, feature, first, limit, end,
    exponent, WEIGHTED: tl.constexpr, SHARDS: tl.constexpr, SCHEME: tl.constexpr, FOUND: tl.constexpr, UNPOOLED: tl.constexpr,
    TILE: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """Sums of bags.

    Rows are located one row a lane, 32 at once, and the distances are passed to the lanes that load them. Otherwise all lanes
    of a row (8 of an int8 row of 128, 32 of an fp32 row) would locate it, which takes as long as the loads. Lanes with the same
    columns of different rows sum separately until the end of a bag.
    """
    PLAIN: tl.constexpr = FORMAT == R.FP32 or FORMAT == R.FP16 or FORMAT == R.BF16
    WIDTH: tl.constexpr = 4 * DIM if FORMAT == R.FP32 else (2 * DIM if PLAIN else (DIM * BLOCK_H + BLOCK - 1) // BLOCK)
    BESIDE: tl.constexpr = 32 * ROW_ALIGN // BLOCK_H  # rows of codes side by side in the lanes
    G: tl.constexpr = TILE if STRIDE == 1 else (1 if PLAIN or BESIDE < 1 else (STRIDE if BESIDE > STRIDE else BESIDE))
    LANES: tl.constexpr = 32
    STEP: tl.constexpr = LANES if STRIDE > 1 else 1
    lane_L = tl.arange(0, LANES)
    first_L, last_L = _bounds(offsets, first + lane_L % TILE, end, UNPOOLED)
    longest = 1 if UNPOOLED else tl.max(last_L - first_L, 0).to(tl.int32)
    if STRIDE > 1:
        first_L += lane_L
    if BLOCK == BLOCK_H:
        acc = tl.zeros((G, BLOCK), tl.float32)
    else:
        acc = tl.zeros((G, BLOCK_H, BLOCK // BLOCK_H), tl.float32)
    bias_L = tl.zeros((LANES,), tl.float32)
    first_bad_L = tl.full((LANES,), NO_POSITION, tl.int64)
    for k in range(0, longest, STEP):
        distance_L, scale_L, more_L, bad_L = _lanes(
            meta, bases, meta_bases, field, rotations, rows, weights, feature * (SHARDS + 1), first_L + k, last_L, limit,
            WEIGHTED, SHARDS, SCHEME, FOUND, FORMAT, WIDTH, PLAIN,
        )  # fmt: skip
        bias_L += more_L
        first_bad_L = tl.minimum(first_bad_L, tl.where(bad_L, first_L + k, NO_POSITION))
        if PLAIN:
            acc = add_plain(acc, codes, distance_L, scale_L, STRIDE, STEP, WEIGHTED, DIM, FORMAT, BLOCK, ROW_ALIGN)
        elif STRIDE == 1:
            acc = add_coded(acc, codes, distance_L, scale_L, 0, exponent, TILE, FOUND, DIM, FORMAT, BLOCK, BLOCK_H, ROW_ALIGN)
        else:
            for begin in range(0, tl.minimum(longest - k, STEP), STRIDE):
                acc = add_coded(
                    acc, codes, distance_L, scale_L, begin, exponent, STRIDE, FOUND, DIM, FORMAT, BLOCK, BLOCK_H, ROW_ALIGN
                )
    if not FOUND:
        check_ids(rows, fields, feature, limit, first_bad_L, flag, record)
    if STRIDE > 1:
        acc = tl.sum(acc, 0)[None]
    if FORMAT >= R.INT4:
        if STRIDE > 1:
            acc += tl.sum(bias_L, 0)
        else:
            acc += R.over_rows(tl.gather(bias_L, tl.arange(0, TILE), 0), acc)
    return acc


@triton.jit
def _pool(
    codes, meta, bases, meta_bases, fields, rotations, rows, ends, offsets, weights, out, targets, flag, record, feature, first,
    each, exponent, MODE: tl.constexpr, WEIGHTED: tl.constexpr, SHARDS: tl.constexpr, SCHEME: tl.constexpr, FOUND: tl.constexpr,
    UNPOOLED: tl.constexpr,
    TILE: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, ROW_ALIGN: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """TILE bags of one feature, STRIDE rows of each at a time (one of the two is 1)."""
    field = fields + feature * _FIELDS
    limit = tl.load(field + _ROWS)
    if EVEN:
        begin = feature.to(tl.int64) * each
        end = begin + each
    else:
        begin = tl.load(ends + feature).to(tl.int64)
        end = tl.load(ends + feature + 1).to(tl.int64)
    bag_T = first + tl.arange(0, TILE)
    first_T, last_T = _bounds(offsets, bag_T, end, UNPOOLED)
    if BLOCK == BLOCK_H:
        column, _, _, inside = R.columns(DIM, BLOCK, BLOCK_H, True)
    else:
        column, inside = R.plane_columns(DIM, BLOCK_H, BLOCK // BLOCK_H)
    acc = _sum(
        codes, meta, bases, meta_bases, field, rotations, rows, offsets, weights, flag, record, fields, feature, first, limit,
        end, exponent, WEIGHTED, SHARDS, SCHEME, FOUND, UNPOOLED, TILE, STRIDE, DIM, FORMAT, BLOCK, BLOCK_H, ROW_ALIGN,
    )  # fmt: skip
    if MODE == _MEAN:
        acc = acc * R.over_rows(tl.div_rn(1.0, tl.maximum(last_T - first_T, 1).to(tl.float32)), acc)
    start = tl.multiple_of(tl.load(targets + 2 * feature), ALIGN)
    pitch = tl.multiple_of(tl.load(targets + 2 * feature + 1), ALIGN)
    to = R.over_rows(bag_T - begin, acc) * pitch + start + column[None]
    tl.store(out + to, acc, mask=R.over_rows(bag_T < end, acc) & inside[None], cache_modifier=".cs")  # not read again here


@triton.jit
def _serve(
    codes, meta, bases, meta_bases, fields, rotations, rows, ends, offsets, weights, out, targets, flag, record, bags, each,
    exponent, MODE: tl.constexpr, WEIGHTED: tl.constexpr, SHARDS: tl.constexpr, SCHEME: tl.constexpr, FOUND: tl.constexpr,
    UNPOOLED: tl.constexpr,
    EVEN: tl.constexpr, TILE: tl.constexpr, STRIDE: tl.constexpr, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr,
    GROUPS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """GROUPS: (dimension, format, BLOCK, BLOCK_H, row alignment) of each kind of table. EVEN: every feature has `each` bags."""
    feature, first = locate_bags(ends, tl.program_id(0), bags, each, FEATURES, BLOCK_F, not EVEN, TILE)
    if feature >= FEATURES:
        return
    if EVEN:
        first += feature.to(tl.int64) * each
    dim = tl.load(fields + feature * _FIELDS + _DIM)
    format = tl.load(fields + feature * _FIELDS + _FORMAT)
    for g in tl.static_range(len(GROUPS)):
        if len(GROUPS) == 1 or ((dim == GROUPS[g][0]) & (format == GROUPS[g][1])):
            _pool(
                codes, meta, bases, meta_bases, fields, rotations, rows, ends, offsets, weights, out, targets, flag, record,
                feature, first, each, exponent, MODE, WEIGHTED, SHARDS, SCHEME, FOUND, UNPOOLED, TILE, STRIDE,
                GROUPS[g][0], GROUPS[g][1], GROUPS[g][2], GROUPS[g][3], GROUPS[g][4], ALIGN, EVEN,
            )  # fmt: skip


@lru_cache(maxsize=256)
def _constants(kinds: tuple[tuple[int, int], ...], long: bool) -> tuple[int, int, int, tuple[tuple[int, ...], ...]]:
    """(bags of a program, rows of a bag at a time, warps, GROUPS)."""
    groups = tuple((dim, format, *R.tile_shape(format, dim), row_align(format, dim, long)) for dim, format in kinds)
    return *tiling(max(group[2] for group in groups), long), groups


@functools.cache
def _no_tally() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


def gather_pool(placed: ShardedTables, bags: ServedBags, out: Tensor) -> Tensor:
    """Look up and pool into `out`. Rows out of range are reported and contribute nothing."""
    rows_N, count, features = bags.rows_N.contiguous(), bags.rows_N.numel(), placed.fields_FN.shape[0]
    anchor = placed.segments[0]
    assert anchor is not None
    errors = error_buffer(anchor)
    errors.raise_pending()
    if bags.total == 0:
        return _no_tally()
    offsets = bags.ends_F1 if bags.offsets_B1 is None else bags.offsets_B1
    if placed.sets:
        starts_F1 = bags.ends_F1 if bags.offsets_B1 is None else offsets[bags.ends_F1]
        rows_N = _find_all(placed, rows_N, starts_F1, features)
    tile, stride, warps, groups = _constants(placed.kinds, bags.offsets_B1 is not None and count >= LONG_BAG * bags.total)
    even = bags.each * features == bags.total
    programs = features * ceil_div(bags.each, tile) if even else ceil_div(bags.total, tile) + features - 1
    launch(
        _serve, programs,
        (anchor, anchor.view(torch.int32), placed.bases_FC, placed.meta_bases_FC, placed.fields_FN, placed.rotations, rows_N,
         bags.ends_F1, offsets, rows_N if bags.weights_N is None else bags.weights_N, out, bags.target_F2, errors.flag,
         errors.record),
        (bags.total, bags.each, EXPONENT),
        (bags.mode, bags.weights_N is not None, placed.shards, placed.scheme, placed.sets, bags.offsets_B1 is None, even, tile,
         stride, features, power_of_two(features), groups, bags.align), exact=False, warps=warps,
        registers=REGISTERS if stride == 16 and len(groups) == 1 else None,
    )  # fmt: skip
    return _no_tally()


def _find_all(placed: ShardedTables, rows_N: Tensor, starts_F1: Tensor, features: int) -> Tensor:
    errors, count = error_buffer(rows_N), rows_N.numel()
    handles_N = torch.empty_like(rows_N, dtype=torch.int64)
    if count:
        launch(
            _find, ceil_div(count, TILE_IDS) + features - 1,
            (placed.fields_FN, placed.rotations, placed.words, placed.counts, rows_N, starts_F1, handles_N, errors.flag,
             errors.record),
            (count,), (placed.shards, placed.scheme, features, power_of_two(features), TILE_IDS), exact=True,
        )  # fmt: skip
    return handles_N
