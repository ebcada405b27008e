"""One row at a time: find it, read it to floats, move floats, ask for a row ahead of its use; the random keys of rows.

For each format a few loops over `cpu_codes` blocks, then one function that picks by format at run time: a branch for
each row is free, and one compiled kernel serves tables of all formats.

Scratch rows are fp32 with room for `PAD` more columns than the dimension, so only what touches a table or an output
needs a mask.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline import formats as F
from thermocline.kernels.quantize.reference import MIX1, MIX2

from .codes import Decoder, float_to_short
from .compile import helper, inlined
from .vectors import WIDTH, Emit, block, get_u32, prefetch

PAD = 4 * WIDTH
FORMATS = range(len(F.BITS))
_MASK = 0xFFFFFFFF


# -- sizes ------------------------------------------------------------------------------------------------------------

_BITS, _WORDS = np.array(F.BITS), np.array(F.META_WORDS)


@inlined
def row_bytes(format, dim):
    """Bytes of codes in one row."""
    return (_BITS[format] * dim + 7) >> 3


@inlined
def meta_bytes(format):
    """Bytes of metadata of one row."""
    return 4 * _WORDS[format]


# -- ask --------------------------------------------------------------------------------------------------------------

AHEAD = 16  # lookups
TOGETHER = 32  # lookups of a table with a cache that are asked for at once, and as far ahead,
UNIT = 8 * WIDTH  # where rows have so many columns: as many as are pooled at once


@inlined
def next_asking(i):
    """The next lookup at which those of a table with a cache are asked for that come `TOGETHER` later."""
    return (i + TOGETHER - 1) // TOGETHER * TOGETHER


@inlined
def ask_for(address, size):
    """Ask for the cache lines of a row."""
    for line in range(0, size, 64):
        prefetch(address + line)


@inlined
def ask_for_row(codes, meta, width, words, row):
    """Ask for a row and its metadata."""
    ask_for(codes + row * width, width)
    if words > 0:
        prefetch(meta + row * words)


# -- find -------------------------------------------------------------------------------------------------------------

# What kernels take as `values` is the address of the cache's values, 0 where there is no cache; `near`, that of near slots.
CACHED = 1 << 31  # in a first meta word, which is read without a sign
NEAR = CACHED + F.NEAR


@inlined
def near_bytes(dim):
    """Bytes of a near slot: a scale and int8 codes (`slots.py`)."""
    return 4 + ((dim + 3) & ~3)


@inlined
def find_row(format, codes, meta, width, words, values, near, dim, row):
    """(format, address, address of metadata) of a row: in its table, or where it is cached in its slot."""
    place, about = codes + row * width, meta + row * words
    if values != 0 and words > 0:
        word = get_u32(about, 0)
        if word >= CACHED:
            format, place = F.FP32, values + 4 * dim * (word - CACHED)
            if word >= NEAR:
                about = near + near_bytes(dim) * (word - NEAR)
                format, place = F.INT8, about + 4
    return format, place, about


@inlined
def ask_for_found(format, codes, meta, width, words, values, near, dim, row):
    """Ask for a row where it is, which takes a look at its metadata."""
    found, place, about = find_row(format, codes, meta, width, words, values, near, dim, row)
    if found == format:
        ask_for(place, width)
    elif found == F.FP32:
        ask_for(place, 4 * dim)
    else:
        ask_for(about, 4 + dim)


# -- planes -----------------------------------------------------------------------------------------------------------


def column_of(e: Emit, j: Any, plane: Any, p: int) -> Any:
    """Column of element j in plane p."""
    for _ in range(p):
        j = e.builder.add(j, plane)
    return j


def left_of(e: Emit, j: Any, plane: Any, dim: Any, p: int) -> Any:
    """Columns that plane p still has from element j on: it ends where the next begins, or with the row."""
    here, row = e.builder.sub(plane, j), e.builder.sub(dim, column_of(e, j, plane, p))
    return e.builder.select(e.builder.icmp_signed("<", here, row), here, row)


# -- read -------------------------------------------------------------------------------------------------------------


def _reader(format: int) -> Any:
    planes = F.planes(format)

    @block("i64 i64 i64 i64 i64 i64 -> none")
    def whole(e: Emit, row: Any, meta: Any, j: Any, plane: Any, dim: Any, out: Any) -> None:
        for p, vec in enumerate(Decoder(e, format, row, meta).block(j)):
            e.store(e.at(out, column_of(e, j, plane, p), 4), vec)

    @block("i64 i64 i64 i64 i64 i64 -> none")
    def part(e: Emit, row: Any, meta: Any, j: Any, plane: Any, dim: Any, out: Any) -> None:
        for p, vec in enumerate(Decoder(e, format, row, meta).block(j, e.builder.sub(plane, j))):
            e.store(e.at(out, column_of(e, j, plane, p), 4), vec, count=left_of(e, j, plane, dim, p))

    @helper
    def read(row, meta, dim, out):
        plane = (dim + planes - 1) // planes
        j = 0
        while j + WIDTH <= dim - (planes - 1) * plane:
            whole(row, meta, j, plane, dim, out)
            j += WIDTH
        while j < plane:
            part(row, meta, j, plane, dim, out)
            j += WIDTH

    return read


(
    _read_fp32,
    _read_fp16,
    _read_bf16,
    _read_fp8,
    _read_int8,
    _read_int4,
    _read_int2,
    _read_int8_affine,
    _read_int4_affine,
    _read_int2_affine,
) = (_reader(f) for f in FORMATS)


@helper
def read_row(format, row, meta, dim, out):
    """Dequantize a row to `dim` floats."""
    if format == F.FP32:
        _read_fp32(row, meta, dim, out)
    elif format == F.FP16:
        _read_fp16(row, meta, dim, out)
    elif format == F.BF16:
        _read_bf16(row, meta, dim, out)
    elif format == F.FP8:
        _read_fp8(row, meta, dim, out)
    elif format == F.INT8:
        _read_int8(row, meta, dim, out)
    elif format == F.INT4:
        _read_int4(row, meta, dim, out)
    elif format == F.INT2:
        _read_int2(row, meta, dim, out)
    elif format == F.INT8_AFFINE:
        _read_int8_affine(row, meta, dim, out)
    elif format == F.INT4_AFFINE:
        _read_int4_affine(row, meta, dim, out)
    else:
        _read_int2_affine(row, meta, dim, out)


# -- move -------------------------------------------------------------------------------------------------------------


@block("i64 i64 -> none")
def _copy_whole(e: Emit, source: Any, target: Any) -> None:
    e.store(target, e.load_f32(source))


@block("i64 i64 i64 -> none")
def _copy_part(e: Emit, source: Any, target: Any, left: Any) -> None:
    e.store(target, e.load_f32(source, left), count=left)


@inlined
def copy_floats(source, target, count):
    """Copy `count` floats."""
    whole = count // WIDTH * WIDTH
    for c in range(0, whole, WIDTH):
        _copy_whole(source + 4 * c, target + 4 * c)
    if whole < count:
        _copy_part(source + 4 * whole, target + 4 * whole, count - whole)


@block("i64 i64 -> none")
def _stream_whole(e: Emit, source: Any, target: Any) -> None:
    e.stream(target, e.load_f32(source))


@inlined
def stream_floats(source, target, count):
    """Copy `count` floats past the caches. Target and count must be whole vectors."""
    for c in range(0, 4 * count, 4 * WIDTH):
        _stream_whole(source + c, target + c)


@block("i64 i64 f32 -> none")
def _fill_part(e: Emit, target: Any, left: Any, value: Any) -> None:
    e.store(target, e.splat(value), count=left)


@inlined
def fill_floats(target, count, value):
    """Set `count` floats."""
    for c in range(0, count, WIDTH):
        _fill_part(target + 4 * c, count - c, value)


def _narrower(format: int) -> Any:
    @block("i64 i64 i64 -> none")
    def part(e: Emit, source: Any, target: Any, left: Any) -> None:
        e.store(target, float_to_short(e, e.load_f32(source), format, None, saturate=False), bits=16, count=left)

    return part


_narrow_fp16, _narrow_bf16 = _narrower(F.FP16), _narrower(F.BF16)


@helper
def narrow(source, target, count, format):
    """Round `count` scratch floats to fp16 or bf16, nearest-even; too large becomes infinite."""
    for c in range(0, count, WIDTH):
        if format == F.FP16:
            _narrow_fp16(source + 4 * c, target + 2 * c, count - c)
        else:
            _narrow_bf16(source + 4 * c, target + 2 * c, count - c)


# -- random keys ------------------------------------------------------------------------------------------------------


@inlined
def mix(x):
    """The 32-bit finalizer of the reference."""
    x = ((x ^ (x >> 16)) * MIX1) & _MASK
    x = ((x ^ (x >> 13)) * MIX2) & _MASK
    return x ^ (x >> 16)


@inlined
def step_key(seed, step):
    """The part of a row's key that all rows share."""
    key = mix((seed & _MASK) ^ mix((seed >> 32) & _MASK))
    return mix((step & _MASK) ^ mix(((step >> 32) & _MASK) ^ key))


@inlined
def row_key(step, row):
    """The random key of an arena row, from `step_key`."""
    return mix((row & _MASK) ^ mix(((row >> 32) & _MASK) ^ step))
