"""Quantize one row: measure its extent, compute scale and bias, round it to codes. Equals `quantize/reference.py`.

Largest magnitudes are compared as integers: infinity and NaN lie above all numbers, so one comparison checks a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline import formats as F
from thermocline.kernels.quantize.reference import TINY

from .codes import SIZE, Decoder, encode, random_bits
from .compile import helper, inlined
from .rows import FORMATS, column_of, copy_floats, left_of
from .vectors import WIDTH, Vec, bits_of, block, by_format, float_of, put_f32, put_u32

_TINY = np.float32(TINY)
_ZERO, _ONE = np.float32(0), np.float32(1)
_INFINITY = float("inf")
_LIMIT_BITS = 0x7E800000  # of 2.0**126


# -- extent -----------------------------------------------------------------------------------------------------------


def widened(acc: list[Vec], value: Vec, mask: Any, both: bool) -> list[Vec]:
    """The extent widened by a vector, where the mask (None: everywhere) is set."""
    low, high, top = acc
    size = value.bits() & 0x7FFFFFFF
    if mask is not None:
        size = size.where(mask, 0)
    top = size.where(size.compare(">", top.bits()), top.bits()).floats()
    if both:
        low = low.smaller(value if mask is None else value.where(mask, _INFINITY))
        high = high.larger(value if mask is None else value.where(mask, -_INFINITY))
    return [low, high, top]


_no_extent = block("-> acc3")(lambda e: [e.constant([k * _INFINITY] * WIDTH) for k in (1, -1)] + [e.zeros()])
_widen = block("acc3 i64 -> acc3")(lambda e, acc, at: widened(acc, e.load_f32(at), None, True))
_widen_part = block("acc3 i64 i64 -> acc3")(lambda e, acc, at, left: widened(acc, e.load_f32(at), e.first(left), True))
_lowest = block("acc3 -> f32")(lambda e, acc: acc[0].fold(Vec.smaller))
_highest = block("acc3 -> f32")(lambda e, acc: acc[1].fold(Vec.larger))
_top = block("acc3 -> i64")(lambda e, acc: e.widen(acc[2].bits().fold(Vec.larger)))


@inlined
def measure_row(values, dim):
    """(smallest, largest, bits of the largest magnitude) of a scratch row."""
    acc = _no_extent()
    whole = dim // WIDTH * WIDTH
    for c in range(0, whole, WIDTH):
        acc = _widen(acc, values + 4 * c)
    if whole < dim:
        acc = _widen_part(acc, values + 4 * whole, dim - whole)
    return _lowest(acc), _highest(acc), _top(acc)


@inlined
def is_good(top):
    """Whether a row of this largest magnitude is finite and below 2**126."""
    return top < _LIMIT_BITS


# -- SGD step: read, subtract, measure in one pass --------------------------------------------------------------------


def _sgd_stepper(format: int) -> Any:
    """row - rate * gradient into scratch, and its extent: the step of SGD and row-wise Adagrad."""
    planes, both = F.planes(format), F.META_WORDS[format] > 0 and format not in (F.FP8, F.INT8)

    def step_block(masked):
        @block("acc3 i64 i64 i64 i64 i64 f32 i64 i64 -> acc3")
        def step(e, acc, row, meta, j, plane, dim, rate, g, w):
            for p, old in enumerate(Decoder(e, format, row, meta).block(j, e.builder.sub(plane, j) if masked else None)):
                column = column_of(e, j, plane, p)
                left = left_of(e, j, plane, dim, p) if masked else None
                new = old - e.splat(rate) * e.load_f32(e.at(g, column, 4))
                e.store(e.at(w, column, 4), new, count=left)
                acc = widened(acc, new, e.first(left) if masked else None, both)
            return acc

        return step

    whole, part = step_block(False), step_block(True)

    @helper
    def step(row, meta, dim, rate, g, w):
        plane = (dim + planes - 1) // planes
        acc = _no_extent()
        j = 0
        while j + WIDTH <= dim - (planes - 1) * plane:
            acc = whole(acc, row, meta, j, plane, dim, rate, g, w)
            j += WIDTH
        while j < plane:
            acc = part(acc, row, meta, j, plane, dim, rate, g, w)
            j += WIDTH
        return _lowest(acc), _highest(acc), _top(acc)

    return step


# -- metadata ---------------------------------------------------------------------------------------------------------


@helper
def _half_code(value, mantissa, smallest, top):
    """Code of `value` as fp16 or bf16, nearest-even. Scalar: vector code made int4 updates 6% slower."""
    bits = bits_of(value)
    sign, raw = bits >> 31, (bits >> 23) & 0xFF
    exponent = max(raw, 1)
    significand = bits & 0x7FFFFF
    if raw > 0:
        significand |= 0x800000
    floor = max(exponent, smallest + 127)
    shift = min(23 - mantissa + floor - exponent, 31)
    add = (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)
    return min(((floor - smallest - 127) << mantissa) + ((significand + add) >> shift), top) | (sign << 15)


@helper
def _half_value(code, mantissa, smallest):
    """Value of a finite fp16 or bf16 code."""
    if mantissa == 7:
        return float_of(code << 16)
    size = code & 0x7FFF
    if size < 0x400:
        value = np.float32(size) * np.float32(2.0**-24)
    else:
        value = float_of((size << 13) + (112 << 23))
    return -value if code & 0x8000 else value


@inlined
def _reciprocal(scale):
    return _ONE / scale if scale >= _TINY else _ZERO


def _metadata(format: int) -> Any:
    """(extent, meta) -> (one over the scale, bias); writes the row's metadata."""
    if format in (F.FP8, F.INT8):
        top = np.float32(448 if format == F.FP8 else 127)

        @inlined
        def symmetric(low, high, size, meta):
            scale = float_of(size) / top
            if not scale >= _TINY:
                scale = _ZERO
            put_f32(meta, 0, scale)
            return _reciprocal(scale), _ZERO

        return symmetric
    levels = np.float32(F.levels(format))
    if format == F.INT8_AFFINE:

        @inlined
        def affine(low, high, size, meta):
            low += _ZERO  # a bias is never negative zero
            scale = (high - low) / levels + _ZERO
            put_f32(meta, 0, scale)
            put_f32(meta, 1, low)
            return _reciprocal(scale), low

        return affine
    mantissa, smallest, top_code = (7, -126, 0x7F7F) if format in (F.INT4, F.INT2) else (10, -14, 0x7BFF)

    @inlined
    def packed(low, high, size, meta):
        bias_code = _half_code(low + _ZERO, mantissa, smallest, top_code)
        bias = _half_value(bias_code, mantissa, smallest)
        scale_code = _half_code(max((high - bias) / levels, _ZERO) + _ZERO, mantissa, smallest, top_code)
        put_u32(meta, 0, (scale_code << 16) | bias_code)
        return _reciprocal(_half_value(scale_code, mantissa, smallest)), bias

    return packed


def _writer(format: int) -> Any:
    planes, bits, size = F.planes(format), F.BITS[format], SIZE[format]

    def write_block(stochastic, masked):
        @block("i64 i64 i64 i64 i64 i64 f32 f32 -> none")
        def write(e, values, row, j, plane, dim, key, inverse, bias):
            packed = None
            for p in range(planes):
                column = column_of(e, j, plane, p)
                random = random_bits(e, key, column) if stochastic else None
                code = encode(e, e.load_f32(e.at(values, column, 4)), format, inverse, bias, random)
                if masked:
                    code = code.where(e.first(e.builder.sub(dim, column)), 0)
                code = code << (p * bits) if p else code
                packed = code if packed is None else packed | code
            e.store(e.at(row, j, size), packed, bits=8 * size, count=e.builder.sub(plane, j) if masked else None)

        return write

    random_whole, random_part, nearest_part = write_block(True, False), write_block(True, True), write_block(False, True)
    has_meta = F.META_WORDS[format] > 0
    metadata: Any = _metadata(format) if has_meta else None

    @helper
    def write(values, dim, low, high, size, row, meta, key, stochastic):
        plane = (dim + planes - 1) // planes
        inverse, bias = metadata(low, high, size, meta) if has_meta else (_ZERO, _ZERO)
        j = 0
        if stochastic:
            while j + WIDTH <= dim - (planes - 1) * plane:
                random_whole(values, row, j, plane, dim, key, inverse, bias)
                j += WIDTH
        while j < plane:
            if stochastic:
                random_part(values, row, j, plane, dim, key, inverse, bias)
            else:
                nearest_part(values, row, j, plane, dim, key, inverse, bias)
            j += WIDTH

    return write


@helper
def _write_fp32(values, dim, low, high, size, row, meta, key, stochastic):
    copy_floats(values, row, dim)


# -- by format --------------------------------------------------------------------------------------------------------

_write = by_format(
    lambda format: _write_fp32 if format == F.FP32 else _writer(format), FORMATS, "i64 i64 f32 f32 i64 i64 i64 i64 i64"
)
_sgd = by_format(_sgd_stepper, FORMATS, "i64 i64 i64 f32 i64 i64")


@helper
def write_row(format, values, dim, low, high, size, row, meta, key, stochastic):
    """Quantize a scratch row of the given extent into a table; `key` is the row's random key."""
    _write(format, values, dim, low, high, size, row, meta, key, stochastic)


@helper
def sgd_row(format, row, meta, dim, rate, g, w):
    """w = row - rate * g in scratch; returns the extent of w."""
    return _sgd(format, row, meta, dim, rate, g, w)
