"""Exchange with the fused row-wise quantized tables of torch and FBGEMM.

`torch.ops.quantized.embedding_bag_byte_prepack`, `..._4bit_prepack` and `..._2bit_prepack` (and FBGEMM's functions
behind them) keep a table as one `uint8` matrix. A row of it is the codes, then the scale, then the bias:

    bits  codes                                                      scale, bias     ours          bytes of a row, both
    8     1 byte a column                                            fp32, fp32      int8_affine   dim + 8
    4     byte j: column 2j in the low bits, 2j + 1 above            fp16, fp16      int4_affine   dim / 2 + 4
    2     byte j: columns 4j to 4j + 3, the first in the low bits    fp16, fp16      int2_affine   dim / 4 + 4

Our affine formats hold the same codes and the same scale and bias, bit for bit, in other places: metadata beside the
codes, the sub-byte codes in planes (`formats.py`). So import and export only move bits, and an imported table
is a table like any other: it can be looked up and trained. Training it costs the optimizer's state and nothing else;
the rows stay the size above.

Only affine formats are exported: what other formats hold (a code of -127, a bf16 scale) has no place in a fused row, so
it would be rounded again, silently. `to_fused` quantizes fp32 rows for those who want that. Its rows are ours, not the
packers': the range is the same, but the bias is rounded down and the scale up where torch rounds both to nearest.

The sign bit of a scale has another meaning in our rows, so a negative scale is refused. torch's 4- and 2-bit packers do
write them: for a constant row, whose bias they may round above its only value. `requantize_negative=True` quantizes
such rows again; their codes change, their values by less than the packer's own rounding did.

Large tables are worked on in blocks of rows, so beside the table and its copy in the other form there is little else in
memory. FBGEMM's inference operators (`IntNBitTableBatchedEmbeddingBags`) keep scale and bias in front of the codes: not
this format.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput, FormatError
from thermocline.kernels import quantize_rows
from thermocline.kernels.quantize import reference

FORMAT_OF_BITS = {8: F.INT8_AFFINE, 4: F.INT4_AFFINE, 2: F.INT2_AFFINE}
_BLOCK_BYTES = 1 << 22


def import_fused(
    packed: Tensor, bits: int, dim: int | None = None, requantize_negative: bool = False
) -> tuple[Tensor, Tensor, int, int]:
    """A fused table as (codes, meta, format, dim) of an affine format, bit for bit. `dim` is checked where given."""
    format = _format_of_bits(bits)
    dim = check_fused(packed, format, dim, requantize_negative)
    rows = packed.shape[0]
    codes_RB = torch.empty((rows, F.row_bytes(format, dim)), dtype=torch.uint8, device=packed.device)
    meta_RW = torch.empty((rows, F.META_WORDS[format]), dtype=torch.int32, device=packed.device)
    unpack_into(packed, format, codes_RB, meta_RW)
    return codes_RB, meta_RW, format, dim


def export_fused(codes_RB: Tensor, meta_RW: Tensor, format: int, dim: int) -> Tensor:
    """A table of an affine format as a fused table, bit for bit."""
    check_format(format)
    _check_dim(format, dim)
    rows, width, words = codes_RB.shape[0], F.row_bytes(format, dim), F.META_WORDS[format]
    if tuple(codes_RB.shape) != (rows, width) or tuple(meta_RW.shape) != (rows, words):
        raise BadInput(
            f"codes are {tuple(codes_RB.shape)} and meta {tuple(meta_RW.shape)}; "
            f"{F.NAMES[format]} of dimension {dim} has {width} bytes and {words} words a row",
            parameter="codes",
            needed=(width, words),
        )
    packed = torch.empty((rows, width + 4 * words), dtype=torch.uint8, device=codes_RB.device)
    for block in _blocks(packed):
        packed[block, :width] = _interleave(codes_RB[block], format)
        packed[block, width:] = _swap(meta_RW[block], format).view(torch.uint8)
    return packed


def to_fused(values_ND: Tensor, bits: int) -> Tensor:
    """fp32 rows, quantized to nearest and packed as a fused table."""
    format = _format_of_bits(bits)
    return export_fused(*quantize_rows(values_ND, format), format, values_ND.shape[1])


def check_format(format: int) -> None:
    """Refuse formats that have no fused form."""
    if format not in FORMAT_OF_BITS.values():
        names = ", ".join(F.NAMES[f] for f in FORMAT_OF_BITS.values())
        raise FormatError(
            f"{F.NAMES[format]} rows have no fused form; {names} rows have. Convert the table to one of these first, "
            "or read its rows and give them to to_fused, which rounds them again.",
            parameter="precision",
            value=F.NAMES[format],
        )


def check_fused(packed: Tensor, format: int, dim: int | None = None, negative: bool = False) -> int:
    """The dimension of a fused table, after a look at its shape and at every scale and bias."""
    if packed.dim() != 2 or packed.dtype != torch.uint8:
        message = f"a fused table is a 2-D uint8 tensor, not {packed.dim()}-D {packed.dtype}"
        raise BadInput(message, parameter="packed", value=packed.dtype)
    tail = 4 * F.META_WORDS[format]
    held = (packed.shape[1] - tail) * F.planes(format)
    if held < 1:
        message = f"fused rows are {packed.shape[1]} bytes; scale and bias take {tail} of them, which leaves no codes"
        raise FormatError(message, parameter="packed", value=packed.shape[1], needed=tail + 1)
    if dim is not None:
        _check_dim(format, dim)
    if dim is not None and dim != held:
        raise FormatError(
            f"fused rows are {packed.shape[1]} bytes: {held} columns of {F.BITS[format]} bits, a scale and a bias. "
            f"Dimension {dim} was named. Check the number of bits, or pass the table without padding.",
            parameter="dim",
            value=dim,
            available=held,
        )
    _check_dim(format, held)
    for block in _blocks(packed):
        _check_meta(_floats(packed[block, -tail:], format), negative, block.start)
    return held


def unpack_into(packed: Tensor, format: int, codes_RB: Tensor, meta_RW: Tensor) -> None:
    """Write a fused table that `check_fused` passed to codes and meta of our own."""
    width = codes_RB.shape[1]
    for block in _blocks(packed):
        codes_RB[block] = _planes(packed[block, :width], format)
        floats_N2 = _floats(packed[block, width:], format)
        meta_RW[block] = _swap(floats_N2.view(torch.int32), format)
        negative_N = torch.signbit(floats_N2[:, 0]).nonzero()[:, 0] + block.start
        if negative_N.numel():
            values_ND = reference.dequantize_rows(codes_RB[negative_N], meta_RW[negative_N], format, width * F.planes(format))
            codes_RB[negative_N], meta_RW[negative_N] = quantize_rows(values_ND, format)


def _blocks(packed: Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK_BYTES // max(1, packed.shape[1]))
    return (slice(first, min(first + rows, packed.shape[0])) for first in range(0, packed.shape[0], rows))


def _planes(bytes_RB: Tensor, format: int) -> Tensor:
    """Neighbouring columns in a byte -> planes."""
    return _repack(bytes_RB, format, 2)


def _interleave(bytes_RB: Tensor, format: int) -> Tensor:
    """Planes -> neighbouring columns in a byte."""
    return _repack(bytes_RB, format, 1)


def _repack(bytes_RB: Tensor, format: int, axis: int) -> Tensor:
    """Take codes out of their bytes along `axis` of [rows, ..., ...] and put them back along the other."""
    planes, bits = F.planes(format), F.BITS[format]
    if planes == 1:
        return bytes_RB
    rows, width = bytes_RB.shape
    codes = torch.stack([(bytes_RB >> (bits * p)) & F.levels(format) for p in range(planes)], dim=axis)
    shape, other = ((rows, planes, width), 1) if axis == 2 else ((rows, width, planes), 2)
    by_plane = codes.reshape(shape).unbind(other)
    packed_RB = by_plane[0].clone()
    for p in range(1, planes):
        packed_RB |= by_plane[p] << (bits * p)
    return packed_RB


def _swap(meta_RW: Tensor, format: int) -> Tensor:
    """fp16 scale and bias in the order of the other form: a fused word has the scale in its low half, ours above."""
    if format == F.INT8_AFFINE:
        return meta_RW.contiguous()
    return meta_RW.contiguous().view(torch.int16).flip(1).view(torch.int32)


def _format_of_bits(bits: int) -> int:
    if bits not in FORMAT_OF_BITS:
        raise BadInput(f"fused tables have 8, 4 or 2 bits a column, not {bits}", parameter="bits", value=bits)
    return FORMAT_OF_BITS[bits]


def _check_dim(format: int, dim: int) -> None:
    planes = F.planes(format)
    if not 1 <= dim <= F.MAX_DIM:
        message = f"fused rows have {dim} columns; rows hold 1 to {F.MAX_DIM}"
        raise FormatError(message, parameter="dim", value=dim, available=F.MAX_DIM)
    if dim % planes:
        raise FormatError(
            f"dimension {dim} does not fill whole bytes of {planes} columns; fused rows of {F.BITS[format]} bits must. "
            f"Use a table of {-(-dim // planes) * planes} columns, or 8 bits, which take any dimension.",
            parameter="dim",
            value=dim,
            needed=-(-dim // planes) * planes,
        )


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
    found = f"row {first + row} of the fused table has scale {scale:g} and bias {bias:g}; "
    if not bool(finite_N[row]):
        message = "both must be finite. The packer met NaN, or values its float type cannot hold."
    else:
        message = (
            "a scale must not be negative, though torch's packers write that for constant rows. "
            "Import with requantize_negative=True to quantize those rows again."
        )
    raise FormatError(found + message, row=first + row, finite=bool(finite_N[row]))
