"""The lookups of a batch sorted by row, on a GPU: what summing, updating and caching begin with.

`describe` writes, for each lookup, its arena row (the key), where the gradient of its bag lies, and what to multiply it with.
The keys are sorted, stably, so equal rows become runs that keep the order of the lookups.

torch's sort is a dozen launches, and the host needs longer to ask for them than the card to sort half a million keys. So
sizes that come again and again are recorded as a CUDA graph, once, and replayed: one launch. A graph sorts buffers of its own,
which have room for a few more lookups, an eighth at most; what is left over is filled with keys that no row has, and
sorts to the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gather.gpu import out_align
from thermocline.kernels.layout import Layout, per_feature

from .bags import bag_bounds, check_features, locate
from .errors import mailbox
from .graphs import recorded
from .launch import INTERPRETED, Array, Piece, ceil_div, launch, power_of_two, scratch

_FIELDS, _ROW, _ROWS = tl.constexpr(F.LAYOUT_FIELDS), tl.constexpr(F.ROW), tl.constexpr(F.ROWS)
_COLUMN, _MEAN, _MAX = (tl.constexpr(k) for k in (F.COLUMN, F.MEAN, F.MAX))
_STEP, _BETA1, _BETA2 = (tl.constexpr(k) for k in (F.STEP, F.BETA1, F.BETA2))
_POWER1, _POWER2 = (tl.constexpr(k) for k in (F.BETA1_POWER, F.BETA2_POWER))


class Lookups(NamedTuple):
    """The lookups of a batch, sorted by row. `places`, `factors` and `marks` are by lookup, not by sorted place."""

    keys: Array  # arena rows, ascending; bad ids are at the end, with keys that no row has
    order: Array  # the lookup of each sorted place
    places: Array  # element of the gradient where the lookup's bag begins; empty where unpooled
    sorted_places: Array  # the same in sorted order, written by `sum_gradients`
    factors: Array  # what the gradient is multiplied with; empty if nothing
    marks: Array  # the lookup's number in its bag, for max pooling; else empty
    winners: Tensor
    align: int  # divides every place


@triton.jit
def advance(clock, hyper):
    """One more step: the clock ticks and the powers of Adam's betas follow it."""
    tl.store(clock + _STEP, tl.load(clock + _STEP) + 1)
    tl.store(hyper + _POWER1, tl.load(hyper + _POWER1) * tl.load(hyper + _BETA1))
    tl.store(hyper + _POWER2, tl.load(hyper + _POWER2) * tl.load(hyper + _BETA2))


@triton.jit
def _describe(
    fields, ids, offsets, weights, keys, places, factors, marks, flag, record, clock, hyper,
    ids_count, batch, width, rows_total,
    MODE: tl.constexpr, WEIGHTED: tl.constexpr, UNPOOLED: tl.constexpr, ADVANCE: tl.constexpr,
    FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, BAGS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    if ADVANCE and tl.program_id(0) == 0:
        advance(clock, hyper)
    if UNPOOLED and tl.program_id(0) == 0:
        check_features(offsets, ids_count, flag, record, FEATURES, BLOCK_F)
    feature, first = locate(offsets, tl.program_id(0), ids_count, batch, FEATURES, BLOCK_F, UNPOOLED, BAGS)
    if feature >= FEATURES:
        return
    field = fields + feature * _FIELDS
    row, rows = tl.load(field + _ROW), tl.load(field + _ROWS)
    bag_B = first + tl.arange(0, BAGS)
    first_B, last_B = bag_bounds(offsets, ids_count, feature, bag_B, batch, flag, record, FEATURES, UNPOOLED)
    longest = 1 if UNPOOLED else tl.max(last_B - first_B, 0).to(tl.int32)
    for k0 in range(0, longest, STRIDE):
        k = k0 + tl.arange(0, STRIDE)
        lookup = first_B[:, None] + k[None, :]
        mask = lookup < last_B[:, None]
        id = tl.load(ids + lookup, mask=mask, other=0).to(tl.int64)
        good = (id >= 0) & (id < rows)
        tl.store(keys + lookup, tl.where(good, row + id, rows_total).to(keys.dtype.element_ty), mask=mask)
        if not UNPOOLED:
            place_B = bag_B * width + tl.load(field + _COLUMN)
            place = place_B[:, None] + k[None, :] * 0
            tl.store(places + lookup, place.to(places.dtype.element_ty), mask=mask)
        if MODE == _MEAN:
            factor_B = tl.div_rn(1.0, tl.maximum(last_B - first_B, 1).to(tl.float32))
            tl.store(factors + lookup, factor_B[:, None] + 0.0 * k[None, :], mask=mask)
        if WEIGHTED:
            tl.store(factors + lookup, tl.load(weights + lookup, mask=mask, other=0.0).to(tl.float32), mask=mask)
        if MODE == _MAX:
            tl.store(marks + lookup, k[None, :] + 0 * first_B[:, None].to(tl.int32), mask=mask)


class _Sorter:
    """A sort of up to `room` keys, recorded. `keys` holds keys that no row has, but for what is to be sorted."""

    def __init__(self, room: int, kind: torch.dtype, device: torch.device) -> None:
        self.keys = torch.full((room,), torch.iinfo(kind).max, dtype=kind, device=device)
        self._sorted, self._order = torch.empty_like(self.keys), torch.empty(room, dtype=torch.int64, device=device)
        self._clean = True
        self._replay = self._record()

    def _record(self) -> Callable[[], None]:
        self._work()
        return recorded(self._work, self.keys.device)

    def _work(self) -> None:
        torch.sort(self.keys, stable=True, out=(self._sorted, self._order))
        self.keys.fill_(torch.iinfo(self.keys.dtype).max)

    def begin(self) -> Tensor:
        """Where to put the keys."""
        if not self._clean:  # the last one was left in the middle, by an error
            self.keys.fill_(torch.iinfo(self.keys.dtype).max)
        self._clean = False
        return self.keys

    def sort(self, count: int) -> tuple[Piece, Piece]:
        """(keys, order) of the first `count`."""
        self._replay()
        self._clean = True
        return tuple(Piece(t, t.data_ptr(), count, t.dtype) for t in (self._sorted, self._order))  # type: ignore[return-value]


_MOST = 1 << 22  # keys; the card needs longer than the host to sort more
_SEEN, _KEPT = 8, 16  # a size is recorded when it comes for the eighth time, and so many sizes at most


class Sorters:
    """Recorded sorts. What one of them left is overwritten by its next sort, and by no sort of other `Sorters`."""

    def __init__(self) -> None:
        self.kept: dict[tuple[object, ...], _Sorter] = {}
        self.seen: dict[tuple[object, ...], int] = {}


_of_all = Sorters()


class _Plain(threading.local):
    on = False


_plain = _Plain()


@contextmanager
def plain_sorts() -> Iterator[None]:
    """Sorts of this thread are torch's own, as they will be inside a larger recording."""
    _plain.on = True
    try:
        yield
    finally:
        _plain.on = False


def _sorter(count: int, kind: torch.dtype, device: torch.device, sorters: Sorters = _of_all) -> _Sorter | None:
    """What sorts so many keys on the current stream, if that was asked for often enough to be recorded."""
    if INTERPRETED or _plain.on or count > _MOST or torch.cuda.is_current_stream_capturing():
        return None
    grain = power_of_two(count) // 16 or 1
    room = ceil_div(count, grain) * grain
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    key = (room, kind, device.index, stream, threading.get_ident())
    found = sorters.kept.get(key)
    if found is None:
        seen = sorters.seen[key] = sorters.seen.get(key, 0) + 1
        if seen < _SEEN or len(sorters.kept) >= _KEPT:
            return None
        found = sorters.kept[key] = _Sorter(room, kind, device)
    return found


class Sorting:
    """A stable sort of `count` keys, which are to be written into `keys`. Keys that nobody writes sort to the end."""

    def __init__(self, count: int, kind: torch.dtype, device: torch.device, sorters: Sorters = _of_all) -> None:
        self._count, self._sorter = count, _sorter(count, kind, device, sorters)
        if self._sorter is None:
            self.keys = torch.full((count,), torch.iinfo(kind).max, dtype=kind, device=device)
        else:
            self.keys = self._sorter.begin()

    def sort(self) -> tuple[Array, Array]:
        """(keys, order), which may be overwritten by the next sort with these sorters in this thread and stream."""
        return torch.sort(self.keys, stable=True) if self._sorter is None else self._sorter.sort(self._count)


def key_type(rows: int) -> torch.dtype:
    """What holds the number of any of so many rows, and one number more."""
    return torch.int32 if rows < 2**31 - 1 else torch.int64


def sort_lookups(
    layout: Layout,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    mode: int,
    winners: Tensor,
    clock: Tensor | None = None,
    hyper: Tensor | None = None,
    sorters: Sorters = _of_all,
) -> Lookups:
    """Describe every lookup and sort by row. With a clock, advances it in the same launch."""
    tables, count, batch = layout.tables, ids_N.numel(), per_feature(layout, offsets)
    sorting = Sorting(count, key_type(tables.rows), ids_N.device, sorters)
    place = (0 if mode == F.NONE else count, torch.int32 if batch * tables.width < 2**31 else torch.int64)
    scaled = mode == F.MEAN or weights_N is not None
    places, sorted_places, factors, marks = scratch(
        ids_N.device, place, place, (count if scaled else 0, torch.float32), (count if mode == F.MAX else 0, torch.int32)
    )
    _launch_describe(layout, ids_N, offsets, weights_N, mode, (sorting.keys, places, factors, marks), clock, hyper)
    return Lookups(*sorting.sort(), places, sorted_places, factors, marks, winners, out_align(tables))


def sort_rows(layout: Layout, batches: Sequence[tuple[Tensor, Tensor]], sorters: Sorters) -> Array:
    """The arena rows of all lookups of batches (ids, offsets) that have some, ascending, as `keys` of `sort_lookups`."""
    count = sum(ids_N.numel() for ids_N, _ in batches)
    sorting, begin = Sorting(count, key_type(layout.tables.rows), batches[0][0].device, sorters), 0
    for ids_N, offsets in batches:
        keys_N = sorting.keys[begin : begin + ids_N.numel()]
        ends = offsets[:: per_feature(layout, offsets)]  # of features: nobody asks which bag a lookup is in
        _launch_describe(layout, ids_N, ends, None, F.NONE, (keys_N, keys_N, keys_N, keys_N))
        begin += ids_N.numel()
    return sorting.sort()[0]


def _launch_describe(
    layout: Layout, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None, mode: int, into: tuple[Array, ...],
    clock: Tensor | None = None, hyper: Tensor | None = None,
) -> None:  # fmt: skip
    """`into`: keys, places, factors and marks."""
    tables, count, batch, keys = layout.tables, ids_N.numel(), per_feature(layout, offsets), into[0]
    unpooled, features, box = mode == F.NONE, len(tables.features), mailbox(ids_N)
    ids_N, offsets = ids_N.contiguous(), offsets.contiguous()
    weights = keys if weights_N is None else weights_N.contiguous()
    bags, stride = (128, 1) if count < 4 * features * batch or unpooled else (32, 8)
    programs = ceil_div(count, bags) + features - 1 if unpooled else features * ceil_div(batch, bags)
    launch(
        _describe, programs,
        (layout.fields_F8, ids_N, offsets, weights, *into, box.flag, box.record, keys if clock is None else clock,
         keys if hyper is None else hyper),
        (count, batch, tables.width, tables.rows),
        (mode, weights_N is not None, unpooled, clock is not None, features, power_of_two(features), bags, stride),
        exact=True, warps=2,
    )  # fmt: skip
