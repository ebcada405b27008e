"""Sort the lookups of a batch by row on a GPU; sorts of recurring sizes are replayed as CUDA graphs."""

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

from .bags import bag_bounds, check_feature_offsets, locate_bags
from .errors import error_buffer
from .graphs import recorded
from .launch import INTERPRETED, Array, ScratchArray, ceil_div, launch, power_of_two, scratch

_FIELDS, _ROW, _ROWS = tl.constexpr(F.LAYOUT_FIELDS), tl.constexpr(F.ROW), tl.constexpr(F.ROWS)
_COLUMN, _MEAN, _MAX = (tl.constexpr(k) for k in (F.COLUMN, F.MEAN, F.MAX))
_STEP, _BETA1, _BETA2 = (tl.constexpr(k) for k in (F.STEP, F.BETA1, F.BETA2))
_POWER1, _POWER2 = (tl.constexpr(k) for k in (F.BETA1_POWER, F.BETA2_POWER))


class SortedLookups(NamedTuple):
    """The lookups of a batch, sorted by row. `places`, `factors` and `in_bag` are indexed by lookup, not by sorted place."""

    keys: Array  # arena rows, ascending; bad ids sort to the end
    order: Array  # the lookup of each sorted place; empty if every row occurs once
    places: Array  # first gradient element of the lookup's bag; empty if unpooled
    sorted_places: Array  # the same in sorted order, written by `sum_gradients`
    factors: Array  # factor of the gradient; empty without one
    in_bag: Array  # index of the lookup in its bag, for max pooling; else empty
    winners: Tensor
    align: int  # divides every place

    @property
    def flags(self) -> tuple[bool, bool, bool, int]:
        """UNPOOLED, FACTORS, IN_BAG and ALIGN of the kernels that sum gradients."""
        return self.places.numel() == 0, self.factors.numel() > 0, self.in_bag.numel() > 0, self.align


@triton.jit
def advance(clock, hyper):
    """Advance the clock and the powers of Adam's betas."""
    tl.store(clock + _STEP, tl.load(clock + _STEP) + 1)
    tl.store(hyper + _POWER1, tl.load(hyper + _POWER1) * tl.load(hyper + _BETA1))
    tl.store(hyper + _POWER2, tl.load(hyper + _POWER2) * tl.load(hyper + _BETA2))


@triton.jit
def outside(keys, begin, count, low, high, LENGTH: tl.constexpr):
    """Whether no key of a stretch of ascending keys is in [low, high)."""
    last = tl.load(keys + tl.minimum(begin + LENGTH, count) - 1)
    return (last < low) | (tl.load(keys + begin) >= high)


@triton.jit
def _make_keys(
    fields, ids, offsets, weights, keys, places, factors, in_bag, flag, record, clock, hyper,
    ids_count, batch, width, rows_total,
    MODE: tl.constexpr, WEIGHTED: tl.constexpr, UNPOOLED: tl.constexpr, ADVANCE: tl.constexpr,
    FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, BAGS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    if ADVANCE and tl.program_id(0) == 0:
        advance(clock, hyper)
    if UNPOOLED and tl.program_id(0) == 0:
        check_feature_offsets(offsets, ids_count, flag, record, FEATURES, BLOCK_F)
    feature, first = locate_bags(offsets, tl.program_id(0), ids_count, batch, FEATURES, BLOCK_F, UNPOOLED, BAGS)
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
            tl.store(in_bag + lookup, k[None, :] + 0 * first_B[:, None].to(tl.int32), mask=mask)


class _SortGraph:
    """A recorded sort of up to `room` keys. Unused entries of `keys` hold the largest key."""

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

    def buffer(self) -> Tensor:
        """Buffer for the keys of the next sort."""
        if not self._clean:  # an error interrupted the last sort
            self.keys.fill_(torch.iinfo(self.keys.dtype).max)
        self._clean = False
        return self.keys

    def sort(self, count: int) -> tuple[ScratchArray, ScratchArray]:
        """(keys, order) of the first `count`."""
        self._replay()
        self._clean = True
        return tuple(ScratchArray(t, t.data_ptr(), count, t.dtype) for t in (self._sorted, self._order))  # type: ignore[return-value]


_MAX_KEYS = 1 << 22  # above, the GPU takes longer than the host
_RECORD_AFTER, _MAX_GRAPHS = 8, 16  # uses of a size before it is recorded, and most recorded sizes


class SortGraphs:
    """Recorded sorts. The result of a sort is overwritten by the next sort of the same size with the same `SortGraphs`."""

    def __init__(self) -> None:
        self.kept: dict[tuple[object, ...], _SortGraph] = {}
        self.seen: dict[tuple[object, ...], int] = {}


_shared_graphs = SortGraphs()


class _ThreadState(threading.local):
    plain = False


_thread = _ThreadState()


@contextmanager
def without_sort_graphs() -> Iterator[None]:
    """Use `torch.sort` in this thread, as inside a larger recording."""
    _thread.plain = True
    try:
        yield
    finally:
        _thread.plain = False


def _sort_graph(count: int, kind: torch.dtype, device: torch.device, graphs: SortGraphs = _shared_graphs) -> _SortGraph | None:
    """The recorded sort of `count` keys on the current stream, if the size recurred often enough."""
    if INTERPRETED or _thread.plain or count > _MAX_KEYS or torch.cuda.is_current_stream_capturing():
        return None
    grain = power_of_two(count) // 16 or 1
    room = ceil_div(count, grain) * grain
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    key = (room, kind, device.index, stream, threading.get_ident())
    graph = graphs.kept.get(key)
    if graph is None:
        seen = graphs.seen[key] = graphs.seen.get(key, 0) + 1
        if seen < _RECORD_AFTER or len(graphs.kept) >= _MAX_GRAPHS:
            return None
        graph = graphs.kept[key] = _SortGraph(room, kind, device)
    return graph


class KeySort:
    """A stable sort of `count` keys, which the caller writes into `keys`. Unwritten keys sort to the end."""

    def __init__(self, count: int, kind: torch.dtype, device: torch.device, graphs: SortGraphs = _shared_graphs) -> None:
        self._count, self._graph = count, _sort_graph(count, kind, device, graphs)
        if self._graph is None:
            self.keys = torch.full((count,), torch.iinfo(kind).max, dtype=kind, device=device)
        else:
            self.keys = self._graph.buffer()

    def sort(self) -> tuple[Array, Array]:
        """(keys, order); the next sort with the same graphs in this thread and stream may overwrite both."""
        return torch.sort(self.keys, stable=True) if self._graph is None else self._graph.sort(self._count)


def key_type(rows: int) -> torch.dtype:
    """Integer type of keys 0 to `rows`."""
    return torch.int32 if rows < 2**31 - 1 else torch.int64


def sort_lookups(
    layout: Layout, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None, mode: int, winners: Tensor,
    clock: Tensor | None = None, hyper: Tensor | None = None, graphs: SortGraphs = _shared_graphs,
) -> SortedLookups:  # fmt: skip
    """Sort lookups by row. With a clock, advances it in the same launch."""
    tables, count, batch = layout.tables, ids_N.numel(), per_feature(layout, offsets)
    sorting = KeySort(count, key_type(tables.rows), ids_N.device, graphs)
    place = (0 if mode == F.NONE else count, torch.int32 if batch * tables.width < 2**31 else torch.int64)
    scaled = mode == F.MEAN or weights_N is not None
    places, sorted_places, factors, in_bag = scratch(
        ids_N.device, place, place, (count if scaled else 0, torch.float32), (count if mode == F.MAX else 0, torch.int32)
    )
    _launch_make_keys(layout, ids_N, offsets, weights_N, mode, (sorting.keys, places, factors, in_bag), clock, hyper)
    return SortedLookups(*sorting.sort(), places, sorted_places, factors, in_bag, winners, out_align(tables))


def sort_rows(layout: Layout, batches: Sequence[tuple[Tensor, Tensor]], graphs: SortGraphs) -> Array:
    """Arena rows of all lookups of non-empty batches (ids, offsets), ascending, as `keys` of `sort_lookups`."""
    count = sum(ids_N.numel() for ids_N, _ in batches)
    sorting, begin = KeySort(count, key_type(layout.tables.rows), batches[0][0].device, graphs), 0
    for ids_N, offsets in batches:
        keys_N = sorting.keys[begin : begin + ids_N.numel()]
        ends = offsets[:: per_feature(layout, offsets)]  # of features: bags do not matter here
        _launch_make_keys(layout, ids_N, ends, None, F.NONE, (keys_N, keys_N, keys_N, keys_N))
        begin += ids_N.numel()
    return sorting.sort()[0]


def _launch_make_keys(
    layout: Layout, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None, mode: int, into: tuple[Array, ...],
    clock: Tensor | None = None, hyper: Tensor | None = None,
) -> None:  # fmt: skip
    """`into`: keys, places, factors and in_bag."""
    tables, count, batch, keys = layout.tables, ids_N.numel(), per_feature(layout, offsets), into[0]
    unpooled, features, errors = mode == F.NONE, len(tables.features), error_buffer(ids_N)
    ids_N, offsets = ids_N.contiguous(), offsets.contiguous()
    weights = keys if weights_N is None else weights_N.contiguous()
    stride = 1 if unpooled else min(8, power_of_two(max(1, count // max(1, features * batch))))
    bags = max(32, 128 // stride)
    programs = ceil_div(count, bags) + features - 1 if unpooled else features * ceil_div(batch, bags)
    launch(
        _make_keys, programs,
        (layout.fields_F8, ids_N, offsets, weights, *into, errors.flag, errors.record, keys if clock is None else clock,
         keys if hyper is None else hyper),
        (count, batch, tables.width, tables.rows),
        (mode, weights_N is not None, unpooled, clock is not None, features, power_of_two(features), bags, stride),
        exact=True, warps=2,
    )  # fmt: skip
