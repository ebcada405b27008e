"""Batches that were sorted when they were prefetched: their update need not sort them again.

Claiming places wants the rows of a batch in order, and so does the update that follows a step later. Beside the copies of a
prefetch the dozen small launches of a sort take three times as long as alone (H200: 250 us instead of 80), so one sort fewer is
worth more than its own time. It is also the one part of a decision that needs nothing of the table: it runs before the copies
of the last batch have come.

Batches that are prefetched together are sorted together, which is one sort for all of them; their updates sort for themselves.

The last two batches of each staging area are kept: the one in flight and the one after it. Sorts of the two take turns with
their buffers. A batch is known again by its tensors: the same memory, kept alive here, and the same version. That is what
autograd, too, goes by to know that a tensor was not changed, and it does not see everything: collectives, `.data`, DLPack and
kernels of others write without raising a version. A buffer that is filled so looks the same with every batch. So the newest
batch is the one that is meant, and is used once; only a change between a prefetch and the update of its batch goes unseen.

All batches of the last two prefetches are known so, sorted alone or together: no row of theirs is leaving (`expected`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gpu.launch import Array
from thermocline.kernels.gpu.sort import SortedLookups, SortGraphs, sort_lookups, sort_rows
from thermocline.kernels.layout import Layout
from thermocline.kernels.tensor_identity import mark_of


class _Batch(NamedTuple):
    memory: tuple[torch.UntypedStorage, ...]  # held, so that no other tensor gets it; a tensor may be given another
    mark: tuple[object, ...]
    lookups: SortedLookups


class _Expected(NamedTuple):
    memory: tuple[torch.UntypedStorage, ...]
    mark: tuple[object, ...]


class _Ahead:
    """What was sorted for one staging area."""

    __slots__ = ("batches", "expected", "sorters", "together", "turn")

    def __init__(self) -> None:
        self.sorters, self.turn, self.together = (SortGraphs(), SortGraphs()), 0, SortGraphs()
        self.expected: deque[list[_Expected]] = deque(maxlen=2)
        self.batches: list[_Batch | None] = [None, None]


_ahead: dict[int, _Ahead] = {}  # by the address of the staging area


def _mark(ids_N: Tensor, offsets: Tensor, mode: int) -> tuple[object, ...]:
    """What a sort depends on, and the stream that it was on."""
    stream = torch._C._cuda_getCurrentRawStream(ids_N.device.index) if ids_N.is_cuda else None
    return mark_of(ids_N), mark_of(offsets), mode, stream


def _captured(tensor: Tensor) -> bool:
    """Whether a user captures a graph, which will run again with other ids in the same memory."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def rows_ahead(area: Tensor, layout: Layout, batches: Sequence[tuple[Tensor, Tensor]]) -> Array | None:
    """The rows of batches (ids, offsets) that are prefetched together, in order; None where they have none."""
    batches = [batch for batch in batches if batch[0].numel()]
    ahead = _ahead.setdefault(area.data_ptr(), _Ahead())
    if len(batches) == 1:
        keys: Array | None = sort_ahead(area, layout, *batches[0]).keys
    else:
        turn = ahead.turn = 1 - ahead.turn
        ahead.batches[turn] = None  # from two prefetches ago: its tensors may be filled with other ids by now
        keys = sort_rows(layout, batches, ahead.together) if batches else None
    plain = [(ids_N, offsets) for ids_N, offsets in batches if not (ids_N.is_inference() or offsets.is_inference())]
    made = [_Expected(_memory(*batch), (mark_of(batch[0]), mark_of(batch[1]))) for batch in plain]
    if len(batches) > 1:
        marks = [one.mark for one in made]  # of what is newer than a sort of the same tensors
        ahead.batches = [None if sort is not None and sort.mark[:2] in marks else sort for sort in ahead.batches]
    ahead.expected.append(made)  # and not before: where a sort failed, rows stay as they were
    return keys


def expected(area: Tensor, ids_N: Tensor, offsets: Tensor) -> bool:
    """Whether this batch, which is about to be updated, was of one of the last two prefetches. Once, as below."""
    ahead = _ahead.get(area.data_ptr())
    if ahead is None or _captured(ids_N):
        return False
    mark, found = (mark_of(ids_N), mark_of(offsets)), False
    for group in ahead.expected:
        left = [one for one in group if one.mark != mark]
        found, group[:] = found or len(left) < len(group), left
    return found


def _memory(ids_N: Tensor, offsets: Tensor) -> tuple[torch.UntypedStorage, ...]:
    return ids_N.untyped_storage(), offsets.untyped_storage()


def sort_ahead(area: Tensor, layout: Layout, ids_N: Tensor, offsets: Tensor) -> SortedLookups:
    """The lookups of a batch that is being prefetched; offsets may be those of all bags or of features only."""
    mode = F.NONE if offsets.numel() - 1 == len(layout.tables.features) else F.SUM
    ahead = _ahead.setdefault(area.data_ptr(), _Ahead())
    turn = ahead.turn = 1 - ahead.turn
    ahead.batches[turn] = None  # its buffers are about to be overwritten
    lookups = sort_lookups(layout, ids_N, offsets, None, mode, ids_N, graphs=ahead.sorters[turn])
    if not (ids_N.is_inference() or offsets.is_inference()):  # which have no version
        ahead.batches[turn] = _Batch(_memory(ids_N, offsets), _mark(ids_N, offsets, mode), lookups)
    return lookups


def sorted_ahead(area: Tensor, ids_N: Tensor, offsets: Tensor, mode: int, winners: Tensor) -> SortedLookups | None:
    """The lookups of a batch, summed or one by one and without weights, if they were sorted ahead and are the same still.

    Once: the next time they are sorted anew.
    """
    ahead = _ahead.get(area.data_ptr())
    if ahead is None or mode not in (F.SUM, F.NONE) or _captured(ids_N):
        return None
    mark, lookups = _mark(ids_N, offsets, mode), None
    for turn in (ahead.turn, 1 - ahead.turn):  # the newest first
        batch = ahead.batches[turn]
        if batch is not None and batch.mark == mark:
            ahead.batches[turn] = None
            lookups = batch.lookups._replace(winners=winners) if lookups is None else lookups
    return lookups


def forget(area: Tensor) -> None:
    """Nothing was sorted for this area: it is new, or given up."""
    _ahead.pop(area.data_ptr(), None)
