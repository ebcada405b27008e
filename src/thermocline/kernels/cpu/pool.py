"""Sum bags of rows of one table, in the order of their ids, in registers (prefetching: docs/decisions/kernel_notes.md)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from thermocline import formats as F

from . import rows as R
from .codes import Decoder
from .compile import helper, inlined
from .rows import CACHED, FORMATS, PREFETCH_DISTANCE, column_of, left_of
from .vectors import WIDTH, Emit, Vec, block, by_format, get_f32, get_i64, get_u32, prefetch, put_i64

_ONE = np.float32(1)


MOST_VECTORS = 8  # vectors of columns that one pass over a bag sums
SIZES = (0, 1, 2, 4, 6, 8)  # blocks of the passes that are compiled
USUAL = (F.FP32, F.INT8)  # formats that have lookups of their own, which compile in less time than those of all formats
GROUP = 16  # lookups whose rows are listed and prefetched together, two groups ahead of the sums


def _accumulator(format: int, blocks: int) -> Any:
    """Blocks of code for a sum over `blocks` blocks of elements from j on; 0 for rows of part of one.

    The last block of a row ends with it and repeats elements of the block before: masked loads of bytes are slow.
    """
    planes, narrow, blocks = F.planes(format), blocks == 0, max(blocks, 1)
    count = planes * blocks

    def first_of(e: Emit, k: int, j: Any, plane: Any) -> Any:
        """The first element of a block."""
        at = e.at(j, k * WIDTH)
        if narrow or k < blocks - 1:
            return at
        last = e.at(plane, -WIDTH)
        return e.builder.select(e.builder.icmp_signed("<", at, last), at, last)

    def columns(e: Emit, j: Any, plane: Any, dim: Any) -> list[tuple[Any, Any]]:
        """First column of each vector, and its columns (None: all)."""
        found = []
        for k in range(blocks):
            at = first_of(e, k, j, plane)
            for p in range(planes):
                # The last plane may be up to `planes` - 1 columns shorter: with four planes, two blocks may end after it.
                masked = narrow or (k >= blocks - planes // 2 and 0 < p == planes - 1)
                found.append((column_of(e, at, plane, p), left_of(e, at, plane, dim, p) if masked else None))
        return found

    start = block(f"f32 -> acc{count}")(lambda e, zero: [e.splat(zero)] * count)

    @block(f"i64 -> acc{count}")
    def resume(e: Emit, carry: Any) -> list[Vec]:
        return [e.load_f32(e.at(carry, 4 * WIDTH * n)) for n in range(count)]

    @block(f"acc{count} i64 -> none")
    def interrupt(e: Emit, acc: list[Vec], carry: Any) -> None:
        for n, vec in enumerate(acc):
            e.store(e.at(carry, 4 * WIDTH * n), vec)

    def decode(e: Emit, row: Any, meta: Any, j: Any, plane: Any, weight: Any) -> list[Vec]:
        decoder, left = Decoder(e, format, row, meta, e.splat(weight)), e.builder.sub(plane, j) if narrow else None
        return [v for k in range(blocks) for v in decoder.block(first_of(e, k, j, plane), left)]

    @block(f"acc{count} i64 i64 i64 i64 f32 -> none")
    def finish(e: Emit, acc: list[Vec], j: Any, plane: Any, dim: Any, out: Any, factor: Any) -> None:
        for vec, (column, left) in zip(acc, columns(e, j, plane, dim), strict=True):
            e.store(e.at(out, column, 4), vec * e.splat(factor), count=left)

    return start, resume, interrupt, decode, finish, columns


def _row_adder_of(format: int, blocks: int, cached: bool, decode: Any, columns: Any) -> Any:
    """acc += weight * a unit of a listed row, which may be fp32 in a slot if `cached`."""
    accumulator = f"acc{F.planes(format) * max(blocks, 1)}"
    arguments = f"{accumulator} i64 i64 i64 i64 i64 f32 -> {accumulator}"

    def floats(e: Emit, row: Any, j: Any, plane: Any, dim: Any, mask: Any = None) -> list[Vec]:
        """The unit of an fp32 row."""
        return [e.load_f32(e.at(row, column, 4), left, mask) for column, left in columns(e, j, plane, dim)]

    @block(arguments)
    def add(e: Emit, acc: list[Vec], row: Any, meta: Any, j: Any, plane: Any, dim: Any, weight: Any) -> list[Vec]:
        return [a + v for a, v in zip(acc, decode(e, row, meta, j, plane, weight), strict=True)]

    @block(arguments)
    def add_floats(e: Emit, acc: list[Vec], row: Any, meta: Any, j: Any, plane: Any, dim: Any, weight: Any) -> list[Vec]:
        return [a + v * e.splat(weight) for a, v in zip(acc, floats(e, row, j, plane, dim), strict=True)]

    @block(arguments)
    def add_either(e: Emit, acc: list[Vec], row: Any, meta: Any, j: Any, plane: Any, dim: Any, weight: Any) -> list[Vec]:
        mask = e.splat(e.load_word(meta)).compare("<", 0)  # the codes of a slot are read, too; those of a row not as floats
        held, stored = floats(e, row, j, plane, dim, mask), decode(e, row, meta, j, plane, weight)
        return [a + (v * e.splat(weight)).where(mask, w) for a, v, w in zip(acc, held, stored, strict=True)]

    @inlined
    def by_branch(acc, rows, weights, i, j, plane, dim):
        row, meta = get_i64(rows, 2 * i), get_i64(rows, 2 * i + 1)
        weight = get_f32(weights, i) if weights != 0 else _ONE
        if get_u32(meta, 0) >= CACHED:
            acc = add_floats(acc, row, meta, j, plane, dim, weight)
        else:
            acc = add(acc, row, meta, j, plane, dim, weight)
        return acc

    add_one = add_either if cached else add

    @inlined
    def without_branch(acc, rows, weights, i, j, plane, dim):
        weight = get_f32(weights, i) if weights != 0 else _ONE
        return add_one(acc, get_i64(rows, 2 * i), get_i64(rows, 2 * i + 1), j, plane, dim, weight)

    # Of a narrow row both kinds are computed: a mispredicted branch takes longer.
    return by_branch if cached and F.planes(format) * blocks > 2 else without_branch


def _unit(format: int, blocks: int, cached: bool) -> Any:
    """Sum `blocks` blocks of elements from j on (0: less than one) over lookups at to until - 1 of bags `bag` to `last` - 1.

    Returns the first bag that goes on after `until`; its sum so far is kept in `carry`, from which the next call resumes.
    """
    start, resume, interrupt, decode, finish, columns = _accumulator(format, blocks)
    add_row = _row_adder_of(format, blocks, cached, decode, columns)

    @helper
    def unit(rows, offsets, weights, bag, last, at, until, j, plane, dim, mean, out, pitch, carry, zero):
        low = get_i64(offsets, bag)
        acc = start(zero)
        if low < at:
            acc = resume(carry)
        first = max(low, at)
        while bag < last:
            high = get_i64(offsets, bag + 1)
            for i in range(first, min(high, until)):
                acc = add_row(acc, rows, weights, i, j, plane, dim)
            if high > until:
                interrupt(acc, carry)
                break
            factor = _ONE / np.float32(max(high - low, 1)) if mean else _ONE
            finish(acc, j, plane, dim, out, factor)
            acc = start(zero)
            low = first = high
            bag += 1
            out += pitch
        return bag

    return unit


@helper
def list_rows(codes, meta, values, width, words, bytes, dim, ids, first, last, end, rows):
    """List (row or fp32 slot, metadata) of lookups first to last - 1, prefetch them and the metadata of later ones.

    `bytes` of codes in a row; rows are `width` bytes apart.

    Prefetches do not branch on what is cached, which would be mispredicted: a row of codes has fewer lines than a slot, so its
    last line is prefetched repeatedly. Most rows do not begin on a line, so they end on one line more than their size says.
    """
    size = bytes
    if values != 0:
        size = 4 * dim
        for i in range(last, min(last + GROUP, end)):
            prefetch(meta + get_i64(ids, i) * words)
    for i in range(first, last):
        row, most = get_i64(ids, i), bytes - 1
        row, row_meta = codes + row * width, meta + row * words
        if values != 0:
            row, most = _place_of(row, row_meta, values, dim), _last_byte(row_meta, dim, bytes)
        elif words > 0:
            prefetch(row_meta)
        put_i64(rows, 2 * (i - first), row)
        put_i64(rows, 2 * (i - first) + 1, row_meta)
        prefetch(row)
        prefetch(row + most)
    if size <= 64:
        return
    # After those of all rows: a core stalls on a line whose page misses the TLB, but resolves several such misses at once.
    for i in range(last - first):
        row, most = get_i64(rows, 2 * i), bytes - 1
        if values != 0:
            most = _last_byte(get_i64(rows, 2 * i + 1), dim, bytes)
        for byte in range(64, size, 64):
            prefetch(row + min(byte, most))


@block("i64 i64 i64 i64 -> i64")
def _place_of(e: Emit, row: Any, meta: Any, values: Any, dim: Any) -> Any:
    """The address of a row, or of the fp32 slot that its first meta word points at."""
    word = e.load_word(meta)
    slot = e.at(values, e.builder.mul(e.builder.sub(word, e.number(CACHED)), dim), 4)
    return e.builder.select(e.builder.icmp_signed(">=", word, e.number(CACHED)), slot, row)


@block("i64 i64 i64 -> i64")
def _last_byte(e: Emit, meta: Any, dim: Any, bytes: Any) -> Any:
    """The last byte of a row or of its fp32 slot."""
    is_cached = e.builder.icmp_signed(">=", e.load_word(meta), e.number(CACHED))
    return e.at(e.builder.select(is_cached, e.builder.mul(dim, e.number(4)), bytes), -1)


@block("-> i64")
def _new_list(e: Emit) -> Any:
    """Memory for GROUP rows on the stack."""
    return e.stack(2 * GROUP)


@block("-> i64")
def _new_carry(e: Emit) -> Any:
    """Memory for the sum of a row on the stack; with up to one vector more than columns for each plane."""
    return e.stack(F.MAX_DIM // 2 + 4 * WIDTH)


@cache
def _pooler(format: int, cached: bool) -> Any:
    planes = F.planes(format)
    most = MOST_VECTORS // planes
    # A pass of its own for the last few columns of 72 takes as long as the first. Not every size is compiled: 3, 5
    # and 7 vectors are two passes. Bags without weights have the weight 1: a second set of passes takes 20 s to compile.
    sum_unit = by_format(lambda blocks: _unit(format, blocks, cached), [n for n in SIZES if n <= most], "i64 " * 14 + "f32")

    @helper
    def pool(codes, meta, values, width, words, ids, offsets, weights, bag, last, end, dim, mean, out, pitch, zero):
        plane, bytes = (dim + planes - 1) // planes, R.row_bytes(format, dim)
        slots = values if cached else 0
        at, stop = get_i64(offsets, bag), get_i64(offsets, last)
        ready, coming, later, carry = _new_list(), _new_list(), _new_list(), _new_carry()
        until = min(at + GROUP, end)
        listed = min(until + GROUP, end)
        list_rows(codes, meta, slots, width, words, bytes, dim, ids, at, until, end, ready)
        list_rows(codes, meta, slots, width, words, bytes, dim, ids, until, listed, end, coming)
        while bag < last:
            further, until, next, j = min(listed + GROUP, end), min(until, stop), bag, 0
            list_rows(codes, meta, slots, width, words, bytes, dim, ids, listed, further, end, later)
            while j < plane:
                blocks = min((plane - j + WIDTH - 1) // WIDTH, most)
                blocks -= (blocks & 1) * (blocks > 2)
                which = blocks if plane >= WIDTH else 0
                next = sum_unit(
                    which, ready - 16 * at, offsets, weights, bag, last, at, until, j, plane, dim, mean, out, pitch,
                    carry + 4 * planes * j, zero,
                )  # fmt: skip
                j += blocks * WIDTH
            out += (next - bag) * pitch
            bag, at, until, listed = next, until, listed, further
            ready, coming, later = coming, later, ready

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
    format, codes, meta, values, int8_slots, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch, zero,
):  # fmt: skip
    """`pool_bags` of int4 and int2 tables."""
    for b in range(first, last):
        low, high = get_i64(offsets, b), get_i64(offsets, b + 1)
        R.fill_floats(out, dim, zero)
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

_ARGUMENTS = "i64 " * 15 + "f32"
_pool_uncached = by_format(lambda format: _pooler(format, False), FORMATS, _ARGUMENTS)
_pool_cached = by_format(lambda format: _pooler(format, True), (f for f in FORMATS if F.META_WORDS[f]), _ARGUMENTS)
_pool_usual = by_format(lambda format: _pooler(format, False), USUAL, _ARGUMENTS)
_pool_cached_int8 = by_format(lambda format: _pooler(format, True), (F.INT8,), _ARGUMENTS)


@inlined
def pool_plain(format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch, zero):
    """`pool_bags` of a table without a cache."""
    _pool_uncached(
        format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch, zero
    )


@inlined
def pool_bags(
    format, codes, meta, values, int8_slots, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch, zero,
):  # fmt: skip
    """Sum or mean of bags first to last - 1 of one table, `pitch` bytes apart. Ids before `end` have been checked.

    Sums begin with `zero`: 0, or -0, which does not change a row that is summed alone.
    """
    if int8_slots != 0 and (format == F.INT4 or format == F.INT2):
        pool_int8_slots(
            format, codes, meta, values, int8_slots, width, words, ids, offsets, weights, first, last, end, dim, mean, out,
            pitch, zero,
        )  # fmt: skip
    elif values != 0 and words > 0:
        _pool_cached(
            format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch, zero
        )
    else:
        pool_plain(
            format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch, zero
        )


@inlined
def pool_usual_bags(
    format, codes, meta, values, int8_slots, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch, zero,
):  # fmt: skip
    """`pool_bags` of fp32 and int8 tables."""
    if values != 0 and words > 0:
        _pool_cached_int8(
            format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch, zero,
        )  # fmt: skip
    else:
        _pool_usual(
            format, codes, meta, values, width, words, ids, offsets, weights, first, last, end, dim, mean, out, pitch, zero
        )
