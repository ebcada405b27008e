"""Prefetching of rows in host memory: streams, events and the size of the staging area.

`kernels/stage/reference.py` defines staging. Decisions run on the caller's stream; codes are copied on a second stream, and
places are chosen on a third. The first prefetch, and the first of a much larger batch, wait for the GPU and only make room: for
three times the uncached rows of the batch, or for the requested share of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.layout import Layout, Pool
from thermocline.kernels.stage.reference import arena_rows, make_staging

from .memory import size_of

if TYPE_CHECKING:
    from thermocline.kernels.gpu.launch import Array  # which needs Triton

Batch = tuple[Tensor, Tensor]  # ids and offsets, as `lookup` takes them

BATCHES = 3.0  # batches with room: the one in flight, the next one, and the last one, which is leaving
SLICES = 4  # batches that one choice of places serves at most
_ROOM = 2  # places for each of them, in multiples of the rows that a batch may move
LARGER = 1.25  # a batch with more lookups than this many times those of the first gets a new staging area


def _room(layout: Layout, pool: Pool, meta: Tensor, rows_U: Tensor, share: float | None) -> tuple[int, int]:
    """(places, rows that move at a time) for batches like one with these rows, all of which the cache may evict.

    A pool gets at least the places that it would need if all features had the same number of rows.
    """
    at_K = rows_U[(rows_U >= pool.row) & (rows_U < pool.row + pool.rows)] - pool.row
    uncached = int((meta[pool.meta + F.META_WORDS[pool.format] * at_K] >= 0).sum())
    features = layout.tables.features
    mine = sum(pool.row <= feature[F.ROW] < pool.row + pool.rows for feature in features)
    once = max(at_K.numel(), -(-rows_U.numel() * mine // len(features)))
    places = max(BATCHES * uncached, BATCHES / 3 * once) if share is None else math.ceil(share * pool.rows)
    places = min(int(places), pool.rows, F.PLACE_BITS)
    return places, min(places, max(1, once))  # the first batch may have no ids


def place_bytes(format: int, dim: int) -> int:
    """Bytes of a place on the GPU: the row as stored, its number, and the time of its last use."""
    return F.row_bytes(format, dim) + 4 * F.META_WORDS[format] + 13


def _lookups(batches: Sequence[Batch]) -> int:
    return sum(ids_N.numel() for ids_N, _ in batches)


class _SideStreams:
    """The streams of copies and choices, and the events that order them with the training stream."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.choosing = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
        self.decided, self.copied, self.chosen = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()


class Stage:
    """The staged rows of one arena, and the host's record of them (`area`)."""

    def __init__(
        self, codes: Tensor, meta: Tensor, layout: Layout, batches: Sequence[Batch], share: float | None = None
    ) -> None:
        from thermocline.kernels.gpu.launch import current_stream  # needs Triton
        from thermocline.kernels.stage import gpu
        from thermocline.kernels.stage.gpu_area import StagingArea

        self._device, self._side = meta.device, _SideStreams(meta.device) if meta.is_cuda else None
        self._gpu, self._current_stream, self.layout, self.lookups = gpu, current_stream, layout, _lookups(batches)
        rows_U = torch.unique(torch.cat([arena_rows(layout, *batch) for batch in batches]))
        rooms = [_room(layout, pool, meta, rows_U, share) for pool in layout.tables.pools]
        places, most = tuple(room[0] for room in rooms), tuple(room[1] for room in rooms)
        least = min((room // once for room, once in rooms if room), default=0)
        slices = max(1, min(SLICES, least // _ROOM))
        self.staging = make_staging(codes, meta, layout.tables.pools, places, most, slices)
        self._table, self._recorder = (meta, self.staging, layout, codes), gpu.recorder()
        self.area = StagingArea(self.staging, codes, meta)
        self._open()  # compiles the kernels, too
        self._gpu.copy(*self._table)
        self._under_way = False  # whether a decision waits for its commit
        self._choosing = False  # whether places are being chosen on their stream

    @property
    def bytes(self) -> int:
        """Bytes of the staging area and its lists."""
        return size_of(*self.staging.tensors)

    def suffices(self, batches: Sequence[Batch]) -> bool:
        """Whether the staging area is large enough for these batches."""
        return _lookups(batches) <= LARGER * self.lookups

    def prefetch(self, batches: Sequence[Batch]) -> None:
        """Start copying the rows of batches to the GPU."""
        keys = self.area.sort_rows(self.layout, batches)  # while copies of other batches may still be in flight
        self._wait()
        self._recorder.run(partial(self._decide, keys), self._device, self._gpu.repetition_key(keys))
        self._copy()
        self._slices_left -= 1
        if self._slices_left == 0:
            self._choose()

    def _decide(self, keys: Array | None) -> None:
        self._gpu.commit(*self._table, True)
        if keys is not None:
            self._gpu.claim(*self._table[:3], keys)
        self._gpu.send(*self._table)

    def arrive(self) -> None:
        """Let later work on the current stream use the rows that were prefetched last."""
        if self._under_way:
            self._wait()
            self._gpu.commit(*self._table, False)
            self._under_way = False

    def settle(self) -> None:
        """Write every staged row back to its table."""
        self._wait()
        self._gpu.commit(*self._table, False)
        for _ in range(self.staging.rounds):
            self._gpu.choose(*self._table, True)
            self._gpu.send(*self._table, True)
            self._gpu.copy(*self._table)
            self._gpu.commit(*self._table, False)
        self._open()
        self._under_way = False

    def _open(self) -> None:
        """Open places for the next batch, and choose those for the batches after it."""
        self._gpu.choose(*self._table)
        self._gpu.send(*self._table)
        self._gpu.choose(*self._table)
        self._slices_left = self.staging.slices

    def _wait(self) -> None:
        """Let the current stream wait for copies and choices."""
        self.area.wait_for_copies()
        if self._choosing and self._side is not None:
            self._current_stream(self._device.index).wait_event(self._side.chosen)
            self._choosing = False

    def _choose(self) -> None:
        self._slices_left = self.staging.slices
        if self._side is None:
            self._gpu.choose(*self._table)
            return
        side, device = self._side, self._device
        side.choosing.wait_event(side.decided)
        with torch.cuda.stream(side.choosing):
            self._recorder.run(partial(self._gpu.choose, *self._table), device, "choose")
            side.chosen.record(side.choosing)
        self._choosing = True

    def _copy(self) -> None:
        self._under_way = True
        if self._side is None:
            self._gpu.copy(*self._table)
            return
        side = self._side
        side.decided.record(self._current_stream(self._device.index))
        side.stream.wait_event(side.decided)
        self._gpu.copy(*self._table, side.stream)
        side.copied.record(side.stream)
        self.area.start_copies(side.copied)

    def statistics(self) -> dict[str, int]:
        """Rows and bytes that were prefetched and written back. Waits for the GPU."""
        totals = {"rows_in": 0, "rows_out": 0, "rows_there": 0, "no_room": 0, "bytes_in": 0, "bytes_out": 0}
        for pool, line in zip(self.layout.tables.pools, self.staging.counts.tolist(), strict=True):
            taken = min(line[F.TAKEN], line[F.FREE])  # the last copies are not in the sums yet
            moved = {"in": line[F.ROWS_IN] + taken, "out": line[F.ROWS_OUT] + line[F.LEFT]}
            for way, rows in moved.items():
                totals[f"rows_{way}"] += rows
                totals[f"bytes_{way}"] += rows * F.row_bytes(pool.format, pool.dim)
            totals["rows_there"] += line[F.ROWS_THERE]
            totals["no_room"] += line[F.NO_ROOM] + line[F.TAKEN] - taken
        return {f"prefetch_{name}": count for name, count in totals.items()}

    def __del__(self) -> None:
        if hasattr(self, "staging") and self._side is not None:  # without staging, its allocation failed
            self._side.stream.synchronize()  # copies in flight keep their memory
            self._side.choosing.synchronize()
