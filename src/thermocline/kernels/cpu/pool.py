"""Sum bags of rows of one table, in the order of their ids, in registers (prefetching: docs/decisions/kernel_notes.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline import formats as F

from . import rows as R
from .codes import SIZE, Decoder
from .compile import helper, inlined
from .rows import CACHED, FORMATS, GROUPED_COLUMNS, PREFETCH_DISTANCE, PREFETCH_GROUP, column_of, left_of, next_group
from .vectors import WIDTH, Emit, Vec, block, by_format, get_f32, get_i64, get_u32, prefetch

_ZERO, _ONE = np.float32(0), np.float32(1)


def _accumulator(format: int, blocks: int, weighted: bool) -> tuple[Any, Any, Any]:
    """(start, add, finish) of a sum over `blocks` blocks of elements from j on."""
    masked = blocks == 1
    planes = F.planes(format)
    count = planes * blocks

    start = block(f"-> acc{count}")(lambda e: [e.zeros()] * count)

    @block(f"acc{count} i64 i64 i64 i64 f32 -> acc{count}")
    def add(e: Emit, acc: list[Vec], row: Any, meta: Any, j: Any, left: Any, weight: Any) -> list[Vec]:
        decoder = Decoder(e, format, row, meta, e.splat(weight) if weighted else None)
        values = [v for k in range(blocks) for v in decoder.block(e.at(j, k * WIDTH), left if masked else None)]
        return [a + v for a, v in zip(acc, values, strict=True)]

    @block(f"acc{count} i64 i64 i64 i64 f32 -> none")
    def finish(e: Emit, acc: list[Vec], j: Any, plane: Any, dim: Any, out: Any, factor: Any) -> None:
        for k in range(blocks):
            for p in range(planes):
                left = left_of(e, j, plane, dim, p) if masked else None
                column = column_of(e, e.at(j, k * WIDTH), plane, p)
                e.store(e.at(out, column, 4), acc[k * planes + p] * e.splat(factor), count=left)

    return start, add, finish


def _prefetchers(format: int, blocks: int, cached: bool) -> tuple[Any, Any]:
    """(prefetch all lines, prefetch the first line) of a unit of a row, in its table or in its fp32 slot."""
    planes, size = F.planes(format), blocks * WIDTH * SIZE[format]

    def table_lines(e: Emit, row: Any, meta: Any, values: Any, j: Any, plane: Any, dim: Any) -> list[Any]:
        codes = e.at(row, j, SIZE[format])
        return [e.at(codes, line) for line in range(0, size, 64)] + [meta] * (F.META_WORDS[format] > 0)

    def slot_lines(e: Emit, row: Any, meta: Any, values: Any, j: Any, plane: Any, dim: Any) -> list[Any]:
        # Without a branch, which would be mispredicted as often as the one that adds. A row of codes has fewer lines, so its
        # last line is prefetched repeatedly, which costs nothing.
        word = e.load_word(meta)
        is_cached = e.builder.icmp_signed(">=", word, e.number(CACHED))
        slot, codes = e.builder.mul(e.builder.sub(word, e.number(CACHED)), dim), e.at(row, j, SIZE[format])
        found = []
        for p in range(planes):
            floats = e.at(values, e.builder.add(slot, column_of(e, j, plane, p)), 4)
            for line in range(0, 4 * blocks * WIDTH, 64):
                within = min((p * 4 * blocks * WIDTH + line) // 64, (size - 1) // 64) * 64
                found.append(e.builder.select(is_cached, e.at(floats, line), e.at(codes, within)))
        return found

    lines = slot_lines if cached else table_lines

    @block("i64 i64 i64 i64 i64 i64 -> none")
    def prefetch_unit(e: Emit, *where: Any) -> None:
        for line in lines(e, *where):
            e.prefetch(line)

    @block("i64 i64 i64 i64 i64 i64 -> none")
    def prefetch_first_line(e: Emit, *where: Any) -> None:
        e.prefetch(lines(e, *where)[0])

    return prefetch_unit, prefetch_first_line


def _unit(format: int, blocks: int, weighted: bool, cached: bool) -> Any:
    """Sum `blocks` blocks of elements from j on over the rows of a bag, and write the sum."""
    masked, planes = blocks == 1, F.planes(format)
    start, add, finish = _accumulator(format, blocks, weighted)
    prefetch_unit, prefetch_first_line = _prefetchers(format, blocks, cached)

    @block(f"acc{planes * blocks} i64 i64 i64 i64 f32 -> acc{planes * blocks}")
    def add_floats(e: Emit, acc: list[Vec], row: Any, j: Any, plane: Any, dim: Any, weight: Any) -> list[Vec]:
        result = []
        for k in range(blocks):
            for p in range(planes):
                left = left_of(e, j, plane, dim, p) if masked else None
                value = e.load_f32(e.at(row, column_of(e, e.at(j, k * WIDTH), plane, p), 4), left)
                result.append(acc[k * planes + p] + (value * e.splat(weight) if weighted else value))
        return result

    @inlined
    def add_row(acc, codes, meta, values, width, words, ids, weights, i, j, plane, dim):
        row = get_i64(ids, i)
        weight = get_f32(weights, i) if weighted else _ONE
        word = get_u32(meta + row * words, 0) if cached else 0
        if word >= CACHED:
            acc = add_floats(acc, values + 4 * dim * (word - CACHED), j, plane, dim, weight)
        else:
            acc = add(acc, codes + row * width, meta + row * words, j, plane - j, weight)
        return acc

    @inlined
    def row_by_row(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out):
        acc = start()
        for i in range(first, last):
            if cached and i + 2 * PREFETCH_DISTANCE < end:
                prefetch(meta + get_i64(ids, i + 2 * PREFETCH_DISTANCE) * words)
            if i + PREFETCH_DISTANCE < end:
                later = get_i64(ids, i + PREFETCH_DISTANCE)
                prefetch_unit(codes + later * width, meta + later * words, values, j, plane, dim)
            acc = add_row(acc, codes, meta, values, width, words, ids, weights, i, j, plane, dim)
        finish(acc, j, plane, dim, out, factor)

    @inlined
    def in_groups(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out):
        acc = start()
        for low in range(first, last, PREFETCH_GROUP):
            high, at = min(low + PREFETCH_GROUP, last), next_group(low)
            if at < high:
                for i in range(at + 2 * PREFETCH_GROUP, min(at + 3 * PREFETCH_GROUP, end)):
                    prefetch(meta + get_i64(ids, i) * words)
                for i in range(at + PREFETCH_GROUP, min(at + 2 * PREFETCH_GROUP, end)):
                    later = get_i64(ids, i)
                    prefetch_first_line(codes + later * width, meta + later * words, values, j, plane, dim)
                for i in range(at + PREFETCH_GROUP, min(at + 2 * PREFETCH_GROUP, end)):
                    later = get_i64(ids, i)
                    prefetch_unit(codes + later * width, meta + later * words, values, j, plane, dim)
            for i in range(low, high):
                acc = add_row(acc, codes, meta, values, width, words, ids, weights, i, j, plane, dim)
        finish(acc, j, plane, dim, out, factor)

    return in_groups if cached and planes * blocks * WIDTH == GROUPED_COLUMNS and not weighted else row_by_row


def _pooler(format: int, cached: bool) -> Any:
    planes = F.planes(format)
    large, middle = 8 // planes, 4 // planes
    unit_large, unit_middle, unit_small = (_unit(format, n, False, cached) for n in (large, middle, 1))
    weighted_middle, weighted_small = (_unit(format, n, True, cached) for n in (middle, 1))

    @helper  # the loops over units stand here: Numba inlines a large function in the square of its size
    def pool(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch):
        plane = (dim + planes - 1) // planes
        for b in range(first, last):
            low, high = get_i64(offsets, b), get_i64(offsets, b + 1)
            factor = _ONE / np.float32(max(high - low, 1)) if mean else _ONE
            short = dim - (planes - 1) * plane
            j = 0
            while weights == 0 and j + large * WIDTH <= short:
                unit_large(codes, meta, values, width, words, ids, weights, low, high, end, j, plane, dim, factor, out)
                j += large * WIDTH
            while j + middle * WIDTH <= short:
                if weights == 0:
                    unit_middle(codes, meta, values, width, words, ids, weights, low, high, end, j, plane, dim, factor, out)
                else:
                    weighted_middle(codes, meta, values, width, words, ids, weights, low, high, end, j, plane, dim, factor, out)
                j += middle * WIDTH
            while j < plane:
                if weights == 0:
                    unit_small(codes, meta, values, width, words, ids, weights, low, high, end, j, plane, dim, factor, out)
                else:
                    weighted_small(codes, meta, values, width, words, ids, weights, low, high, end, j, plane, dim, factor, out)
                j += WIDTH
            out += pitch

    return pool


# -- tables with int8 slots -------------------------------------------------------------------------------------------


def _row_adder(format: int) -> Any:
    """sum += weight * row, one row at a time into memory: the format changes from row to row."""
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


_add_row = by_format(_row_adder, (F.FP32, F.INT8, F.INT4, F.INT2), "i64 i64 i64 i64 f32")


_scale = block("i64 i64 f32 -> none")(lambda e, out, n, factor: e.store(out, e.load_f32(out, n) * e.splat(factor), count=n))


@helper
def pool_int8_slots(
    format, codes, meta, values, int8_slots, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch
):  # fmt: skip
    """`pool_bags` of int4 and int2 tables."""
    for b in range(first, last):
        low, high = get_i64(offsets, b), get_i64(offsets, b + 1)
        R.fill_floats(out, dim, _ZERO)
        for i in range(low, high):
            if i + 2 * PREFETCH_DISTANCE < end:
                prefetch(meta + get_i64(ids, i + 2 * PREFETCH_DISTANCE) * words)
            if i + PREFETCH_DISTANCE < end:
                later = get_i64(ids, i + PREFETCH_DISTANCE)
                R.prefetch_located_row(format, codes, meta, width, words, values, int8_slots, dim, later)
            stored, row, row_meta = R.locate_row(format, codes, meta, width, words, values, int8_slots, dim, get_i64(ids, i))
            weight = get_f32(weights, i) if weights != 0 else _ONE
            _add_row(stored, row, row_meta, dim, out, weight)
        if mean:
            factor = _ONE / np.float32(max(high - low, 1))
            for c in range(0, dim, WIDTH):
                _scale(out + 4 * c, dim - c, factor)
        out += pitch


# -- all tables -------------------------------------------------------------------------------------------------------

_ARGUMENTS = "i64 i64 i64 i64 i64 i64 i64 i64 i64 i64 i64 i64 i64 i64 i64"
_pool_uncached = by_format(lambda format: _pooler(format, False), FORMATS, _ARGUMENTS)
_pool_cached = by_format(lambda format: _pooler(format, True), (f for f in FORMATS if F.META_WORDS[f]), _ARGUMENTS)


@inlined
def pool_plain(format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch):
    """`pool_bags` of a table without a cache."""
    _pool_uncached(format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)


@inlined
def pool_bags(
    format, codes, meta, values, int8_slots, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch
):  # fmt: skip
    """Sum or mean of bags first to last - 1 of one table, `pitch` bytes apart. Ids before `end` have been checked."""
    if int8_slots != 0 and (format == F.INT4 or format == F.INT2):
        pool_int8_slots(
            format, codes, meta, values, int8_slots, width, words, ids, offsets, weights, first, last, end, dim, mean, out,
            pitch,
        )  # fmt: skip
    elif values != 0 and words > 0:
        _pool_cached(format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    else:
        pool_plain(format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
