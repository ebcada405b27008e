"""Pool rows of tables with int8 slots, one at a time into memory: the format changes from row to row."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline import formats as F

from .codes import Decoder
from .compile import helper
from .format_switch import by_format
from .rows import PREFETCH_DISTANCE, column_of, fill_floats, left_of, locate_row, prefetch_located_row
from .vectors import WIDTH, Emit, block, get_f32, get_i64, prefetch

_ZERO, _ONE = np.float32(0), np.float32(1)


def _adder(format: int) -> Any:
    """sum += weight * row."""
    planes = F.planes(format)

    @block("i64 i64 i64 i64 i64 i64 f32 -> none")
    def add_block(e: Emit, row: Any, row_meta: Any, j: Any, plane: Any, dim: Any, out: Any, weight: Any) -> None:
        decoder = Decoder(e, format, row, row_meta, e.splat(weight))
        for p, value in enumerate(decoder.block(j, e.builder.sub(plane, j))):
            left, at = left_of(e, j, plane, dim, p), e.at(out, column_of(e, j, plane, p), 4)
            e.store(at, e.load_f32(at, left) + value, count=left)

    @helper
    def add(row, row_meta, dim, out, weight):
        plane = (dim + planes - 1) // planes
        for j in range(0, plane, WIDTH):
            add_block(row, row_meta, j, plane, dim, out, weight)

    return add


_add_row = by_format(_adder, (F.FP32, F.INT8, F.INT4, F.INT2), "i64 i64 i64 i64 f32")


@block("i64 i64 f32 -> none")
def _scale(e: Emit, out: Any, left: Any, factor: Any) -> None:
    e.store(out, e.load_f32(out, left) * e.splat(factor), count=left)


@helper
def pool_int8_slots(
    format, codes, meta, values, int8_slots, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch
):  # fmt: skip
    """`pool_bags` of int4 and int2 tables."""
    for b in range(first, last):
        low, high = get_i64(offsets, b), get_i64(offsets, b + 1)
        fill_floats(out, dim, _ZERO)
        for i in range(low, high):
            if i + 2 * PREFETCH_DISTANCE < end:
                prefetch(meta + get_i64(ids, i + 2 * PREFETCH_DISTANCE) * words)
            if i + PREFETCH_DISTANCE < end:
                later = get_i64(ids, i + PREFETCH_DISTANCE)
                prefetch_located_row(format, codes, meta, width, words, values, int8_slots, dim, later)
            stored, row, row_meta = locate_row(format, codes, meta, width, words, values, int8_slots, dim, get_i64(ids, i))
            weight = get_f32(weights, i) if weights != 0 else _ONE
            _add_row(stored, row, row_meta, dim, out, weight)
        if mean:
            factor = _ONE / np.float32(max(high - low, 1))
            for c in range(0, dim, WIDTH):
                _scale(out + 4 * c, dim - c, factor)
        out += pitch
