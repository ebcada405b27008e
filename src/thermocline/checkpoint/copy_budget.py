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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.rows.memory import size_of

from .format.tensor_files import bytes_of, writing

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


class Memory:
    """What sections are put together in, one after another: new memory takes longer than reading the rows does."""

    def __init__(self) -> None:
        self._free: list[NDArray[Any]] = []
        self._taken: list[NDArray[Any]] = []

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        size = int(np.prod(shape)) * dtype.itemsize
        at = next((at for at, each in enumerate(self._free) if each.size >= size), None)
        if at is None:
            self._taken.append(np.empty(size, np.uint8))
            self._taken[-1].fill(0)  # have the memory now, and not while a step waits
        else:
            self._taken.append(self._free.pop(at))
        return self._taken[-1][:size].view(dtype).reshape(shape)

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in self._free + self._taken)

    def release(self) -> None:
        """Nobody looks at what was taken any more."""
        self._free, self._taken = self._taken, []


class Room:
    """The memory of one save; `turn` is held by whoever looks at it or changes it.

    `memory` is that of sections, of which one is written at a time, whatever the number of modules.
    """

    def __init__(self, rows_bytes: int, folder: Path, section: int) -> None:
        self.bytes, self._folder = max(ROOM, int(SHARE * rows_bytes)), folder
        self.used = self.most = self._set_aside = section
        self.turn = threading.Condition()
        self.memory, self._written = Memory(), 0  # bytes of the section before
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

    def swap(self, beside: int) -> None:
        """A section, of so many bytes beside its memory, takes the place of one that has been written."""
        before, self._written = self._written, beside + self.memory.bytes
        self.take(max(0, self._written - self._set_aside) - max(0, before - self._set_aside))

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
        self._copied, self.memory = [], Memory()

    def _copy_to_file(self, tensor: Tensor) -> Tensor:
        """The file goes with the last tensor that looks at it."""
        flat, each = tensor.detach().reshape(-1), max(1, _PIECE // tensor.element_size())
        with writing(self._folder), tempfile.TemporaryFile(dir=self._folder) as file:
            for first in range(0, flat.numel(), each):
                file.write(memoryview(bytes_of(flat[first : first + each].cpu())))  # type: ignore[arg-type]
            file.flush()
            seen = np.memmap(file, np.uint8, "c", shape=(size_of(tensor),))  # read alone; torch asks for memory it may write
        return torch.from_numpy(seen).view(tensor.dtype).view(tensor.shape)
