"""Report bad input from GPU kernels to the host without a synchronization (docs/decisions/gpu_errors.md)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from thermocline.errors import BadGradient, BadOffsets, IdOutOfRange
from thermocline.kernels.layout import TableLayout

BAD_ID, BAD_OFFSETS, BAD_GRADIENT = 1, 2, 3
ID, OFFSETS, GRADIENT = (tl.constexpr(k) for k in (BAD_ID, BAD_OFFSETS, BAD_GRADIENT))


class ErrorBuffer:
    """Flag and record of the kernels of one device, for all threads or for one."""

    def __init__(self, device: torch.device) -> None:
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.record = torch.zeros(6, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._view: np.ndarray = self.record.numpy()
        self._tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of the tensors that kernels report with
        self._opened: tuple[Callable[[], Tensor | None], TableLayout | None] = lambda: None, None  # the last call of `open`

    def open(self, source: Tensor, tables: TableLayout) -> None:
        """Raise a pending error. Errors that kernels report with the address of `source` from now on name these tables."""
        self.raise_pending()
        if self._opened[0]() is not source or self._opened[1] is not tables:  # a new entry takes 1 us
            self._tables[source] = tables
            self._opened = weakref.ref(source), tables

    def raise_pending(self) -> None:
        """Raise the error that a kernel reported, if any, and clear the buffer."""
        if self._view[0] == 0:
            return
        if self.flag.is_cuda:
            torch.cuda.synchronize(self.flag.device)
        kind, feature, position, id, rows, address = self._view.tolist()
        tables = next((known for source, known in self._tables.items() if source.data_ptr() == address), None)
        self._view[:] = 0
        self.flag.zero_()
        if kind == BAD_ID:
            raise IdOutOfRange(feature, position, id, rows, *(tables.names_of(feature) if tables else ()))
        if kind == BAD_OFFSETS:
            raise BadOffsets(
                f"offsets of bag {position} run from {id} to {rows}; they must begin at 0, rise, and end at the number of ids",
                parameter="offsets", position=position, value=(id, rows),
            )  # fmt: skip
        raise BadGradient(position, id, *(tables.table_of(position) if tables else ()))


@cache
def _buffer_of(device: torch.device) -> ErrorBuffer:
    return ErrorBuffer(device)


class _ThreadBuffers(threading.local):
    """Buffers of one thread: the active one, and one for each device, which recorded graphs may refer to."""

    def __init__(self) -> None:
        self.active: ErrorBuffer | None = None
        self.by_device: dict[torch.device, ErrorBuffer] = {}


_thread = _ThreadBuffers()


@contextmanager
def thread_error_buffer(device: torch.device) -> Iterator[None]:
    """Kernels that this thread launches on a device inside the context report to a buffer of this thread."""
    if device not in _thread.by_device:
        _thread.by_device[device] = ErrorBuffer(device)
    with reporting_to(_thread.by_device[device]):
        yield


@contextmanager
def reporting_to(buffer: ErrorBuffer) -> Iterator[None]:
    """Kernels that this thread launches inside the context report to `buffer`."""
    before, _thread.active = _thread.active, buffer
    try:
        yield
    finally:
        _thread.active = before


def error_buffer(tensor: Tensor) -> ErrorBuffer:
    """The active buffer of this thread, or else the buffer of the tensor's device."""
    return _thread.active or _buffer_of(tensor.device)


@triton.jit
def report(flag, record, source, kind, feature, position, id, rows):
    """Write the record unless one is pending. `source`: pointer to a tensor that identifies the arena at fault."""
    if tl.atomic_cas(flag, 0, 1) == 0:
        tl.store(record + 1, feature.to(tl.int64))
        tl.store(record + 2, position.to(tl.int64))
        tl.store(record + 3, id.to(tl.int64))
        tl.store(record + 4, rows.to(tl.int64))
        tl.store(record + 5, source.to(tl.int64))
        tl.store(record, 0 * position.to(tl.int64) + kind)
