"""Pool long bags of tables with a cache on a GPU.

The first meta word of a row says where its values are, so a row takes two dependent loads. The words of the next rows are
loaded before the values of the current ones. The tile is wide (`gpu/row_tiles.py`): in a flat tile every thread would hold the
word and address of every row, and half as many programs would fit on a multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline import formats as F
from thermocline.kernels.gpu.bags import NO_POSITION, bag_bounds, check_ids
from thermocline.kernels.gpu.row_tiles import columns, first_words, load_codes, over_rows, scale_and_bias, zeros_of
from thermocline.kernels.gpu.slots import BOTH_SLOTS, int8_scales, is_int8_slot, load_fp32_slots, load_int8_codes

_FIELDS, _MEAN = tl.constexpr(F.LAYOUT_FIELDS), tl.constexpr(F.MEAN)
_CODES, _META, _ROWS, _COLUMN = (tl.constexpr(k) for k in (F.CODES, F.META, F.ROWS, F.COLUMN))


@triton.jit
def _load_words(meta, ids, place_S, last, rows, CHECKED: tl.constexpr, FORMAT: tl.constexpr):
    """(id, mask of valid ids, first meta word) of positions of a bag."""
    mask_S = place_S < last
    id_S = tl.load(ids + place_S, mask=mask_S, other=0).to(tl.int64)
    if CHECKED:
        mask_S = mask_S & (id_S >= 0) & (id_S < rows)
    return id_S, mask_S, first_words(meta, id_S, mask_S, FORMAT)


@triton.jit
def pool_cached(
    codes, meta, values, int8_slots, fields, ids, offsets, weights, out, flag, record, ids_count, batch, width,
    feature, bag, MODE: tl.constexpr, WEIGHTED: tl.constexpr, CHECKED: tl.constexpr, STRIDE: tl.constexpr,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, CACHED: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Sum or mean of one long bag, STRIDE rows at a time."""
    field = fields + feature * _FIELDS
    codes += tl.multiple_of(tl.load(field + _CODES), ROW_ALIGN)
    meta += tl.load(field + _META)
    rows = tl.load(field + _ROWS)
    first_T, last_T = bag_bounds(
        offsets, ids_count, feature, bag + tl.arange(0, 1), batch, flag, record, FEATURES, False
    )  # fmt: skip
    first, last = tl.sum(first_T, 0), tl.sum(last_T, 0)
    place_S = first + tl.arange(0, STRIDE)
    total = zeros_of(STRIDE, BLOCK, BLOCK_H)
    bias_S = tl.zeros((STRIDE,), tl.float32)
    first_bad_S = tl.full((STRIDE,), NO_POSITION, tl.int64)
    id_S, mask_S, word_S = _load_words(meta, ids, place_S, last, rows, CHECKED, FORMAT)
    for _k in range(0, (last - first).to(tl.int32), STRIDE):
        next_id_S, next_mask_S, next_word_S = _load_words(meta, ids, place_S + STRIDE, last, rows, CHECKED, FORMAT)
        if CHECKED:
            first_bad_S = tl.minimum(first_bad_S, tl.where((place_S < last) & (mask_S == 0), place_S, NO_POSITION))
        hit_S = mask_S & (word_S < 0)
        value = load_codes(codes, id_S, mask_S & (word_S >= 0), DIM, FORMAT, BLOCK, BLOCK_H)
        fp32_S = hit_S
        if CACHED == BOTH_SLOTS:
            fp32_S = hit_S & (is_int8_slot(word_S) == 0)
        value += load_fp32_slots(values, word_S, fp32_S, DIM, BLOCK, BLOCK_H)  # one of the two is zero
        scale_S, add_S = scale_and_bias(word_S, meta, id_S, mask_S, FORMAT)
        scale_S, add_S = tl.where(hit_S, 1.0, scale_S), tl.where(hit_S, 0.0, add_S)
        if CACHED == BOTH_SLOTS:
            int8_S = hit_S & is_int8_slot(word_S)
            value += load_int8_codes(int8_slots, word_S, int8_S, DIM, BLOCK, BLOCK_H)
            scale_S = tl.where(int8_S, int8_scales(int8_slots, word_S, int8_S, DIM), scale_S)
        if WEIGHTED:
            weight_S = tl.load(weights + place_S, mask=mask_S, other=0.0).to(tl.float32)
            scale_S, add_S = scale_S * weight_S, add_S * weight_S
        total += value * over_rows(scale_S, value)
        bias_S += add_S
        place_S += STRIDE
        id_S, mask_S, word_S = next_id_S, next_mask_S, next_word_S
    if CHECKED:
        check_ids(ids, fields, feature, rows, first_bad_S, flag, record)
    sum_D = tl.sum(total, 0) + tl.sum(bias_S, 0)
    if MODE == _MEAN:
        sum_D = sum_D * tl.div_rn(1.0, tl.maximum(last - first, 1).to(tl.float32))
    column_D, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    start = tl.multiple_of(tl.load(field + _COLUMN), ALIGN)
    at_D = bag.to(tl.int64) * width + start + column_D
    tl.store(out + at_D, sum_D.to(out.dtype.element_ty), mask=inside_D & (bag < batch), cache_modifier=".cs")
