"""Prefetching rows of an arena in host memory: when rows are staged, on which stream codes travel, and how much room they get.

What staging is, and why it may overlap with anything, is said in `kernels/stage/reference.py`. Decisions run on the stream of
the caller, in order with lookups and updates; codes travel on a stream of their own. Nothing here waits for the card, but for
the first prefetch and for one of a much larger batch: they count the uncached rows of their batch, to make room for three times
as many, and for some of every kind of table, or for the share of all rows that was asked for. Such a call only makes the room;
the next one brings rows.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from .. import formats as F
from ..kernels.gpu_launch import Array, Piece, current_stream
from ..kernels.layout import Layout, Pool
from ..kernels.stage.reference import arena_rows, make_staging
from .memory import size_of

BATCHES = 3.0  # that find room: the one in flight, the one after it, and the one before it, which is on its way out
LARGER = 1.25  # a batch with so many times the lookups that room was made for gets room of its own


def _room(layout: Layout, pool: Pool, meta: Tensor, rows_U: Tensor, share: float | None) -> tuple[int, int]:
    """(places, rows that move at a time) for batches like one with these rows.

    Places at least for all of its rows, for the cache may lose those it has. A pool that has few or none of them may have more
    in other batches: it gets room for as many as its features would have if all features had the same.
    """
    at_K = rows_U[(rows_U >= pool.row) & (rows_U < pool.row + pool.rows)] - pool.row
    uncached = int((meta[pool.meta + F.META_WORDS[pool.format] * at_K] >= 0).sum())
    features = layout.tables.features
    mine = sum(pool.row <= feature[F.ROW] < pool.row + pool.rows for feature in features)
    once = max(at_K.numel(), -(-rows_U.numel() * mine // len(features)))
    places = max(BATCHES * uncached, BATCHES / 3 * once) if share is None else math.ceil(share * pool.rows)
    places = min(int(places), pool.rows, F.PLACE_BITS)
    return places, min(places, max(1, once))  # a batch without ids is no measure of those to come


def place_bytes(format: int, dim: int) -> int:
    """Bytes that a place takes on the card: its row as stored, which row it is, and when it was asked for."""
    return F.row_bytes(format, dim) + 4 * F.META_WORDS[format] + 13


class _Side:
    """The stream that codes travel on, and the two events that tie it to the stream of training."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.decided, self.copied = torch.cuda.Event(), torch.cuda.Event()


class Stage:
    """The staged rows of one arena."""

    def __init__(
        self, codes: Tensor, meta: Tensor, layout: Layout, ids_N: Tensor, offsets: Tensor, share: float | None = None
    ) -> None:
        from ..kernels.stage import gpu

        self._side = _Side(meta.device) if meta.is_cuda else None
        self._gpu, self.layout, self.lookups = gpu, layout, ids_N.numel()
        rows_U = torch.unique(arena_rows(layout, ids_N, offsets))
        rooms = [_room(layout, pool, meta, rows_U, share) for pool in layout.tables.pools]
        places, most = tuple(room[0] for room in rooms), tuple(room[1] for room in rooms)
        self.staging = make_staging(codes, meta, layout.tables.pools, places, most)
        self._table, self._recorder = (meta, self.staging, layout, codes), gpu.recorder()
        self._gpu.forget(self.area)  # of an earlier area at the same address
        self._gpu.leave(*self._table)  # opens places; and kernels are compiled before a row is on its way
        self._gpu.copy(*self._table)
        self._under_way = False  # whether a decision waits for its commit

    @property
    def area(self) -> Tensor:
        """What lookups and updates need to know."""
        return self.staging.area

    @property
    def bytes(self) -> int:
        """Of everything that is kept for staged rows."""
        return size_of(*self.staging.tensors)

    def suffices(self, ids_N: Tensor) -> bool:
        """Whether there is room for batches like this one."""
        return ids_N.numel() <= LARGER * self.lookups

    def prefetch(self, ids_N: Tensor, offsets: Tensor) -> None:
        """Let the rows of a batch come while the caller goes on."""
        keys = None
        if ids_N.numel():
            keys = self._gpu.sort_ahead(self.area, self.layout, ids_N, offsets).keys  # while rows may still be on their way
        self._gpu.arrived(self.area)
        # A recorded sort leaves its keys where it left the last ones; others do not come again.
        key = (keys.pointer, keys.length) if isinstance(keys, Piece) else None
        self._recorder.run(partial(self._decide, keys), ids_N.device, key)
        self._copy()

    def _decide(self, keys: Array | None) -> None:
        self._gpu.commit(*self._table, True)
        if keys is not None:
            self._gpu.claim_sorted(*self._table[:3], keys)
        self._gpu.leave(*self._table)

    def arrive(self) -> None:
        """Rows that were prefetched are there for what follows."""
        if self._under_way:
            self._gpu.arrived(self.area)
            self._gpu.commit(*self._table, False)
            self._under_way = False

    def settle(self) -> None:
        """Put every staged row back into its table."""
        self._gpu.arrived(self.area)
        self._gpu.commit(*self._table, False)
        for _ in range(self.staging.rounds):
            self._gpu.leave(*self._table, True)
            self._gpu.copy(*self._table)
            self._gpu.commit(*self._table, False)
        self._gpu.leave(*self._table)  # opens places
        self._under_way = False

    def _copy(self) -> None:
        self._under_way = True
        if self._side is None:
            self._gpu.copy(*self._table)
            return
        side = self._side
        side.decided.record(current_stream(self.area.device.index))
        side.stream.wait_event(side.decided)
        self._gpu.copy(*self._table, side.stream)
        side.copied.record(side.stream)
        self._gpu.set_out(self.area, side.copied)

    def statistics(self) -> dict[str, int]:
        """Rows and bytes that prefetching moved. Waits for the GPU."""
        totals = {"rows_in": 0, "rows_out": 0, "rows_there": 0, "no_room": 0, "bytes_in": 0, "bytes_out": 0}
        for pool, line in zip(self.layout.tables.pools, self.staging.counts.tolist(), strict=True):
            taken = min(line[F.TAKEN], line[F.FREE])  # the last journey is not in the sums yet
            moved = {"in": line[F.ROWS_IN] + taken, "out": line[F.ROWS_OUT] + line[F.LEFT]}
            for way, rows in moved.items():
                totals[f"rows_{way}"] += rows
                totals[f"bytes_{way}"] += rows * F.row_bytes(pool.format, pool.dim)
            totals["rows_there"] += line[F.ROWS_THERE]
            totals["no_room"] += line[F.NO_ROOM] + line[F.TAKEN] - taken
        return {f"prefetch_{name}": count for name, count in totals.items()}

    def __del__(self) -> None:
        if not hasattr(self, "staging"):  # there was no memory for it
            return
        if self._side is not None:
            self._side.stream.synchronize()  # codes under way keep their memory until they have come
        self._gpu.forget(self.area)
