"""Prefetched batches of a module, and the loop behind `prefetched`.

Forward recognises a prefetched batch by the tensor objects of its input, so models that pass them on need no change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from thermocline.errors import BadInput
from thermocline.kernels.tensor_identity import TensorIdentity

from .inputs import Given

AT_ONCE = 4  # batches whose rows are copied together; 8 take twice the memory and up to an eighth less time a step
T = TypeVar("T")


class PrefetchedInput(NamedTuple):
    """The input of a batch that `prefetched` yields: `module(rows)` is `module(*rows.arguments)`.

    Attributes:
        arguments: the arguments of forward.

    Example::

        for batch, rows in bag.prefetched(loader, ids=lambda batch: batch["ids"]):
            out = bag(rows)
    """

    arguments: tuple[Any, ...]


class PrefetchRequest(NamedTuple):
    """A batch to prefetch."""

    given: Sequence[Given]  # the tensors of the input, by which forward recognises the batch
    ids: Tensor  # and offsets, as kernels take them
    offsets: Tensor
    parsed: Any  # what forward may use in place of parsing the input again


class _Remembered(NamedTuple):
    """Part of an input as it was."""

    item: Given
    tensors: list[TensorIdentity]

    def matches(self, item: Given) -> bool:
        if not isinstance(item, Tensor):
            return not isinstance(self.item, Tensor) and item == self.item
        return item is self.item and all(map(TensorIdentity.is_unchanged, self.tensors, _tensors(item)))


class _Batch(NamedTuple):
    given: list[_Remembered]
    parsed: Any

    def matches(self, given: Sequence[Given]) -> bool:
        return len(given) == len(self.given) and all(map(_Remembered.matches, self.given, given))

    def begins_with(self, item: Given) -> bool:
        return bool(self.given) and self.given[0].item is item


class PrefetchedBatches:
    """The batches of a module's last two prefetches that forward has not taken yet."""

    def __init__(self) -> None:
        self._groups: deque[list[_Batch]] = deque(maxlen=2)
        self._in_flight = False  # whether the rows of the last group are in flight

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, requests: Sequence[PrefetchRequest]) -> None:
        """Add a group of batches whose rows are in flight."""
        group = []
        for given, ids, offsets, parsed in requests:
            parsed = None if ids.is_inference() or offsets.is_inference() else parsed  # training cannot use it
            group.append(_Batch([_Remembered(item, [*map(TensorIdentity.of, _tensors(item))]) for item in given], parsed))
        self._groups.append(group)
        self._in_flight = True

    def take(self, given: Sequence[Given], arrive: Callable[[], None]) -> Any:
        """The parsed input of a prefetched batch, once, if it has not changed since; the newest of several.

        Calls `arrive` if the rows of the batch are in flight. The same first tensor is enough for that, because waiting is
        never wrong, and inference tensors do not tell whether they changed.
        """
        same = [[one for one in group if one.matches(given)] for group in self._groups]
        if self._in_flight and (same[-1] or (not any(same) and any(one.begins_with(given[0]) for one in self._groups[-1]))):
            arrive()
            self._in_flight = False
        found = [one for group in same for one in group]
        for group in self._groups:
            group[:] = [one for one in group if all(one is not other for other in found)]
        return found[-1].parsed if found else None


def _tensors(item: Given) -> list[Tensor]:
    if not isinstance(item, Tensor):
        return []
    return [item.values(), item.offsets()] if item.is_nested else [item]  # type: ignore[attr-defined]


def _pairs(
    loader: Iterable[T], ids: Callable[[T], Any] | None, at_once: int
) -> Iterator[tuple[T, PrefetchedInput]]:  # fmt: skip
    """Each batch and its input."""
    if at_once < 1:
        raise BadInput(f"at_once is {at_once}; use 1 or more batches", parameter="at_once", value=at_once)

    def pair(batch: T) -> tuple[T, PrefetchedInput]:
        given = batch if ids is None else ids(batch)
        several = isinstance(given, tuple) and not isinstance(given, PrefetchedInput)
        return batch, PrefetchedInput(given if several else (given,))  # type: ignore[arg-type]

    return map(pair, loader)


def prefetch_loop(
    loader: Iterable[T], ids: Callable[[T], Any] | None, prefetch: Callable[[list[tuple[Any, ...]]], None] | None, at_once: int
) -> Iterator[tuple[T, PrefetchedInput]]:
    """The loop behind `prefetched` of local modules; `prefetch` starts the prefetch of a group of inputs."""
    upcoming = _pairs(loader, ids, at_once)
    if prefetch is None:
        yield from upcoming
        return
    these = list(islice(upcoming, at_once))
    while these:
        following = list(islice(upcoming, at_once))
        if following:
            prefetch([rows.arguments for _, rows in following])
        yield from these
        these = following


def prefetch_window(
    loader: Iterable[T], ids: Callable[[T], Any] | None, prefetch: Callable[..., None], at_once: int
) -> Iterator[tuple[T, PrefetchedInput]]:
    """The loop behind `prefetched` of sharded modules, whose batches are exchanged one by one, `at_once` ahead."""
    upcoming = _pairs(loader, ids, at_once)
    ahead = deque(islice(upcoming, 1))
    while ahead:
        for following in islice(upcoming, at_once + 1 - len(ahead)):
            prefetch(*following[1].arguments)
            ahead.append(following)
        yield ahead.popleft()
