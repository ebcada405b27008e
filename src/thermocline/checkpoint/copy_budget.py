"""Memory that a background save may take: a second copy of the tables never fits.

The budget is 256 MiB or a tenth of the bytes of the rows, whichever is more. It pays for:
- copies made at the call, at most half of the budget: cache, clocks, dense parameters and optimizers, which change without
  notice. Larger ones are copied to an unnamed file beside the save: the call then waits for the disk.
- the section that is being written, and one flag for each row.
- copies of rows that change before they are written. When the budget is spent, a training step waits.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.rows.memory import size_of

from .format.tensor_files import bytes_of, explain_write_errors

MIN_BYTES, SHARE = 1 << 28, 0.1
_PIECE = 1 << 22  # bytes copied to a file at a time
_POLL_SECONDS = 1e-4

# Memory of the last save's copies, at most half of its budget. Fresh memory takes ten times as long as the copying, because the
# system clears page after page while training waits.
_SPARE: list[NDArray[np.uint8]] = []


class SectionBuffers:
    """Buffers of the section that is being read, reused for the next one: allocating takes longer than reading rows."""

    def __init__(self) -> None:
        self._free: list[NDArray[Any]] = []
        self._used: list[NDArray[Any]] = []

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        size = int(np.prod(shape)) * dtype.itemsize
        at = next((at for at, each in enumerate(self._free) if each.size >= size), None)
        if at is None:
            self._used.append(np.empty(size, np.uint8))
            self._used[-1].fill(0)  # touches the pages now, and not while a step waits
        else:
            self._used.append(self._free.pop(at))
        return self._used[-1][:size].view(dtype).reshape(shape)

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in self._free + self._used)

    def release(self) -> None:
        """Make all buffers free."""
        self._free, self._used = self._used, []


class CopyBudget:
    """Memory of one background save. Threads hold `lock` to read or change rows, copies and counts.

    One section is written at a time, so all modules share `buffers`.
    """

    def __init__(self, rows_bytes: int, folder: Path, section: int) -> None:
        self.bytes, self._folder = max(MIN_BYTES, int(SHARE * rows_bytes)), folder
        self.used = self.peak = self._reserved = section
        self.lock = threading.Condition()
        self.buffers, self._section_bytes = SectionBuffers(), 0
        self._copied: list[NDArray[np.uint8]] = []
        self._waiting_steps: list[None] = []  # one for each step that wants the lock; list operations are atomic

    @contextlib.contextmanager
    def step_lock(self) -> Iterator[None]:
        """The lock for a training step, ahead of the writer thread."""
        self._waiting_steps.append(None)
        try:
            self.lock.acquire()
        finally:  # also on Ctrl-C: the writer thread would wait for ever
            self._waiting_steps.pop()
        try:
            yield
        finally:
            self.lock.release()

    @contextlib.contextmanager
    def writer_lock(self) -> Iterator[None]:
        """The lock for the writer thread. Locks are not fair, so the writer waits until no step wants it."""
        while self._waiting_steps:
            time.sleep(_POLL_SECONDS)
        with self.lock:
            yield
            self.lock.notify_all()

    def fits(self, size: int) -> bool:
        return self.used + size <= self.bytes

    def take(self, size: int) -> None:
        """Count bytes as used, even beyond the budget; a negative size frees them."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def begin_section(self, extra: int) -> None:
        """Count the buffers of a new section, and `extra` bytes, in place of those of the section before."""
        before, self._section_bytes = self._section_bytes, extra + self.buffers.bytes
        self.take(max(0, self._section_bytes - self._reserved) - max(0, before - self._reserved))

    def copy(self, tensor: Tensor) -> Tensor:
        """A CPU copy of a tensor: in memory up to half of the budget, beyond that in a file."""
        size = size_of(tensor)
        if not size:
            return tensor.detach().cpu().clone()
        if self.used - self._reserved + size > self.bytes // 2:
            return self._copy_to_file(tensor)
        self.take(size)
        if tensor.device.type != "cpu":
            return tensor.detach().cpu()
        spare = next((at for at, each in enumerate(_SPARE) if each.nbytes == size), None)
        copied = np.empty(size, np.uint8) if spare is None else _SPARE.pop(spare)
        self._copied.append(copied)
        return torch.from_numpy(copied).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())  # uses all threads

    def close(self) -> None:
        """Keep the memory of large copies for the next save."""
        _SPARE[:] = [each for each in self._copied if each.nbytes >= _PIECE]
        self._copied, self.buffers = [], SectionBuffers()

    def _copy_to_file(self, tensor: Tensor) -> Tensor:
        """A copy in an unnamed file, which disappears with the last tensor that maps it."""
        flat, each = tensor.detach().reshape(-1), max(1, _PIECE // tensor.element_size())
        with explain_write_errors(self._folder), tempfile.TemporaryFile(dir=self._folder) as file:
            for first in range(0, flat.numel(), each):
                file.write(memoryview(bytes_of(flat[first : first + each].cpu())))  # type: ignore[arg-type]
            file.flush()
            mapped = np.memmap(file, np.uint8, "c", shape=(size_of(tensor),))  # "c": torch requires writable memory
        return torch.from_numpy(mapped).view(tensor.dtype).view(tensor.shape)
