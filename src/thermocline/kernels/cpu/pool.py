"""Sum bags of rows of one table, in the order of their ids, in registers (prefetching: docs/decisions/kernel_notes.md)."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline import formats as F

from .codes import SIZE, Decoder
from .compile import helper, inlined
from .format_switch import by_format
from .pool_int8_slots import pool_int8_slots
from .rows import CACHED, FORMATS, GROUPED_COLUMNS, PREFETCH_DISTANCE, PREFETCH_GROUP, column_of, left_of, next_group
from .vectors import WIDTH, Emit, Vec, block, get_f32, get_i64, get_u32, prefetch

_ONE = np.float32(1)


def _accumulator(format: int, blocks: int, weighted: bool) -> tuple[Any, Any, Any]:
    """(start, add, finish) of a sum over `blocks` blocks of elements from j on."""
    masked = blocks == 1
    planes = F.planes(format)
    count = planes * blocks

    @block(f"-> acc{count}")
    def start(e: Emit) -> list[Vec]:
        return [e.zeros()] * count

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


def _unit(format: int, blocks: int, weighted: bool) -> Any:
    """Sum `blocks` blocks of elements from j on over the rows of a bag, and write the sum."""
    start, add, finish = _accumulator(format, blocks, weighted)

    @block("i64 i64 i64 -> none")
    def prefetch_blocks(e: Emit, row: Any, meta: Any, j: Any) -> None:
        for line in range(0, blocks * WIDTH * SIZE[format], 64):
            e.prefetch(e.at(e.at(row, j, SIZE[format]), line))
        if F.META_WORDS[format]:
            e.prefetch(meta)

    @inlined
    def unit(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out):
        acc = start()
        for i in range(first, last):
            if i + PREFETCH_DISTANCE < end:
                later = get_i64(ids, i + PREFETCH_DISTANCE)
                prefetch_blocks(codes + later * width, meta + later * words, j)
            row = get_i64(ids, i)
            weight = get_f32(weights, i) if weighted else _ONE
            acc = add(acc, codes + row * width, meta + row * words, j, plane - j, weight)
        finish(acc, j, plane, dim, out, factor)

    return unit


def _cached_accumulator(format: int, blocks: int, weighted: bool) -> tuple[Any, Any, Any]:
    """(start, add, finish) of such a sum where a row may be cached."""
    masked = blocks == 1
    planes = F.planes(format)
    start, add, finish = _accumulator(format, blocks, weighted)

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
        word = get_u32(meta + row * words, 0)
        if word >= CACHED:
            acc = add_floats(acc, values + 4 * dim * (word - CACHED), j, plane, dim, weight)
        else:
            acc = add(acc, codes + row * width, meta + row * words, j, plane - j, weight)
        return acc

    return start, add_row, finish


def _prefetchers(format: int, blocks: int) -> tuple[Any, Any]:
    """(prefetch all lines, prefetch the first line) of a unit of a row that may be cached."""
    planes = F.planes(format)

    def lines(e: Emit, row: Any, meta: Any, values: Any, j: Any, plane: Any, dim: Any) -> list[Any]:
        # Without a branch, which would be mispredicted as often as the one that adds. A row of codes has fewer lines, so its
        # last line is prefetched repeatedly, which costs nothing.
        word = e.load_word(meta)
        is_cached = e.builder.icmp_signed(">=", word, e.number(CACHED))
        slot = e.builder.mul(e.builder.sub(word, e.number(CACHED)), dim)
        codes, size = e.at(row, j, SIZE[format]), blocks * WIDTH * SIZE[format]
        found = []
        for p in range(planes):
            floats = e.at(values, e.builder.add(slot, column_of(e, j, plane, p)), 4)
            for line in range(0, 4 * blocks * WIDTH, 64):
                within = min((p * 4 * blocks * WIDTH + line) // 64, (size - 1) // 64) * 64
                found.append(e.builder.select(is_cached, e.at(floats, line), e.at(codes, within)))
        return found

    @block("i64 i64 i64 i64 i64 i64 -> none")
    def prefetch_unit(e: Emit, row: Any, meta: Any, values: Any, j: Any, plane: Any, dim: Any) -> None:
        for line in lines(e, row, meta, values, j, plane, dim):
            e.prefetch(line)

    @block("i64 i64 i64 i64 i64 i64 -> none")
    def prefetch_first_line(e: Emit, row: Any, meta: Any, values: Any, j: Any, plane: Any, dim: Any) -> None:
        e.prefetch(lines(e, row, meta, values, j, plane, dim)[0])

    return prefetch_unit, prefetch_first_line


def _cached_unit(format: int, blocks: int, weighted: bool) -> Any:
    """`_unit` where rows may be cached."""
    start, add_row, finish = _cached_accumulator(format, blocks, weighted)
    prefetch_unit, prefetch_first_line = _prefetchers(format, blocks)

    @inlined
    def row_by_row(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out):
        acc = start()
        for i in range(first, last):
            if i + 2 * PREFETCH_DISTANCE < end:
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

    return in_groups if F.planes(format) * blocks * WIDTH == GROUPED_COLUMNS and not weighted else row_by_row


def _pooler(format: int, cached: bool) -> Any:
    planes = F.planes(format)
    large, middle = 8 // planes, 4 // planes
    make = _cached_unit if cached else _unit
    unit_large, unit_middle, unit_small = (make(format, n, False) for n in (large, middle, 1))
    weighted_middle, weighted_small = (make(format, n, True) for n in (middle, 1))

    @inlined
    def bag(codes, meta, values, width, words, ids, weights, first, last, end, plane, dim, factor, out):
        short = dim - (planes - 1) * plane
        j = 0
        while weights == 0 and j + large * WIDTH <= short:
            unit_large(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out)
            j += large * WIDTH
        while j + middle * WIDTH <= short:
            if weights == 0:
                unit_middle(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out)
            else:
                weighted_middle(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out)
            j += middle * WIDTH
        while j < plane:
            if weights == 0:
                unit_small(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out)
            else:
                weighted_small(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out)
            j += WIDTH

    @helper
    def pool(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch):
        plane = (dim + planes - 1) // planes
        for b in range(first, last):
            low, high = get_i64(offsets, b), get_i64(offsets, b + 1)
            factor = _ONE / np.float32(max(high - low, 1)) if mean else _ONE
            bag(codes, meta, values, width, words, ids, weights, low, high, end, plane, dim, factor, out)
            out += pitch

    return pool


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
