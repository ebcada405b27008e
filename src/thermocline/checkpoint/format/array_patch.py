"""Flat arrays that changed in some places: what an incremental save writes of the cache.

An array is seen as lines of some width. Of the lines that differ from what was saved before, `<name>@at` has the numbers, in
rising order, and `<name>@to` the lines. Where most of them differ the array is written whole, where none does not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .tensor_files import TensorFile

AT, TO = "@at", "@to"
_ELEMENTS = 1 << 21  # compared at a time


def patches(name: str, array: Tensor, width: int, before: Callable[[int, int], Tensor]) -> dict[str, Tensor]:
    """What to write of an array: all of it, or `@at` and `@to`, or nothing. `before` reads elements as they were saved."""
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
    numbers = torch.int32 if array.numel() < 1 << 31 else torch.int64
    return {name + AT: at.to(numbers), name + TO: torch.cat([to for _, _, to in found])}


def _differing(
    array: Tensor, width: int, size: int, before: Callable[[int, int], Tensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Lines that differ, bit for bit, some at a time: where they are counted from, their numbers, and they themselves."""
    for first in range(0, array.numel(), size):
        now = array[first : first + size].cpu()
        bits = torch.int32 if array.element_size() == 4 else torch.int64
        same = now.view(bits) == before(first, first + now.numel()).view(bits)
        lines_P = (~same.view(-1, width).all(dim=1)).nonzero()[:, 0]
        yield first, lines_P, now.view(-1, width)[lines_P]


def put_patch(file: TensorFile, name: str, out: Tensor, first: int) -> None:
    """Put lines of an incremental save into a part of a flat array that begins at element `first`."""
    at_P, width = file.read(name + AT), file.entry(name + TO).shape[1]
    bounds = torch.tensor([first // width, -(-(first + out.numel()) // width)], dtype=at_P.dtype)
    begin, end = torch.searchsorted(at_P, bounds).tolist()
    to = file.read(name + TO, begin, end).view(-1)
    place = (at_P[begin:end].long()[:, None] * width + torch.arange(width)).view(-1) - first
    inside = (place >= 0) & (place < out.numel())
    out[place[inside]] = to[inside]
