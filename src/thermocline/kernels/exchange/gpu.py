"""Row exchange between ranks on a GPU (definition: `reference.py`): one launch for each function, in which parts are data.

A record of a message begins at any byte. Where all records are whole words, words are copied, else pairs of bytes or bytes.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from thermocline.kernels.gpu.floats import decode_half
from thermocline.kernels.gpu.launch import ceil_div, launch, power_of_two
from thermocline.kernels.gpu.row_tiles import (
    BF16,
    FP8,
    FP16,
    FP32,
    INT8,
    INT8_AFFINE,
    columns,
    load_codes,
    over_columns,
    over_rows,
    scale_and_bias,
    tile_shape,
)
from thermocline.kernels.quantize.reference import TINY

from . import fields as E
from . import reference
from .gpu_routes import distinct_padded, global_rows, locate, route

__all__ = [
    "copy_rows", "distinct_padded", "distinct_rows", "global_rows", "locate", "offsets", "pack_gradients", "pack_rows", "route",
    "unpack_gradients", "unpack_rows",
]  # fmt: skip

ON_DEVICE = True  # sizes of results stay on the device

offsets = reference.offsets

ELEMENTS = 2048  # of a tile

_FIELDS, _ROW_BYTES, _WORDS = tl.constexpr(len(E.FIELDS)), tl.constexpr(E.ROW_BYTES), tl.constexpr(E.WORDS)
_CODES, _META, _DIM = tl.constexpr(E.CODES), tl.constexpr(E.META), tl.constexpr(E.DIM)
_FORMAT, _GRADIENT = tl.constexpr(E.FORMAT), tl.constexpr(E.GRADIENT)

_TINY = tl.constexpr(TINY)

_lines: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _on_host(fields_KF: Tensor) -> list[list[int]]:
    """Fields of parts, which never change, without a wait from the second time on."""
    found: list[list[int]] | None = _lines.get(fields_KF)
    if found is None:
        found = _lines[fields_KF] = fields_KF.tolist()
    return found


def _unit(sizes: list[int]) -> int:
    """The largest of 1, 2 and 4 that divides all sizes."""
    return gcd(4, *sizes)


def _tiling(elements: int) -> tuple[int, int]:
    """(rows, columns) of a tile for rows of at most this number of elements."""
    block = min(power_of_two(max(1, elements)), ELEMENTS // 2)
    return max(1, ELEMENTS // block), block


def distinct_rows(rows_N: Tensor, limit: int, once: bool = True) -> tuple[Tensor, Tensor]:
    """(rows below `limit`, ascending; index of each of `rows_N` among them): each row once, or with repetitions."""
    found_N, inverse_N, number = distinct_padded(rows_N, limit, once)
    return found_N[: int(number)], inverse_N


# -- rows -------------------------------------------------------------------------------------------------------------


@triton.jit
def _as_units(pointer, UNIT: tl.constexpr):
    if UNIT == 4:
        return pointer.to(tl.pointer_type(tl.uint32))
    elif UNIT == 2:
        return pointer.to(tl.pointer_type(tl.uint16))
    else:
        return pointer.to(tl.pointer_type(tl.uint8))


@triton.jit
def _pack_rows(
    meta, codes, fields, part, place, offset, out, count, longest,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask_T = at_T < count
    field_T = fields + tl.load(part + at_T, mask=mask_T, other=0) * _FIELDS
    place_T = tl.load(place + at_T, mask=mask_T, other=0)
    width_T, words_T = tl.load(field_T + _ROW_BYTES) // UNIT, tl.load(field_T + _WORDS) * (4 // UNIT)
    codes_T = _as_units(codes, UNIT) + tl.load(field_T + _CODES) // UNIT + place_T * width_T
    meta_T = _as_units(meta, UNIT) + tl.load(field_T + _META) * (4 // UNIT) + place_T * words_T
    out_T = _as_units(out, UNIT) + tl.load(offset + at_T, mask=mask_T, other=0) // UNIT
    for begin in range(0, longest, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        coded = mask_T[:, None] & (column < width_T[:, None])
        worded = mask_T[:, None] & ~coded & (column < (width_T + words_T)[:, None])
        code = tl.load(codes_T[:, None] + column, mask=coded, other=0)
        word = tl.load(meta_T[:, None] + (column - width_T[:, None]), mask=worded, other=0)
        tl.store(out_T[:, None] + column, tl.where(coded, code, word), mask=coded | worded)


@triton.jit
def _copy_rows(
    message, source, fields, part, offset, out, count, longest, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask_T = at_T < count
    field_T = fields + tl.load(part + at_T, mask=mask_T, other=0) * _FIELDS
    size_T = (tl.load(field_T + _ROW_BYTES) + 4 * tl.load(field_T + _WORDS)) // UNIT
    from_T = _as_units(message, UNIT) + tl.load(source + at_T, mask=mask_T, other=0) // UNIT
    out_T = _as_units(out, UNIT) + tl.load(offset + at_T, mask=mask_T, other=0) // UNIT
    for begin in range(0, longest, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = mask_T[:, None] & (column < size_T[:, None])
        tl.store(out_T[:, None] + column, tl.load(from_T[:, None] + column, mask=mask, other=0), mask=mask)


def _records(fields_KF: Tensor) -> tuple[int, int]:
    """(unit of records, units of the longest record)."""
    lines = _on_host(fields_KF)
    sizes = [line[E.ROW_BYTES] + 4 * line[E.WORDS] for line in lines]
    unit = _unit([line[at] for line in lines for at in (E.ROW_BYTES, E.CODES)])
    return unit, max(sizes) // unit


def pack_rows(
    codes: Tensor, meta: Tensor, fields_KF: Tensor, part_N: Tensor, place_N: Tensor, offset_N: Tensor, out: Tensor
) -> None:
    """Copy rows of an arena, given by part and place, to a message. Codes may be in pinned host memory."""
    count, (unit, longest) = part_N.numel(), _records(fields_KF)
    if count:
        rows, block = _tiling(longest)
        launch(
            _pack_rows, ceil_div(count, rows), (meta, codes, fields_KF, part_N, place_N, offset_N, out), (count, longest),
            (unit, rows, block), exact=True,
        )  # fmt: skip


def copy_rows(
    message: Tensor, from_N: Tensor, fields_KF: Tensor, part_N: Tensor, offset_N: Tensor, out: Tensor
) -> None:  # fmt: skip
    """Copy rows of one message to another."""
    count, (unit, longest) = part_N.numel(), _records(fields_KF)
    if count:
        rows, block = _tiling(longest)
        launch(
            _copy_rows, ceil_div(count, rows), (message, from_N, fields_KF, part_N, offset_N, out), (count, longest),
            (unit, rows, block), exact=True,
        )  # fmt: skip


@triton.jit
def _half_at(pointer, mask, UNIT: tl.constexpr):
    """The 16 bits at each pointer to bytes, as uint32."""
    if UNIT >= 2:
        return tl.load(pointer.to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.uint32)
    else:
        low, high = tl.load(pointer, mask=mask, other=0), tl.load(pointer + 1, mask=mask, other=0)
        return low.to(tl.uint32) | (high.to(tl.uint32) << 8)


@triton.jit
def _word_at(pointer, mask, UNIT: tl.constexpr):
    """The 32 bits at each pointer to bytes, as uint32."""
    if UNIT == 4:
        return tl.load(pointer.to(tl.pointer_type(tl.uint32)), mask=mask, other=0)
    else:
        return _half_at(pointer, mask, UNIT) | (_half_at(pointer + 2, mask, UNIT) << 16)


@triton.jit
def _unpack_rows(
    message, offset, fields, part, target, rows, count,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask_T = at_T < count
    field_T = fields + tl.load(part + at_T, mask=mask_T, other=0) * _FIELDS
    mask_T = mask_T & (tl.load(field_T + _DIM) == DIM) & (tl.load(field_T + _FORMAT) == FORMAT)
    row_T = message + tl.load(offset + at_T, mask=mask_T, other=0)
    column, place_D, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    column, place = over_columns(column), over_columns(place_D)
    row, mask = over_rows(row_T, column), over_rows(mask_T, column) & over_columns(inside_D)
    if FORMAT == FP32:
        value = _word_at(row + 4 * place, mask, UNIT).to(tl.float32, bitcast=True)
    elif FORMAT == FP16 or FORMAT == BF16:
        value = decode_half(_half_at(row + 2 * place, mask, UNIT), FORMAT == BF16)
    else:
        value = load_codes(row, at_T * 0, mask_T, DIM, FORMAT, BLOCK, BLOCK_H)
        meta_T = row_T + tl.load(field_T + _ROW_BYTES)
        word_T = _word_at(meta_T, mask_T, UNIT)
        if FORMAT == INT8_AFFINE:
            scale_T = word_T.to(tl.float32, bitcast=True)
            bias_T = _word_at(meta_T + 4, mask_T, UNIT).to(tl.float32, bitcast=True)
        else:
            scale_T, bias_T = scale_and_bias(word_T, message, at_T, mask_T, FORMAT)
        value = value * over_rows(scale_T, value)
        if FORMAT != FP8 and FORMAT != INT8:
            value += over_rows(bias_T, value)
    out_T = rows.to(tl.pointer_type(tl.float32)) + tl.load(target + at_T, mask=mask_T, other=0) // 4
    tl.store(over_rows(out_T, value) + column, value, mask=mask)


def unpack_rows(message: Tensor, offset_N: Tensor, fields_KF: Tensor, part_N: Tensor, target_N: Tensor, rows: Tensor) -> None:
    """Dequantize rows of a message to byte offsets `target_N` of `rows`."""
    count, (unit, _) = part_N.numel(), _records(fields_KF)
    for dim, format in dict.fromkeys((line[E.DIM], line[E.FORMAT]) for line in _on_host(fields_KF) if count):
        block, block_h = tile_shape(format, dim)
        tile = max(1, min(16, ELEMENTS // block))
        launch(
            _unpack_rows, ceil_div(count, tile), (message, offset_N, fields_KF, part_N, target_N, rows), (count,),
            (dim, format, block, block_h, unit, tile), exact=True,
        )  # fmt: skip


# -- gradients --------------------------------------------------------------------------------------------------------


@triton.jit
def _put_half(pointer, bits, mask, UNIT: tl.constexpr):
    """Store the low 16 bits at each pointer to bytes."""
    if UNIT >= 2:
        tl.store(pointer.to(tl.pointer_type(tl.uint16)), (bits & 0xFFFF).to(tl.uint16), mask=mask)
    else:
        tl.store(pointer, (bits & 0xFF).to(tl.uint8), mask=mask)
        tl.store(pointer + 1, ((bits >> 8) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def _put_word(pointer, bits, mask, UNIT: tl.constexpr):
    if UNIT == 4:
        tl.store(pointer.to(tl.pointer_type(tl.uint32)), bits, mask=mask)
    else:
        _put_half(pointer, bits, mask, UNIT)
        _put_half(pointer + 2, bits >> 16, mask, UNIT)


@triton.jit
def _int8_scale(from_T, dim_T, mask_T, longest, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(scale, one over the scale) of vectors, as int8 rows have them; (NaN, 0) where a value is not finite."""
    size_T = tl.zeros((ROWS,), tl.int32)
    for begin in range(0, longest, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = mask_T[:, None] & (column < dim_T[:, None])
        bits = tl.load(from_T[:, None] + column, mask=mask, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        size_T = tl.maximum(size_T, tl.max(bits, axis=1))
    good_T = size_T <= 0x7F7FFFFF
    scale_T = tl.div_rn(tl.where(good_T, size_T, 0).to(tl.float32, bitcast=True), 127.0 + tl.zeros((ROWS,), tl.float32))
    normal_T = scale_T >= _TINY
    inverse_T = tl.where(normal_T, tl.div_rn(1.0 + tl.zeros((ROWS,), tl.float32), tl.where(normal_T, scale_T, 1.0)), 0.0)
    return tl.where(good_T, tl.where(normal_T, scale_T, 0.0), float("nan")), inverse_T


@triton.jit
def _pack_gradients(
    grads, fields, part, at, offset, out, count, pitch, longest,
    INT8S: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask_T = at_T < count
    field_T = fields + tl.load(part + at_T, mask=mask_T, other=0) * _FIELDS
    dim_T, each_T = tl.load(field_T + _DIM), tl.load(field_T + _GRADIENT)
    from_T = grads + tl.load(at + at_T, mask=mask_T, other=0) * pitch
    out_T = out + tl.load(offset + at_T, mask=mask_T, other=0)
    if INT8S:
        scale_T, inverse_T = _int8_scale(from_T, dim_T, mask_T, longest, ROWS, BLOCK)
        _put_word(out_T + dim_T, scale_T.to(tl.uint32, bitcast=True), mask_T & (each_T == 1), UNIT)
    for begin in range(0, longest, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = mask_T[:, None] & (column < dim_T[:, None])
        bits = tl.load(from_T[:, None] + column, mask=mask, other=0.0).to(tl.uint32, bitcast=True)
        _put_word(out_T[:, None] + 4 * column, bits, mask & (each_T == 4)[:, None], UNIT)
        half = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16  # to nearest, ties to even
        half = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, half)
        _put_half(out_T[:, None] + 2 * column, half, mask & (each_T == 2)[:, None], UNIT)
        if INT8S:
            inverse = inverse_T[:, None]
            scaled = tl.where(inverse > 0.0, bits.to(tl.float32, bitcast=True), 0.0) * inverse
            code = tl.minimum(tl.maximum(tl.floor(scaled + 0.5), -127.0), 127.0).to(tl.int32)
            tl.store(out_T[:, None] + column, (code & 0xFF).to(tl.uint8), mask=mask & (each_T == 1)[:, None])


@triton.jit
def _unpack_gradients(
    message, fields, part, offset, grads, count, pitch,
    INT8S: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask_T = at_T < count
    field_T = fields + tl.load(part + at_T, mask=mask_T, other=0) * _FIELDS
    dim_T, each_T = tl.load(field_T + _DIM), tl.load(field_T + _GRADIENT)
    row_T = message + tl.load(offset + at_T, mask=mask_T, other=0)
    for begin in range(0, pitch, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = mask_T[:, None] & (column < dim_T[:, None])
        wide = _word_at(row_T[:, None] + 4 * column, mask & (each_T == 4)[:, None], UNIT)
        half = _half_at(row_T[:, None] + 2 * column, mask & (each_T == 2)[:, None], UNIT)
        value = tl.where((each_T == 4)[:, None], wide, half << 16).to(tl.float32, bitcast=True)
        if INT8S:
            narrow = mask & (each_T == 1)[:, None]
            code = tl.load(row_T[:, None] + column, mask=narrow, other=0).to(tl.int8, bitcast=True).to(tl.float32)
            scale_T = _word_at(row_T + dim_T, mask_T & (each_T == 1), UNIT).to(tl.float32, bitcast=True)
            value = tl.where(narrow, code * scale_T[:, None], value)
        inside = mask_T[:, None] & (column < pitch)
        tl.store(grads + at_T[:, None] * pitch + column, tl.where(mask, value, 0.0), mask=inside)


def _vectors(fields_KF: Tensor) -> tuple[bool, int]:
    """(whether any vectors are in int8, unit of records)."""
    lines = _on_host(fields_KF)
    unit = _unit([E.vector_bytes(line[E.DIM], line[E.GRADIENT]) for line in lines])
    return any(line[E.GRADIENT] == 1 for line in lines), unit


def pack_gradients(grads_UW: Tensor, fields_KF: Tensor, part_N: Tensor, at_N: Tensor, size: int | None = None) -> Tensor:
    """A message of the gradients of rows `at_N`, whose parts are `part_N`. Waits for its size if that is not given."""
    offset_N, end = offsets(part_N, E.vector_bytes(fields_KF[:, E.DIM], fields_KF[:, E.GRADIENT]))
    out = torch.empty(int(end) if size is None else size, dtype=torch.uint8, device=grads_UW.device)
    count, width, grads_UW = part_N.numel(), grads_UW.shape[1], grads_UW.contiguous()
    if count:
        rows, block = _tiling(width)
        launch(
            _pack_gradients, ceil_div(count, rows), (grads_UW, fields_KF, part_N, at_N, offset_N, out), (count, width, width),
            (*_vectors(fields_KF), rows, block), exact=True,
        )  # fmt: skip
    return out


def unpack_gradients(message: Tensor, fields_KF: Tensor, part_N: Tensor, width: int) -> Tensor:
    """The gradients of a message as fp32, zeros after the columns of a row."""
    offset_N, _ = offsets(part_N, E.vector_bytes(fields_KF[:, E.DIM], fields_KF[:, E.GRADIENT]))
    count = part_N.numel()
    grads_NW = torch.empty(count, width, dtype=torch.float32, device=message.device)
    if count:
        rows, block = _tiling(width)
        launch(
            _unpack_gradients, ceil_div(count, rows), (message, fields_KF, part_N, offset_N, grads_NW), (count, width),
            (*_vectors(fields_KF), rows, block), exact=True,
        )  # fmt: skip
    return grads_NW
