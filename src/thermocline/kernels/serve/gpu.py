"""Look up rows of tables that are split over cards, on a GPU: one launch, which reads the memory of all cards itself.

Bags are gone through as in `gather/gpu.py` for tables without a cache, but rows are found first, a row a lane: each has a base
pointer of its own. Card and place are worked out in registers from the number of the row, then the pointer is loaded from the
table of base pointers, a few numbers that stay in the cache. Values are then read by these distances, and words of codes are
decoded as `gpu_rows.py` says. Cards are other allocations of this GPU, memory of other processes, or other GPUs of the host
whose memory is mapped (peer access): it makes no difference here.

Bases are kept as distances in bytes from the first segment. A pointer that is an argument and a distance that is known to be a
multiple of 16 is what the compiler needs to load 16 bytes at once; of a pointer made from a number it knows nothing.

Where rows have copies or an overlay, a launch before it finds card and place of every lookup, as one number (HANDLE): looking
into a set takes several loads that depend on each other, which wants more rows in flight than a tile of values leaves room for.
"""

from __future__ import annotations

import functools
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gather.gpu import LONG_BAG, row_align, tiling
from thermocline.kernels.gpu.bags import NO_POSITION, check_ids, locate_bags
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.gpu.launch import ceil_div, launch, power_of_two
from thermocline.kernels.gpu.row_tiles import (
    BF16,
    FP16,
    FP32,
    INT4,
    columns,
    first_words,
    fmix32,
    over_rows,
    plane_columns,
    scale_and_bias,
    tile_shape,
)
from thermocline.kernels.ids.gpu import ids_of_program, rank_in_bitmap, rank_in_sorted

from . import fields as S
from .fields import Bags, Placed
from .gpu_rows import ABSENT, EXPONENT, add_coded, add_plain

TILE_IDS = 512
REGISTERS = 64  # of long bags: as many warps fit on a card as it takes, and the loads of 16 rows in one go
HANDLE_BITS = 44  # of a place: 2^44 rows; the card is above

_FIELDS, _ROWS, _DIM, _FORMAT = (tl.constexpr(k) for k in (S.FIELDS, S.ROWS, S.DIM, S.FORMAT))
_WAY, _FIRST, _PER, _TURNS, _KEY = (tl.constexpr(k) for k in (S.WAY, S.FIRST, S.PER, S.TURNS, S.KEY))
_COPY_PLACE, _COPIED, _OVERLAY = (tl.constexpr(k) for k in (S.COPY_PLACE, S.COPIED, S.OVERLAY))
_KIND, _COUNT, _WORDS, _BLOCK, _LOW, _HIGH = (tl.constexpr(k) for k in (S.KIND, S.COUNT, S.WORDS, S.BLOCK, S.LOW, S.HIGH))
_RANGES, _HASHED_TURN = tl.constexpr(S.RANGES), tl.constexpr(S.HASHED)
_ALL_RANGES, _ALL_HASHED, _ALL_TURNED = (tl.constexpr(k) for k in (S.ALL_RANGES, S.ALL_HASHED, S.ALL_TURNED))
_NOTHING, _SORTED = tl.constexpr(S.NOTHING), tl.constexpr(S.SORTED)
_MEAN, _HANDLE, _PLACE = (tl.constexpr(k) for k in (F.MEAN, HANDLE_BITS, (1 << HANDLE_BITS) - 1))


@triton.jit
def _in_ranges(field, row_T):
    """(card, place) of rows in order. The quotient is made with a reciprocal, at most one too small: dividing is slow."""
    per = tl.load(field + _PER)
    reciprocal = (tl.zeros_like(per) - 1).to(tl.uint64, bitcast=True) // per.to(tl.uint64)
    quotient_T = tl.umulhi(row_T.to(tl.uint64), tl.zeros_like(row_T).to(tl.uint64) + reciprocal).to(tl.int64)
    quotient_T += (row_T - quotient_T * per >= per).to(tl.int64)
    return (tl.load(field + _FIRST) + quotient_T).to(tl.int32), row_T - quotient_T * per


@triton.jit
def _in_blocks(field, turns, row_T, mask_T, CARDS: tl.constexpr, HASHED: tl.constexpr):
    """(card, place) of rows in turned runs."""
    place_T = (row_T.to(tl.uint64) // CARDS).to(tl.int64)
    if HASHED:
        low_T = ((place_T ^ tl.load(field + _KEY)) & 0xFFFFFFFF).to(tl.uint32)
        turn_T = tl.umulhi(fmix32(low_T), tl.full(low_T.shape, CARDS, tl.uint32)).to(tl.int32)
    else:
        turn_T = tl.load(turns + tl.load(field + _TURNS) + place_T, mask=mask_T, other=0).to(tl.int32)
    card_T = row_T.to(tl.int32) - place_T.to(tl.int32) * CARDS + turn_T
    return tl.where(card_T >= CARDS, card_T - CARDS, card_T), place_T


@triton.jit
def _owners(field, turns, row_T, mask_T, CARDS: tl.constexpr, WAYS: tl.constexpr):
    """(card, place) of rows, but for copies and the overlay. WAYS: how all tables of this launch are split, if alike."""
    if CARDS == 1:
        return (row_T * 0).to(tl.int32), row_T
    elif WAYS == _ALL_RANGES:
        return _in_ranges(field, row_T)
    elif WAYS == _ALL_HASHED:
        return _in_blocks(field, turns, row_T, mask_T, CARDS, True)
    elif WAYS == _ALL_TURNED:
        return _in_blocks(field, turns, row_T, mask_T, CARDS, False)
    else:
        if tl.load(field + _WAY) == _RANGES:
            card_T, place_T = _in_ranges(field, row_T)
        elif tl.load(field + _TURNS) == _HASHED_TURN:
            card_T, place_T = _in_blocks(field, turns, row_T, mask_T, CARDS, True)
        else:
            card_T, place_T = _in_blocks(field, turns, row_T, mask_T, CARDS, False)
        return card_T, place_T


@triton.jit
def _ranks(a_set, words, counts, row_T, mask_T):
    """(whether rows are in a set, their rank there)."""
    words += tl.load(a_set + _WORDS)
    if tl.load(a_set + _KIND) == _SORTED:
        in_T, rank_T = rank_in_sorted(words, tl.load(a_set + _COUNT), row_T, mask_T)
    else:
        counts += tl.load(a_set + _BLOCK)
        in_T, rank_T = rank_in_bitmap(words, counts, tl.load(a_set + _LOW), tl.load(a_set + _HIGH), row_T, mask_T)
    return in_T, rank_T


@triton.jit
def _find(
    fields, turns, words, counts, rows, starts, handles, flag, record, ids_count,
    CARDS: tl.constexpr, WAYS: tl.constexpr, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Card and place of every lookup, with copies and the overlay; -1 for a row that the table does not have."""
    feature, first, last = ids_of_program(starts, tl.program_id(0), ids_count, 1, FEATURES, BLOCK_F, TILE)
    if feature >= FEATURES:
        return
    field = fields + feature * _FIELDS
    at_T = first + tl.arange(0, TILE)
    mask_T = at_T < last
    row_T = tl.load(rows + at_T, mask=mask_T, other=0).to(tl.int64)
    limit = tl.load(field + _ROWS)
    good_T = mask_T & (row_T >= 0) & (row_T < limit)
    card_T, place_T = _owners(field, turns, row_T, good_T, CARDS, WAYS)
    card_T = card_T.to(tl.int64)
    if tl.load(field + _COPIED + _KIND) != _NOTHING:
        copied_T, rank_T = _ranks(field + _COPIED, words, counts, row_T, good_T)
        card_T = tl.where(copied_T, at_T % CARDS, card_T)
        place_T = tl.where(copied_T, tl.load(field + _COPY_PLACE) + rank_T, place_T)
    if tl.load(field + _OVERLAY + _KIND) != _NOTHING:
        over_T, rank_T = _ranks(field + _OVERLAY, words, counts, row_T, good_T)
        card_T = tl.where(over_T, CARDS, card_T)
        place_T = tl.where(over_T, rank_T, place_T)
    tl.store(handles + at_T, tl.where(good_T, (card_T << _HANDLE) + place_T, -1), mask=mask_T)
    check_ids(rows, fields, feature, limit, tl.where(mask_T & (good_T == 0), at_T, NO_POSITION), flag, record)


@triton.jit
def _lanes(
    meta, bases, meta_bases, field, turns, rows, weights, base, at_L, last_L, limit,
    WEIGHTED: tl.constexpr, CARDS: tl.constexpr, WAYS: tl.constexpr, FOUND: tl.constexpr, FORMAT: tl.constexpr,
    WIDTH: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """A lookup a lane: (distance of its row in bytes, its scale and bias, weighted, whether the table has no such row).

    Where there is none to read, distances of floats are ABSENT. Codes are read without asking, since what they are is scaled
    by 0: they are those of place 0 of a card that has one; but for places that were found before, of which 0 may not exist.
    """
    mask_L = at_L < last_L
    row_L = tl.load(rows + at_L, mask=mask_L, other=0).to(tl.int64)
    if FOUND:
        good_L = mask_L & (row_L >= 0)
        row_L = tl.where(good_L, row_L, 0)
        card_L, place_L = row_L >> _HANDLE, row_L & _PLACE
    else:
        good_L = mask_L & (row_L >= 0) & (row_L < limit)
        card_L, place_L = _owners(field, turns, tl.where(good_L, row_L, 0), good_L, CARDS, WAYS)
    distance_L = tl.load(bases + base + card_L) + place_L * WIDTH
    if PLAIN or FOUND:
        distance_L = tl.where(good_L, distance_L, ABSENT)
    scale_L, bias_L = tl.full(at_L.shape, 1.0, tl.float32), tl.full(at_L.shape, 0.0, tl.float32)
    if not PLAIN:
        meta_L = meta + (tl.load(meta_bases + base + card_L) >> 2)
        scale_L, bias_L = scale_and_bias(first_words(meta_L, place_L, good_L, FORMAT), meta_L, place_L, good_L, FORMAT)
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
    codes, meta, bases, meta_bases, field, turns, rows, offsets, weights, flag, record, fields, feature, first, limit, end,
    exponent, WEIGHTED: tl.constexpr, CARDS: tl.constexpr, WAYS: tl.constexpr, FOUND: tl.constexpr, UNPOOLED: tl.constexpr,
    TILE: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """Sums of bags.

    Where rows lie is worked out a row a lane, for 32 of them at once, and handed to the lanes that load them: done where it is
    needed, it would be done by all lanes that share a row (8 of an int8 row of 128, 32 of an fp32 one), and take as long as
    the loads. Lanes that have the same columns of different rows add up on their own, and are added at the end of a bag.
    """
    PLAIN: tl.constexpr = FORMAT == FP32 or FORMAT == FP16 or FORMAT == BF16
    WIDTH: tl.constexpr = 4 * DIM if FORMAT == FP32 else (2 * DIM if PLAIN else (DIM * BLOCK_H + BLOCK - 1) // BLOCK)
    BESIDE: tl.constexpr = 32 * ROW_ALIGN // BLOCK_H  # rows of codes that lie beside each other in the lanes
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
            meta, bases, meta_bases, field, turns, rows, weights, feature * (CARDS + 1), first_L + k, last_L, limit,
            WEIGHTED, CARDS, WAYS, FOUND, FORMAT, WIDTH, PLAIN,
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
    if FORMAT >= INT4:
        if STRIDE > 1:
            acc += tl.sum(bias_L, 0)
        else:
            acc += over_rows(tl.gather(bias_L, tl.arange(0, TILE), 0), acc)
    return acc


@triton.jit
def _pool(
    codes, meta, bases, meta_bases, fields, turns, rows, ends, offsets, weights, out, targets, flag, record, feature, first,
    each, exponent, MODE: tl.constexpr, WEIGHTED: tl.constexpr, CARDS: tl.constexpr, WAYS: tl.constexpr, FOUND: tl.constexpr,
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
        column, _, _, inside = columns(DIM, BLOCK, BLOCK_H, True)
    else:
        column, inside = plane_columns(DIM, BLOCK_H, BLOCK // BLOCK_H)
    acc = _sum(
        codes, meta, bases, meta_bases, field, turns, rows, offsets, weights, flag, record, fields, feature, first, limit, end,
        exponent, WEIGHTED, CARDS, WAYS, FOUND, UNPOOLED, TILE, STRIDE, DIM, FORMAT, BLOCK, BLOCK_H, ROW_ALIGN,
    )  # fmt: skip
    if MODE == _MEAN:
        acc = acc * over_rows(tl.div_rn(1.0, tl.maximum(last_T - first_T, 1).to(tl.float32)), acc)
    start = tl.multiple_of(tl.load(targets + 2 * feature), ALIGN)
    pitch = tl.multiple_of(tl.load(targets + 2 * feature + 1), ALIGN)
    to = over_rows(bag_T - begin, acc) * pitch + start + column[None]
    tl.store(out + to, acc, mask=over_rows(bag_T < end, acc) & inside[None], cache_modifier=".cs")  # not read again here


@triton.jit
def _serve(
    codes, meta, bases, meta_bases, fields, turns, rows, ends, offsets, weights, out, targets, flag, record, bags, each,
    exponent, MODE: tl.constexpr, WEIGHTED: tl.constexpr, CARDS: tl.constexpr, WAYS: tl.constexpr, FOUND: tl.constexpr,
    UNPOOLED: tl.constexpr,
    EVEN: tl.constexpr, TILE: tl.constexpr, STRIDE: tl.constexpr, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr,
    GROUPS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """GROUPS: (dimension, format, BLOCK, BLOCK_H, alignment of rows) of each kind of table in this launch. EVEN: every feature
    has `each` bags."""
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
                codes, meta, bases, meta_bases, fields, turns, rows, ends, offsets, weights, out, targets, flag, record,
                feature, first, each, exponent, MODE, WEIGHTED, CARDS, WAYS, FOUND, UNPOOLED, TILE, STRIDE,
                GROUPS[g][0], GROUPS[g][1], GROUPS[g][2], GROUPS[g][3], GROUPS[g][4], ALIGN, EVEN,
            )  # fmt: skip


@lru_cache(maxsize=256)
def _constants(kinds: tuple[tuple[int, int], ...], long: bool) -> tuple[int, int, int, tuple[tuple[int, ...], ...]]:
    """(bags of a program, rows of a bag at a time, warps, GROUPS)."""
    groups = tuple((dim, format, *tile_shape(format, dim), row_align(format, dim, long)) for dim, format in kinds)
    return *tiling(max(group[2] for group in groups), long), groups


@functools.cache
def _no_tally() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


def gather_pool(placed: Placed, bags: Bags, out: Tensor) -> Tensor:
    """Look up and pool; writes `out` where `bags` says. Rows that a table does not have are reported, and add nothing."""
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
        (anchor, anchor.view(torch.int32), placed.bases_FC, placed.meta_bases_FC, placed.fields_FN, placed.turns, rows_N,
         bags.ends_F1, offsets, rows_N if bags.weights_N is None else bags.weights_N, out, bags.target_F2, errors.flag,
         errors.record),
        (bags.total, bags.each, EXPONENT),
        (bags.mode, bags.weights_N is not None, placed.cards, placed.ways, placed.sets, bags.offsets_B1 is None, even, tile,
         stride, features, power_of_two(features), groups, bags.align), exact=False, warps=warps,
        registers=REGISTERS if stride == 16 and len(groups) == 1 else None,
    )  # fmt: skip
    return _no_tally()


def _find_all(placed: Placed, rows_N: Tensor, starts_F1: Tensor, features: int) -> Tensor:
    errors, count = error_buffer(rows_N), rows_N.numel()
    handles_N = torch.empty_like(rows_N, dtype=torch.int64)
    if count:
        launch(
            _find, ceil_div(count, TILE_IDS) + features - 1,
            (placed.fields_FN, placed.turns, placed.words, placed.counts, rows_N, starts_F1, handles_N, errors.flag,
             errors.record),
            (count,), (placed.cards, placed.ways, features, power_of_two(features), TILE_IDS), exact=True,
        )  # fmt: skip
    return handles_N
