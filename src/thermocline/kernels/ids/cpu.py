"""Map raw ids to rows on the CPU (definition: `reference.py`); `GROUP` ids are searched in lockstep."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thermocline.errors import IdOutOfRange
from thermocline.kernels.checks import raise_bad_offsets
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.compile import addresses, helper, kernel
from thermocline.kernels.cpu.vectors import get_i64, get_u32, ones, put_i64

from . import fields as M

CHUNK = 8192
GROUP = 64
_GOLDEN, _MIX1, _MIX2 = np.uint64(M.GOLDEN), np.uint64(M.MIX1), np.uint64(M.MIX2)
_27, _30, _31, _32, _LOW = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32), np.uint64(0xFFFFFFFF)


@helper
def mix(z):
    """The finalizer of SplitMix64."""
    z = (z ^ (z >> _30)) * _MIX1
    z = (z ^ (z >> _27)) * _MIX2
    return z ^ (z >> _31)


@helper
def hash_id(id, key):
    """64 bits (unsigned) of an id."""
    return mix((np.uint64(id) ^ np.uint64(key)) * _GOLDEN)


@helper
def reduce_to(z, rows):
    """The number below `rows` of a hash: the high word of their product."""
    n = np.uint64(rows)
    a, b, c, d = z >> _32, z & _LOW, n >> _32, n & _LOW
    middle = a * d + ((b * d) >> _32)
    return np.int64(a * c + (middle >> _32) + ((b * c + (middle & _LOW)) >> _32))


@helper
def hashed(id, key, rows):
    """Row of a hashed id."""
    return reduce_to(hash_id(id, key), rows)


@helper
def rank_in_bitmap(words, counts, low, high, id):
    """Rank of an id, or -1."""
    if id < low or id > high:
        return np.int64(-1)
    at = id - low
    word = at >> 6
    mine = get_i64(words, word)
    if (mine >> (at & 63)) & 1 == 0:
        return np.int64(-1)
    block = word // M.BLOCK_WORDS
    rank = get_u32(counts, block) + ones(mine & ((np.int64(1) << (at & 63)) - 1))
    for before in range(block * M.BLOCK_WORDS, word):
        rank += ones(get_i64(words, before))
    return rank


@helper
def _start(field, ids, rows, first, last):
    """First step for ids of a feature; returns -1 or the position of an id out of range."""
    start, limit, key = get_i64(field, M.START), get_i64(field, M.START_ROWS), get_i64(field, M.START_KEY)
    if start == M.HASHED:
        for i in range(first, last):
            put_i64(rows, i, hashed(get_i64(ids, i), key, limit))
        return np.int64(-1)
    for i in range(first, last):
        id = get_i64(ids, i)
        if start == M.WITHIN and (id < 0 or id >= limit):
            return i
        put_i64(rows, i, id)
    return np.int64(-1)


@helper
def rank_in_sorted(words, count, rows, places, first, last):
    """Index in `words` of each number, if present."""
    for i in range(first, last):
        put_i64(places, i - first, 0)
    left = count
    while left > 1:
        half = left >> 1
        for i in range(first, last):
            place = get_i64(places, i - first)
            if get_i64(words, place + half) <= get_i64(rows, i):
                place += half
            put_i64(places, i - first, place)
        left -= half


@helper
def _keep(field, words, counts, rows, places, first, last):
    """Second step for at most GROUP numbers of a feature, in place."""
    kept, count = get_i64(field, M.KEPT), get_i64(field, M.KEPT_COUNT)
    others, key = get_i64(field, M.OTHERS), get_i64(field, M.OTHERS_KEY)
    low, high = get_i64(field, M.LOW), get_i64(field, M.HIGH)
    words += 8 * get_i64(field, M.PLACE)
    counts += 4 * get_i64(field, M.BLOCK)
    if kept == M.SORTED:
        rank_in_sorted(words, count, rows, places, first, last)
    for i in range(first, last):
        id = get_i64(rows, i)
        if kept == M.BITMAP:
            rank = rank_in_bitmap(words, counts, low, high, id)
        else:
            rank = get_i64(places, i - first)
            if count == 0 or get_i64(words, rank) != id:
                rank = np.int64(-1)
        if rank < 0:
            rank = count + hashed(id, key, others)
        put_i64(rows, i, rank)


@helper
def map_rows(fields, words, counts, ids, offsets, batch, rows, places, first, last):
    """Rows of the ids at positions first to last - 1; returns -1 or the position of an id out of range."""
    feature = 0
    while first < last:
        while get_i64(offsets, (feature + 1) * batch) <= first:
            feature += 1
        field = fields + 8 * M.FIELDS * feature
        until = min(first + GROUP, last, get_i64(offsets, (feature + 1) * batch))
        bad = _start(field, ids, rows, first, until)
        if bad >= 0:
            return bad
        if get_i64(field, M.KEPT) != M.ALL:
            _keep(field, words, counts, rows, places, first, until)
        begin = get_i64(field, M.FIRST)
        for i in range(first, until):
            put_i64(rows, i, get_i64(rows, i) + begin)
        first = until
    return np.int64(-1)


_map = kernel("int64(" + ", ".join(["int64"] * 10) + ")")(map_rows.py_func)


def map_ids(fields_FM: Tensor, words: Tensor, counts: Tensor, ids_N: Tensor, offsets: Tensor) -> Tensor:
    """Rows (int64) of the ids of all features; an id without a row raises."""
    ids_N, offsets, features, count = ids_N.long().contiguous(), offsets.long().contiguous(), len(fields_FM), ids_N.numel()
    batch = (offsets.numel() - 1) // features
    ends_F = offsets[::batch] if batch else offsets
    if int(ends_F[0]) != 0 or int(ends_F[-1]) != count or bool((ends_F.diff() < 0).any()):
        raise_bad_offsets(offsets, count)
    rows_N = torch.empty_like(ids_N)
    fields, *parts = addresses("qqiqq", fields_FM, words, counts, ids_N, offsets)
    parts += (batch, *addresses("q", rows_N))
    bad: list[int] = []

    def task(first: int, last: int) -> None:
        places = np.empty(GROUP, dtype=np.int64)
        position = _map(fields, *parts, *addresses("q", places), first, last)
        if position >= 0:
            bad.append(position)

    threads.run_chunks(task, count, CHUNK)
    if bad:
        position = min(bad)
        feature = int(torch.searchsorted(ends_F[1:].contiguous(), position, right=True))
        rows, first = int(fields_FM[feature, M.START_ROWS]), int(ends_F[feature])
        raise IdOutOfRange(feature, position, int(ids_N[position]), rows, first=first)
    return rows_N
