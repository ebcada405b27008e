"""Long bags of tables with a cache, on a GPU.

A row's first meta word says where its values are, so a row is two trips to memory. The words of the next rows are asked for
before the values of these. The tile is wide (`gpu_device.py`): in a flat one every thread would keep the word and address of
every row, and half as many programs would fit on the card.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline import formats as F
from thermocline.kernels.gpu.bags import NEVER, bag_bounds, check_ids
from thermocline.kernels.gpu.row_tiles import columns, first_words, load_codes, over_rows, scale_and_bias, zeros_of
from thermocline.kernels.gpu.slots import BOTH, is_near, load_cached, load_near_codes, near_scales

_FIELDS, _MEAN = tl.constexpr(F.LAYOUT_FIELDS), tl.constexpr(F.MEAN)
_CODES, _META, _ROWS, _COLUMN = (tl.constexpr(k) for k in (F.CODES, F.META, F.ROWS, F.COLUMN))


@triton.jit
def _known(meta, ids, place_S, last, rows, CHECKED: tl.constexpr, FORMAT: tl.constexpr):
    """(id, is to be read, first meta word) of some places of a bag."""
    mask_S = place_S < last
    id_S = tl.load(ids + place_S, mask=mask_S, other=0).to(tl.int64)
    if CHECKED:
        mask_S = mask_S & (id_S >= 0) & (id_S < rows)
    return id_S, mask_S, first_words(meta, id_S, mask_S, FORMAT)


@triton.jit
def pool_cached(
    codes, meta, values, near, fields, ids, offsets, weights, out, flag, record, ids_count, batch, width,
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
    worst_S = tl.full((STRIDE,), NEVER, tl.int64)
    id_S, mask_S, word_S = _known(meta, ids, place_S, last, rows, CHECKED, FORMAT)
    for _k in range(0, (last - first).to(tl.int32), STRIDE):
        next_id_S, next_mask_S, next_word_S = _known(meta, ids, place_S + STRIDE, last, rows, CHECKED, FORMAT)
        if CHECKED:
            worst_S = tl.minimum(worst_S, tl.where((place_S < last) & (mask_S == 0), place_S, NEVER))
        hit_S = mask_S & (word_S < 0)
        value = load_codes(codes, id_S, mask_S & (word_S >= 0), DIM, FORMAT, BLOCK, BLOCK_H)
        full_S = hit_S
        if CACHED == BOTH:
            full_S = hit_S & (is_near(word_S) == 0)
        value += load_cached(values, word_S, full_S, DIM, BLOCK, BLOCK_H)  # one of the two is zero
        scale_S, add_S = scale_and_bias(word_S, meta, id_S, mask_S, FORMAT)
        scale_S, add_S = tl.where(hit_S, 1.0, scale_S), tl.where(hit_S, 0.0, add_S)
        if CACHED == BOTH:
            near_S = hit_S & is_near(word_S)
            value += load_near_codes(near, word_S, near_S, DIM, BLOCK, BLOCK_H)
            scale_S = tl.where(near_S, near_scales(near, word_S, near_S, DIM), scale_S)
        if WEIGHTED:
            weight_S = tl.load(weights + place_S, mask=mask_S, other=0.0).to(tl.float32)
            scale_S, add_S = scale_S * weight_S, add_S * weight_S
        total += value * over_rows(scale_S, value)
        bias_S += add_S
        place_S += STRIDE
        id_S, mask_S, word_S = next_id_S, next_mask_S, next_word_S
    if CHECKED:
        check_ids(ids, fields, feature, rows, worst_S, flag, record)
    sum_D = tl.sum(total, 0) + tl.sum(bias_S, 0)
    if MODE == _MEAN:
        sum_D = sum_D * tl.div_rn(1.0, tl.maximum(last - first, 1).to(tl.float32))
    column_D, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    start = tl.multiple_of(tl.load(field + _COLUMN), ALIGN)
    at_D = bag.to(tl.int64) * width + start + column_D
    tl.store(out + at_D, sum_D.to(out.dtype.element_ty), mask=inside_D & (bag < batch), cache_modifier=".cs")
