"""Tensors of a checkpoint that are not rows, read across a chain of incremental saves.

An incremental save has a tensor whole, in part, or not at all. A flat array of the cache is written in part: it is a matrix of
lines of some width, `<name>@at` holds the numbers of the lines that changed, in rising order, and `<name>@to` their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .tensor_files import TensorFile, TensorInfo, damaged

AT, TO = "@at", "@to"
_ELEMENTS = 1 << 21  # compared at a time


class StateFiles:
    """State tensors of a chain of saves, oldest first; names are unique among the files of a save."""

    def __init__(self, saves: list[list[TensorFile]]) -> None:
        self._first, self._saves = saves[0][0], [{name: file for file in files for name in file.names()} for files in saves]
        for file in (file for files in saves for file in files):
            lines, values = ({name.removesuffix(end) for name in file.names() if name.endswith(end)} for end in (AT, TO))
            if lone := sorted(lines ^ values):  # without its other half, a change would be skipped
                raise damaged(file.path, f"it has {AT!r} or {TO!r} of {lone[0]!r}, and not both")

    def __contains__(self, name: str) -> bool:
        return any(name in each for each in self._saves)

    def _newest(self, name: str) -> tuple[int, TensorFile]:
        """The last save that has a tensor whole, and the file; a file that raises if there is none."""
        found = [(number, files[name]) for number, files in enumerate(self._saves) if name in files]
        return found[-1] if found else (0, self._first)

    def info(self, name: str) -> TensorInfo:
        """Type and shape of a tensor."""
        return self._newest(name)[1].info(name)

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """A tensor after all incremental saves, or indices `first` to `last` (exclusive) of its first dimension."""
        full, file = self._newest(name)
        out = file.read(name, first, last)
        for each in self._saves[full + 1 :]:
            if name + AT in each:
                _apply_patch(each[name + AT], name, out, first)
        return out

    def with_prefix(self, prefix: str) -> dict[str, Tensor]:
        """Tensors of the last save whose names begin with a prefix, by the rest of their names."""
        return {name[len(prefix) :]: file.read(name) for name, file in self._saves[-1].items() if name.startswith(prefix)}

    def merged(self) -> dict[str, TensorInfo]:
        """Tensors of one full save with the same content: dense tensors of the last save, modules and id maps of all saves."""
        *before, last = self._saves
        names = [*last, *(name for each in before for name in each if name.startswith(("module/", "ids/")))]
        return {name: self.info(name) for name in names if not name.endswith((AT, TO))}


def patches(name: str, array: Tensor, width: int, before: Callable[[int, int], Tensor]) -> dict[str, Tensor]:
    """Tensors to write for a flat array: the whole array, its `@at` and `@to`, or nothing.

    `before` reads elements as the save before has them. An array whose patch would be larger than itself is written whole.
    """
    assert array.dim() == 1 and array.numel() % width == 0 and array.element_size() in (4, 8)
    size = _ELEMENTS // width * width
    line_bytes, count = 4 + width * array.element_size(), 0
    for _, lines_P, _ in _differing(array, width, size, before):
        count += lines_P.numel()
        if count * line_bytes >= array.numel() * array.element_size():
            return {name: array}
    if not count:
        return {}
    found = list(_differing(array, width, size, before))
    at = torch.cat([first // width + lines_P for first, lines_P, _ in found])
    dtype = torch.int32 if array.numel() < 1 << 31 else torch.int64
    return {name + AT: at.to(dtype), name + TO: torch.cat([to for _, _, to in found])}


def _differing(
    array: Tensor, width: int, size: int, before: Callable[[int, int], Tensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Lines that differ bit for bit, `size` elements at a time: first element, line numbers from there, new lines."""
    for first in range(0, array.numel(), size):
        now = array[first : first + size].cpu()
        bits = torch.int32 if array.element_size() == 4 else torch.int64
        same = now.view(bits) == before(first, first + now.numel()).view(bits)
        lines_P = (~same.view(-1, width).all(dim=1)).nonzero()[:, 0]
        yield first, lines_P, now.view(-1, width)[lines_P]


def _apply_patch(file: TensorFile, name: str, out: Tensor, first: int) -> None:
    """Apply the patch of one save to the part of a flat array that begins at element `first`."""
    at_P, lines = file.read(name + AT), file.info(name + TO)
    fits = at_P.dtype in (torch.int32, torch.int64) and lines.dtype == out.dtype and len(lines.shape) == 2 and out.dim() == 1
    if not fits or at_P.shape != lines.shape[:1] or not bool((at_P[1:] > at_P[:-1]).all()):
        raise damaged(file.path, f"the changes of {name!r} do not fit it")
    width = lines.shape[1]
    bounds = torch.tensor([first // width, -(-(first + out.numel()) // width)], dtype=at_P.dtype)
    begin, end = torch.searchsorted(at_P, bounds).tolist()
    to = file.read(name + TO, begin, end).view(-1)
    place = (at_P[begin:end].long()[:, None] * width + torch.arange(width)).view(-1) - first
    inside = (place >= 0) & (place < out.numel())
    out[place[inside]] = to[inside]
