"""Look up rows of tables that are split over cards, on a CPU (see `reference.py` for the definition).

Two passes over the lookups of a batch. The first turns rows into addresses, through the table of base pointers; the second is
the pooling of `cpu_pool`, which takes a row as address = codes + row * width and its metadata as meta + row * words: with
codes 0, a width of 1 and metadata right in front of the codes, a row may lie anywhere. So cards hold *records*, metadata and
codes of a row together, and pooling over several cards is the same code as over one.

Rejected: one pass. The addresses of a task stay in the processor's cache, and rows that are known early can be asked for early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import IdOutOfRange
from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.compile import helper, kernel
from thermocline.kernels.cpu.pool import pool_plain
from thermocline.kernels.cpu.rows import PREFETCH_DISTANCE, fmix32, meta_bytes, prefetch_lines
from thermocline.kernels.cpu.vectors import get_i64, get_u8, put_i64
from thermocline.kernels.ids.cpu import rank_in_bitmap, rank_in_sorted

from . import fields as S
from .fields import FEW, Bags, CardMissing, Placed
from .reference import locate

GROUP = 64
LEAST = 1024  # lookups of a task: waking a thread takes as long as so many
TASKS_PER_THREAD = 4
_NO_CARD = np.int64(-1)
_FIELDS, _CARDS, _TURNS, _WORDS, _COUNTS, _BASES, _OFFSETS = range(7)  # fields of the array that `UnpooledLookup` passes


@helper
def _find_ranks(a_set, words, counts, rows, ranks, first, last):
    """The rank of at most GROUP rows in a set, or -1."""
    kind, count = get_i64(a_set, S.KIND), get_i64(a_set, S.COUNT)
    low, high = get_i64(a_set, S.LOW), get_i64(a_set, S.HIGH)
    words += 8 * get_i64(a_set, S.WORDS)
    counts += 4 * get_i64(a_set, S.BLOCK)
    if kind == S.SORTED:
        rank_in_sorted(words, count, rows, ranks, first, last)
        for i in range(first, last):
            if count == 0 or get_i64(words, get_i64(ranks, i - first)) != get_i64(rows, i):
                put_i64(ranks, i - first, -1)
        return
    for i in range(first, last):
        put_i64(ranks, i - first, rank_in_bitmap(words, counts, low, high, get_i64(rows, i)))


@helper
def _find_owners(field, cards, turns, rows, card_of, place_of, first, last):
    """Card and place of at most GROUP rows; -1, or the position of one that the table does not have."""
    limit, way = get_i64(field, S.ROWS), get_i64(field, S.WAY)
    begin, per = get_i64(field, S.FIRST), get_i64(field, S.PER)
    turns_at, key = get_i64(field, S.TURNS), get_i64(field, S.KEY)
    for i in range(first, last):
        row = get_i64(rows, i)
        if row < 0 or row >= limit:
            return i
        if way == S.RANGES:
            quotient = row // per if per < limit else np.int64(0)
            card, place = begin + quotient, row - quotient * per
        else:
            place = row // cards
            if turns_at == S.HASHED:
                turn = (fmix32((place & 0xFFFFFFFF) ^ key) * cards) >> 32
            else:
                turn = get_u8(turns, turns_at + place)
            card = row - place * cards + turn
            if card >= cards:
                card -= cards
        put_i64(card_of, i - first, card)
        put_i64(place_of, i - first, place)
    return np.int64(-1)


@helper
def _find_addresses(
    fields, cards, turns, words, counts, bases, starts, rows, addresses, tally, scratch, feature, first, last
):  # fmt: skip
    """Addresses of the rows at positions first to last - 1, from `feature` on; -1, or a position with a bad row, or -2 less a
    position whose card is down."""
    card_of, place_of, ranks = scratch, scratch + 8 * GROUP, scratch + 16 * GROUP
    while first < last:
        while get_i64(starts, feature + 1) <= first:
            feature += 1
        field = fields + 8 * S.FIELDS * feature
        until = min(first + GROUP, last, get_i64(starts, feature + 1))
        bad = _find_owners(field, cards, turns, rows, card_of, place_of, first, until)
        if bad >= 0:
            return bad
        if get_i64(field, S.COPIED + S.KIND) != S.NOTHING:
            _find_ranks(field + 8 * S.COPIED, words, counts, rows, ranks, first, until)
            begin = get_i64(field, S.COPY_PLACE)
            for i in range(first, until):
                rank = get_i64(ranks, i - first)
                if rank >= 0:
                    put_i64(card_of, i - first, i % cards)
                    put_i64(place_of, i - first, begin + rank)
        if get_i64(field, S.OVERLAY + S.KIND) != S.NOTHING:
            _find_ranks(field + 8 * S.OVERLAY, words, counts, rows, ranks, first, until)
            for i in range(first, until):
                rank = get_i64(ranks, i - first)
                if rank >= 0:
                    put_i64(card_of, i - first, cards)
                    put_i64(place_of, i - first, rank)
        stride, own = get_i64(field, S.STRIDE), bases + 8 * (cards + 1) * feature
        for i in range(first, until):
            card = get_i64(card_of, i - first)
            base = get_i64(own, card)
            if base == 0:
                return -2 - i
            put_i64(tally, card, get_i64(tally, card) + 1)
            put_i64(addresses, i, base + get_i64(place_of, i - first) * stride)
        first = until
    return _NO_CARD


@kernel("int64(" + ", ".join(["int64"] * 14) + ")")
def _find(
    fields, cards, turns, words, counts, bases, starts, rows, addresses, tally, scratch, feature, first, last
):  # fmt: skip
    return _find_addresses(
        fields, cards, turns, words, counts, bases, starts, rows, addresses, tally, scratch, feature, first, last
    )  # fmt: skip


@helper
def _pool_bags(fields, ends, addresses, offsets, weights, mean, out, targets, feature, first, last):
    """Pool bags first to last - 1, from `feature` on."""
    while first < last:
        while get_i64(ends, feature + 1) <= first:
            feature += 1
        field = fields + 8 * S.FIELDS * feature
        format, dim = get_i64(field, S.FORMAT), get_i64(field, S.DIM)
        until = min(last, get_i64(ends, feature + 1))
        begin, end = get_i64(offsets, first), get_i64(offsets, until)
        for i in range(begin, min(begin + PREFETCH_DISTANCE, end)):
            prefetch_lines(get_i64(addresses, i), get_i64(field, S.STRIDE))
        pitch = 4 * get_i64(targets, 2 * feature + 1)
        place = out + 4 * get_i64(targets, 2 * feature) + (first - get_i64(ends, feature)) * pitch
        pool_plain(
            format, 0, -meta_bytes(format), 0, 1, 1, addresses, offsets, weights, first, until, end, dim, mean, place, pitch
        )  # fmt: skip
        first = until
    return np.int64(0)


@kernel("int64(" + ", ".join(["int64"] * 11) + ")")
def _pool(fields, ends, addresses, offsets, weights, mean, out, targets, feature, first, last):
    return _pool_bags(fields, ends, addresses, offsets, weights, mean, out, targets, feature, first, last)


# The GIL is kept: this is over in microseconds, and whoever gets the GIL meanwhile is another thread to wait for.
@kernel("int64(int64, int64, int64, int64, int64, int64)", nogil=False)
def _look_up_rows(table, rows, count, out, tally, space):
    """Rows of one feature, each for itself, written to `out`. -1, or as `_find` if some cannot be had: then none is counted."""
    fields, cards = get_i64(table, _FIELDS), get_i64(table, _CARDS)
    ends, targets, scratch = space, space + 16, space + 32
    counted = scratch + 8 * 3 * GROUP
    addresses = counted + 8 * (cards + 1)
    put_i64(ends, 0, 0)
    put_i64(ends, 1, count)
    put_i64(targets, 0, 0)
    put_i64(targets, 1, get_i64(fields, S.DIM))
    for card in range(cards + 1):
        put_i64(counted, card, 0)
    found = _find_addresses(
        fields, cards, get_i64(table, _TURNS), get_i64(table, _WORDS), get_i64(table, _COUNTS), get_i64(table, _BASES), ends,
        rows, addresses, counted, scratch, 0, 0, count,
    )  # fmt: skip
    if found != _NO_CARD:
        return found
    _pool_bags(fields, ends, addresses, get_i64(table, _OFFSETS), 0, False, out, targets, 0, 0, count)
    for card in range(cards + 1):
        put_i64(tally, card, get_i64(tally, card) + get_i64(counted, card))
    return found


_EACH_ALONE = torch.arange(FEW + 1)


def _alone(count: int) -> Tensor:
    """Offsets of so many bags of one row."""
    return _EACH_ALONE if count <= FEW else torch.arange(count + 1)


def _tasks(lookups: int) -> int:
    return max(1, min(TASKS_PER_THREAD * threads.thread_count(), lookups // LEAST)) if threads.thread_count() > 1 else 1


def _int64(tensor: Tensor) -> Tensor:
    """As kernels read it; most often as it is."""
    return tensor if tensor.dtype is torch.int64 and tensor.is_contiguous() else tensor.to(torch.int64).contiguous()


def gather_pool(placed: Placed, bags: Bags, out: Tensor, fetch: Callable[[NDArray[np.int64]], object] | None = None) -> Tensor:
    """Look up and pool; writes `out` where `bags` says, and returns how many lookups each card and the overlay answered."""
    rows_N, count, ends_F1 = _int64(bags.rows_N), bags.rows_N.numel(), _int64(bags.ends_F1)
    if bags.offsets_B1 is None:
        offsets, starts_F1 = _alone(count), ends_F1
    else:
        offsets = _int64(bags.offsets_B1)
        starts_F1 = torch.from_numpy(offsets.numpy()[ends_F1.numpy()])
    addresses_N, tasks = np.empty(count, dtype=np.int64), _tasks(count)
    tallies = np.zeros((tasks, placed.cards + 1), dtype=np.int64)
    scratches = np.empty((tasks, 3 * GROUP), dtype=np.int64)
    table = (placed.fields_FN, placed.turns, placed.words, placed.counts, placed.bases_FC, starts_F1, rows_N)
    fields, turns, *rest = [tensor.data_ptr() for tensor in table]
    addresses, tally, scratch = (array.ctypes.data for array in (addresses_N, tallies, scratches))
    found = [-1] * tasks

    def find(n: int) -> None:
        into = (addresses, tally + n * tallies.strides[0], scratch + n * scratches.strides[0])
        found[n] = _find(fields, placed.cards, turns, *rest, *into, 0, count * n // tasks, count * (n + 1) // tasks)

    if tasks == 1:
        found[0] = _find(fields, placed.cards, turns, *rest, addresses, tally, scratch, 0, 0, count)
    else:
        threads.run(find, tasks)
    if min(found) < -1 or max(found) > -1:
        _raise(placed, rows_N, starts_F1, found)
    kept = None if fetch is None else fetch(addresses_N)
    weights = None if bags.weights_N is None else bags.weights_N.float().contiguous()
    targets_F2, total = _int64(bags.target_F2), bags.total
    how = (0 if weights is None else weights.data_ptr(), bags.mode == F.MEAN, out.data_ptr(), targets_F2.data_ptr())
    what = (fields, ends_F1.data_ptr(), addresses, offsets.data_ptr())
    if tasks == 1:
        _pool(*what, *how, 0, 0, total)
    else:
        threads.run(lambda n: _pool(*what, *how, 0, total * n // tasks, total * (n + 1) // tasks), tasks)
    del kept
    return torch.from_numpy(tallies.sum(axis=0) if tasks > 1 else tallies[0])


class UnpooledLookup:
    """Rows of one feature, unpooled, looked up by addresses: the kernel entry of the server's fast path.

    Pointers to the tables are collected once, and each thread keeps its scratch memory. `gather_pool` inspects a dozen tensors
    in every call, which takes three times as long as 64 rows.

    Args:
        placed: tables on a CPU
        feature: number of the feature
        tally_C: lookups of each shard and of the overlay, counted here
    """

    def __init__(self, placed: Placed, feature: int, tally_C: NDArray[np.int64]) -> None:
        self._alive = placed, tally_C  # addresses of both are used
        self._cards, self.dim = placed.cards, int(placed.fields_FN[feature, S.DIM])
        tensors = (placed.turns, placed.words, placed.counts, placed.bases_FC[feature], _EACH_ALONE)
        fields, *others = [tensor.data_ptr() for tensor in (placed.fields_FN[feature], *tensors)]
        self._table = np.array([fields, placed.cards, *others])
        self._at, self._tally = self._table.ctypes.data, tally_C.ctypes.data

    def __call__(self, rows: int, count: int, out: int) -> bool:
        """Write at most `FEW` rows to an address.

        Args:
            rows: address of int64 row numbers
            count: number of rows
            out: address of count * dim fp32 values, which needs no alignment

        Returns:
            False if a row is out of range or its shard is down. No lookup is counted then; `gather_pool` raises the error.
        """
        space = _space.of(count + self._cards)
        return bool(_look_up_rows(self._at, rows, count, out, self._tally, space) == _NO_CARD)


class _Space(threading.local):
    """Memory that a thread works in."""

    def __init__(self) -> None:
        self._memory, self._at = np.zeros(0, np.int64), 0

    def of(self, size: int) -> int:
        """The address of at least so many numbers, beside those that every launch needs."""
        if len(self._memory) < size + 3 * GROUP + 8:
            self._memory = np.zeros(2 * size + 3 * GROUP + 8, np.int64)
            self._at = self._memory.__array_interface__["data"][0]
        return self._at


_space = _Space()


def _raise(placed: Placed, rows_N: Tensor, starts_F1: Tensor, found: list[int]) -> None:
    position = min(-2 - each if each < -1 else each for each in found if each != -1)
    feature = int(torch.searchsorted(starts_F1[1:].contiguous(), position, right=True))
    row, limit = int(rows_N[position]), int(placed.fields_FN[feature, S.ROWS])
    if not 0 <= row < limit:
        raise IdOutOfRange(feature, position, row, limit)
    card_N, _ = locate(placed, feature, rows_N[position : position + 1], torch.tensor([position]))
    raise CardMissing(int(card_N))
