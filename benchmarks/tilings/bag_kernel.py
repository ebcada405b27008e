"""Sum or mean of bags on a GPU: a warp takes a few bags of one feature in turn, with accumulators in lanes.

A program serves `bags` consecutive bags of one feature, so that its fields, its checks and its error report cost once for all
of them. Their lookups are consecutive, and 32 of them are prepared at once, one a lane: a lane loads and checks an id, loads
the meta word and decodes the scale. Rows are then summed bag by bag, ROWS at a time; ids, words and scales come from their
lanes by shuffles. A tile is [ROWS, columns / WIDTH, WIDTH], four columns a lane, so WIDTH / 4 lanes share a row. Every lane
keeps its own sums until the end of a bag. Codes become fp32 by a byte permutation and an exact subtraction instead of a
conversion instruction. Rejected: ids and words loaded by every lane that shares a row (33 instead of 23 instructions a row of
128 columns, beside checks).
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from thermocline import formats as F
from thermocline.kernels.gpu import row_tiles as R
from thermocline.kernels.gpu import slots as S
from thermocline.kernels.gpu.bags import NO_POSITION, bag_bounds, check_ids
from thermocline.kernels.gpu.floats import decode_fp8, decode_half

_FIELDS, _MEAN = tl.constexpr(F.LAYOUT_FIELDS), tl.constexpr(F.MEAN)
_CODES, _META, _ROWS, _DIM, _FORMAT, _COLUMN = (tl.constexpr(k) for k in (F.CODES, F.META, F.ROWS, F.DIM, F.FORMAT, F.COLUMN))
MOST_BAGS = 32  # of a program
_MOST, _LANES = tl.constexpr(MOST_BAGS), tl.constexpr(32)
_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


def _widen(take: str, zero: float) -> str:
    """PTX: four bytes of $4, after `take`, as fp32 minus `zero`. 0x4B0000xx is 2**23 + xx."""
    lines = [".reg .b32 x;", take]
    lines += [f"prmt.b32 ${k}, x, 0x4B000000, 0x744{k}; sub.f32 ${k}, ${k}, 0f{_hex(8388608.0 + zero)};" for k in range(4)]
    return "{" + " ".join(lines) + "}"


def _hex(value: float) -> str:
    return struct.pack(">f", value).hex().upper()


_SIGNED = tl.constexpr(_widen("xor.b32 x, $4, 0x80808080;", 128.0))
_UNSIGNED = tl.constexpr(_widen("mov.b32 x, $4;", 0.0))
_HALVES = tl.constexpr(tuple(_widen(f"shr.b32 x, $4, {4 * k}; and.b32 x, x, 0x0F0F0F0F;", 0.0) for k in range(2)))
_QUARTERS = tl.constexpr(tuple(_widen(f"shr.b32 x, $4, {2 * k}; and.b32 x, x, 0x03030303;", 0.0) for k in range(4)))


@triton.jit
def _prefetch(address):
    """Ask for the sectors at these addresses."""
    if _COMPILED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _converted(byte, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(PTX, "=r,=r,=r,=r,r", [byte], dtype=tl.float32, is_pure=True, pack=4)


@triton.jit
def _plane(byte, PLANE: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr, CONVERT: tl.constexpr):
    """Codes of one plane as fp32."""
    if FORMAT == R.FP8:
        return decode_fp8(byte.to(tl.uint32))
    elif FORMAT == R.INT8:
        if CONVERT:
            return _converted(byte, _SIGNED)
        else:
            return byte.to(tl.int8, bitcast=True).to(tl.float32)
    elif PLANES == 1:
        if CONVERT:
            return _converted(byte, _UNSIGNED)
        else:
            return byte.to(tl.float32)
    elif PLANES == 2:
        if CONVERT:
            HALF: tl.constexpr = _HALVES[PLANE]
            return _converted(byte, HALF)
        else:
            return ((byte >> (4 * PLANE)) & 15).to(tl.float32)
    else:
        if CONVERT:
            QUARTER: tl.constexpr = _QUARTERS[PLANE]
            return _converted(byte, QUARTER)
        else:
            return ((byte >> (2 * PLANE)) & 3).to(tl.float32)


@triton.jit
def _prepare(
    codes, meta, values, ids, weights, begin, end, rows, bad_L, WEIGHTED: tl.constexpr, CHECKED: tl.constexpr,
    BYTES: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr, CACHED: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """(ids, first meta words, scales and biases times weights, weights, bad ids) of the next lookups, one a lane.

    A bad id becomes row 0 with a scale, a bias and a weight of 0.
    """
    WORDS: tl.constexpr = 2 if FORMAT == R.INT8_AFFINE else 1
    place_L = begin + tl.arange(0, _LANES)
    good_L = place_L < end
    id_L = tl.load(ids + place_L, mask=good_L, other=0).to(tl.int64)
    if CHECKED:
        bad = good_L & ((id_L < 0) | (id_L >= rows))
        bad_L |= bad.to(tl.int32)
        good_L = good_L & (bad == 0)
        id_L = tl.where(good_L, id_L, 0)
    weight_L = good_L.to(tl.float32)
    if WEIGHTED:
        weight_L = tl.load(weights + place_L, mask=good_L, other=0.0).to(tl.float32)
    word_L, scale_L, add_L = id_L.to(tl.int32), weight_L, weight_L
    if FORMAT > R.BF16:
        word_L = tl.load(meta + WORDS * id_L, mask=good_L, other=0)
        scale_L, add_L = R.scale_and_bias(word_L, meta, id_L, good_L, FORMAT)
        if CACHED:
            scale_L, add_L = tl.where(word_L < 0, 0.0, scale_L), tl.where(word_L < 0, 0.0, add_L)
        if WEIGHTED:
            scale_L, add_L = scale_L * weight_L, add_L * weight_L
    if FETCH:
        address_L = codes.to(tl.int64) + id_L * BYTES
        if CACHED:
            address_L = tl.where(word_L < 0, values.to(tl.int64) + 4 * S.fp32_offset(word_L, DIM), address_L)
        _prefetch(address_L)
        if BYTES > 32:
            _prefetch(address_L + (BYTES - 1))
    return id_L.to(tl.uint32), word_L, scale_L, add_L, weight_L, bad_L


@triton.jit
def _slots(values, area, word_S, hit_S, column, inside, DIM: tl.constexpr, CACHED: tl.constexpr):
    """Some columns of rows in slots, and 0 for others."""
    fp32_S = hit_S
    if CACHED == S.BOTH_SLOTS:
        fp32_S = hit_S & (S.is_int8_slot(word_S) == 0)
    at = S.fp32_offset(word_S, DIM)[:, None, None] + column
    value = tl.load(values + at, mask=fp32_S[:, None, None] & inside, other=0.0)
    if CACHED == S.BOTH_SLOTS:
        int8_S = hit_S & S.is_int8_slot(word_S)
        code = tl.load(S._int8_codes(area, word_S, DIM)[:, None, None] + column, mask=int8_S[:, None, None] & inside, other=0)
        value += code.to(tl.float32) * S.int8_scales(area, word_S, int8_S, DIM)[:, None, None]
    return value


@triton.jit
def _store(at, column, inside, total, add, factor):
    """Store a plane of the sums of a bag."""
    sums = (tl.sum(total, 0) + add) * factor
    tl.store(at + column, sums.to(at.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def _add_slots(
    total, total1, total2, total3, values, area, word_S, hit_S, weight_S, column, inside, DIM: tl.constexpr, H: tl.constexpr,
    PLANES: tl.constexpr, WEIGHTED: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """Add rows in slots to the sums of all planes."""
    weight = weight_S[:, None, None]
    for plane in tl.static_range(PLANES):
        within = inside
        if PLANES > 1:
            within = inside & (column + plane * H < DIM)
        value = _slots(values, area, word_S, hit_S, column + plane * H, within, DIM, CACHED)
        if WEIGHTED:
            value = value * weight
        if plane == 0:
            total += value
        elif plane == 1:
            total1 += value
        elif plane == 2:
            total2 += value
        else:
            total3 += value
    return total, total1, total2, total3


@triton.jit
def _add_quantized(
    total, total1, total2, total3, bias_S, stored, values, area, id_S, mask_S, index_S, word_L, scale_L, add_L, weight_L,
    column, inside, WEIGHTED: tl.constexpr, DIM: tl.constexpr, H: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr,
    CACHED: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Add a tile of quantized rows, or of their slots, to the sums of all planes."""
    plain = inside
    if CACHED:
        word_S = tl.gather(word_L, index_S, 0)
        plain = inside & (word_S >= 0)[:, None, None]
    # Loaded before the rows in slots, and used after them. What other lanes hold is multiplied by zero.
    byte = tl.load(stored + (id_S * H)[:, None, None] + column, mask=plain)
    if CACHED:
        hit_S = mask_S & (word_S < 0)
        if tl.max(tl.max(tl.max(hit_S[:, None, None].to(tl.int32), 0), 0), 0) > 0:
            weight_S = scale_L
            if WEIGHTED:
                weight_S = tl.gather(weight_L, index_S, 0)
            total, total1, total2, total3 = _add_slots(
                total, total1, total2, total3, values, area, word_S, hit_S, weight_S, column, inside, DIM, H, PLANES, WEIGHTED,
                CACHED,
            )  # fmt: skip
    scale = tl.where(mask_S, tl.gather(scale_L, index_S, 0), 0.0)[:, None, None]
    total += _plane(byte, 0, FORMAT, PLANES, CONVERT) * scale
    if PLANES > 1:
        total1 += _plane(byte, 1, FORMAT, PLANES, CONVERT) * scale
    if PLANES > 2:
        total2 += _plane(byte, 2, FORMAT, PLANES, CONVERT) * scale
        total3 += _plane(byte, 3, FORMAT, PLANES, CONVERT) * scale
    if FORMAT >= R.INT4:
        bias_S += tl.where(mask_S, tl.gather(add_L, index_S, 0), 0.0)
    return total, total1, total2, total3, bias_S


@triton.jit
def _add_floats(
    total, stored, id_S, mask_S, index_S, weight_L, column, inside, WEIGHTED: tl.constexpr, CHECKED: tl.constexpr,
    DIM: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Add a tile of rows without codes to the sums."""
    if WEIGHTED or CHECKED:
        weight_S = tl.gather(weight_L, index_S, 0)
        mask_S = mask_S & (weight_S != 0.0)
    value = tl.load(stored + (id_S * DIM)[:, None, None] + column, mask=mask_S[:, None, None] & inside, other=0)
    if FORMAT == R.FP16:
        value = value.to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == R.BF16:
        value = decode_half(value.to(tl.uint32), True)
    if WEIGHTED:
        value = value * weight_S[:, None, None]
    return total + value


@triton.jit
def _store_planes(
    at, total, total1, total2, total3, bias_S, j, length, MODE: tl.constexpr, DIM: tl.constexpr, H: tl.constexpr,
    FORMAT: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Reduce the lanes and store a bag."""
    add, factor = 0.0, 1.0
    if FORMAT >= R.INT4:
        add = tl.sum(bias_S, 0)
    if MODE == _MEAN:
        factor = tl.div_rn(1.0, tl.maximum(length, 1).to(tl.float32))
    _store(at, j, j < H, total, add, factor)
    if PLANES > 1:
        _store(at, j + H, (j < H) & (j + H < DIM), total1, add, factor)
    if PLANES > 2:
        _store(at, j + 2 * H, (j < H) & (j + 2 * H < DIM), total2, add, factor)
        _store(at, j + 3 * H, (j < H) & (j + 3 * H < DIM), total3, add, factor)


@triton.jit
def _typed(codes, FORMAT: tl.constexpr):
    """A pointer to the elements of rows."""
    if FORMAT == R.FP32:
        return codes.to(tl.pointer_type(tl.float32))
    elif FORMAT == R.FP16 or FORMAT == R.BF16:
        return codes.to(tl.pointer_type(tl.uint16))
    else:
        return codes


@triton.jit
def pool_bags(
    codes, meta, values, area, fields, ids, offsets, weights, out, flag, record, ids_count, batch, width, bags,
    features, feature, first, MODE: tl.constexpr, WEIGHTED: tl.constexpr, CHECKED: tl.constexpr, ROWS: tl.constexpr,
    FETCH: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK_H: tl.constexpr, PLANES: tl.constexpr,
    WIDTH: tl.constexpr, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, CACHED: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Bags `first` to `first + bags` of a feature."""
    H: tl.constexpr = (DIM + PLANES - 1) // PLANES
    BYTES: tl.constexpr = H if FORMAT > R.BF16 else (4 * DIM if FORMAT == R.FP32 else 2 * DIM)
    field = fields + feature * _FIELDS
    codes += tl.multiple_of(tl.load(field + _CODES), ROW_ALIGN)
    meta += tl.load(field + _META)
    rows = tl.load(field + _ROWS)
    until = tl.minimum(first + bags, batch)
    if CHECKED:
        bag_B = first.to(tl.int64) + tl.arange(0, _MOST)
        bag_bounds(offsets, ids_count, feature, bag_B, batch, flag, record, features, False, until)
    offsets += feature.to(tl.int64) * batch
    stored = _typed(codes, FORMAT)
    j = tl.arange(0, BLOCK_H // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    column, inside, lane_S = j[None], (j < H)[None], tl.arange(0, ROWS)
    start = tl.maximum(tl.load(offsets + first), 0).to(ids_count.dtype)
    end = tl.minimum(tl.load(offsets + until), ids_count).to(ids_count.dtype)
    ready = start  # end of the lookups that lanes hold
    bad_L = tl.zeros((_LANES,), tl.int32)
    id_L, word_L = bad_L.to(tl.uint32), bad_L
    scale_L = bad_L.to(tl.float32)
    add_L, weight_L = scale_L, scale_L
    at = out + (first.to(tl.int64) * width + tl.multiple_of(tl.load(field + _COLUMN), ALIGN))
    for bag in range(first, until):
        begin, last = tl.load(offsets + bag), tl.load(offsets + bag + 1)
        last = tl.where((begin >= 0) & (last <= ids_count), last, begin).to(ids_count.dtype)
        begin = begin.to(ids_count.dtype)
        total = tl.zeros((ROWS, BLOCK_H // WIDTH, WIDTH), tl.float32)
        total1, total2, total3, bias_S = total, total, total, tl.zeros((ROWS,), tl.float32)
        for place in range(begin, last, ROWS):
            if (tl.minimum(place + ROWS, last) > ready) | (place < ready - _LANES):
                id_L, word_L, scale_L, add_L, weight_L, bad_L = _prepare(
                    codes, meta, values, ids, weights, place, end, rows, bad_L, WEIGHTED, CHECKED, BYTES, DIM, FORMAT, CACHED,
                    FETCH,
                )  # fmt: skip
                ready = place + _LANES
            mask_S = place + lane_S < last
            index_S = (place - (ready - _LANES) + lane_S) & (_LANES - 1)
            id_S = tl.gather(id_L, index_S, 0).to(tl.int64)
            if FORMAT > R.BF16:
                total, total1, total2, total3, bias_S = _add_quantized(
                    total, total1, total2, total3, bias_S, stored, values, area, id_S, mask_S, index_S, word_L, scale_L, add_L,
                    weight_L, column, inside, WEIGHTED, DIM, H, FORMAT, PLANES, CACHED, CONVERT and _COMPILED,
                )  # fmt: skip
            else:
                total = _add_floats(
                    total, stored, id_S, mask_S, index_S, weight_L, column, inside, WEIGHTED, CHECKED, DIM, FORMAT
                )  # fmt: skip
        _store_planes(at, total, total1, total2, total3, bias_S, j, last - begin, MODE, DIM, H, FORMAT, PLANES)
        at += width
    if CHECKED:
        if tl.max(bad_L, 0) > 0:
            _report_ids(ids, fields, feature, rows, start, end, flag, record)


@triton.jit
def _report_ids(ids, fields, feature, rows, start, end, flag, record):
    """Report the first bad id from `start` on."""
    first_bad = tl.full((_LANES,), NO_POSITION, tl.int64)
    for place in range(start, end, _LANES):
        place_W = tl.arange(0, _LANES).to(tl.int64) + place
        mask_W = place_W < end
        id_W = tl.load(ids + place_W, mask=mask_W, other=0).to(tl.int64)
        first_bad = tl.minimum(first_bad, tl.where(mask_W & ((id_W < 0) | (id_W >= rows)), place_W, NO_POSITION))
    check_ids(ids, fields, feature, rows, first_bad, flag, record)


@triton.jit(do_not_specialize=["ids_count", "batch", "bags", "features"])
def gather_bags(
    meta, codes, values, area, fields, chosen, ids, offsets, weights, out, flag, record, ids_count, batch, width, bags,
    features,
    MODE: tl.constexpr, WEIGHTED: tl.constexpr, CHECKED: tl.constexpr, FETCH: tl.constexpr, CONVERT: tl.constexpr,
    CHOSEN: tl.constexpr, GROUPS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """GROUPS: `groups_of` the tables of this launch. CHOSEN: `chosen` lists its features, else it serves all."""
    tiles = tl.cdiv(batch, bags)
    feature = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles) * bags
    if CHOSEN:
        feature = tl.load(chosen + feature)
    if len(GROUPS) > 1:
        dim = tl.load(fields + feature * _FIELDS + _DIM)
        format = tl.load(fields + feature * _FIELDS + _FORMAT)
    for g in tl.static_range(len(GROUPS)):
        if len(GROUPS) == 1 or ((dim == GROUPS[g][0]) & (format == GROUPS[g][1])):
            pool_bags(
                codes, meta, values, area, fields, ids, offsets, weights, out, flag, record, ids_count, batch, width, bags,
                features, feature, first, MODE, WEIGHTED, CHECKED, GROUPS[g][5], FETCH, GROUPS[g][0], GROUPS[g][1],
                GROUPS[g][2], GROUPS[g][3], GROUPS[g][4], ALIGN, GROUPS[g][6], GROUPS[g][7], CONVERT,
            )  # fmt: skip
