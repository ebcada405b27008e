"""One row at a time: locate, prefetch, dequantize, copy, random key. Scratch rows have `PAD` columns more than a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline import formats as F
from thermocline.kernels.quantize.reference import MIX1, MIX2

from .codes import Decoder, round_output
from .compile import helper, inlined
from .vectors import WIDTH, Emit, block, by_format, get_i64, get_u32, prefetch

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


@inlined
def table_of(codes, meta, fields, number):
    """(dim, format, codes, meta, row bytes, meta bytes) of a table or of a feature's table, from the fields of a layout."""
    at = number * F.LAYOUT_FIELDS
    dim, format = get_i64(fields, at + F.DIM), get_i64(fields, at + F.FORMAT)
    codes, meta = codes + get_i64(fields, at + F.CODES), meta + 4 * get_i64(fields, at + F.META)
    return dim, format, codes, meta, row_bytes(format, dim), meta_bytes(format)


# -- prefetch ---------------------------------------------------------------------------------------------------------

PREFETCH_DISTANCE = 16  # lookups


@inlined
def prefetch_lines(address, size):
    """Prefetch the cache lines of `size` bytes."""
    for line in range(address & ~63, address + size, 64):
        prefetch(line)


# -- locate -----------------------------------------------------------------------------------------------------------

# Kernels take the address of the cache's fp32 slots as `values` (0 without a cache) and that of its int8 slots as `int8_slots`.
CACHED = 1 << 31  # in a first meta word, read as unsigned
CACHED_INT8 = CACHED + F.INT8_SLOT


@inlined
def int8_slot_bytes(dim):
    """Bytes of an int8 slot: a scale and codes (`slots.py`)."""
    return 4 + ((dim + 3) & ~3)


@inlined
def locate_row(format, codes, meta, width, words, values, int8_slots, dim, row):
    """(format, address, address of metadata) of a row, in its table or in its cache slot."""
    address, row_meta = codes + row * width, meta + row * words
    if values != 0 and words > 0:
        word = get_u32(row_meta, 0)
        if word >= CACHED:
            format, address = F.FP32, values + 4 * dim * (word - CACHED)
            if word >= CACHED_INT8:
                row_meta = int8_slots + int8_slot_bytes(dim) * (word - CACHED_INT8)
                format, address = F.INT8, row_meta + 4
    return format, address, row_meta


@inlined
def prefetch_located_row(format, codes, meta, width, words, values, int8_slots, dim, row):
    """Prefetch a row where `locate_row` finds it; reads its metadata."""
    stored, address, row_meta = locate_row(format, codes, meta, width, words, values, int8_slots, dim, row)
    if stored == format:
        prefetch_lines(address, width)
    elif stored == F.FP32:
        prefetch_lines(address, 4 * dim)
    else:
        prefetch_lines(row_meta, 4 + dim)


# -- planes -----------------------------------------------------------------------------------------------------------


def column_of(e: Emit, j: Any, plane: Any, p: int) -> Any:
    """Column of element j in plane p."""
    for _ in range(p):
        j = e.builder.add(j, plane)
    return j


def left_of(e: Emit, j: Any, plane: Any, dim: Any, p: int) -> Any:
    """Columns of plane p from element j on: the plane ends where the next one begins, or with the row."""
    here, row = e.builder.sub(plane, j), e.builder.sub(dim, column_of(e, j, plane, p))
    return e.builder.select(e.builder.icmp_signed("<", here, row), here, row)


# -- read -------------------------------------------------------------------------------------------------------------


def _reader(format: int) -> Any:
    planes = F.planes(format)

    def read_block(masked: bool) -> Any:
        @block("i64 i64 i64 i64 i64 i64 -> none")
        def read(e: Emit, row: Any, meta: Any, j: Any, plane: Any, dim: Any, out: Any) -> None:
            for p, vec in enumerate(Decoder(e, format, row, meta).block(j, e.builder.sub(plane, j) if masked else None)):
                left = left_of(e, j, plane, dim, p) if masked else None
                e.store(e.at(out, column_of(e, j, plane, p), 4), vec, count=left)

        return read

    whole, part = read_block(False), read_block(True)

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


_read = by_format(_reader, FORMATS, "i64 i64 i64 i64")


@helper
def read_row(format, row, meta, dim, out):
    """Dequantize a row to `dim` floats."""
    _read(format, row, meta, dim, out)


# -- move -------------------------------------------------------------------------------------------------------------


_copy_whole = block("i64 i64 -> none")(lambda e, source, target: e.store(target, e.load_f32(source)))
_copy_part = block("i64 i64 i64 -> none")(lambda e, source, target, n: e.store(target, e.load_f32(source, n), count=n))
_stream_whole = block("i64 i64 -> none")(lambda e, source, target: e.stream(target, e.load_f32(source)))
_fill_part = block("i64 i64 f32 -> none")(lambda e, target, left, value: e.store(target, e.splat(value), count=left))


@inlined
def copy_floats(source, target, count):
    """Copy `count` floats."""
    whole = count // WIDTH * WIDTH
    for c in range(0, whole, WIDTH):
        _copy_whole(source + 4 * c, target + 4 * c)
    if whole < count:
        _copy_part(source + 4 * whole, target + 4 * whole, count - whole)


@inlined
def stream_floats(source, target, count):
    """Copy `count` floats with non-temporal stores. Target and count must be whole vectors."""
    for c in range(0, 4 * count, 4 * WIDTH):
        _stream_whole(source + c, target + c)


@inlined
def fill_floats(target, count, value):
    """Set `count` floats."""
    for c in range(0, count, WIDTH):
        _fill_part(target + 4 * c, count - c, value)


def _narrower(format: int) -> Any:
    @block("i64 i64 -> none")
    def whole(e: Emit, source: Any, target: Any) -> None:
        e.store(target, round_output(e, e.load_f32(source), format), bits=16)

    @block("i64 i64 i64 -> none")
    def part(e: Emit, source: Any, target: Any, left: Any) -> None:
        e.store(target, round_output(e, e.load_f32(source), format), bits=16, count=left)

    @helper
    def narrow(source, target, count):
        end = count // WIDTH * WIDTH  # masked stores of 16 bits are several times slower
        for c in range(0, end, WIDTH):
            whole(source + 4 * c, target + 2 * c)
        if end < count:
            part(source + 4 * end, target + 2 * end, count - end)

    return narrow


_narrow = by_format(_narrower, (F.FP16, F.BF16), "i64 i64 i64")


@helper
def narrow(source, target, count, format):
    """Round `count` scratch floats to fp16 or bf16, nearest-even; overflow becomes infinite."""
    _narrow(format, source, target, count)


# -- random keys ------------------------------------------------------------------------------------------------------


@inlined
def fmix32(x):
    """The 32-bit finalizer of MurmurHash3."""
    x = ((x ^ (x >> 16)) * MIX1) & _MASK
    x = ((x ^ (x >> 13)) * MIX2) & _MASK
    return x ^ (x >> 16)


@inlined
def step_key(seed, step):
    """The part of a row's random key that all rows of a step share."""
    key = fmix32((seed & _MASK) ^ fmix32((seed >> 32) & _MASK))
    return fmix32((step & _MASK) ^ fmix32(((step >> 32) & _MASK) ^ key))


@inlined
def row_key(step, row):
    """The random key of an arena row, from `step_key`."""
    return fmix32((row & _MASK) ^ fmix32(((row >> 32) & _MASK) ^ step))
