"""Vector code that decodes and encodes 16 codes of a row, for every format, as `quantize/reference.py` defines.

Floats go through integers, because Numba lacks short ones. Subnormals are decoded by addition, so that flushing keeps them.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from thermocline import formats as F
from thermocline.kernels.quantize.reference import GOLDEN, MIX1, MIX2

from .vectors import WIDTH, Emit, Vec

# mantissa bits, smallest normal exponent, code of the largest finite value, code of infinity, code of NaN
_SHORT = {
    F.FP16: (10, -14, 0x7BFF, 0x7C00, 0x7E00),
    F.BF16: (7, -126, 0x7F7F, 0x7F80, 0x7FC0),
    F.FP8: (3, -6, 0x7E, 0x7E, 0x7F),
}
SIZE = {fmt: max(8, F.BITS[fmt]) // 8 for fmt in range(len(F.BITS))}
_HALF = {F.INT4: F.BF16, F.INT2: F.BF16, F.INT4_AFFINE: F.FP16, F.INT2_AFFINE: F.FP16}
_HAS_PERMUTE = bool(llvm.get_host_cpu_features().get("avx512f", False))
_HAS_HALF = bool(llvm.get_host_cpu_features().get("f16c", False))


# -- fp16, bf16, fp8 --------------------------------------------------------------------------------------------------


def short_to_float(e: Emit, code: Vec, format: int) -> Vec:
    """Code of fp16, bf16 or fp8 -> fp32, exact; infinities and NaN included."""
    if format == F.BF16:
        return (code << 16).floats()
    mantissa, smallest, _, infinity, nan = _SHORT[format]
    sign = (code >> (F.BITS[format] - 1)) << 31
    size = code & ((1 << (F.BITS[format] - 1)) - 1)
    wide = size << (23 - mantissa)
    lift = (126 + smallest) << 23
    small = ((wide + (lift + (1 << 23))).floats() - float(2.0 ** (smallest))).bits()
    bits = small.where(size.compare("<", 1 << mantissa), wide + lift)
    if format == F.FP8:
        bits = bits.where(size.compare("<", nan), 0x7FC00000)
    else:
        bits = bits.where(size.compare("<", infinity), wide + ((255 - 31) << 23))
    return (bits | sign).floats()


def float_to_short(e: Emit, value: Vec, format: int, random: Vec | None, saturate: bool = True) -> Vec:
    """fp32 -> code of fp16, bf16 or fp8: nearest-even, or stochastic if random bits are given."""
    mantissa, smallest, top, infinity, nan = _SHORT[format]
    bits = value.bits()
    size = bits & 0x7FFFFFFF
    raw = size >> 23
    normal = raw.compare(">", 0)
    exponent = raw.where(normal, 1)
    hidden = e.constant([1 << 23] * WIDTH).where(normal, 0)
    significand = (bits & 0x7FFFFF) | hidden
    floor = exponent.where(exponent.compare(">", smallest + 127), smallest + 127)
    shift = floor - exponent + (23 - mantissa)
    shift = shift.where(shift.compare("<", 31), 31)
    one = e.constant([1] * WIDTH)
    if random is None:
        add = (one << (shift - 1)) - 1 + ((significand >> shift) & 1)
    else:
        add = random >> (e.constant([32] * WIDTH) - shift)
    code = ((floor - (smallest + 127)) << mantissa) + ((significand + add) >> shift)
    limit = top if saturate else infinity
    code = code.where(code.compare("<", limit), limit)
    if not saturate:
        code = code.where(size.compare("<", 0x7F800001), nan)
    return code | ((bits >> 31) << (F.BITS[format] - 1))


def round_output(e: Emit, value: Vec, format: int) -> Vec:
    """fp32 -> code of fp16 or bf16, nearest-even; overflow becomes infinite. Equals `float_to_short` at a fifth of its time."""
    bits = value.bits()
    if format == F.BF16:
        code = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    elif _HAS_HALF:
        code = Vec(e, e.builder.fptrunc(value.value, ir.VectorType(ir.HalfType(), WIDTH)))
        code = Vec(e, e.builder.zext(e.builder.bitcast(code.value, ir.VectorType(ir.IntType(16), WIDTH)), bits.value.type))
    else:
        return float_to_short(e, value, format, None, saturate=False)
    number = (bits & 0x7FFFFFFF).compare("<", 0x7F800001)
    return code.where(number, ((bits >> 31) << 15) | _SHORT[format][4])


# -- rows -------------------------------------------------------------------------------------------------------------


def scale_and_bias(e: Emit, meta: Any, format: int) -> tuple[Any, Any]:
    """(scale, bias) of a row as vectors; None if the format has none."""
    words = F.META_WORDS[format]
    if words == 0:
        return None, None
    first = e.splat(e.load_word(meta))
    if format in (F.FP8, F.INT8):
        return first.floats(), None
    if format == F.INT8_AFFINE:
        return first.floats(), e.splat(e.load_word(e.at(meta, 4))).floats()
    half = _HALF[format]
    return short_to_float(e, first >> 16, half), short_to_float(e, first & 0xFFFF, half)


class Decoder:
    """Decodes blocks of one row; reads the metadata once."""

    def __init__(self, e: Emit, format: int, row: Any, meta: Any, weight: Vec | None = None) -> None:
        self.e, self.format, self.row, self.weight = e, format, row, weight
        self.scale, self.bias = scale_and_bias(e, meta, format)
        self.bits, self.planes = F.BITS[format], F.planes(format)
        self.tables = self._tables() if self.planes > 1 and _HAS_PERMUTE else None

    def _affine(self, codes: Vec) -> Vec:
        value = codes.to_float() * self.scale
        return self._weighted(value if self.bias is None else value + self.bias)

    def _weighted(self, value: Vec) -> Vec:
        return value if self.weight is None else value * self.weight

    def _tables(self) -> list[Vec]:
        """Values of the 16 nibbles: one table for int4; for int2 one for the low and one for the high code."""
        if self.bits == 4:
            return [self._affine(self.e.lanes())]
        return [self._affine(self.e.lanes() & 3), self._affine(self.e.lanes() >> 2)]

    def _pick(self, table: Vec, nibbles: Vec) -> Vec:
        """Table entries indexed by the low four bits of each element."""
        return self.e.call("llvm.x86.avx512.permvar.sf.512", table, nibbles)

    def block(self, j: Any, count: Any = None) -> list[Vec]:
        """Elements j to j + 15: one vector of columns for each plane."""
        e, format = self.e, self.format
        address = e.at(self.row, j, SIZE[format])
        if format == F.FP32:
            return [self._weighted(e.load_f32(address, count))]
        if format in (F.FP16, F.BF16):
            return [self._weighted(short_to_float(e, e.load_unsigned(address, 16, count), format))]
        if format == F.INT8:
            return [self._affine(e.load_signed(address, 8, count))]
        codes = e.load_unsigned(address, 8, count)
        if format == F.FP8:
            return [self._weighted(short_to_float(e, codes, format) * self.scale)]
        if self.planes == 1:
            return [self._affine(codes)]
        if self.tables is not None:
            nibbles = (codes, codes >> 4)
            return [self._pick(table, nibble) for nibble in nibbles for table in self.tables]
        return [self._affine((codes >> (p * self.bits)) & F.levels(format)) for p in range(self.planes)]


def fmix32(x: Vec) -> Vec:
    """The 32-bit finalizer of MurmurHash3."""
    x = (x ^ (x >> 16)) * MIX1
    x = (x ^ (x >> 13)) * MIX2
    return x ^ (x >> 16)


def random_bits(e: Emit, key: Any, column: Any) -> Vec:
    """32 random bits for each of 16 columns from `column` on; key and column are i64."""
    start = e.builder.add(key, e.at(ir.Constant(ir.IntType(64), 0), column, GOLDEN))
    return fmix32(e.splat(start) + e.constant([(i * GOLDEN) & 0xFFFFFFFF for i in range(WIDTH)]))


def encode(e: Emit, value: Vec, format: int, inverse: Any, bias: Any, random: Vec | None) -> Vec:
    """fp32 columns -> codes. `inverse` is one over the row's scale."""
    if format in (F.FP16, F.BF16):
        return float_to_short(e, value, format, random)
    if format in (F.FP8, F.INT8):
        scaled = value * e.splat(inverse)
    else:
        scaled = (value - e.splat(bias)) * e.splat(inverse)
    if format == F.FP8:
        return float_to_short(e, scaled, format, random)
    u: Any = 0.5 if random is None else (random >> 8).to_float() * 2.0**-24
    low, high = (-127.0, 127.0) if format == F.INT8 else (0.0, float(F.levels(format)))
    codes: Vec = (scaled + u).floor().clamp(low, high).to_int()
    return codes
