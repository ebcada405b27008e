"""Exchange with the fused row-wise quantized tables of torch and FBGEMM.

`torch.ops.quantized.embedding_bag_byte_prepack`, `..._4bit_prepack` and `..._2bit_prepack` keep a table as one `uint8` matrix.
A row of it is the codes, then the scale, then the bias:

    bits  codes                                                      scale, bias     ours          bytes of a row, both
    8     1 byte a column                                            fp32, fp32      int8_affine   dim + 8
    4     byte j: column 2j in the low bits, 2j + 1 above            fp16, fp16      int4_affine   dim / 2 + 4
    2     byte j: columns 4j to 4j + 3, the first in the low bits    fp16, fp16      int2_affine   dim / 4 + 4

Our affine formats hold the same codes, scale and bias in other places, so import and export only move bits, a block of rows at
a time. Other formats are refused: they would have to be rounded again. So is a negative scale, whose sign bit has another
meaning here. torch's 4- and 2-bit packers write such scales for constant rows; `requantize_negative=True` quantizes those rows
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput, FormatError
from thermocline.kernels import quantize_rows
from thermocline.kernels.quantize import reference

FORMAT_OF_BITS = {8: F.INT8_AFFINE, 4: F.INT4_AFFINE, 2: F.INT2_AFFINE}
_BLOCK_BYTES = 1 << 22


def export_fused(codes_RB: Tensor, meta_RW: Tensor, format: int, dim: int) -> Tensor:
    """A table of an affine format as a fused table, bit for bit."""
    check_format(format)
    _check_dim(format, dim)
    rows, width, words = codes_RB.shape[0], F.row_bytes(format, dim), F.META_WORDS[format]
    if tuple(codes_RB.shape) != (rows, width) or tuple(meta_RW.shape) != (rows, words):
        message = f"codes are {tuple(codes_RB.shape)}, meta {tuple(meta_RW.shape)}; {width} bytes and {words} words a row fit"
        raise BadInput(message, parameter="codes", needed=(width, words))
    packed = torch.empty((rows, width + 4 * words), dtype=torch.uint8, device=codes_RB.device)
    for block in _blocks(packed):
        packed[block, :width] = _repack(codes_RB[block], format, 1)  # planes -> neighbouring columns in a byte
        packed[block, width:] = _swap(meta_RW[block], format).view(torch.uint8)
    return packed


def check_format(format: int) -> None:
    """Refuse formats that have no fused form."""
    if format not in FORMAT_OF_BITS.values():
        names = ", ".join(F.NAMES[f] for f in FORMAT_OF_BITS.values())
        message = f"{F.NAMES[format]} rows have no fused form; convert the table to one of {names} first"
        raise FormatError(message, parameter="precision", value=F.NAMES[format])


def check_fused(packed: Tensor, format: int, dim: int | None = None, negative: bool = False) -> int:
    """The dimension of a fused table, after its shape and every scale and bias were checked."""
    if packed.dim() != 2 or packed.dtype != torch.uint8:
        message = f"a fused table is a 2-D uint8 tensor, not {packed.dim()}-D {packed.dtype}"
        raise BadInput(message, parameter="packed", value=packed.dtype)
    tail = 4 * F.META_WORDS[format]
    held = (packed.shape[1] - tail) * F.planes(format)
    if held < 1:
        message = f"fused rows are {packed.shape[1]} bytes; scale and bias take {tail} of them, which leaves no codes"
        raise FormatError(message, parameter="packed", value=packed.shape[1], needed=tail + 1)
    _check_dim(format, held if dim is None else dim)
    if dim not in (None, held):
        message = f"fused rows are {packed.shape[1]} bytes, {held} columns of {F.BITS[format]} bits; dimension {dim} was named"
        raise FormatError(message, parameter="dim", value=dim, available=held)
    for block in _blocks(packed):
        _check_meta(_floats(packed[block, -tail:], format), negative, block.start)
    return held


def unpack_into(packed: Tensor, format: int, codes_RB: Tensor, meta_RW: Tensor) -> None:
    """Write a fused table, which `check_fused` accepted, to codes and meta words."""
    width = codes_RB.shape[1]
    for block in _blocks(packed):
        codes_RB[block] = _repack(packed[block, :width], format, 2)  # and back
        floats_N2 = _floats(packed[block, width:], format)
        meta_RW[block] = _swap(floats_N2.view(torch.int32), format)
        negative_N = torch.signbit(floats_N2[:, 0]).nonzero()[:, 0] + block.start
        if negative_N.numel():
            values_ND = reference.dequantize_rows(codes_RB[negative_N], meta_RW[negative_N], format, width * F.planes(format))
            codes_RB[negative_N], meta_RW[negative_N] = quantize_rows(values_ND, format)


def _blocks(packed: Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK_BYTES // max(1, packed.shape[1]))
    return (slice(first, min(first + rows, packed.shape[0])) for first in range(0, packed.shape[0], rows))


def _repack(bytes_RB: Tensor, format: int, axis: int) -> Tensor:
    """Take codes out of their bytes along `axis` of [rows, ..., ...] and put them back along the other."""
    planes, bits = F.planes(format), F.BITS[format]
    if planes == 1:
        return bytes_RB
    rows, width = bytes_RB.shape
    codes = torch.stack([(bytes_RB >> (bits * p)) & F.levels(format) for p in range(planes)], dim=axis)
    shape, other = ((rows, planes, width), 1) if axis == 2 else ((rows, width, planes), 2)
    return reduce(torch.bitwise_or, (plane << (bits * p) for p, plane in enumerate(codes.reshape(shape).unbind(other))))


def _swap(meta_RW: Tensor, format: int) -> Tensor:
    """fp16 scale and bias in the order of the other form: a fused word has the scale in its low half, ours above."""
    if format == F.INT8_AFFINE:
        return meta_RW.contiguous()
    return meta_RW.contiguous().view(torch.int16).flip(1).view(torch.int32)


def _check_dim(format: int, dim: int) -> None:
    planes = F.planes(format)
    if not 1 <= dim <= F.MAX_DIM:
        message = f"fused rows have {dim} columns; rows hold 1 to {F.MAX_DIM}"
        raise FormatError(message, parameter="dim", value=dim, available=F.MAX_DIM)
    if dim % planes:
        needed = -(-dim // planes) * planes
        message = f"dimension {dim} does not fill whole bytes of {planes} columns; use {needed} columns, or 8 bits"
        raise FormatError(message, parameter="dim", value=dim, needed=needed)


def _floats(tail_NB: Tensor, format: int) -> Tensor:
    """(scale, bias) of fused rows. Copied, because in a fused row they lie at any address."""
    dtype = torch.float32 if format == F.INT8_AFFINE else torch.float16
    return tail_NB.clone(memory_format=torch.contiguous_format).view(dtype)


def _check_meta(both_N2: Tensor, negative: bool, first: int) -> None:
    finite_N = torch.isfinite(both_N2).all(dim=1)
    good_N = finite_N if negative else finite_N & ~torch.signbit(both_N2[:, 0])
    if bool(good_N.all()):
        return
    row = int((~good_N).nonzero()[0])
    scale, bias = both_N2[row].tolist()
    finite = bool(finite_N[row])
    way = (
        "the scale must not be negative; requantize_negative=True quantizes such rows again" if finite else "use finite values"
    )
    message = f"row {first + row} of the fused table has scale {scale:g} and bias {bias:g}; {way}"
    raise FormatError(message, row=first + row, finite=finite)
