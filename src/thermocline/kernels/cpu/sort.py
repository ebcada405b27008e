"""Sort lookups by row on the CPU: count, scatter, sort, each cut into tasks (docs/decisions/kernel_notes.md)."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.checks import raise_bad_id, raise_bad_offsets
from thermocline.kernels.layout import Layout, TableLayout, per_feature

from . import threads
from .compile import addresses, as_int64, helper, inlined, kernel
from .rows import copy_floats
from .vectors import Emit, block, get_i64, put_f32, put_i64, put_u32

BUCKET = 4096  # target keys a bucket: with smaller buckets scattering misses the first-level cache
DIGIT = 11  # most bits of a radix pass
TASKS_PER_THREAD = 4
OK, BAD_OFFSETS = -1, -2  # results of checking tasks; others are positions of bad ids
_INSERTION_SORT_BELOW = 32  # keys
_SINGLE_THREAD_KEYS = 4096  # most keys that one thread sorts alone
PACK_MIN_POOLING = 4  # lookups a bag from which gradients are packed by feature


class SortedKeys(NamedTuple):
    """Lookups in the order of their rows, and the gradient offset of each."""

    keys_N: Tensor  # arena row << bits | position, or bag
    bits: int
    place: Tensor  # by position or bag: first element of the lookup's gradient
    factor: Tensor | None  # by position or bag: factor of the gradient
    within_N: Tensor | None  # by position: index in the bag, for max pooling
    pieces: int
    places: list[int]  # addresses of `place`, `factor` and `within_N`; 0 for None


# -- count and scatter ------------------------------------------------------------------------------------------------


@inlined
def _task_range(total, task, tasks):
    return total * task // tasks, total * (task + 1) // tasks


@helper
def _bag_of_position(offsets, bags, position):
    """The bag that holds a position: the last that begins at or before it."""
    low, high = 0, bags - 1
    while low < high:
        middle = (low + high + 1) // 2
        if get_i64(offsets, middle) <= position:
            low = middle
        else:
            high = middle - 1
    return low


@helper
def offsets_ascend(offsets, bags, count, first, last):
    for b in range(first, last):
        if get_i64(offsets, b + 1) < get_i64(offsets, b):
            return False
    return get_i64(offsets, 0) == 0 and get_i64(offsets, bags) == count


@helper
def _count(
    ids, offsets, fields, features, batch, count, mode, pitch, packed, by_bag, plan, counts, buckets, place, factor,
    within, task, tasks,
):  # fmt: skip
    """Check the offsets and ids of one task, count its keys by bucket; returns OK, BAD_OFFSETS or a bad position."""
    bags = features * batch
    first, last = _task_range(bags, task, tasks)
    if not offsets_ascend(offsets, bags, count, first, last):
        return BAD_OFFSETS
    first, last = _task_range(count, task, tasks)
    counts += 8 * task * buckets
    for k in range(buckets):
        put_i64(counts, k, 0)
    bag = _bag_of_position(offsets, bags, first)
    i = first
    while i < last:
        while bag < bags - 1 and get_i64(offsets, bag + 1) <= i:
            bag += 1
        f = bag // batch
        at = f * F.LAYOUT_FIELDS
        rows, dim, column = get_i64(fields, at + F.ROWS), get_i64(fields, at + F.DIM), get_i64(fields, at + F.COLUMN)
        bucket, shift = get_i64(plan, 2 * f), get_i64(plan, 2 * f + 1)
        end_bag = (f + 1) * batch
        while i < last and bag < end_bag:
            low, high = get_i64(offsets, bag), get_i64(offsets, bag + 1)
            at = batch * column + (bag - f * batch) * dim if packed else (bag - f * batch) * pitch + column
            share = np.float32(1) / np.float32(max(high - low, 1))
            if by_bag:  # two tasks that share a bag write the same values
                put_i64(place, bag, at)
                if mode == F.MEAN:
                    put_f32(factor, bag, share)
            while i < min(high, last):
                row = get_i64(ids, i)
                if row < 0 or row >= rows:
                    return i
                into = bucket + (row >> shift)
                put_i64(counts, into, get_i64(counts, into) + 1)
                i += 1
                if by_bag:
                    continue
                put_i64(place, i - 1, (i - 1) * pitch if mode == F.NONE else at)
                if mode == F.MEAN:
                    put_f32(factor, i - 1, share)
                elif mode == F.MAX:
                    put_u32(within, i - 1, i - 1 - low)
            if i >= high:
                bag += 1
            elif i < last:
                return BAD_OFFSETS
    return OK


@helper
def _start_buckets(counts, buckets, tasks, bounds):
    """Turn the counts of each task into where it writes its keys of each bucket; `bounds`: where each bucket begins."""
    at = 0
    for bucket in range(buckets):
        put_i64(bounds, bucket, at)
        for task in range(tasks):
            here = get_i64(counts, task * buckets + bucket)
            put_i64(counts, task * buckets + bucket, at)
            at += here
    put_i64(bounds, buckets, at)


@helper
def _scatter(ids, offsets, fields, features, batch, count, plan, starts, buckets, bits, by_bag, keys, task, tasks):
    """Write the keys of one task into their buckets."""
    first, last = _task_range(count, task, tasks)
    starts += 8 * task * buckets
    i, f, bag = first, 0, _bag_of_position(offsets, features * batch, first)
    while i < last:
        while get_i64(offsets, (f + 1) * batch) <= i:
            f += 1
        base = get_i64(fields, f * F.LAYOUT_FIELDS + F.ROW)
        bucket, shift = get_i64(plan, 2 * f), get_i64(plan, 2 * f + 1)
        end = min(last, get_i64(offsets, (f + 1) * batch))
        while i < end:
            until, number = end, i
            if by_bag:
                while get_i64(offsets, bag + 1) <= i:
                    bag += 1
                until, number = min(end, get_i64(offsets, bag + 1)), bag
            while i < until:
                row = get_i64(ids, i)
                into = bucket + (row >> shift)
                at = get_i64(starts, into)
                put_i64(starts, into, at + 1)
                put_i64(keys, at, ((base + row) << bits) | number)
                i += 1
                number += 1 - by_bag


# -- sort inside buckets ----------------------------------------------------------------------------------------------


@inlined
def _insertion_sort(keys, low, high):
    """Sort few keys: keys compare by row, then by position."""
    for i in range(low + 1, high):
        key = get_i64(keys, i)
        j = i
        while j > low and get_i64(keys, j - 1) > key:
            put_i64(keys, j, get_i64(keys, j - 1))
            j -= 1
        put_i64(keys, j, key)


@inlined
def radix_pass(source, target, first, low, high, base, shift, width, digits):
    """One stable pass by `width` bits of (key - base) from `shift` on; target begins at `first`."""
    mask = (1 << width) - 1
    for d in range(mask + 1):
        put_i64(digits, d, 0)
    for i in range(low, high):
        d = ((get_i64(source, i) - base) >> shift) & mask
        put_i64(digits, d, get_i64(digits, d) + 1)
    at = first
    for d in range(mask + 1):
        here = get_i64(digits, d)
        put_i64(digits, d, at)
        at += here
    for i in range(low, high):
        key = get_i64(source, i)
        d = ((key - base) >> shift) & mask
        at = get_i64(digits, d)
        put_i64(digits, d, at + 1)
        put_i64(target, at, key)


@block("-> i64")
def _new_digits(e: Emit) -> Any:
    """Memory for the counts of a radix pass on the stack."""
    return e.stack(1 << DIGIT)


@helper
def _sort(keys, other, bounds, tables, bits, first, last):
    """Sort buckets first to last - 1. `tables`: (first arena row, bits left to sort) of each bucket."""
    digits = _new_digits()
    for bucket in range(first, last):
        low, high = get_i64(bounds, bucket), get_i64(bounds, bucket + 1)
        if high - low < _INSERTION_SORT_BELOW:
            _insertion_sort(keys, low, high)
            continue
        base, left = get_i64(tables, 2 * bucket) << bits, get_i64(tables, 2 * bucket + 1)
        passes = (left + DIGIT - 1) // DIGIT
        shift, done = bits, 0
        for p in range(passes):
            width = (left - done + passes - p - 1) // (passes - p)
            if p % 2 == 0:
                radix_pass(keys, other, low, low, high, base, shift, width, digits)
            else:
                radix_pass(other, keys, low, low, high, base, shift, width, digits)
            shift, done = shift + width, done + width
        if passes % 2:
            for i in range(low, high):
                put_i64(keys, i, get_i64(other, i))


_COUNT, _START, _SCATTER, _SORT, _ALL = range(5)  # passes; one task runs all of them in one call


@kernel("int64(" + ", ".join(["int64"] * 24) + ")")
def _run_pass(
    which, ids, offsets, fields, features, batch, count, mode, pitch, packed, by_bag, bits, plan, tables, buckets, place,
    factor, within, keys, other, counts, bounds, task, tasks,
):  # fmt: skip
    """One pass, or all, for one task; returns OK, BAD_OFFSETS or a bad position."""
    if which == _COUNT or which == _ALL:
        found = _count(
            ids, offsets, fields, features, batch, count, mode, pitch, packed, by_bag, plan, counts, buckets, place, factor,
            within, task, tasks,
        )  # fmt: skip
        if which == _COUNT or found != OK:
            return found
    if which == _START or which == _ALL:
        _start_buckets(counts, buckets, tasks, bounds)
    if which == _SCATTER or which == _ALL:
        _scatter(ids, offsets, fields, features, batch, count, plan, counts, buckets, bits, by_bag, keys, task, tasks)
    if which == _SORT or which == _ALL:
        _sort(keys, other, bounds, tables, bits, buckets * task // tasks, buckets * (task + 1) // tasks)
    return OK


@kernel("void(" + ", ".join(["int64"] * 8) + ")")
def _pack_gradients(grad, pitch, fields, features, batch, packed, task, tasks):
    """Copy the gradients of one task's bags to their features; bag by bag, which reads them in order."""
    for b in range(batch * task // tasks, batch * (task + 1) // tasks):
        for f in range(features):
            dim, column = get_i64(fields, f * F.LAYOUT_FIELDS + F.DIM), get_i64(fields, f * F.LAYOUT_FIELDS + F.COLUMN)
            copy_floats(grad + 4 * (b * pitch + column), packed + 4 * (batch * column + b * dim), dim)


# -- pieces -----------------------------------------------------------------------------------------------------------


@inlined
def piece_start(keys, bits, count, piece, pieces):
    """First key of a piece: count * piece / pieces, advanced to the start of a row."""
    at = count * piece // pieces
    while 0 < at < count and get_i64(keys, at) >> bits == get_i64(keys, at - 1) >> bits:
        at += 1
    return at


@inlined
def row_end(keys, bits, at, last):
    """End of the run of keys of one row that begins at `at`."""
    row = get_i64(keys, at) >> bits
    at += 1
    while at < last and get_i64(keys, at) >> bits == row:
        at += 1
    return at


@inlined
def row_ends(keys, bits, first, last, ends):
    """Write the key end of each row among keys first to last - 1 to `ends` from index `first` on; returns the end of `ends`."""
    if first == last:
        return last
    # No branch at the end of a row: half of them would be mispredicted, which took longer than all the rest.
    u, row = first - 1, ~(get_i64(keys, first) >> bits)
    for k in range(first, last):
        now = get_i64(keys, k) >> bits
        u += now != row
        row = now
        put_i64(ends, u, k + 1)
    return u + 1


class _BucketPlan(NamedTuple):
    """Assignment of rows to buckets."""

    buckets: int
    of_feature: Any  # int64 [features, 2]: first bucket of its table, low bits of a row inside a bucket
    of_bucket: Any  # int64 [buckets, 2]: first arena row, bits left to sort
    places: list[int]  # addresses of both


@lru_cache(maxsize=1024)
def _plan(tables: TableLayout, magnitude: int) -> _BucketPlan:
    """Buckets for about 2**magnitude lookups, spread evenly over the features. Cached by the identity of `tables`."""
    wanted = max(1, (1 << magnitude) // (len(tables.features) * BUCKET))
    first: dict[int, tuple[int, int]] = {}
    of_bucket: list[tuple[int, int]] = []
    for field in tables.distinct:
        row, rows = field[F.ROW], field[F.ROWS]
        sharing = sum(f[F.ROW] == row for f in tables.features)
        shift = max(0, (rows - 1).bit_length() - (wanted * sharing).bit_length() + 1)
        first[row] = len(of_bucket), shift
        of_bucket += [(row + (k << shift), shift) for k in range(((rows - 1) >> shift) + 1)]
    arrays = np.array([first[f[F.ROW]] for f in tables.features], dtype=np.int64), np.array(of_bucket, dtype=np.int64)
    return _BucketPlan(len(of_bucket), *arrays, addresses("qq", *arrays))


def tasks_for(count: int) -> int:
    """Number of tasks and pieces for `count` keys."""
    several = torch.get_num_threads() > 1 and count > _SINGLE_THREAD_KEYS
    return TASKS_PER_THREAD * torch.get_num_threads() if several else 1


def sort_lookups(
    layout: Layout, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None, mode: int, grad_out: Tensor
) -> tuple[SortedKeys, Tensor]:
    """Check a lookup and sort it by row; also returns the gradient in the order of `place`, of max pooling in fp32."""
    ids_N, offsets = as_int64(ids_N), as_int64(offsets)
    count, batch, features = ids_N.numel(), per_feature(layout, offsets), len(layout.tables.features)
    plan = _plan(layout.tables, count.bit_length())
    packed = mode in (F.SUM, F.MEAN) and count >= PACK_MIN_POOLING * batch * features
    by_bag = packed and weights_N is None
    entries = batch * features if by_bag else count
    bits = entries.bit_length()
    assert layout.tables.rows.bit_length() + bits < 64, "rows and positions must fit one key"
    tasks, place = tasks_for(count), torch.empty(entries, dtype=torch.int64)
    factor = torch.empty(entries, dtype=torch.float32) if mode == F.MEAN else None
    if weights_N is not None:
        factor = weights_N.float().contiguous()
    within_N = torch.empty(count, dtype=torch.int32) if mode == F.MAX else None
    places = addresses("qfi", place, factor, within_N)
    if batch == 0:
        raise_bad_offsets(offsets, count)
        return SortedKeys(place, bits, place, factor, within_N, 1, places), grad_out
    sorted = SortedKeys(torch.empty(count, dtype=torch.int64), bits, place, factor, within_N, tasks, places)
    memory, fields_F8 = torch.empty(count + (tasks + 1) * plan.buckets + 1, dtype=torch.int64), layout.fields_F8.contiguous()
    other = memory.data_ptr()
    counts, bounds = other + 8 * count, other + 8 * (count + tasks * plan.buckets)
    # Not `addresses`: these arrays were made here, or checked by `as_int64`.
    lookup = (ids_N.data_ptr(), offsets.data_ptr(), fields_F8.data_ptr(), features, batch, count)
    how = (mode, grad_out.shape[1], packed, by_bag, bits, *plan.places, plan.buckets)
    arrays = (*lookup, *how, *places, sorted.keys_N.data_ptr(), other, counts, bounds)
    found = [OK] * tasks

    def task(which: int, number: int) -> None:
        found[number] = _run_pass(which, *arrays, number, tasks)

    for which in (_ALL,) if tasks == 1 else (_COUNT, _START, _SCATTER, _SORT):
        threads.run(partial(task, which), 1 if which == _START else tasks)
        raise_if_bad(found, layout, ids_N, offsets)
    grad = (grad_out.float() if mode == F.MAX else grad_out).contiguous()
    if packed and features > 1:
        grad = _gradient_by_feature(grad, layout, batch, tasks)
    return sorted, grad


def _gradient_by_feature(grad: Tensor, layout: Layout, batch: int, tasks: int) -> Tensor:
    """The gradient with the columns of each feature contiguous: with long bags the part of a table stays in the cache.

    In the output, rows of a feature are a whole output row apart, often a multiple of 4096 bytes, and an 8-way cache holds few
    of those (8 x 1M x 128, pooling 20: 7.6 of 10.6 ms of the sum were stalls).
    """
    flat, fields_F8 = torch.empty(grad.numel(), dtype=grad.dtype), layout.fields_F8.contiguous()
    if grad.dtype != torch.float32:
        for field in layout.tables.features:
            column, dim = field[F.COLUMN], field[F.DIM]
            flat[batch * column : batch * (column + dim)].view(batch, dim).copy_(grad[:, column : column + dim])
        return flat
    features, (source, fields, target) = len(layout.tables.features), addresses("fqf", grad, fields_F8, flat)
    where = (source, grad.shape[1], fields, features, batch, target)
    threads.run(lambda number: _pack_gradients(*where, number, tasks), tasks)
    return flat


def raise_if_bad(found: list[int], layout: Layout, ids_N: Tensor, offsets: Tensor) -> None:
    """Raise for the results of checking tasks."""
    if BAD_OFFSETS in found:
        raise_bad_offsets(offsets, ids_N.numel())
    if positions := [p for p in found if p >= 0]:
        raise_bad_id(layout, min(positions), ids_N, offsets)
