"""Look up rows of sharded tables on a CPU (definition: `reference.py`): first addresses of all rows, then pooling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import IdOutOfRange
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.compile import addresses, as_int64, helper, kernel
from thermocline.kernels.cpu.pool import pool_plain
from thermocline.kernels.cpu.rows import fmix32, meta_bytes
from thermocline.kernels.cpu.vectors import get_i64, get_u8, put_i64
from thermocline.kernels.ids.cpu import rank_in_bitmap, rank_in_sorted

from . import fields as S
from .fields import MAX_UNPOOLED_ROWS, ServedBags, ShardedTables, ShardMissing
from .reference import locate

GROUP = 64
MIN_TASK_LOOKUPS = 1024  # waking a thread takes as long as this many lookups
TASKS_PER_THREAD = 4
FOUND = np.int64(-1)


@helper
def _find_ranks(row_set, words, counts, rows, ranks, first, last):
    """Ranks of at most GROUP rows in a set, or -1."""
    kind, count = get_i64(row_set, S.KIND), get_i64(row_set, S.COUNT)
    low, high = get_i64(row_set, S.LOW), get_i64(row_set, S.HIGH)
    words += 8 * get_i64(row_set, S.WORDS)
    counts += 4 * get_i64(row_set, S.BLOCK)
    if kind == S.SORTED:
        rank_in_sorted(words, count, rows, ranks, first, last)
        for i in range(first, last):
            if count == 0 or get_i64(words, get_i64(ranks, i - first)) != get_i64(rows, i):
                put_i64(ranks, i - first, -1)
        return
    for i in range(first, last):
        put_i64(ranks, i - first, rank_in_bitmap(words, counts, low, high, get_i64(rows, i)))


@helper
def _find_owners(field, shards, rotations, rows, shard_of, place_of, first, last):
    """Shard and place of at most GROUP rows; returns -1 or the position of a row out of range."""
    limit, scheme = get_i64(field, S.ROWS), get_i64(field, S.SCHEME)
    begin, per = get_i64(field, S.FIRST), get_i64(field, S.PER)
    rotations_at, key = get_i64(field, S.ROTATIONS), get_i64(field, S.KEY)
    for i in range(first, last):
        row = get_i64(rows, i)
        if row < 0 or row >= limit:
            return i
        if scheme == S.RANGES:
            quotient = row // per if per < limit else np.int64(0)
            shard, place = begin + quotient, row - quotient * per
        else:
            place = row // shards
            if rotations_at == S.HASHED:
                rotation = (fmix32((place & 0xFFFFFFFF) ^ key) * shards) >> 32
            else:
                rotation = get_u8(rotations, rotations_at + place)
            shard = row - place * shards + rotation
            if shard >= shards:
                shard -= shards
        put_i64(shard_of, i - first, shard)
        put_i64(place_of, i - first, place)
    return np.int64(-1)


@helper
def find_addresses(fields, shards, rotations, words, counts, bases, starts, rows, addresses, tally, scratch, first, last):
    """Addresses of the rows at positions first to last - 1.

    Returns -1, the position of a row out of range, or -2 - position of a row whose shard is down.
    """
    shard_of, place_of, ranks, feature = scratch, scratch + 8 * GROUP, scratch + 16 * GROUP, 0
    while first < last:
        while get_i64(starts, feature + 1) <= first:
            feature += 1
        field = fields + 8 * S.FIELDS * feature
        until = min(first + GROUP, last, get_i64(starts, feature + 1))
        bad = _find_owners(field, shards, rotations, rows, shard_of, place_of, first, until)
        if bad >= 0:
            return bad
        if get_i64(field, S.COPIED + S.KIND) != S.NOTHING:
            _find_ranks(field + 8 * S.COPIED, words, counts, rows, ranks, first, until)
            begin = get_i64(field, S.COPY_PLACE)
            for i in range(first, until):
                rank = get_i64(ranks, i - first)
                if rank >= 0:
                    put_i64(shard_of, i - first, i % shards)
                    put_i64(place_of, i - first, begin + rank)
        if get_i64(field, S.OVERLAY + S.KIND) != S.NOTHING:
            _find_ranks(field + 8 * S.OVERLAY, words, counts, rows, ranks, first, until)
            for i in range(first, until):
                rank = get_i64(ranks, i - first)
                if rank >= 0:
                    put_i64(shard_of, i - first, shards)
                    put_i64(place_of, i - first, rank)
        stride, own = get_i64(field, S.STRIDE), bases + 8 * (shards + 1) * feature
        for i in range(first, until):
            shard = get_i64(shard_of, i - first)
            base = get_i64(own, shard)
            if base == 0:
                return -2 - i
            put_i64(tally, shard, get_i64(tally, shard) + 1)
            put_i64(addresses, i, base + get_i64(place_of, i - first) * stride)
        first = until
    return FOUND


@helper
def pool_bags(fields, ends, addresses, offsets, weights, mean, out, targets, first, last):
    """Pool bags first to last - 1."""
    feature = 0
    while first < last:
        while get_i64(ends, feature + 1) <= first:
            feature += 1
        field = fields + 8 * S.FIELDS * feature
        format, dim = get_i64(field, S.FORMAT), get_i64(field, S.DIM)
        until = min(last, get_i64(ends, feature + 1))
        end = get_i64(offsets, until)
        pitch = 4 * get_i64(targets, 2 * feature + 1)
        place = out + 4 * get_i64(targets, 2 * feature) + (first - get_i64(ends, feature)) * pitch
        pool_plain(
            format, 0, -meta_bytes(format), 0, 1, 1, addresses, offsets, weights, first, until, end, dim, mean, place, pitch,
            np.float32(0),
        )  # fmt: skip
        first = until
    return np.int64(0)


_find = kernel("int64(" + ", ".join(["int64"] * 13) + ")")(find_addresses.py_func)
_pool = kernel("int64(" + ", ".join(["int64"] * 10) + ")")(pool_bags.py_func)


ROW_OFFSETS = torch.arange(MAX_UNPOOLED_ROWS + 1)


def gather_pool(
    placed: ShardedTables, bags: ServedBags, out: Tensor, fetch: Callable[[NDArray[np.int64]], object] | None = None
) -> Tensor:
    """Look up and pool into `out`; returns the lookups of each shard and of the overlay."""
    rows_N, count, ends_F1 = as_int64(bags.rows_N), bags.rows_N.numel(), as_int64(bags.ends_F1)
    if bags.offsets_B1 is None:
        offsets, starts_F1 = ROW_OFFSETS if count <= MAX_UNPOOLED_ROWS else torch.arange(count + 1), ends_F1
    else:
        offsets = as_int64(bags.offsets_B1)
        starts_F1 = torch.from_numpy(offsets.numpy()[ends_F1.numpy()])
    several = torch.get_num_threads() > 1
    tasks = max(1, min(TASKS_PER_THREAD * torch.get_num_threads(), count // MIN_TASK_LOOKUPS)) if several else 1
    addresses_N, found = np.empty(count, dtype=np.int64), [-1] * tasks
    tallies = np.zeros((tasks, placed.shards + 1), dtype=np.int64)
    scratches = np.empty((tasks, 3 * GROUP), dtype=np.int64)
    table = (placed.fields_FN, placed.rotations, placed.words, placed.counts, placed.bases_FC, starts_F1, rows_N, addresses_N)
    fields, *others = addresses("qBqiqqqq", *table)

    def find(n: int) -> None:
        span = (count * n // tasks, count * (n + 1) // tasks)
        found[n] = _find(fields, placed.shards, *others, *addresses("qq", tallies[n], scratches[n]), *span)

    if tasks == 1:  # called from here: eight calls lead from the server to the kernel
        found[0] = _find(fields, placed.shards, *others, *addresses("qq", tallies, scratches), 0, count)
    else:
        threads.run(find, tasks)
    if min(found) < -1 or max(found) > -1:
        _raise(placed, rows_N, starts_F1, found)
    kept = None if fetch is None else fetch(addresses_N)
    weights = None if bags.weights_N is None else bags.weights_N.float().contiguous()
    targets_F2, total = as_int64(bags.target_F2), bags.total
    what = addresses("qqqqf", placed.fields_FN, ends_F1, addresses_N, offsets, weights)
    how = (bags.mode == F.MEAN, *addresses("fq", out, targets_F2))
    if tasks == 1:
        _pool(*what, *how, 0, total)
    else:
        threads.run(lambda n: _pool(*what, *how, total * n // tasks, total * (n + 1) // tasks), tasks)
    del kept
    return torch.from_numpy(tallies.sum(axis=0))


def _raise(placed: ShardedTables, rows_N: Tensor, starts_F1: Tensor, found: list[int]) -> None:
    position = min(-2 - each if each < -1 else each for each in found if each != -1)
    feature = int(torch.searchsorted(starts_F1[1:].contiguous(), position, right=True))
    row, limit = int(rows_N[position]), int(placed.fields_FN[feature, S.ROWS])
    if not 0 <= row < limit:
        raise IdOutOfRange(feature, position, row, limit)
    shard_N, _ = locate(placed, feature, rows_N[position : position + 1], torch.tensor([position], dtype=torch.int64))
    raise ShardMissing(int(shard_N))
