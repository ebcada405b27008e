"""Sum bags of rows of one table, in the order of their ids, in registers (prefetching: docs/decisions/kernel_notes.md)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from thermocline import formats as F

from . import rows as R
from .codes import SIZE, Decoder
from .compile import helper, inlined
from .rows import CACHED, FORMATS, GROUPED_COLUMNS, PREFETCH_DISTANCE, PREFETCH_GROUP, column_of, left_of, next_group
from .vectors import WIDTH, Emit, Vec, block, by_format, get_f32, get_i64, get_u32, prefetch

_ZERO, _ONE = np.float32(0), np.float32(1)


MOST_VECTORS = 8  # vectors of columns that one pass over a bag sums
SIZES = (1, 2, 4, 6, 8)  # of passes that are compiled
USUAL = (F.FP32, F.INT8)  # formats that have lookups of their own, which compile in less time than those of all formats
BAGS = 8  # bags that are summed together where a row takes several passes: its pages stay in the TLB


def _is_masked(format: int, blocks: int, block: int) -> bool:
    """Whether a block of a pass may reach past the row: the last one, and with four planes also those before it."""
    return block == blocks - 1 or F.planes(format) > 2


def _accumulator(format: int, blocks: int) -> tuple[Any, Any, Any, Any]:
    """(start, decode, add, finish) of a sum over `blocks` blocks of elements from j on, of which the last may be partial."""
    planes = F.planes(format)
    count = planes * blocks

    start = block(f"-> acc{count}")(lambda e: [e.zeros()] * count)

    def decode(e: Emit, row: Any, meta: Any, j: Any, left: Any, weight: Any) -> list[Vec]:
        decoder = Decoder(e, format, row, meta, e.splat(weight))
        last = e.at(left, 1 - blocks, WIDTH)
        return [v for k in range(blocks) for v in decoder.block(e.at(j, k * WIDTH), last if k == blocks - 1 else None)]

    @block(f"acc{count} i64 i64 i64 i64 f32 -> acc{count}")
    def add(e: Emit, acc: list[Vec], row: Any, meta: Any, j: Any, left: Any, weight: Any) -> list[Vec]:
        return [a + v for a, v in zip(acc, decode(e, row, meta, j, left, weight), strict=True)]

    @block(f"acc{count} i64 i64 i64 i64 f32 -> none")
    def finish(e: Emit, acc: list[Vec], j: Any, plane: Any, dim: Any, out: Any, factor: Any) -> None:
        for k in range(blocks):
            for p in range(planes):
                at, masked = e.at(j, k * WIDTH), _is_masked(format, blocks, k)
                left = left_of(e, at, plane, dim, p) if masked else None
                e.store(e.at(out, column_of(e, at, plane, p), 4), acc[k * planes + p] * e.splat(factor), count=left)

    return start, decode, add, finish


def _slot_of(e: Emit, word: Any, values: Any, dim: Any) -> tuple[Any, Any]:
    """(whether a first meta word is a pointer, address of the fp32 slot that it then points at)."""
    is_cached = e.builder.icmp_signed(">=", word, e.number(CACHED))
    return is_cached, e.at(values, e.builder.mul(e.builder.sub(word, e.number(CACHED)), dim), 4)


def _prefetchers(format: int, blocks: int, cached: bool) -> tuple[Any, Any]:
    """(prefetch all lines, prefetch the first line) of a unit of a row, in its table or in its fp32 slot.

    Most rows do not begin on a line, so a unit ends on one line more than its size says. Without it, a quarter of a lookup of
    360 columns was spent waiting for the last line. Masked loads wait for the line of what they leave out, too.
    """
    planes, end = F.planes(format), blocks * WIDTH - 1

    def all_lines(e: Emit, row: Any, meta: Any, values: Any, j: Any, plane: Any, dim: Any) -> list[Any]:
        first, size = e.at(row, j, SIZE[format]), (end + 1) * SIZE[format]
        codes = [e.at(first, byte) for byte in (*range(0, size, 64), size - 1)]
        if not cached:
            return codes + [meta] * (F.META_WORDS[format] > 0)
        # Without a branch, which would be mispredicted as often as the one that adds. A row of codes has fewer lines, so its
        # last line is prefetched repeatedly, which costs nothing.
        is_cached, slot = _slot_of(e, e.load_word(meta), values, dim)
        lines = []
        for p in range(planes):
            columns = [*range(0, end, WIDTH)] + [end] * (p == planes - 1)
            lines += [e.at(slot, column_of(e, e.at(j, column), plane, p), 4) for column in columns]
        return [e.builder.select(is_cached, at, codes[min(n, len(codes) - 1)]) for n, at in enumerate(lines)]

    @block("i64 i64 i64 i64 i64 i64 -> none")
    def prefetch_unit(e: Emit, *where: Any) -> None:
        for line in all_lines(e, *where):
            e.prefetch(line)

    @block("i64 i64 i64 i64 i64 i64 -> none")
    def prefetch_first_line(e: Emit, *where: Any) -> None:
        e.prefetch(all_lines(e, *where)[0])

    return prefetch_unit, prefetch_first_line


def _row_adder_of(format: int, blocks: int, cached: bool, decode: Any, add: Any) -> Any:
    """acc += weight * a unit of a row, from its table or from its fp32 slot."""
    planes = F.planes(format)
    accumulator = f"acc{planes * blocks}"

    def floats(e: Emit, row: Any, j: Any, plane: Any, dim: Any, weight: Any) -> list[Vec]:
        """The unit of an fp32 row."""
        found = []
        for k in range(blocks):
            for p in range(planes):
                at, masked = e.at(j, k * WIDTH), _is_masked(format, blocks, k)
                left = left_of(e, at, plane, dim, p) if masked else None
                value = e.load_f32(e.at(row, column_of(e, at, plane, p), 4), left)
                found.append(value * e.splat(weight))
        return found

    @block(f"{accumulator} i64 i64 i64 i64 f32 -> {accumulator}")
    def add_floats(e: Emit, acc: list[Vec], row: Any, j: Any, plane: Any, dim: Any, weight: Any) -> list[Vec]:
        return [a + v for a, v in zip(acc, floats(e, row, j, plane, dim, weight), strict=True)]

    @block(f"{accumulator} i64 i64 i64 i64 i64 i64 f32 -> {accumulator}")
    def add_either(
        e: Emit, acc: list[Vec], row: Any, meta: Any, values: Any, j: Any, plane: Any, dim: Any, weight: Any
    ) -> list[Vec]:  # fmt: skip
        word = e.load_word(meta)
        is_cached, slot = _slot_of(e, word, values, dim)
        row, slot = e.builder.select(is_cached, values, row), e.builder.select(is_cached, slot, values)
        stored, held = decode(e, row, meta, j, e.builder.sub(plane, j), weight), floats(e, slot, j, plane, dim, weight)
        mask = e.splat(word).compare("<", 0)
        return [a + v.where(mask, w) for a, v, w in zip(acc, held, stored, strict=True)]

    @inlined
    def add_by_branch(acc, codes, meta, values, width, words, ids, weights, i, j, plane, dim):
        row = get_i64(ids, i)
        weight = get_f32(weights, i) if weights != 0 else _ONE
        word = get_u32(meta + row * words, 0) if cached else 0
        if word >= CACHED:
            acc = add_floats(acc, values + 4 * dim * (word - CACHED), j, plane, dim, weight)
        else:
            acc = add(acc, codes + row * width, meta + row * words, j, plane - j, weight)
        return acc

    @inlined
    def add_without_branch(acc, codes, meta, values, width, words, ids, weights, i, j, plane, dim):
        row = get_i64(ids, i)
        weight = get_f32(weights, i) if weights != 0 else _ONE
        return add_either(acc, codes + row * width, meta + row * words, values, j, plane, dim, weight)

    # Of a narrow row both kinds are read, one of them from any valid address: a mispredicted branch takes longer.
    return add_without_branch if cached and planes * blocks <= 2 else add_by_branch


def _unit(format: int, blocks: int, cached: bool) -> Any:
    """Sum `blocks` blocks of elements from j on over the rows of bags first to last - 1, and write the sums."""
    planes = F.planes(format)
    start, decode, add, finish = _accumulator(format, blocks)
    prefetch_unit, prefetch_first_line = _prefetchers(format, blocks, cached)
    add_row = _row_adder_of(format, blocks, cached, decode, add)

    @inlined
    def row_by_row(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim):
        acc = start()
        for i in range(first, last):
            if cached and i + 2 * PREFETCH_DISTANCE < end:
                prefetch(meta + get_i64(ids, i + 2 * PREFETCH_DISTANCE) * words)
            if i + PREFETCH_DISTANCE < end:
                later = get_i64(ids, i + PREFETCH_DISTANCE)
                prefetch_unit(codes + later * width, meta + later * words, values, j, plane, dim)
            acc = add_row(acc, codes, meta, values, width, words, ids, weights, i, j, plane, dim)
        return acc

    @inlined
    def in_groups(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim):
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
        return acc

    grouped = cached and planes * blocks * WIDTH == GROUPED_COLUMNS
    summed = in_groups if grouped else row_by_row

    @helper
    def unit(codes, meta, values, width, words, ids, offsets, weights, first, last, end, j, plane, dim, mean, out, pitch):
        low = get_i64(offsets, first)
        for b in range(first, last):
            high = get_i64(offsets, b + 1)
            acc = summed(codes, meta, values, width, words, ids, weights, low, high, end, j, plane, dim)
            factor = _ONE / np.float32(max(high - low, 1)) if mean else _ONE
            finish(acc, j, plane, dim, out, factor)
            low = high
            out += pitch

    return unit


@cache
def _pooler(format: int, cached: bool) -> Any:
    planes = F.planes(format)
    most = MOST_VECTORS // planes
    arguments = " ".join(["i64"] * 17)
    # A pass of its own for the last few columns of 72 takes as long as the first. Not every size is compiled: 3, 5
    # and 7 vectors are two passes. Bags without weights have the weight 1: a second set of passes takes 20 s to compile.
    sum_unit = by_format(lambda blocks: _unit(format, blocks, cached), [n for n in SIZES if n <= most], arguments)

    @helper
    def pool(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch):
        plane = (dim + planes - 1) // planes
        at_once = last - first if plane <= most * WIDTH else BAGS
        for low in range(first, last, at_once):
            high, j = min(low + at_once, last), 0
            while j < plane:
                blocks = min((plane - j + WIDTH - 1) // WIDTH, most)
                blocks -= (blocks & 1) * (blocks > 2)
                sum_unit(
                    blocks, codes, meta, values, width, words, ids, offsets, weights, low, high, end, j, plane, dim, mean,
                    out, pitch,
                )  # fmt: skip
                j += blocks * WIDTH
            out += (high - low) * pitch

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
_pool_usual = by_format(lambda format: _pooler(format, False), USUAL, _ARGUMENTS)
_pool_cached_int8 = by_format(lambda format: _pooler(format, True), (F.INT8,), _ARGUMENTS)


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


@inlined
def pool_usual_bags(
    format, codes, meta, values, int8_slots, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch
):  # fmt: skip
    """`pool_bags` of fp32 and int8 tables."""
    if values != 0 and words > 0:
        _pool_cached_int8(
            format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch
        )  # fmt: skip
    else:
        _pool_usual(format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
