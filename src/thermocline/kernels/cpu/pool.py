"""Pool rows: sum bags of rows of one table, in the order of their ids.

The sum stays in registers. The columns of a bag are cut into units of 8 vectors (128 columns), 4 vectors or 1; for
each unit all rows of the bag are added, in order, and the sum is written once. Rows lie where ids send them, so what
limits pooling is waiting for memory: while a row is added, the same part of the row `AHEAD` lookups further on is
asked for.

Every operation is the reference's, in its order, so sums equal it bit for bit. A fused multiply-add would be 20%
faster on rows that lie in the cache and no faster on those that do not (S2, int8: 4.9 against 5.0 ms), so it is not
used. Weights do have code of their own: multiplying by one cost 15% (6.5 against 5.5 ms on 8 x 1M x 128 int8, pooling
20).

A row that is cached lies elsewhere, as floats. Code for tables with a cache is separate, so that those without pay
nothing. It looks at the metadata of a row `AHEAD` lookups before its use and asks for what it names, and asks for the
metadata as much earlier again. Units of `UNIT` columns ask for the rows of `TOGETHER` lookups at once, of whatever bags: first
for one line of each, since a core does not go on past a line whose page it has yet to find, but looks for the pages of several
at once; then for the rest. (Rows of 64 columns, one a bag, took longer that way.) Tables with near slots are pooled by
`cpu_pool_near`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import numpy as np

from thermocline import formats as F

from .codes import SIZE, Decoder
from .compile import helper, inlined
from .pool_int8_slots import pool_near
from .rows import AHEAD, CACHED, FORMATS, TOGETHER, UNIT, column_of, left_of, next_asking
from .vectors import WIDTH, Emit, Vec, block, get_f32, get_i64, get_u32, prefetch

_ONE = np.float32(1)


def _sums(format: int, blocks: int, weighted: bool) -> tuple[Any, Any, Any]:
    """How the sum of `blocks` blocks of elements from j on begins, how a stored row is added, and how the sum is written."""
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
    start, add, finish = _sums(format, blocks, weighted)

    @block("i64 i64 i64 -> none")
    def ask(e: Emit, row: Any, meta: Any, j: Any) -> None:
        for line in range(0, blocks * WIDTH * SIZE[format], 64):
            e.prefetch(e.at(e.at(row, j, SIZE[format]), line))
        if F.META_WORDS[format]:
            e.prefetch(meta)

    @inlined
    def unit(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out):
        acc = start()
        for i in range(first, last):
            if i + AHEAD < end:
                later = get_i64(ids, i + AHEAD)
                ask(codes + later * width, meta + later * words, j)
            row = get_i64(ids, i)
            weight = get_f32(weights, i) if weighted else _ONE
            acc = add(acc, codes + row * width, meta + row * words, j, plane - j, weight)
        finish(acc, j, plane, dim, out, factor)

    return unit


def _cached_sums(format: int, blocks: int, weighted: bool) -> tuple[Any, Any, Any]:
    """How such a sum begins, how the row of a lookup is added where it may be cached, and how the sum is written."""
    masked = blocks == 1
    planes = F.planes(format)
    start, add, finish = _sums(format, blocks, weighted)

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
    def plus(acc, codes, meta, values, width, words, ids, weights, i, j, plane, dim):
        row = get_i64(ids, i)
        weight = get_f32(weights, i) if weighted else _ONE
        word = get_u32(meta + row * words, 0)
        if word >= CACHED:
            acc = add_floats(acc, values + 4 * dim * (word - CACHED), j, plane, dim, weight)
        else:
            acc = add(acc, codes + row * width, meta + row * words, j, plane - j, weight)
        return acc

    return start, plus, finish


def _asking(format: int, blocks: int) -> tuple[Any, Any]:
    """How all lines of a unit of a row are asked for where it may be cached, and how the first of them is."""
    planes = F.planes(format)

    def lines(e: Emit, row: Any, meta: Any, values: Any, j: Any, plane: Any, dim: Any) -> list[Any]:
        # Without a branch, which would be mispredicted as often as the one that adds: a row of codes has fewer lines, so
        # its last is asked for again and again, which costs nothing.
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
    def ask_found(e: Emit, row: Any, meta: Any, values: Any, j: Any, plane: Any, dim: Any) -> None:
        for line in lines(e, row, meta, values, j, plane, dim):
            e.prefetch(line)

    @block("i64 i64 i64 i64 i64 i64 -> none")
    def ask_first(e: Emit, row: Any, meta: Any, values: Any, j: Any, plane: Any, dim: Any) -> None:
        e.prefetch(lines(e, row, meta, values, j, plane, dim)[0])

    return ask_found, ask_first


def _cached_unit(format: int, blocks: int, weighted: bool) -> Any:
    """`_unit` where rows may be cached."""
    start, plus, finish = _cached_sums(format, blocks, weighted)
    ask_found, ask_first = _asking(format, blocks)

    @inlined
    def one_by_one(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out):
        acc = start()
        for i in range(first, last):
            if i + 2 * AHEAD < end:
                prefetch(meta + get_i64(ids, i + 2 * AHEAD) * words)
            if i + AHEAD < end:
                later = get_i64(ids, i + AHEAD)
                ask_found(codes + later * width, meta + later * words, values, j, plane, dim)
            acc = plus(acc, codes, meta, values, width, words, ids, weights, i, j, plane, dim)
        finish(acc, j, plane, dim, out, factor)

    @inlined
    def together(codes, meta, values, width, words, ids, weights, first, last, end, j, plane, dim, factor, out):
        acc = start()
        for low in range(first, last, TOGETHER):
            high, at = min(low + TOGETHER, last), next_asking(low)
            if at < high:
                for i in range(at + 2 * TOGETHER, min(at + 3 * TOGETHER, end)):
                    prefetch(meta + get_i64(ids, i) * words)
                for i in range(at + TOGETHER, min(at + 2 * TOGETHER, end)):
                    later = get_i64(ids, i)
                    ask_first(codes + later * width, meta + later * words, values, j, plane, dim)
                for i in range(at + TOGETHER, min(at + 2 * TOGETHER, end)):
                    later = get_i64(ids, i)
                    ask_found(codes + later * width, meta + later * words, values, j, plane, dim)
            for i in range(low, high):
                acc = plus(acc, codes, meta, values, width, words, ids, weights, i, j, plane, dim)
        finish(acc, j, plane, dim, out, factor)

    return together if F.planes(format) * blocks * WIDTH == UNIT and not weighted else one_by_one


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


(
    _pool_fp32,
    _pool_fp16,
    _pool_bf16,
    _pool_fp8,
    _pool_int8,
    _pool_int4,
    _pool_int2,
    _pool_int8_affine,
    _pool_int4_affine,
    _pool_int2_affine,
) = (_pooler(f, False) for f in FORMATS)
(
    _cached_fp8,
    _cached_int8,
    _cached_int4,
    _cached_int2,
    _cached_int8_affine,
    _cached_int4_affine,
    _cached_int2_affine,
) = (_pooler(f, True) for f in FORMATS if F.META_WORDS[f])


@inlined
def pool_plain(format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch):
    if format == F.FP32:
        _pool_fp32(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.FP16:
        _pool_fp16(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.BF16:
        _pool_bf16(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.FP8:
        _pool_fp8(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.INT8:
        _pool_int8(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.INT4:
        _pool_int4(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.INT2:
        _pool_int2(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.INT8_AFFINE:
        _pool_int8_affine(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.INT4_AFFINE:
        _pool_int4_affine(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    else:
        _pool_int2_affine(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)


@inlined
def _pool_cached(format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch):
    if format == F.FP8:
        _cached_fp8(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.INT8:
        _cached_int8(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.INT4:
        _cached_int4(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.INT2:
        _cached_int2(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.INT8_AFFINE:
        _cached_int8_affine(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    elif format == F.INT4_AFFINE:
        _cached_int4_affine(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    else:
        _cached_int2_affine(codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)


@inlined
def pool_bags(format, codes, meta, values, near, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch):
    """Sum (or mean) of bags first to last - 1 of one table, `pitch` bytes apart. Ids up to `end` are trusted here."""
    if near != 0 and (format == F.INT4 or format == F.INT2):
        pool_near(
            format, codes, meta, values, near, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch
        )
    elif values != 0 and words > 0:
        _pool_cached(format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
    else:
        pool_plain(format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch)
