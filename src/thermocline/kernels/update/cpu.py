"""Update rows on the CPU (definition: `reference.py`): the same bits for any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadGradient
from thermocline.kernels.arguments import LookupCall, OptimizerArrays, RowArrays
from thermocline.kernels.cache.cpu import refresh
from thermocline.kernels.cache.reference import refresh_due
from thermocline.kernels.cpu import rows as R
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.compile import addresses, helper, inlined, kernel
from thermocline.kernels.cpu.optimizer_step import (
    DECAY,
    decay_gradient,
    is_finite,
    row_learning_rate,
    step_columns,
    step_constants,
)
from thermocline.kernels.cpu.sort import piece_start, row_ends, sort_lookups, tasks_for
from thermocline.kernels.cpu.sum_rows import gradient_address, sum_row
from thermocline.kernels.cpu.vectors import WIDTH, get_f32, get_i64, get_u32, prefetch, put_f32, put_i64, put_u32
from thermocline.kernels.cpu.write_row import is_good, sgd_row, write_row
from thermocline.kernels.gather.cpu import slots_of
from thermocline.kernels.layout import Layout, TableLayout

PREFETCH_DISTANCE = 8  # lookups
_ALL_GOOD = 1 << 62
_CHUNK = 512
GROUP = 8  # rows that are updated together
_PLANES = np.array([F.planes(f) for f in range(len(F.BITS))])

# Scratch of a task, in floats: four rows for each of GROUP entries, partial sums, then row, five words and name of each entry.
_SUMS = GROUP * 4 * (F.MAX_DIM + R.PAD)
_INFO = _SUMS + F.MAX_DIM // WIDTH
_SCRATCH = _INFO + 9 * GROUP
_RATES, _LOWS, _HIGHS, _TOPS, _TOTALS, _NAMES = (8 * GROUP + 4 * GROUP * k for k in range(6))


@inlined
def _slot(scratch, dim, number, part):
    """Address of a scratch row of an entry: 0 gradient, 1 weights, 2 and 3 states."""
    return scratch + 4 * ((number * 4 + part) * (dim + R.PAD))


@helper
def _update_slots(
    codes, meta, values, int8_slots, state0, state1, tables, table, optimizer, stochastic, scratch, hyper, shared, slots,
    names,
):  # fmt: skip
    """Update the rows of the scratch entries, all of one table; returns the smallest refused name.

    `names`: address of the rows' names, which seed the rounding bits. Three loops, so that the latencies of a row (mean, root,
    largest column, two divisions) overlap with those of other rows.
    """
    dim, format, codes, meta, width, words = R.table_of(codes, meta, tables, table)
    at = table * F.LAYOUT_FIELDS
    by_column, first = optimizer == F.ADAGRAD or optimizer == F.ADAM, get_i64(tables, at + F.ROW)
    element = get_i64(tables, at + F.ELEMENT) if by_column else first
    state0, state1 = state0 + 4 * element, state1 + 4 * element
    info = scratch + 4 * _INFO
    if optimizer != F.ADAM and get_f32(hyper, DECAY) != 0:
        for k in range(slots):
            g, w, local = _slot(scratch, dim, k, 0), _slot(scratch, dim, k, 1), get_i64(info, k) - first
            found, row, row_meta = R.locate_row(format, codes, meta, width, words, values, int8_slots, dim, local)
            decay_gradient(found, row, row_meta, dim, get_f32(hyper, DECAY), g, w)
    for k in range(slots):
        g, local = _slot(scratch, dim, k, 0), get_i64(info, k) - first
        rate = row_learning_rate(
            optimizer, g, dim, _PLANES[format], scratch + 4 * _SUMS, state0 + 4 * local, info + _TOTALS + 4 * k, hyper
        )
        put_f32(info + _RATES, k, rate)
    for k in range(slots):
        g, w, local = _slot(scratch, dim, k, 0), _slot(scratch, dim, k, 1), get_i64(info, k) - first
        found, row, row_meta = R.locate_row(format, codes, meta, width, words, values, int8_slots, dim, local)
        if by_column:
            s, t, here = _slot(scratch, dim, k, 2), _slot(scratch, dim, k, 3), 4 * local * dim
            low, high, top = step_columns(optimizer, found, row, row_meta, state0 + here, state1 + here, dim, g, w, s, t, hyper)
        else:
            low, high, top = sgd_row(found, row, row_meta, dim, get_f32(info + _RATES, k), g, w)
        put_f32(info + _LOWS, k, low)
        put_f32(info + _HIGHS, k, high)
        put_u32(info + _TOPS, k, top)
    bad = _ALL_GOOD
    for k in range(slots):
        name = get_i64(names, k)
        local, top = get_i64(info, k) - first, get_u32(info + _TOPS, k)
        if not is_good(top) or (optimizer == F.ROWWISE_ADAGRAD and not is_finite(get_f32(info + _TOTALS, k))):
            bad = min(bad, name)
            continue
        low, high, key = get_f32(info + _LOWS, k), get_f32(info + _HIGHS, k), R.row_key(shared, name)
        found, place, row_meta = R.locate_row(format, codes, meta, width, words, values, int8_slots, dim, local)
        write_row(found, _slot(scratch, dim, k, 1), dim, low, high, top, place, row_meta, key, stochastic)
        if optimizer == F.ROWWISE_ADAGRAD:
            put_f32(state0, local, get_f32(info + _TOTALS, k))
        elif by_column:
            R.copy_floats(_slot(scratch, dim, k, 2), state0 + 4 * local * dim, dim)
            if optimizer == F.ADAM:
                R.copy_floats(_slot(scratch, dim, k, 3), state1 + 4 * local * dim, dim)
    return bad


@inlined
def _table_of(tables, count, row, guess):
    """The table that holds an arena row, or -1; `guess` is tried first."""
    first = get_i64(tables, guess * F.LAYOUT_FIELDS + F.ROW)
    if first <= row < first + get_i64(tables, guess * F.LAYOUT_FIELDS + F.ROWS):
        return guess
    for t in range(count):
        first = get_i64(tables, t * F.LAYOUT_FIELDS + F.ROW)
        if first <= row < first + get_i64(tables, t * F.LAYOUT_FIELDS + F.ROWS):
            return t
    return -1


@kernel("int64(" + ", ".join(["int64"] * 21) + ")")
def _update_rows(
    codes, meta, values, int8_slots, state0, state1, tables, count, optimizer, stochastic, scratch, hyper, seed, step,
    rows, names, grads, pitch, bad, first, last,
):  # fmt: skip
    """Update rows[first:last] from their gradients; returns the smallest refused name."""
    shared, table = R.step_key(seed, step), 0
    info = scratch + 4 * _INFO
    u = first
    while u < last:
        table = _table_of(tables, count, get_i64(rows, u), max(table, 0))
        if table < 0:
            u += 1
            continue
        dim, slots = get_i64(tables, table * F.LAYOUT_FIELDS + F.DIM), 0
        low = get_i64(tables, table * F.LAYOUT_FIELDS + F.ROW)
        high = low + get_i64(tables, table * F.LAYOUT_FIELDS + F.ROWS)
        while slots < GROUP and u < last and low <= get_i64(rows, u) < high:
            put_i64(info, slots, get_i64(rows, u))
            put_i64(info + _NAMES, slots, get_i64(names, u))
            R.copy_floats(grads + 4 * u * pitch, _slot(scratch, dim, slots, 0), dim)
            u, slots = u + 1, slots + 1
        refused = _update_slots(
            codes, meta, values, int8_slots, state0, state1, tables, table, optimizer, stochastic, scratch, hyper, shared,
            slots, info + _NAMES,
        )  # fmt: skip
        bad = min(bad, refused)
    return bad


@inlined
def _prefetch_rows(
    codes, meta, values, int8_slots, state0, tables, table, keys, bits, ends, fetched_meta, fetched, u, last, optimizer
):  # fmt: skip
    """Prefetch rows of a table after index u; returns the ends of the prefetched metadata and rows.

    One group at a time, not row by row: a core stalls on a line whose page misses the TLB, but resolves several such misses at
    once. The metadata of a row says where a cached row is, so it is prefetched one group earlier.
    """
    dim, format, codes, meta, width, words = R.table_of(codes, meta, tables, table)
    first = get_i64(tables, table * F.LAYOUT_FIELDS + F.ROW)
    limit = first + get_i64(tables, table * F.LAYOUT_FIELDS + F.ROWS)
    while fetched_meta < min(u + 3 * GROUP, last) and _row_at(keys, bits, ends, fetched_meta) < limit:
        row = _row_at(keys, bits, ends, fetched_meta)
        prefetch(meta + (row - first) * words)
        if optimizer == F.ROWWISE_ADAGRAD:
            prefetch(state0 + 4 * row)
        fetched_meta += 1
    until = min(u + 2 * GROUP, fetched_meta)
    for v in range(fetched, until):
        local = _row_at(keys, bits, ends, v) - first
        _, place, _ = R.locate_row(format, codes, meta, width, words, values, int8_slots, dim, local)
        prefetch(place)
    for v in range(fetched, until):
        local = _row_at(keys, bits, ends, v) - first
        R.prefetch_located_row(format, codes, meta, width, words, values, int8_slots, dim, local)
    return fetched_meta, max(fetched, until)


@inlined
def _row_at(keys, bits, ends, u):
    """The arena row at an index of the list of ends."""
    return get_i64(keys, get_i64(ends, u) - 1) >> bits


@kernel("int64(" + ", ".join(["int64"] * 27) + ")")
def _update_piece(
    codes, meta, values, int8_slots, state0, state1, tables, count, optimizer, stochastic, scratch, hyper, seed, step,
    keys, bits, lookups, ends, place, factor, within, winners, grad, kind, bad, piece, pieces,
):  # fmt: skip
    """Sum and update the rows of one piece of the sorted lookups; returns the smallest refused row.

    `ends`: scratch with one entry for each key, for the key end of each row.
    """
    at, last = piece_start(keys, bits, lookups, piece, pieces), piece_start(keys, bits, lookups, piece + 1, pieces)
    shared, table, mask, size = R.step_key(seed, step), 0, (1 << bits) - 1, 4 if kind == F.FP32 else 2
    info = scratch + 4 * _INFO
    u, end = at, row_ends(keys, bits, at, last, ends)
    fetched_meta, fetched = u, u
    while u < end:
        table, slots = _table_of(tables, count, get_i64(keys, at) >> bits, table), 0
        dim = get_i64(tables, table * F.LAYOUT_FIELDS + F.DIM)
        limit = get_i64(tables, table * F.LAYOUT_FIELDS + F.ROW) + get_i64(tables, table * F.LAYOUT_FIELDS + F.ROWS)
        fetched_meta, fetched = _prefetch_rows(
            codes, meta, values, int8_slots, state0, tables, table, keys, bits, ends, fetched_meta, fetched, u, end, optimizer
        )  # fmt: skip
        while slots < GROUP and u < end and get_i64(keys, at) >> bits < limit:
            stop = get_i64(ends, u)
            for k in range(at + PREFETCH_DISTANCE, min(stop + PREFETCH_DISTANCE, last)):
                R.prefetch_lines(grad + size * get_i64(place, get_i64(keys, k) & mask), size * dim)
            put_i64(info, slots, get_i64(keys, at) >> bits)
            g = _slot(scratch, dim, slots, 0)
            sum_row(keys, mask, at, stop, place, factor, within, winners, grad, kind, dim, g)
            at, u, slots = stop, u + 1, slots + 1
        refused = _update_slots(
            codes, meta, values, int8_slots, state0, state1, tables, table, optimizer, stochastic, scratch, hyper, shared,
            slots, info,
        )  # fmt: skip
        bad = min(bad, refused)
    return bad


def advance(clock: Tensor, hyper: Tensor) -> None:
    """Advance the clock as the reference does, through numpy: small tensor operations cost microseconds."""
    clock.numpy()[F.STEP] += 1
    values = hyper.numpy()
    values[F.BETA1_POWER : F.BETA2_POWER + 1] *= values[F.BETA1 : F.BETA2 + 1]


@lru_cache(maxsize=256)
def _fields_of(tables: TableLayout) -> tuple[Any, int]:
    """Fields of the distinct tables, as kernels take them, and their address."""
    fields = np.array(tables.distinct, dtype=np.int64)
    return fields, addresses("q", fields)[0]


def _run(rows: RowArrays, optimizer: OptimizerArrays, call: Callable[[tuple[int, ...], int], int], tasks: int) -> None:
    """Advance the clock; run `call(shared arguments, task)` for each task; raise if a row was refused."""
    codes, meta, layout, cache = rows
    states, hyper, clock, kind, stochastic = optimizer
    advance(clock, hyper)
    tables, at_tables = _fields_of(layout.tables)
    _kept, constants = step_constants(tuple(hyper.tolist()))  # the cache may drop them
    seed, step = clock.tolist()[: F.CLOCK_FIELDS]
    state0, state1 = addresses("ff", *[*states, None, None][:2])
    where = (codes.data_ptr(), meta.data_ptr(), *slots_of(cache), state0, state1, at_tables, len(tables))
    found = [_ALL_GOOD] * tasks

    def task(number: int) -> None:
        scratch = torch.empty(_SCRATCH, dtype=torch.float32)
        found[number] = call((*where, kind, stochastic, scratch.data_ptr(), constants, seed, step), number)

    threads.run(task, tasks)
    if min(found, default=_ALL_GOOD) != _ALL_GOOD:
        raise BadGradient(min(found), step, *layout.tables.table_of(min(found)))


def update_rows(
    rows: RowArrays, optimizer: OptimizerArrays, rows_U: Tensor, grads_UW: Tensor, seen_N: Tensor | None = None,
    names_U: Tensor | None = None,
) -> None:  # fmt: skip
    """Update distinct arena rows in place."""
    codes, meta, layout, cache = rows
    rows_U, grads_UW = rows_U.to(torch.int64).contiguous(), grads_UW.float().contiguous()
    named_U = rows_U if names_U is None else names_U.contiguous()
    count = rows_U.numel()
    seen_N = rows_U if seen_N is None else seen_N.to(torch.int64)
    if cache is not None and seen_N.numel() and refresh_due(cache, layout.tables.policy, seen_N.numel()):
        refresh(codes, meta, cache, layout, _by_pool(seen_N, layout), 0, tasks_for(seen_N.numel()), optimizer.stochastic)

    def call(shared: tuple[int, ...], number: int) -> int:
        span = (number * _CHUNK, min((number + 1) * _CHUNK, count))
        found: int = _update_rows(*shared, *addresses("qqf", rows_U, named_U, grads_UW), grads_UW.shape[1], _ALL_GOOD, *span)
        return found

    _run(rows, optimizer, call, -(-count // _CHUNK))


def _by_pool(rows_U: Tensor, layout: Layout) -> Tensor:
    """Rows grouped by pool, in their given order."""
    if bool((rows_U.diff() > 0).all()):
        return rows_U
    return torch.cat([rows_U[(rows_U >= p.row) & (rows_U < p.row + p.rows)] for p in layout.tables.pools])


def update_bags(rows: RowArrays, optimizer: OptimizerArrays, call: LookupCall, winners: Tensor, grad_out: Tensor) -> None:
    """Update every row that a lookup read, in place."""
    (codes, meta, layout, cache), count = rows, call.ids_N.numel()
    lookups, grad = sort_lookups(layout, *call[:4], grad_out)
    if cache is not None and count and refresh_due(cache, layout.tables.policy, count):
        refresh(codes, meta, cache, layout, lookups.keys_N, lookups.bits, lookups.pieces, optimizer.stochastic)
    winners = winners.contiguous()
    ends_N = torch.empty_like(lookups.keys_N)
    keys, won = lookups.keys_N.data_ptr(), addresses("i", winners)
    pieces = (keys, lookups.bits, count, ends_N.data_ptr(), *lookups.places, *won, *gradient_address(grad))

    def update(shared: tuple[int, ...], number: int) -> int:
        found: int = _update_piece(*shared, *pieces, _ALL_GOOD, number, lookups.pieces)
        return found

    _run(rows, optimizer, update, lookups.pieces)
