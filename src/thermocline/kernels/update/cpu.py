"""Update rows on the CPU (see `reference.py` for the definition).

`update_bags` sorts the lookups by row (`cpu_sort`) and then, for each row, sums its gradient, dequantizes, steps and
quantizes it while all of it lies in the first-level cache (`cpu_sums`, `cpu_steps`). A row belongs to one thread, and
what happens to it depends on nothing but itself and its lookups in order, so the result is the same bits whatever the
threads: those of `sum_row_gradients` followed by `update_rows`, whose sums never reach memory here.

A row that is cached is a row of fp32, or of int8 in a near slot, that lies in the cache: read, stepped and written like any
other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadGradient
from thermocline.kernels.arguments import LookupCall, OptimizerArrays, RowArrays
from thermocline.kernels.cache.cpu import refresh
from thermocline.kernels.cache.reference import due
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.compile import helper, inlined, kernel
from thermocline.kernels.cpu.optimizer_step import is_finite, numbers, step_columns, step_rate
from thermocline.kernels.cpu.rows import (
    PAD,
    ask_for,
    ask_for_found,
    copy_floats,
    find_row,
    meta_bytes,
    row_bytes,
    row_key,
    step_key,
)
from thermocline.kernels.cpu.sort import piece_start, row_ends, sort_lookups, tasks_for
from thermocline.kernels.cpu.sum_rows import sum_row
from thermocline.kernels.cpu.vectors import WIDTH, get_f32, get_i64, get_u32, prefetch, put_f32, put_i64, put_u32
from thermocline.kernels.cpu.write_row import descend_row, is_good, write_row
from thermocline.kernels.gather.cpu import slots_of
from thermocline.kernels.layout import Layout

AHEAD = 8  # lookups
_NONE_BAD = 1 << 62
_CHUNK = 512
GROUP = 8  # rows that are worked on together
_PLANES = np.array([F.planes(f) for f in range(len(F.BITS))])

# Scratch of a task, in floats: GROUP slots of four rows, partial sums, what is known of each slot (its row, five words, its
# name).
_SUMS = GROUP * 4 * (F.MAX_DIM + PAD)
_INFO = _SUMS + F.MAX_DIM // WIDTH
_SCRATCH = _INFO + 9 * GROUP
_RATES, _LOWS, _HIGHS, _TOPS, _TOTALS, _NAMES = (8 * GROUP + 4 * GROUP * k for k in range(6))


@inlined
def _slot(scratch, dim, number, part):
    """Address of a scratch row of a slot: 0 gradient, 1 weights, 2 and 3 states."""
    return scratch + 4 * ((number * 4 + part) * (dim + PAD))


@helper
def _update_slots(
    codes, meta, values, near, state0, state1, tables, table, optimizer, stochastic, scratch, hyper, shared, slots,
    names,
):  # fmt: skip
    """Update the rows in the slots, all of one table, from their gradients; returns the smallest name that was refused.

    `names`: address of the rows' names, of which rounding bits are drawn.

    Three loops, not one: what a row's codes wait for (a mean, a root, the largest column, two divisions) overlaps
    between rows.
    """
    at = table * F.LAYOUT_FIELDS
    dim, format, first = get_i64(tables, at + F.DIM), get_i64(tables, at + F.FORMAT), get_i64(tables, at + F.ROW)
    width, words = row_bytes(format, dim), meta_bytes(format)
    codes, meta = codes + get_i64(tables, at + F.CODES), meta + 4 * get_i64(tables, at + F.META)
    by_column = optimizer == F.ADAGRAD or optimizer == F.ADAM
    element = get_i64(tables, at + F.ELEMENT) if by_column else first
    state0, state1 = state0 + 4 * element, state1 + 4 * element
    info = scratch + 4 * _INFO
    for k in range(slots):
        g, local = _slot(scratch, dim, k, 0), get_i64(info, k) - first
        rate = step_rate(
            optimizer, g, dim, _PLANES[format], scratch + 4 * _SUMS, state0 + 4 * local, info + _TOTALS + 4 * k, hyper
        )
        put_f32(info + _RATES, k, rate)
    for k in range(slots):
        g, w, local = _slot(scratch, dim, k, 0), _slot(scratch, dim, k, 1), get_i64(info, k) - first
        found, row, row_meta = find_row(format, codes, meta, width, words, values, near, dim, local)
        if by_column:
            s, t, here = _slot(scratch, dim, k, 2), _slot(scratch, dim, k, 3), 4 * local * dim
            low, high, top = step_columns(optimizer, found, row, row_meta, state0 + here, state1 + here, dim, g, w, s, t, hyper)
        else:
            low, high, top = descend_row(found, row, row_meta, dim, get_f32(info + _RATES, k), g, w)
        put_f32(info + _LOWS, k, low)
        put_f32(info + _HIGHS, k, high)
        put_u32(info + _TOPS, k, top)
    bad = _NONE_BAD
    for k in range(slots):
        name = get_i64(names, k)
        local, top = get_i64(info, k) - first, get_u32(info + _TOPS, k)
        if not is_good(top) or (optimizer == F.ROWWISE_ADAGRAD and not is_finite(get_f32(info + _TOTALS, k))):
            bad = min(bad, name)
            continue
        low, high, key = get_f32(info + _LOWS, k), get_f32(info + _HIGHS, k), row_key(shared, name)
        found, place, row_meta = find_row(format, codes, meta, width, words, values, near, dim, local)
        write_row(found, _slot(scratch, dim, k, 1), dim, low, high, top, place, row_meta, key, stochastic)
        if optimizer == F.ROWWISE_ADAGRAD:
            put_f32(state0, local, get_f32(info + _TOTALS, k))
        elif by_column:
            copy_floats(_slot(scratch, dim, k, 2), state0 + 4 * local * dim, dim)
            if optimizer == F.ADAM:
                copy_floats(_slot(scratch, dim, k, 3), state1 + 4 * local * dim, dim)
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
    codes, meta, values, near, state0, state1, tables, count, optimizer, stochastic, scratch, hyper, seed, step,
    rows, names, grads, pitch, bad, first, last,
):  # fmt: skip
    """Update rows[first:last] from their gradients; returns the smallest name that was refused."""
    shared, table = step_key(seed, step), 0
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
            copy_floats(grads + 4 * u * pitch, _slot(scratch, dim, slots, 0), dim)
            u, slots = u + 1, slots + 1
        refused = _update_slots(
            codes, meta, values, near, state0, state1, tables, table, optimizer, stochastic, scratch, hyper, shared, slots,
            info + _NAMES,
        )  # fmt: skip
        bad = min(bad, refused)
    return bad


@inlined
def _ask_rows(codes, meta, values, near, state0, tables, table, keys, bits, ends, known, asked, u, last, optimizer):
    """Ask for rows of a table that come after place u; returns up to where metadata, and rows, are asked for now.

    One group at a time, not one row each time that a row is done: a core does not go on past a line whose page it has yet to
    find, but looks for the pages of several at once where it is asked for them in a row. With a cache the metadata of a row
    says where it lies, so that is asked for a group earlier.
    """
    field = table * F.LAYOUT_FIELDS
    dim, format, first = get_i64(tables, field + F.DIM), get_i64(tables, field + F.FORMAT), get_i64(tables, field + F.ROW)
    width, words, limit = row_bytes(format, dim), meta_bytes(format), first + get_i64(tables, field + F.ROWS)
    codes, meta = codes + get_i64(tables, field + F.CODES), meta + 4 * get_i64(tables, field + F.META)
    while known < min(u + 3 * GROUP, last) and _row_at(keys, bits, ends, known) < limit:
        row = _row_at(keys, bits, ends, known)
        prefetch(meta + (row - first) * words)
        if optimizer == F.ROWWISE_ADAGRAD:
            prefetch(state0 + 4 * row)
        known += 1
    until = min(u + 2 * GROUP, known)
    for v in range(asked, until):
        local = _row_at(keys, bits, ends, v) - first
        _, place, _ = find_row(format, codes, meta, width, words, values, near, dim, local)
        prefetch(place)
    for v in range(asked, until):
        local = _row_at(keys, bits, ends, v) - first
        ask_for_found(format, codes, meta, width, words, values, near, dim, local)
    return known, max(asked, until)


@inlined
def _row_at(keys, bits, ends, u):
    """The arena row at a place in the list of ends."""
    return get_i64(keys, get_i64(ends, u) - 1) >> bits


@kernel("int64(" + ", ".join(["int64"] * 26) + ")")
def _update_piece(
    codes, meta, values, near, state0, state1, tables, count, optimizer, stochastic, scratch, hyper, seed, step,
    keys, bits, lookups, ends, place, factor, within, winners, grad, bad, piece, pieces,
):  # fmt: skip
    """Sum and update the rows of one piece of the sorted lookups; returns the smallest row that was refused.

    `ends`: room for a number for each key, where the piece notes where each row's keys end.
    """
    at, last = piece_start(keys, bits, lookups, piece, pieces), piece_start(keys, bits, lookups, piece + 1, pieces)
    shared, table, mask = step_key(seed, step), 0, (1 << bits) - 1
    info = scratch + 4 * _INFO
    u, end = at, row_ends(keys, bits, at, last, ends)
    known, asked = u, u
    while u < end:
        table, slots = _table_of(tables, count, get_i64(keys, at) >> bits, table), 0
        dim = get_i64(tables, table * F.LAYOUT_FIELDS + F.DIM)
        limit = get_i64(tables, table * F.LAYOUT_FIELDS + F.ROW) + get_i64(tables, table * F.LAYOUT_FIELDS + F.ROWS)
        known, asked = _ask_rows(
            codes, meta, values, near, state0, tables, table, keys, bits, ends, known, asked, u, end, optimizer
        )
        while slots < GROUP and u < end and get_i64(keys, at) >> bits < limit:
            stop = get_i64(ends, u)
            for k in range(at + AHEAD, min(stop + AHEAD, last)):
                ask_for(grad + 4 * get_i64(place, get_i64(keys, k) & mask), 4 * dim)
            put_i64(info, slots, get_i64(keys, at) >> bits)
            g = _slot(scratch, dim, slots, 0)
            sum_row(keys, mask, at, stop, place, factor, within, winners, grad, dim, g)
            at, u, slots = stop, u + 1, slots + 1
        refused = _update_slots(
            codes, meta, values, near, state0, state1, tables, table, optimizer, stochastic, scratch, hyper, shared, slots,
            info,
        )  # fmt: skip
        bad = min(bad, refused)
    return bad


def advance(clock: Tensor, hyper: Tensor) -> None:
    """One more step, as the reference does it; through numpy, because small tensor operations cost microseconds."""
    clock.numpy()[F.STEP] += 1
    values = hyper.numpy()
    values[F.BETA1_POWER : F.BETA2_POWER + 1] *= values[F.BETA1 : F.BETA2 + 1]


def _run(rows: RowArrays, optimizer: OptimizerArrays, call: Callable[[tuple[int, ...], int], int], tasks: int) -> None:
    """One more step of the clock; `call(what all updates share, task)` for each task; raise if a row was refused."""
    codes, meta, layout, cache = rows
    states, hyper, clock, kind, stochastic = optimizer
    advance(clock, hyper)
    tables = np.array(layout.tables.distinct, dtype=np.int64)
    factors = numbers(hyper.tolist())
    seed, step = clock.tolist()[: F.CLOCK_FIELDS]
    state0, state1 = [s.data_ptr() for s in states] + [0] * (2 - len(states))
    found = [_NONE_BAD] * tasks

    def task(number: int) -> None:
        scratch = np.empty(_SCRATCH, dtype=np.float32)
        where = (codes.data_ptr(), meta.data_ptr(), *slots_of(cache), state0, state1, tables.ctypes.data, len(tables))
        how = (kind, stochastic, scratch.ctypes.data, factors.ctypes.data, seed, step)
        found[number] = call((*where, *how), number)

    threads.run(task, tasks)
    if min(found, default=_NONE_BAD) != _NONE_BAD:
        raise BadGradient(min(found), step, *layout.tables.table_of(min(found)))


def update_rows(
    rows: RowArrays,
    optimizer: OptimizerArrays,
    rows_U: Tensor,
    grads_UW: Tensor,
    seen_N: Tensor | None = None,
    names_U: Tensor | None = None,
) -> None:
    """Update distinct arena rows in place."""
    codes, meta, layout, cache = rows
    rows_U, grads_UW = rows_U.to(torch.int64).contiguous(), grads_UW.float().contiguous()
    named_U = rows_U if names_U is None else names_U.contiguous()
    count = rows_U.numel()
    seen_N = rows_U if seen_N is None else seen_N.to(torch.int64)
    if cache is not None and count and due(cache, layout.tables.policy, seen_N.numel()):
        refresh(codes, meta, cache, layout, _by_pool(seen_N, layout), 0, tasks_for(seen_N.numel()), optimizer.stochastic)

    def call(shared: tuple[int, ...], number: int) -> int:
        first, last = number * _CHUNK, min((number + 1) * _CHUNK, count)
        mine = (rows_U.data_ptr(), named_U.data_ptr(), grads_UW.data_ptr(), grads_UW.shape[1], _NONE_BAD, first, last)
        found: int = _update_rows(*shared, *mine)
        return found

    _run(rows, optimizer, call, -(-count // _CHUNK))


def _by_pool(rows_U: Tensor, layout: Layout) -> Tensor:
    """Rows of a pool together, in the order they came in."""
    if bool((rows_U.diff() > 0).all()):
        return rows_U
    return torch.cat([rows_U[(rows_U >= p.row) & (rows_U < p.row + p.rows)] for p in layout.tables.pools])


def update_bags(rows: RowArrays, optimizer: OptimizerArrays, call: LookupCall, winners: Tensor, grad_out: Tensor) -> None:
    """Update every row that a lookup read, in place."""
    (codes, meta, layout, cache), count = rows, call.ids_N.numel()
    lookups, grad = sort_lookups(layout, *call[:4], grad_out)
    if cache is not None and count and due(cache, layout.tables.policy, count):
        refresh(codes, meta, cache, layout, lookups.keys_N, lookups.bits, lookups.pieces, optimizer.stochastic)
    winners = winners.contiguous()
    notes = [t.data_ptr() if t is not None else 0 for t in (lookups.place, lookups.factor, lookups.within_N)]
    ends_N = torch.empty_like(lookups.keys_N)
    keys = (lookups.keys_N.data_ptr(), lookups.bits, count, ends_N.data_ptr())

    def update(shared: tuple[int, ...], number: int) -> int:
        mine = (*notes, winners.data_ptr(), grad.data_ptr(), _NONE_BAD, number, lookups.pieces)
        found: int = _update_piece(*shared, *keys, *mine)
        return found

    _run(rows, optimizer, update, lookups.pieces)
