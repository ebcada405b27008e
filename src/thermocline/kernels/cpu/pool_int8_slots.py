"""Pool rows of tables with near slots: a row is a row of the table, fp32 in a full slot, or int8 in a near one.

One row at a time, added to the sum in memory, where `cpu_pool` keeps sums in registers for a part of the columns at a time:
which of three formats a row has is found out once a row, and code of three formats for each width of unit would be compiled
for nothing where near rows are few. Sums are those of the reference, bit for bit.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline import formats as F

from .codes import Decoder
from .compile import helper
from .rows import AHEAD, ask_for_found, column_of, fill_floats, find_row, left_of
from .vectors import WIDTH, Emit, block, get_f32, get_i64, prefetch

_ZERO, _ONE = np.float32(0), np.float32(1)


def _adder(format: int) -> Any:
    """sum += weight * row."""
    planes = F.planes(format)

    @block("i64 i64 i64 i64 i64 i64 f32 -> none")
    def part(e: Emit, row: Any, about: Any, j: Any, plane: Any, dim: Any, out: Any, weight: Any) -> None:
        decoder = Decoder(e, format, row, about, e.splat(weight))
        for p, value in enumerate(decoder.block(j, e.builder.sub(plane, j))):
            left, at = left_of(e, j, plane, dim, p), e.at(out, column_of(e, j, plane, p), 4)
            e.store(at, e.load_f32(at, left) + value, count=left)

    @helper
    def add(row, about, dim, out, weight):
        plane = (dim + planes - 1) // planes
        for j in range(0, plane, WIDTH):
            part(row, about, j, plane, dim, out, weight)

    return add


_add_fp32, _add_int8, _add_int4, _add_int2 = (_adder(format) for format in (F.FP32, F.INT8, F.INT4, F.INT2))


@block("i64 i64 f32 -> none")
def _scale(e: Emit, out: Any, left: Any, factor: Any) -> None:
    e.store(out, e.load_f32(out, left) * e.splat(factor), count=left)


@helper
def pool_near(format, codes, meta, values, near, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch):
    """As `pool_bags`, for int4 and int2 tables."""
    for b in range(first, last):
        low, high = get_i64(offsets, b), get_i64(offsets, b + 1)
        fill_floats(out, dim, _ZERO)
        for i in range(low, high):
            if i + 2 * AHEAD < end:
                prefetch(meta + get_i64(ids, i + 2 * AHEAD) * words)
            if i + AHEAD < end:
                ask_for_found(format, codes, meta, width, words, values, near, dim, get_i64(ids, i + AHEAD))
            found, row, about = find_row(format, codes, meta, width, words, values, near, dim, get_i64(ids, i))
            weight = get_f32(weights, i) if weights != 0 else _ONE
            if found == F.FP32:
                _add_fp32(row, about, dim, out, weight)
            elif found == F.INT8:
                _add_int8(row, about, dim, out, weight)
            elif found == F.INT4:
                _add_int4(row, about, dim, out, weight)
            else:
                _add_int2(row, about, dim, out, weight)
        if mean:
            factor = _ONE / np.float32(max(high - low, 1))
            for c in range(0, dim, WIDTH):
                _scale(out + 4 * c, dim - c, factor)
        out += pitch
