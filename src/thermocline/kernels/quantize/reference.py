"""Quantize and dequantize rows: the definition, in bit-exact IEEE fp32 arithmetic without fused multiply-add.

Codes are `floor(y + u)`: u = 1/2 rounds to nearest, u uniform in [0, 1) stochastically, hashed from (seed, step, row, column).
"""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline import formats as F

_MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
MIX1, MIX2 = 0x85EBCA6B, 0xC2B2AE35

# Smallest scale whose reciprocal is finite and which is a normal number. Rows below it become zeros.
TINY = 2.0**-126


def fmix32(x: Tensor) -> Tensor:
    """The 32-bit finalizer of MurmurHash3, on int64 tensors of values below 2**32."""
    x = x ^ (x >> 16)
    x = (x * MIX1) & _MASK
    x = x ^ (x >> 13)
    x = (x * MIX2) & _MASK
    return x ^ (x >> 16)


def row_keys(clock: Tensor, rows_N: Tensor) -> Tensor:
    """One 32-bit key for each row, from the seed, the step and the row number."""
    seed, step = clock[F.SEED].long(), clock[F.STEP].long()
    key = fmix32((seed & _MASK) ^ fmix32((seed >> 32) & _MASK))
    key = fmix32((step & _MASK) ^ fmix32(((step >> 32) & _MASK) ^ key))
    rows_N = rows_N.long()
    return fmix32((rows_N & _MASK) ^ fmix32(((rows_N >> 32) & _MASK) ^ key))


def random_bits(clock: Tensor, rows_N: Tensor, dim: int) -> Tensor:
    """32 random bits for each (row, column), as int64."""
    column = torch.arange(dim, device=rows_N.device)
    return fmix32((row_keys(clock, rows_N)[:, None] + column * GOLDEN) & _MASK)


def _fraction(bits_ND: Tensor | None, like: Tensor) -> Tensor:
    """u of floor(y + u): a half, or 24 random bits."""
    if bits_ND is None:
        return torch.full_like(like, 0.5)
    return (bits_ND >> 8).float() * 2.0**-24


# -- shorter floats ---------------------------------------------------------------------------------------------------------

# mantissa bits, smallest normal exponent, code of the largest finite value
_FLOATS = {F.FP16: (10, -14, 0x7BFF), F.BF16: (7, -126, 0x7F7F), F.FP8: (3, -6, 0x7E)}


def _split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sign bit, exponent (at least 1) and 24-bit significand of fp32 numbers, as int64."""
    bits = x.contiguous().view(torch.int32).long() & _MASK
    raw = (bits >> 23) & 0xFF
    return bits >> 31, raw.clamp(min=1), (bits & 0x7FFFFF) | ((raw > 0).long() << 23)


def _cut(exponent: Tensor, format: int) -> tuple[Tensor, Tensor, int, int]:
    """(shift, exponent field times 2**mantissa, ...): how many bits of the significand a shorter float drops."""
    mantissa, smallest, top = _FLOATS[format]
    floor = torch.clamp(exponent, min=smallest + 127)
    shift = torch.clamp(23 - mantissa + floor - exponent, max=31)
    return shift, (floor - smallest - 127) << mantissa, mantissa, top


def encode_float(x: Tensor, format: int, bits_ND: Tensor | None) -> Tensor:
    """fp32 -> the code of a shorter float (int64). Nearest-even, or stochastic where random bits are given. Saturates."""
    sign, exponent, significand = _split(x)
    shift, field, _, top = _cut(exponent, format)
    if bits_ND is None:
        add = (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)
    else:
        add = bits_ND >> (32 - shift)
    code = torch.clamp(field + ((significand + add) >> shift), max=top)
    return code | (sign << (F.BITS[format] - 1))


def decode_float(code: Tensor, format: int) -> Tensor:
    """The code of a shorter float -> fp32, exact."""
    if format == F.FP8:
        return code.to(torch.uint8).view(torch.float8_e4m3fn).float()
    dtype = torch.float16 if format == F.FP16 else torch.bfloat16
    return _as_int16(code).view(dtype).float()


def _as_int16(code: Tensor) -> Tensor:
    return torch.where(code >= 1 << 15, code - (1 << 16), code).to(torch.int16)


# -- codes in bytes ---------------------------------------------------------------------------------------------------------


def pack(codes_ND: Tensor, format: int) -> Tensor:
    """Codes (int64, one a column) -> bytes of the row."""
    if format in (F.FP16, F.BF16):
        return _as_int16(codes_ND).view(torch.uint8).reshape(codes_ND.shape[0], 2 * codes_ND.shape[1])
    codes_ND = codes_ND & 0xFF
    planes, bits = F.planes(format), F.BITS[format]
    width = F.row_bytes(format, codes_ND.shape[1])
    padded = torch.nn.functional.pad(codes_ND, (0, planes * width - codes_ND.shape[1]))
    packed = torch.zeros(codes_ND.shape[0], width, dtype=torch.int64, device=codes_ND.device)
    for plane in range(planes):
        packed |= padded[:, plane * width : (plane + 1) * width] << (plane * bits)
    return packed.to(torch.uint8)


def unpack(bytes_NB: Tensor, format: int, dim: int) -> Tensor:
    """Bytes of the row -> codes (int64, one a column); int8 signed, all others unsigned."""
    if format in (F.FP16, F.BF16):
        return bytes_NB.contiguous().view(torch.int16).long() & 0xFFFF
    if format == F.INT8:
        return bytes_NB.contiguous().view(torch.int8).long()
    bits = F.BITS[format]
    planes = [(bytes_NB.long() >> (plane * bits)) & F.levels(format) for plane in range(F.planes(format))]
    return torch.cat(planes, dim=1)[:, :dim]


# -- rows -------------------------------------------------------------------------------------------------------------------


def quantize_rows(values_ND: Tensor, format: int, clock: Tensor | None, rows_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp32 rows -> (codes as bytes, meta words). Stochastic if a clock is given, with `rows_N` naming the rows."""
    count, dim = values_ND.shape
    values_ND = values_ND.contiguous()
    if format == F.FP32:
        return values_ND.view(torch.uint8).reshape(count, 4 * dim), values_ND.new_empty((count, 0), dtype=torch.int32)
    bits_ND = None
    if clock is not None:
        assert rows_N is not None
        bits_ND = random_bits(clock, rows_N, dim)
    if format in (F.FP16, F.BF16):
        return pack(encode_float(values_ND, format, bits_ND), format), values_ND.new_empty((count, 0), dtype=torch.int32)
    if format in (F.FP8, F.INT8):
        codes_ND, meta_NW = _quantize_symmetric(values_ND, format, bits_ND)
    else:
        codes_ND, meta_NW = _quantize_affine(values_ND, format, bits_ND)
    return pack(codes_ND, format), meta_NW


def _reciprocal(scale_N1: Tensor) -> Tensor:
    return torch.where(scale_N1 >= TINY, 1.0 / scale_N1, torch.zeros_like(scale_N1))


def _quantize_symmetric(values_ND: Tensor, format: int, bits_ND: Tensor | None) -> tuple[Tensor, Tensor]:
    top = 448.0 if format == F.FP8 else 127.0
    scale_N1 = values_ND.abs().amax(dim=1, keepdim=True) / top
    scale_N1 = torch.where(scale_N1 >= TINY, scale_N1, torch.zeros_like(scale_N1))
    scaled_ND = values_ND * _reciprocal(scale_N1)
    if format == F.FP8:
        codes_ND = encode_float(scaled_ND, format, bits_ND)
    else:
        codes_ND = torch.floor(scaled_ND + _fraction(bits_ND, scaled_ND)).clamp(-127, 127).long()
    return codes_ND, scale_N1.contiguous().view(torch.int32)


def _quantize_affine(values_ND: Tensor, format: int, bits_ND: Tensor | None) -> tuple[Tensor, Tensor]:
    # Metadata is rounded to nearest, and codes are clamped. Rounded outwards it would cover the row, but every update would
    # then push the range a little further out and re-round the whole row: 8 times the noise after 200 small steps.
    # + 0.0: which of two zeros amin returns is left open; a bias is never negative zero.
    low_N1, high_N1 = values_ND.amin(dim=1, keepdim=True) + 0.0, values_ND.amax(dim=1, keepdim=True)
    levels = float(F.levels(format))
    if format == F.INT8_AFFINE:
        bias_N1, scale_N1 = low_N1, (high_N1 - low_N1) / levels + 0.0
        meta_NW = torch.cat([scale_N1, bias_N1], dim=1).view(torch.int32)
    else:
        half = F.BF16 if format in (F.INT4, F.INT2) else F.FP16
        bias_code = encode_float(low_N1, half, None)
        bias_N1 = decode_float(bias_code, half)
        scale_code = encode_float(((high_N1 - bias_N1) / levels).clamp(min=0) + 0.0, half, None)
        scale_N1 = decode_float(scale_code, half)
        meta_NW = ((scale_code << 16) | bias_code).to(torch.int32)
    scaled_ND = (values_ND - bias_N1) * _reciprocal(scale_N1)
    codes_ND = torch.floor(scaled_ND + _fraction(bits_ND, scaled_ND)).clamp(0, levels).long()
    return codes_ND, meta_NW


def scale_and_bias(meta_NW: Tensor, format: int) -> tuple[Tensor, Tensor]:
    """The (scale, bias) of each row as fp32 columns; bias is zero for the symmetric formats."""
    if format in (F.FP8, F.INT8):
        scale_N1 = meta_NW.contiguous().view(torch.float32)
        return scale_N1, torch.zeros_like(scale_N1)
    if format == F.INT8_AFFINE:
        both = meta_NW.contiguous().view(torch.float32)
        return both[:, :1], both[:, 1:]
    half = F.BF16 if format in (F.INT4, F.INT2) else F.FP16
    word_N1 = meta_NW.long() & _MASK
    return decode_float(word_N1 >> 16, half), decode_float(word_N1 & 0xFFFF, half)


def dequantize_rows(bytes_NB: Tensor, meta_NW: Tensor, format: int, dim: int) -> Tensor:
    """(codes as bytes, meta words) -> fp32 rows."""
    if format == F.FP32:
        return bytes_NB.contiguous().view(torch.float32)
    codes_ND = unpack(bytes_NB, format, dim)
    if format in (F.FP16, F.BF16):
        return decode_float(codes_ND, format)
    scale_N1, bias_N1 = scale_and_bias(meta_NW, format)
    if format == F.FP8:
        return decode_float(codes_ND, format) * scale_N1
    return codes_ND.float() * scale_N1 + bias_N1
