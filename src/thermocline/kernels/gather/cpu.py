"""Look up, dequantize and pool rows on the CPU (definition: `reference.py`), in tiles of bags of one feature."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.checks import raise_bad_offsets
from thermocline.kernels.cpu import rows as R
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.compile import FORMATS, TRAIN, Kernel, addresses, as_int64, helper, inlined, kernel
from thermocline.kernels.cpu.pool import GROUP, USUAL, list_rows, pool_bags, pool_usual_bags
from thermocline.kernels.cpu.sort import BAD_OFFSETS, OK, TASKS_PER_THREAD, offsets_ascend, raise_if_bad
from thermocline.kernels.cpu.vectors import WIDTH, Emit, Vec, block, fence, get_i64, prefetch, put_f32, put_i64
from thermocline.kernels.layout import Cache, Layout, TableLayout, output_shape, per_feature

STREAM_MIN_BYTES = 1 << 22
READ_CHUNK = 1024  # least unpooled lookups of a task
READ_ROWS = 256  # unpooled rows that are read together
SINGLE_THREAD_COLUMNS = 1 << 16  # columns that one thread reads in the time that it takes to wake another
TILE, SMALL_TILE = 512, 64  # bags of a tile; the small one for short bags and many threads
LONG_BAG = 8  # mean lookups of long bags
SCRATCH_BAGS = 8  # bags of the widest rows whose sums are kept in scratch before they are written out
SCRATCH_ROW = F.MAX_DIM + R.PAD
SCRATCH = SCRATCH_BAGS * SCRATCH_ROW
_TARGET = {torch.float32: F.FP32, torch.float16: F.FP16, torch.bfloat16: F.BF16}
_NO_LIMIT = 1 << 62
_ONE, _ZERO = np.float32(1), np.float32(0)
_MINUS_ONE = np.uint32(0xFFFFFFFF).view(np.float32)  # the bits of -1 as an int32, moved as a float


@inlined
def _tile(tile, height, features, batch):
    """(feature, first bag, end of bags) of a tile of `height` bags."""
    f, b = tile % features, tile // features * height
    return f, f * batch + b, f * batch + min(b + height, batch)


@helper
def _prefetch_tile(codes, meta, values, fields, features, ids, offsets, batch, height, tile, rows):
    """Prefetch the first rows of a checked tile."""
    f, bag, end = _tile(tile, height, features, batch)
    dim, _, codes, meta, width, words = R.table_of(codes, meta, fields, f)
    first, last = get_i64(offsets, bag), get_i64(offsets, end)
    values = values if words > 0 else 0
    list_rows(codes, meta, values, width, words, width, dim, ids, first, min(first + 2 * GROUP, last), last, rows)


@helper
def _prefetch_tile_meta(meta, fields, features, ids, offsets, count, batch, height, tile):
    """Prefetch the metadata of the first rows of a tile. Its ids are not checked yet; an invalid address is harmless."""
    f, bag, end = _tile(tile, height, features, batch)
    _, _, _, meta, _, words = R.table_of(0, meta, fields, f)
    first, last = max(get_i64(offsets, bag), 0), min(get_i64(offsets, end), count)
    for i in range(first, min(first + 3 * GROUP, last)):
        prefetch(meta + get_i64(ids, i) * words)


@block("i64 i64 -> i64")
def _all_below(e: Emit, ids: Any, limit: Any) -> Any:
    """Whether 16 ids lie between 0 and a limit."""
    kind = ir.VectorType(ir.IntType(64), WIDTH)
    found = e.builder.load(e.builder.inttoptr(ids, kind.as_pointer()), align=8)
    bits = e.mask_bits(e.builder.icmp_unsigned("<", found, e.splat_i64(limit)))
    return e.widen(e.builder.icmp_unsigned("==", bits, e.number((1 << WIDTH) - 1)))


@inlined
def _bad_id(ids, first, last, limit):
    """OK, or the position of the first bad id."""
    while first + WIDTH <= last and _all_below(ids + 8 * first, limit):
        first += WIDTH
    for i in range(first, last):
        row = get_i64(ids, i)
        if row < 0 or row >= limit:
            return i
    return OK


@helper
def _check_tile(fields, features, ids, offsets, count, batch, height, checked, tile):
    """OK, BAD_OFFSETS, or the position of the first bad id of a tile."""
    f, bag, end = _tile(tile, height, features, batch)
    limit = get_i64(fields, f * F.LAYOUT_FIELDS + F.ROWS) if checked else _NO_LIMIT
    low = get_i64(offsets, bag)
    if low < 0 or (bag == 0 and low != 0) or (end == features * batch and get_i64(offsets, end) != count):
        return BAD_OFFSETS
    for b in range(bag, end):
        if get_i64(offsets, b + 1) < get_i64(offsets, b) or get_i64(offsets, b + 1) > count:
            return BAD_OFFSETS
    return _bad_id(ids, low, get_i64(offsets, end), limit)


@inlined
def _write_out(scratch, bags, dim, out, pitch, target):
    """Copy sums from scratch to the output: rounded to 16 bits, or with non-temporal stores."""
    for b in range(bags):
        if target == F.FP32:
            R.stream_floats(scratch + 4 * b * dim, out + b * pitch, dim)
        else:
            R.narrow(scratch + 4 * b * dim, out + b * pitch, dim, target)


@block("-> i64")
def _new_numbers(e: Emit) -> Any:
    """Memory for the offsets of `READ_ROWS` bags of one lookup on the stack."""
    return e.stack(READ_ROWS + 1)


def _reader(pool):
    """A function that writes the rows of ids first to last - 1, one output row each, as bags of one lookup."""

    @helper
    def read(
        codes, meta, values, int8_slots, fields, features, ids, offsets, count, checked, out, pitch, target, streamed, scratch,
        first, last,
    ):  # fmt: skip
        """Returns OK, BAD_OFFSETS or a bad position."""
        if not offsets_ascend(offsets, features, count, 0, features):
            return BAD_OFFSETS
        direct, size, f = target == F.FP32 and not streamed, 4 if target == F.FP32 else 2, 0
        most, numbers = READ_ROWS if direct else min(READ_ROWS, SCRATCH // pitch), _new_numbers()
        for k in range(READ_ROWS + 1):
            put_i64(numbers, k, k)
        while first < last:
            while get_i64(offsets, f + 1) <= first:
                f += 1
            limit = get_i64(fields, f * F.LAYOUT_FIELDS + F.ROWS) if checked else _NO_LIMIT
            dim, format, table, table_meta, width, words = R.table_of(codes, meta, fields, f)
            end = min(get_i64(offsets, f + 1), last)
            until, ahead = min(first + most, end), min(first + most + 2 * GROUP, end)
            problem = _bad_id(ids, first, ahead, limit)
            if problem != OK:
                return problem
            place, rows = out + size * first * pitch, until - first
            into = place if direct else scratch
            pool(
                format, table, table_meta, values, int8_slots, width, words, ids + 8 * first, numbers, 0, 0, rows,
                ahead - first, dim, False, into, 4 * pitch, -_ZERO,
            )  # fmt: skip
            for k in range(rows if dim < pitch else 0):
                R.fill_floats(into + 4 * (k * pitch + dim), pitch - dim, _ZERO)
            if streamed:
                R.stream_floats(into, place, rows * pitch)
            elif target != F.FP32:
                R.narrow(into, place, rows * pitch, target)
            first = until
        fence()
        return OK

    return read


def _tile_pooler(pool, group):
    """The kernel that pools tiles of bags by `pool`."""
    read = _reader(pool)

    @kernel("int64(" + ", ".join(["int64"] * 21) + ")", group=group)
    def pool_tiles(
        codes, meta, values, int8_slots, fields, features, ids, offsets, count, batch, height, checked, weights, mode, out,
        pitch, target, streamed, scratch, first, last,
    ):  # fmt: skip
        """Pool a range of tiles, or read a range of ids; returns OK, BAD_OFFSETS or a bad position."""
        if mode == F.NONE:
            return read(
                codes, meta, values, int8_slots, fields, features, ids, offsets, count, checked, out, pitch, target, streamed,
                scratch, first, last,
            )  # fmt: skip
        problem = _check_tile(fields, features, ids, offsets, count, batch, height, checked, first)
        for tile in range(first, last):
            if problem == OK and tile + 1 < last:
                problem = _check_tile(fields, features, ids, offsets, count, batch, height, checked, tile + 1)
            if problem != OK:
                return problem
            f, bag, end = _tile(tile, height, features, batch)
            dim, format, table, table_meta, width, words = R.table_of(codes, meta, fields, f)
            if tile + 1 < last:
                _prefetch_tile(codes, meta, values, fields, features, ids, offsets, batch, height, tile + 1, scratch)
            if values != 0 and tile + 2 < last:
                _prefetch_tile_meta(meta, fields, features, ids, offsets, count, batch, height, tile + 2)
            size, last_id = 4 if target == F.FP32 else 2, get_i64(offsets, end)
            place = out + size * ((bag - f * batch) * pitch + get_i64(fields, f * F.LAYOUT_FIELDS + F.COLUMN))
            whole = dim % WIDTH == 0 and place % 64 == 0 and size * pitch % 64 == 0
            direct = target == F.FP32 and not (streamed and whole)
            while bag < end:
                until = end if direct else min(bag + SCRATCH // dim, end)
                into, step = (place, 4 * pitch) if direct else (scratch, 4 * dim)
                pool(
                    format, table, table_meta, values, int8_slots, width, words, ids, offsets, weights, bag, until, last_id,
                    dim, mode == F.MEAN, into, step, _ZERO,
                )  # fmt: skip
                if not direct:
                    _write_out(scratch, until - bag, dim, place, size * pitch, target)
                place += (until - bag) * size * pitch
                bag = until
        fence()
        return OK

    return pool_tiles


_pool_tiles, _pool_usual_tiles = _tile_pooler(pool_bags, FORMATS), _tile_pooler(pool_usual_bags, TRAIN)


# -- row by row: max, and the gradient of per-sample weights ----------------------------------------------------------

_MAX, _WEIGHT_GRADIENT = range(2)


@block("i64 i64 i64 i64 i64 -> none")
def _keep_larger(e: Emit, best: Vec, winner: Vec, value: Vec, number: Vec, start: Vec) -> None:
    """Update scratch rows `best` and `winner` where the value is larger, everywhere at the start of a bag."""
    new, old = e.load_f32(value), e.load_f32(best)
    always = e.splat(start).compare("!=", 0)
    mask = e.builder.or_(new.compare(">", old), always)
    e.store(best, new.where(mask, old))
    e.store(winner, e.splat(number).where(mask, e.load_unsigned(winner, 32)))


@block("acc1 i64 i64 i64 -> acc1")
def _add_product(e: Emit, acc: list[Vec], value: Vec, grad: Vec, left: Vec) -> list[Vec]:
    return [acc[0] + e.load_f32(value).where(e.first(left), 0.0) * e.load_f32(grad, left)]


_zero = block("-> acc1")(lambda e: [e.zeros()])
_total = block("acc1 -> f32")(lambda e, acc: acc[0].fold(Vec.__add__))


@inlined
def _max_bag(format, codes, meta, values, int8_slots, width, words, ids, low, high, dim, best, winner, value):
    """Write scratch rows `best` and `winner` of one bag."""
    if low == high:
        R.fill_floats(best, dim, _ZERO)
        R.fill_floats(winner, dim, _MINUS_ONE)
    for i in range(low, high):
        row = get_i64(ids, i)
        found, place, row_meta = R.locate_row(format, codes, meta, width, words, values, int8_slots, dim, row)
        R.read_row(found, place, row_meta, dim, value)
        for c in range(0, dim, WIDTH):
            _keep_larger(best + 4 * c, winner + 4 * c, value + 4 * c, i - low, i == low)


@inlined
def _dot(value, grad, dim):
    acc = _zero()
    for c in range(0, dim, WIDTH):
        acc = _add_product(acc, value + 4 * c, grad + 4 * c, dim - c)
    return _total(acc)


@kernel("int64(" + ", ".join(["int64"] * 20) + ")")
def _reduce_tiles(
    codes, meta, values, int8_slots, fields, features, ids, offsets, count, batch, height, checked, operation, out, other,
    pitch, target, scratch, first, last,
):  # fmt: skip
    """Max of a range of tiles (`other`: winners), or the gradient of their weights (`other`: gradient of the output)."""
    best, winner, value = scratch, scratch + 4 * SCRATCH_ROW, scratch + 8 * SCRATCH_ROW
    for tile in range(first, last):
        f, bag, end = _tile(tile, height, features, batch)
        problem = _check_tile(fields, features, ids, offsets, count, batch, height, checked, tile)
        if problem != OK:
            return problem
        dim, format, table, table_meta, width, words = R.table_of(codes, meta, fields, f)
        for b in range(bag, end):
            low, high = get_i64(offsets, b), get_i64(offsets, b + 1)
            place = (b - f * batch) * pitch + get_i64(fields, f * F.LAYOUT_FIELDS + F.COLUMN)
            if operation == _MAX:
                _max_bag(format, table, table_meta, values, int8_slots, width, words, ids, low, high, dim, best, winner, value)
                R.copy_floats(winner, other + 4 * place, dim)
                if target == F.FP32:
                    R.copy_floats(best, out + 4 * place, dim)
                else:
                    R.narrow(best, out + 2 * place, dim, target)
                continue
            for i in range(low, high):
                row = get_i64(ids, i)
                found, at_row, row_meta = R.locate_row(format, table, table_meta, width, words, values, int8_slots, dim, row)
                R.read_row(found, at_row, row_meta, dim, value)
                put_f32(out, i, _dot(value, other + 4 * place, dim))
    return OK


# -- called by the dispatch -------------------------------------------------------------------------------------------


def _most_tasks(layout: Layout, count: int) -> int:
    """Tasks of a lookup: one where waking a thread takes longer."""
    several = torch.get_num_threads() > 1 and count * layout.tables.max_dim > SINGLE_THREAD_COLUMNS
    return TASKS_PER_THREAD * torch.get_num_threads() if several else 1


def _tiles(layout: Layout, batch: int, count: int) -> tuple[int, int, int]:
    """(bags of a tile, number of tiles, number of tasks)."""
    several, bags = _most_tasks(layout, count), batch * len(layout.tables.features)
    height = max(SMALL_TILE, min(TILE, bags // several)) if count >= LONG_BAG * bags else SMALL_TILE
    tiles = -(-batch // height) * len(layout.tables.features)
    return height, tiles, min(tiles, several)


_Tasks = tuple[Callable[[int], None], list[int]]  # a task, and the result of each


def _tile_tasks(rows: RowArrays, call: LookupCall, batch: int, kernel: Kernel, *how: int) -> _Tasks:
    """Tasks that run a kernel on all tiles of a lookup, or on its ids."""
    (codes, meta, layout, cache), (ids_N, offsets, *_) = rows, call
    if call.mode == F.NONE:
        height, tiles = 1, ids_N.numel()
        tasks = min(-(-tiles // READ_CHUNK), _most_tasks(layout, tiles))
    else:
        height, tiles, tasks = _tiles(layout, batch, ids_N.numel())
    fields_F8, features = layout.fields_F8.contiguous(), len(layout.tables.features)
    # Not `addresses`: `check_arrays` and `as_int64` have checked them, and a small lookup takes 30 us.
    table = (codes.data_ptr(), meta.data_ptr(), *slots_of(cache), fields_F8.data_ptr(), features)
    lookup = (ids_N.data_ptr(), offsets.data_ptr(), ids_N.numel(), batch, height, call.checked)
    found = [OK] * tasks

    def task(number: int) -> None:
        scratch = torch.empty(SCRATCH, dtype=torch.float32)
        part = (scratch.data_ptr(), tiles * number // tasks, tiles * (number + 1) // tasks)
        found[number] = kernel(*table, *lookup, *how, *part)

    return task, found


def gather_pool(rows: RowArrays, call: LookupCall) -> tuple[Tensor, Tensor]:
    """(pooled output, for max pooling the winners, else an empty tensor)."""
    call = call._replace(ids_N=as_int64(call.ids_N), offsets=as_int64(call.offsets))
    ids_N, offsets, weights_N, mode, dtype, _ = call
    layout, batch = rows.layout, per_feature(rows.layout, offsets)
    shape = output_shape(layout.tables, ids_N, offsets, mode)
    out = torch.empty(shape, dtype=dtype) if mode == F.NONE or _fills_output(layout.tables) else torch.zeros(shape, dtype=dtype)
    winners = torch.full(shape, -1, dtype=torch.int32) if mode == F.MAX else torch.empty(0, dtype=torch.int32)
    if batch == 0 or (mode == F.NONE and ids_N.numel() == 0):
        raise_bad_offsets(offsets, ids_N.numel())
        return out, winners
    if mode == F.MAX:
        where = (out.data_ptr(), *addresses("i", winners), shape[1], _TARGET[dtype])
        task, found = _tile_tasks(rows, call, batch, _reduce_tiles, _MAX, *where)
    else:
        weights = None if weights_N is None else weights_N.float().contiguous()
        streamed = dtype == torch.float32 and 4 * out.numel() >= STREAM_MIN_BYTES and (mode != F.NONE or shape[1] % WIDTH == 0)
        how = (*addresses("f", weights), mode, out.data_ptr(), shape[1], _TARGET[dtype], streamed)
        usual = all(format in USUAL for _, format in layout.tables.groups)
        task, found = _tile_tasks(rows, call, batch, _pool_usual_tiles if usual else _pool_tiles, *how)
    threads.run(task, len(found))
    raise_if_bad(found, layout, ids_N, offsets)
    return out, winners


def weight_gradient(rows: RowArrays, call: LookupCall, grad_out: Tensor) -> Tensor:
    """Gradient of per-sample weights (sum pooling): each id's row times the gradient of its bag."""
    call = LookupCall(as_int64(call.ids_N), as_int64(call.offsets), None, F.SUM)
    batch, grad = per_feature(rows.layout, call.offsets), grad_out.float().contiguous()
    result_N = torch.empty(call.ids_N.numel(), dtype=torch.float32)
    if batch == 0:
        raise_bad_offsets(call.offsets, call.ids_N.numel())
        return result_N
    how = (_WEIGHT_GRADIENT, *addresses("ff", result_N, grad), grad.shape[1], F.FP32)
    task, found = _tile_tasks(rows, call, batch, _reduce_tiles, *how)
    threads.run(task, len(found))
    raise_if_bad(found, rows.layout, call.ids_N, call.offsets)
    return result_N


def slots_of(cache: Cache | None) -> tuple[int, int]:
    """Addresses of the cache's fp32 and int8 slots; 0 without a cache."""
    return (cache.values.data_ptr(), cache.near.data_ptr()) if cache is not None else (0, 0)


@lru_cache(maxsize=256)
def _fills_output(layout: TableLayout) -> bool:
    """Whether the features fill every column of the output."""
    columns = sorted((f[F.COLUMN], f[F.COLUMN] + f[F.DIM]) for f in layout.features)
    return columns[0][0] == 0 and all(end == start for (_, end), (start, _) in pairwise(columns))
