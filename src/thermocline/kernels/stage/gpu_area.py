"""The host's record of one staging area: batches sorted ahead, batches prefetched lately, and copies in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gpu.launch import Array, current_stream
from thermocline.kernels.gpu.sort import SortedLookups, SortGraphs, sort_lookups, sort_rows
from thermocline.kernels.layout import Layout, Staging
from thermocline.kernels.tensor_identity import TensorIdentity

from . import register


class _BatchIdentity(NamedTuple):
    ids: TensorIdentity
    offsets: TensorIdentity

    @classmethod
    def of(cls, ids_N: Tensor, offsets: Tensor) -> _BatchIdentity:
        return cls(TensorIdentity.of(ids_N), TensorIdentity.of(offsets))

    def matches(self, ids_N: Tensor, offsets: Tensor) -> bool:
        return self.ids.matches(ids_N) and self.offsets.matches(offsets)


class _SortedBatch(NamedTuple):
    identity: _BatchIdentity
    how: tuple[int, int | None]  # mode, and the stream that the sort ran on
    lookups: SortedLookups


class StagingArea:
    """One staging area. `home` goes into the cache of its tables: kernels find this object by the first number."""

    def __init__(self, staging: Staging, codes: Tensor, meta: Tensor) -> None:
        self.tensor = staging.area
        self.home = register(self), codes.data_ptr(), meta.data_ptr()
        self._graphs, self._turn, self._joint_graphs = (SortGraphs(), SortGraphs()), 0, SortGraphs()
        self._sorted: list[_SortedBatch | None] = [None, None]
        self._recent: deque[list[_BatchIdentity]] = deque(maxlen=2)
        self._copies: torch.cuda.Event | None = None
        self._met_unexpected = False  # whether the cache was refreshed beside the copies by a batch of neither prefetch

    def sort_rows(self, layout: Layout, batches: Sequence[tuple[Tensor, Tensor]]) -> Array | None:
        """The sorted rows of batches (ids, offsets) that are prefetched together; None where they have no ids."""
        batches = [batch for batch in batches if batch[0].numel()]
        if len(batches) == 1:
            keys: Array | None = self.sort_batch(layout, *batches[0]).keys
        else:
            turn = self._turn = 1 - self._turn
            self._sorted[turn] = None  # from two prefetches ago: its tensors may hold other ids by now
            keys = sort_rows(layout, batches, self._joint_graphs) if batches else None
            for number, one in enumerate(self._sorted):  # a joint sort is newer than a sort of one of its batches
                if one is not None and any(one.identity.matches(*batch) for batch in batches):
                    self._sorted[number] = None
        self._recent.append([_BatchIdentity.of(*batch) for batch in batches])  # after the sort, which may fail
        return keys

    def sort_batch(self, layout: Layout, ids_N: Tensor, offsets: Tensor) -> SortedLookups:
        """The sorted lookups of a batch that is being prefetched; offsets may be those of all bags or of features only."""
        mode = F.NONE if offsets.numel() - 1 == len(layout.tables.features) else F.SUM
        turn = self._turn = 1 - self._turn
        self._sorted[turn] = None  # its buffers are about to be overwritten
        lookups = sort_lookups(layout, ids_N, offsets, None, mode, ids_N, graphs=self._graphs[turn])
        self._sorted[turn] = _SortedBatch(_BatchIdentity.of(ids_N, offsets), (mode, _stream_of(ids_N)), lookups)
        return lookups

    def take_sorted(self, ids_N: Tensor, offsets: Tensor, mode: int, winners: Tensor) -> SortedLookups | None:
        """The sorted lookups of a batch without weights, once, if it was sorted ahead for this mode and has not changed."""
        if mode not in (F.SUM, F.NONE) or _is_captured(ids_N):
            return None
        lookups = None
        for turn in (self._turn, 1 - self._turn):  # the newest first
            batch = self._sorted[turn]
            if batch is not None and batch.how == (mode, _stream_of(ids_N)) and batch.identity.matches(ids_N, offsets):
                self._sorted[turn] = None
                lookups = batch.lookups._replace(winners=winners) if lookups is None else lookups
        return lookups

    def was_prefetched(self, ids_N: Tensor, offsets: Tensor) -> bool:
        """Whether this batch, which is about to be updated, was of one of the last two prefetches. True once."""
        if _is_captured(ids_N):
            return False
        found = False
        for group in self._recent:
            left = [one for one in group if not one.matches(ids_N, offsets)]
            found, group[:] = found or len(left) < len(group), left
        return found

    def start_copies(self, end: torch.cuda.Event) -> None:
        """Copies are in flight; `end` is recorded after them."""
        self._copies, self._met_unexpected = end, False

    def wait_for_copies(self) -> None:
        """Let the current stream wait for the copies in flight."""
        if self._copies is not None:
            current_stream(self.tensor.device.index).wait_event(self._copies)
            self._copies = None

    def before_refresh(self, expected: bool) -> None:
        """The cache is about to be refreshed, by a batch that was of the last two prefetches or not."""
        if self._copies is not None:
            if self._met_unexpected:
                self.wait_for_copies()
            self._met_unexpected = self._met_unexpected or not expected


def _stream_of(tensor: Tensor) -> int | None:
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else None


def _is_captured(tensor: Tensor) -> bool:
    """Whether a user captures a graph, which will run again with other ids in the same memory."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
