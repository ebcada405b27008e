"""Batches that are prefetched: which they are, so that forward knows them again, and how a loop looks ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from thermocline.errors import BadInput
from thermocline.kernels.tensor_identity import mark_of

from .inputs import Given

AT_ONCE = 4  # batches whose rows come together; with eight, steps on an H200 took up to an eighth less, and twice the room
T = TypeVar("T")


class Coming(NamedTuple):
    """A batch that is to be prefetched: what the user has of it, what kernels take, and what forward may take for it."""

    given: Sequence[Given]
    ids: Tensor
    offsets: Tensor
    read: Any


class _Batch(NamedTuple):
    memory: list[object]  # held, so that no other tensor gets it
    marks: list[tuple[object, ...]]
    read: Any


class Announced:
    """The batches of the last two prefetches of a module that forward has not met yet: the memory of others is not held."""

    def __init__(self) -> None:
        self._last: deque[list[_Batch]] = deque(maxlen=2)
        self._under_way = False  # whether the rows of the last are on their way

    def __bool__(self) -> bool:
        return bool(self._last)

    def add(self, batches: Sequence[Coming]) -> None:
        """These were prefetched now."""
        made = []
        for given, ids, offsets, read in batches:
            usable = not (ids.is_inference() or offsets.is_inference())  # by a training forward
            made.append(_Batch([_memory(item) for item in given], [_mark(item) for item in given], read if usable else None))
        self._last.append(made)
        self._under_way = True

    def begin(self, given: Sequence[Given], arrive: Callable[[], None]) -> Any:
        """Forward begins with this batch: if it is of the last prefetch, its rows are to `arrive`.

        Returns, once, what forward may take for it, if it is of one of the two, and has not changed since.
        """
        marks = [_mark(item) for item in given]
        same = [[one for one in group if one.marks == marks] for group in self._last]
        if self._under_way and (same[-1] or (not any(same) and any(_seems(one.marks, marks) for one in self._last[-1]))):
            arrive()
            self._under_way = False
        for group in self._last:
            group[:] = [one for one in group if one.marks != marks]
        found = [one for group in same for one in group]
        return found[-1].read if found else None  # of tensors that were prefetched twice, the newest


def itself(batch: Any) -> Any:
    """What forward is given of a batch that is just that."""
    return batch


def look_ahead(batches: Iterable[T], prefetch: Callable[[list[T]], None], at_once: int) -> Iterator[T]:
    """The batches; before some of them are given out, those that come after them are prefetched, so many at a time."""
    if at_once < 1:
        raise BadInput(f"at_once is {at_once}; it is how many batches are prefetched together, 1 or more")
    upcoming = iter(batches)
    these = list(islice(upcoming, at_once))
    while these:
        following = list(islice(upcoming, at_once))
        if following:
            prefetch(following)
        yield from these
        these = following


def _memory(item: Given) -> object:
    """What keeps a tensor's memory, also when the tensor is given another (`.data = ...`)."""
    if not isinstance(item, Tensor):
        return None
    if item.is_nested:
        return _memory(item.values()), _memory(item.offsets())  # type: ignore[attr-defined]
    return item.untyped_storage()


def _mark(item: Given) -> tuple[object, ...]:
    """What tells a batch's tensors, or its keys, from others (`kernels/tensor_identity.py`)."""
    if item is None:
        return ()
    if isinstance(item, tuple):
        return item
    if item.is_nested:
        return *_mark(item.values()), _mark(item.offsets())  # type: ignore[attr-defined]
    return mark_of(item)


def _seems(known: Sequence[tuple[object, ...]], marks: Sequence[tuple[object, ...]]) -> bool:
    """Whether a batch begins where another did: enough to wait for its rows, which is never wrong, where marks cannot tell."""
    return bool(known) and known[0][:2] == marks[0][:2]
