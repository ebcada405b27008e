"""Bad input found inside a GPU kernel, told to the host without a stall.

Each GPU has a mailbox: a flag in its memory and a record in pinned host memory. The first program that meets bad input takes
the flag and writes the record; nothing waits. The host looks into the record, a read of its own memory, whenever it is
about to use the GPU again and when the user asks (`raise_pending`), and raises there. By then another arena may be at work:
the record has the address of a tensor that only the arena at fault has, and the box knows whose it is. Bad lookups contribute
nothing and update nothing.

A thread that works beside others (exchanges behind the caller, a model that is served) takes a box of its own, or it would
raise their errors, and they its (`own_mailbox`). Not every thread does, as autograd runs backward on threads of its own; and a
box a stream would not do, as what is recorded on one stream, and keeps the box it began with, is replayed on another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline.errors import BadGradient, BadInput, IdOutOfRange
from thermocline.kernels.layout import TableLayout

BAD_ID, BAD_OFFSETS, BAD_GRADIENT = 1, 2, 3
ID, OFFSETS, GRADIENT = (tl.constexpr(k) for k in (BAD_ID, BAD_OFFSETS, BAD_GRADIENT))


class Mailbox:
    """Where kernels on one device leave word of bad input; of all threads, or of one."""

    def __init__(self, device: torch.device) -> None:
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.record = torch.zeros(6, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._view: np.ndarray = self.record.numpy()
        self._tables: dict[int, TableLayout] = {}  # by the address that kernels report

    def open(self, mark: Tensor, tables: TableLayout) -> None:
        """Raise what is pending. What kernels report with the address of `mark` from now on is of these tables."""
        self.raise_pending()
        self._tables[mark.data_ptr()] = tables

    def forget(self, mark: Tensor) -> None:
        """What kernels report with this address is of no tables; an arena that had it is gone, and its memory used again."""
        self._tables.pop(mark.data_ptr(), None)

    def raise_pending(self) -> None:
        """Raise what a kernel reported, if any, and empty the box."""
        if self._view[0] == 0:
            return
        if self.flag.is_cuda:
            torch.cuda.synchronize(self.flag.device)
        kind, feature, position, id, rows, mark = self._view.tolist()
        tables = self._tables.get(mark)
        self._view[:] = 0
        self.flag.zero_()
        if kind == BAD_ID:
            raise IdOutOfRange(feature, position, id, rows, *(tables.names_of(feature) if tables else ()))
        if kind == BAD_OFFSETS:
            raise BadInput(
                f"offsets of bag {position} run from {id} to {rows}; they must begin at 0, rise, and end at the number of ids"
            )
        raise BadGradient(position, id, *(tables.table_of(position) if tables else ()))


@cache
def _of(device: torch.device) -> Mailbox:
    return Mailbox(device)


class _Here(threading.local):
    """Boxes of one thread: the one it uses now, if it is its own, and all it ever had, which recordings may know."""

    def __init__(self) -> None:
        self.box: Mailbox | None = None
        self.kept: dict[torch.device, Mailbox] = {}


_here = _Here()


@contextmanager
def own_mailbox(device: torch.device) -> Iterator[None]:
    """What this thread launches on a device meanwhile reports to a box that no other thread looks into."""
    if device not in _here.kept:
        _here.kept[device] = Mailbox(device)
    before, _here.box = _here.box, _here.kept[device]
    try:
        yield
    finally:
        _here.box = before


def mailbox(tensor: Tensor) -> Mailbox:
    """The mailbox of this thread, or else of the tensor's device."""
    return _here.box or _of(tensor.device)


@triton.jit
def report(flag, record, mark, kind, feature, position, id, rows):
    """Leave word, unless something is already waiting to be read. `mark`: a pointer that tells whose mistake it is."""
    if tl.atomic_cas(flag, 0, 1) == 0:
        tl.store(record + 1, feature.to(tl.int64))
        tl.store(record + 2, position.to(tl.int64))
        tl.store(record + 3, id.to(tl.int64))
        tl.store(record + 4, rows.to(tl.int64))
        tl.store(record + 5, mark.to(tl.int64))
        tl.store(record, kind + 0 * position.to(tl.int64))
