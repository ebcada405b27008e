"""Memory that a save in the background may take, in all: a second copy of the tables never fits.

256 MiB, or a tenth of the bytes of the rows, whichever is more. Out of it come, first, copies of what changes in places that
nobody is told of: the cache, clocks, the dense part and its optimizers, which are copied at the call. They may take half; what
is larger than that is copied into a file without a name beside the save, so that the call waits for the disk and memory stays
free. The section that is being written has its room set aside, and every row has a mark. The rest is for rows that change
before they are written; where it is full, a step waits.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..rows.memory import size_of
from .tensors import bytes_of, writing

ROOM, SHARE = 1 << 28, 0.1
_PIECE = 1 << 22  # bytes that go to a file at a time
_BRIEF = 1e-4  # seconds


# Memory of the copies of the last save, at most half of its room. New memory takes ten times as long as the copying: the system
# finds and clears page after page while training stands still.
_SPARE: list[NDArray[np.uint8]] = []


def _spare(size: int) -> NDArray[np.uint8]:
    for at, each in enumerate(_SPARE):
        if each.nbytes == size:
            return _SPARE.pop(at)
    return np.empty(size, np.uint8)


class Room:
    """The memory of one save; `turn` is held by whoever looks at it or changes it."""

    def __init__(self, rows_bytes: int, folder: Path, section: int) -> None:
        self.bytes, self._folder = max(ROOM, int(SHARE * rows_bytes)), folder
        self.used = self.most = self._set_aside = section
        self.turn = threading.Condition()
        self._copied: list[NDArray[np.uint8]] = []
        self._asking: list[None] = []  # one for each step that wants its turn; lists grow and shrink in one piece

    @contextlib.contextmanager
    def turn_of_step(self) -> Iterator[None]:
        """A lock goes to whoever comes first, and the thread that writes comes at once again: it looks here before it does."""
        self._asking.append(None)
        try:
            self.turn.acquire()
        finally:  # also where the user interrupts it: the thread that writes would wait for ever
            self._asking.pop()
        try:
            yield
        finally:
            self.turn.release()

    @contextlib.contextmanager
    def turn_of_writer(self) -> Iterator[None]:
        while self._asking:
            time.sleep(_BRIEF)
        with self.turn:
            yield
            self.turn.notify_all()

    def fits(self, size: int) -> bool:
        return self.used + size <= self.bytes

    def take(self, size: int) -> None:
        """Also more than there is, where it cannot be helped."""
        self.used += size
        self.most = max(self.most, self.used)

    def give_back(self, size: int) -> None:
        self.used -= size

    def swap(self, before: int, section: int) -> None:
        """A section of so many bytes takes the place of one that has been written."""
        over = max(0, section - self._set_aside) - max(0, before - self._set_aside)
        self.take(over)

    def copy(self, tensor: Tensor) -> Tensor:
        """A tensor as it is now, on the CPU: in memory as long as there is half of it left, else in a file."""
        size = size_of(tensor)
        if not size:
            return tensor.detach().cpu().clone()
        if self.used - self._set_aside + size > self.bytes // 2:
            return self._copy_to_file(tensor)
        self.take(size)
        if tensor.device.type != "cpu":
            return tensor.detach().cpu()
        copied = _spare(size)
        self._copied.append(copied)
        return torch.from_numpy(copied).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())  # by all threads

    def close(self) -> None:
        """Nobody reads the copies any more: the next save may have their memory."""
        _SPARE[:] = [each for each in self._copied if each.nbytes >= _PIECE]
        self._copied = []

    def _copy_to_file(self, tensor: Tensor) -> Tensor:
        """The file goes with the last tensor that looks at it."""
        flat, each = tensor.detach().reshape(-1), max(1, _PIECE // tensor.element_size())
        with writing(self._folder), tempfile.TemporaryFile(dir=self._folder) as file:
            for first in range(0, flat.numel(), each):
                file.write(memoryview(bytes_of(flat[first : first + each].cpu())))  # type: ignore[arg-type]
            file.flush()
            seen = np.memmap(file, np.uint8, "c", shape=(size_of(tensor),))  # read alone; torch asks for memory it may write
        return torch.from_numpy(seen).view(tensor.dtype).view(tensor.shape)
