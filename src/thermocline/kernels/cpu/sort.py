"""Lookups sorted by row: what summing and updating on the CPU begin with.

A lookup becomes one 64-bit key, `arena row << bits | position`. Sorted, the lookups of a row lie together in the
order of their positions, and the rows of a table rise, so its memory is walked once and in order. Where all lookups of
a bag have the same gradient, and bags are long, a key holds the bag in place of the position: the order is the same, and
what is noted of a bag stays in the first-level cache where notes of its lookups would not. Three passes, each cut into
tasks:

    count      each task, for its share of the positions: checks offsets and ids, notes where each lookup's gradient
               lies, counts keys by bucket (a bucket: some 4000 keys of neighbouring rows of one table)
    scatter    each task writes its keys to their buckets; tasks and positions in order, so equal rows keep their order
    sort       each bucket by the low bits of the row that are left, a radix sort inside the caches of one core

Then the keys are cut anew, into equal pieces between rows (`piece_start`), which is fair however skewed the ids are.
A row is never in two pieces. Rejected: one sort for each table, which leaves a second thread idle when there is one
table; `torch.sort`, which takes longer than everything else together.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.checks import raise_bad_id, raise_bad_offsets
from thermocline.kernels.layout import Layout, TableLayout, per_feature

from . import threads
from .compile import helper, inlined, kernel
from .rows import copy_floats
from .vectors import get_i64, put_f32, put_i64, put_u32

BUCKET = 4096  # keys a bucket is meant to hold: smaller ones are so many that scattering misses the first-level cache
DIGIT = 11  # bits a pass of the radix sort takes at most
TASKS_A_THREAD = 4
_GOOD, _BAD_OFFSETS = -1, -2
_FEW = 32
_ALONE = 4096  # keys that one thread sorts by itself
PACK_FROM = 4  # lookups a bag


class Sorted(NamedTuple):
    """Lookups in the order of their rows, and where the gradient of each lies."""

    keys_N: Tensor  # arena row << bits | position, or bag
    bits: int
    place: Tensor  # by position or bag: element of the gradient where the lookup's columns begin
    factor: Tensor | None  # by position or bag: what its gradient is multiplied with
    within_N: Tensor | None  # by position: its number in its bag, for max
    pieces: int


# -- count and scatter ------------------------------------------------------------------------------------------------


@inlined
def _share(total, task, tasks):
    return total * task // tasks, total * (task + 1) // tasks


@helper
def _bag_of(offsets, bags, position):
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
def _offsets_rise(offsets, bags, count, first, last):
    for b in range(first, last):
        if get_i64(offsets, b + 1) < get_i64(offsets, b):
            return False
    return get_i64(offsets, 0) == 0 and get_i64(offsets, bags) == count


_COUNT = "int64(" + ", ".join(["int64"] * 18) + ")"


@kernel(_COUNT)
def _count(
    ids, offsets, fields, features, batch, count, mode, pitch, packed, by_bag, plan, counts, buckets, place, factor,
    within, task, tasks,
):  # fmt: skip
    """Check a share of the offsets and ids, count its keys by bucket; _GOOD, _BAD_OFFSETS or a bad position."""
    bags = features * batch
    first, last = _share(bags, task, tasks)
    if not _offsets_rise(offsets, bags, count, first, last):
        return _BAD_OFFSETS
    first, last = _share(count, task, tasks)
    counts += 8 * task * buckets
    for k in range(buckets):
        put_i64(counts, k, 0)
    bag = _bag_of(offsets, bags, first)
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
            if by_bag:  # two tasks may note the same of a bag that both have lookups of
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
                return _BAD_OFFSETS
    return _GOOD


@kernel("void(" + ", ".join(["int64"] * 14) + ")")
def _scatter(ids, offsets, fields, features, batch, count, plan, starts, buckets, bits, by_bag, keys, task, tasks):
    """Write one share of the keys into their buckets."""
    first, last = _share(count, task, tasks)
    starts += 8 * task * buckets
    i, f, bag = first, 0, _bag_of(offsets, features * batch, first)
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


@kernel("int64(int64, int64, int64, int64)")
def _starts(counts, buckets, tasks, bounds):
    """Counts by task and bucket to first places, in place; `bounds` gets the first place of each bucket and the end."""
    at = 0
    for bucket in range(buckets):
        put_i64(bounds, bucket, at)
        for task in range(tasks):
            here = get_i64(counts, task * buckets + bucket)
            put_i64(counts, task * buckets + bucket, at)
            at += here
    put_i64(bounds, buckets, at)
    return at


# -- sort inside buckets ----------------------------------------------------------------------------------------------


@inlined
def _insertion(keys, low, high):
    """Few keys: whole keys compare as rows then positions."""
    for i in range(low + 1, high):
        key = get_i64(keys, i)
        j = i
        while j > low and get_i64(keys, j - 1) > key:
            put_i64(keys, j, get_i64(keys, j - 1))
            j -= 1
        put_i64(keys, j, key)


@inlined
def _pass(source, target, first, low, high, base, shift, width, digits):
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


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _sort(keys, other, bounds, tables, bits, digits, first, last):
    """Sort buckets first to last - 1. `tables`: (arena row it begins with, bits left to sort) of each bucket."""
    for bucket in range(first, last):
        low, high = get_i64(bounds, bucket), get_i64(bounds, bucket + 1)
        if high - low < _FEW:
            _insertion(keys, low, high)
            continue
        base, left = get_i64(tables, 2 * bucket) << bits, get_i64(tables, 2 * bucket + 1)
        passes = (left + DIGIT - 1) // DIGIT
        shift, done = bits, 0
        for p in range(passes):
            width = (left - done + passes - p - 1) // (passes - p)
            if p % 2 == 0:
                _pass(keys, other, low, low, high, base, shift, width, digits)
            else:
                _pass(other, keys, low, low, high, base, shift, width, digits)
            shift, done = shift + width, done + width
        if passes % 2:
            for i in range(low, high):
                put_i64(keys, i, get_i64(other, i))


@kernel("void(" + ", ".join(["int64"] * 8) + ")")
def _pack(grad, pitch, fields, features, batch, packed, task, tasks):
    """Copy a share of the bags' gradients to the parts of their features. By bags, since that reads them in order."""
    for b in range(batch * task // tasks, batch * (task + 1) // tasks):
        for f in range(features):
            dim, column = get_i64(fields, f * F.LAYOUT_FIELDS + F.DIM), get_i64(fields, f * F.LAYOUT_FIELDS + F.COLUMN)
            copy_floats(grad + 4 * (b * pitch + column), packed + 4 * (batch * column + b * dim), dim)


# -- pieces -----------------------------------------------------------------------------------------------------------


@inlined
def piece_start(keys, bits, count, piece, pieces):
    """First key of a piece: count * piece / pieces, moved on to where a row begins."""
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
    """Where the keys of each row end among keys first to last - 1, from place `first` on; returns where these places end."""
    if first == last:
        return last
    # No branch where a row ends: half of them would be mispredicted, which took longer than all the rest.
    u, row = first - 1, ~(get_i64(keys, first) >> bits)
    for k in range(first, last):
        now = get_i64(keys, k) >> bits
        u += now != row
        row = now
        put_i64(ends, u, k + 1)
    return u + 1


class _Plan(NamedTuple):
    """How the rows of each table fall into buckets."""

    buckets: int
    of_feature: Any  # int64 [features, 2]: first bucket of its table, bits of a row that stay inside a bucket
    of_bucket: Any  # int64 [buckets, 2]: first arena row, bits left to sort


_plans: dict[tuple[int, int], tuple[TableLayout, _Plan]] = {}


def _plan(tables: TableLayout, magnitude: int) -> _Plan:
    """`_make_plan`, remembered by identity: hashing the fields of many tables takes longer than a small batch."""
    known = _plans.get((id(tables), magnitude))
    if known is None:
        if len(_plans) >= 1024:
            _plans.clear()
        known = tables, _make_plan(tables, magnitude)  # holding tables keeps its id its own
        _plans[id(tables), magnitude] = known
    return known[1]


def _make_plan(tables: TableLayout, magnitude: int) -> _Plan:
    """Buckets for about 2**magnitude lookups, spread evenly over the features."""
    wanted = max(1, (1 << magnitude) // (len(tables.features) * BUCKET))
    first: dict[int, tuple[int, int]] = {}
    of_bucket: list[tuple[int, int]] = []
    for field in tables.distinct:
        row, rows = field[F.ROW], field[F.ROWS]
        sharing = sum(f[F.ROW] == row for f in tables.features)
        shift = max(0, (rows - 1).bit_length() - (wanted * sharing).bit_length() + 1)
        first[row] = len(of_bucket), shift
        of_bucket += [(row + (k << shift), shift) for k in range(((rows - 1) >> shift) + 1)]
    of_feature = np.array([first[f[F.ROW]] for f in tables.features], dtype=np.int64)
    return _Plan(len(of_bucket), of_feature, np.array(of_bucket, dtype=np.int64))


def tasks_for(count: int) -> int:
    """Tasks, and pieces, that so many keys are cut into."""
    several = threads.thread_count() > 1 and count > _ALONE
    return TASKS_A_THREAD * threads.thread_count() if several else 1


def sort_lookups(
    layout: Layout, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None, mode: int, grad_out: Tensor
) -> tuple[Sorted, Tensor]:
    """Check a lookup and sort it by row; returns also the gradient in fp32, in the order that `place_N` counts in."""
    ids_N, offsets = ids_N.to(torch.int64).contiguous(), offsets.to(torch.int64).contiguous()
    count, batch, features = ids_N.numel(), per_feature(layout, offsets), len(layout.tables.features)
    plan = _plan(layout.tables, count.bit_length())
    packed = mode in (F.SUM, F.MEAN) and count >= PACK_FROM * batch * features
    by_bag = packed and weights_N is None
    noted = batch * features if by_bag else count
    bits = noted.bit_length()
    assert layout.tables.rows.bit_length() + bits < 64, "rows and positions must fit one key"
    tasks, place = tasks_for(count), torch.empty(noted, dtype=torch.int64)
    factor = torch.empty(noted) if mode == F.MEAN else None
    if weights_N is not None:
        factor = weights_N.float().contiguous()
    within_N = torch.empty(count, dtype=torch.int32) if mode == F.MAX else None
    if batch == 0:
        raise_bad_offsets(offsets, count)
        return Sorted(place, bits, place, factor, within_N, 1), grad_out.float()
    counts = np.empty((tasks, plan.buckets), dtype=np.int64)
    fields_F8 = layout.fields_F8.contiguous()
    lookup = (ids_N.data_ptr(), offsets.data_ptr(), fields_F8.data_ptr(), features, batch, count)
    notes = [t.data_ptr() if t is not None else 0 for t in (place, factor, within_N)]
    buckets = (plan.of_feature.ctypes.data, counts.ctypes.data, plan.buckets)
    found = [_GOOD] * tasks

    def count_task(number: int) -> None:
        found[number] = _count(*lookup, mode, grad_out.shape[1], packed, by_bag, *buckets, *notes, number, tasks)

    threads.run(count_task, tasks)
    _raise_if_bad(found, layout, ids_N, offsets)
    keys_N, other_N = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    bounds = np.empty(plan.buckets + 1, dtype=np.int64)
    _starts(counts.ctypes.data, plan.buckets, tasks, bounds.ctypes.data)
    threads.run(lambda n: _scatter(*lookup, *buckets, bits, by_bag, keys_N.data_ptr(), n, tasks), tasks)

    def sort_task(number: int) -> None:
        digits = np.empty(1 << DIGIT, dtype=np.int64)
        first, last = plan.buckets * number // tasks, plan.buckets * (number + 1) // tasks
        arrays = (keys_N.data_ptr(), other_N.data_ptr(), bounds.ctypes.data, plan.of_bucket.ctypes.data)
        _sort(*arrays, bits, digits.ctypes.data, first, last)

    threads.run(sort_task, tasks)
    grad = grad_out.float().contiguous()
    return Sorted(keys_N, bits, place, factor, within_N, tasks), _by_feature(grad, layout, batch, tasks) if packed else grad


def _by_feature(grad: Tensor, layout: Layout, batch: int, tasks: int) -> Tensor:
    """The gradient with each feature's columns together: where bags are long, a table's part then stays in the cache.

    In the order of the output its rows lie a whole output row apart, which is often a multiple of 4096 bytes; an 8-way
    cache keeps few of those (8 x 1M x 128, pooling 20: the sum alone took 10.6 ms, of which 7.6 went into waiting).
    """
    flat, fields_F8, features = torch.empty(grad.numel()), layout.fields_F8.contiguous(), len(layout.tables.features)
    where = (grad.data_ptr(), grad.shape[1], fields_F8.data_ptr(), features, batch, flat.data_ptr())
    threads.run(lambda number: _pack(*where, number, tasks), tasks)
    return flat


def _raise_if_bad(found: list[int], layout: Layout, ids_N: Tensor, offsets: Tensor) -> None:
    if _BAD_OFFSETS in found:
        raise_bad_offsets(offsets, ids_N.numel())
    positions = [p for p in found if p >= 0]
    if positions:
        raise_bad_id(layout, min(positions), ids_N, offsets)
