"""Prefetching batches: the record of batches that were prefetched lately, and a loop that looks ahead.

A module owns one `PrefetchedBatches`. Its forward recognises a prefetched batch by the tensor objects of its input. A converted
model thus needs no change: its forward hands the tensors of the batch down to the module. Code that calls the module itself
may pass the second item of each pair that `prefetched` yields.
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

AT_ONCE = 4  # batches whose rows are copied together; with 8, steps on an H200 took up to an eighth less, and twice the room
T = TypeVar("T")


class PrefetchedInput(NamedTuple):
    """The arguments of a forward whose rows are prefetched: `module(rows)` is `module(*rows.arguments)`."""

    arguments: tuple[Any, ...]


class PrefetchRequest(NamedTuple):
    """A batch to prefetch."""

    given: Sequence[Given]  # the tensors of the input, by which forward recognises the batch
    ids: Tensor  # and offsets, as kernels take them
    offsets: Tensor
    parsed: Any  # what forward may use in place of parsing the input again


class _NestedIdentity(NamedTuple):
    nested: Tensor
    values: TensorIdentity
    offsets: TensorIdentity

    def matches(self, item: Any) -> bool:
        parts = item is self.nested and self.values.is_unchanged(item.values())
        return parts and self.offsets.is_unchanged(item.offsets())


class _Batch(NamedTuple):
    given: list[Any]  # an identity for each tensor, else the item
    first: Given
    parsed: Any

    def matches(self, given: Sequence[Given]) -> bool:
        return len(given) == len(self.given) and all(map(_matches, self.given, given))


class PrefetchedBatches:
    """The batches of a module's last two prefetches that forward has not taken yet."""

    def __init__(self) -> None:
        self._groups: deque[list[_Batch]] = deque(maxlen=2)
        self._in_flight = False  # whether the rows of the last group are in flight

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, requests: Sequence[PrefetchRequest]) -> None:
        """Note a group of batches whose rows are in flight now."""
        group = []
        for given, ids, offsets, parsed in requests:
            trainable = not (ids.is_inference() or offsets.is_inference())
            group.append(
                _Batch([_identity(item) for item in given], given[0] if given else None, parsed if trainable else None)
            )
        self._groups.append(group)
        self._in_flight = True

    def take(self, given: Sequence[Given], arrive: Callable[[], None]) -> Any:
        """What forward may use in place of parsing this input, once, if the batch was prefetched and has not changed since.

        Calls `arrive` if the batch is of the last group and its rows are in flight. The same first tensor is enough for that:
        waiting is never wrong, and inference tensors do not tell whether they changed. Of a batch that was prefetched twice,
        the newest counts.
        """
        same = [[one for one in group if one.matches(given)] for group in self._groups]
        if self._in_flight and (same[-1] or (not any(same) and any(one.first is given[0] for one in self._groups[-1]))):
            arrive()
            self._in_flight = False
        found = [one for group in same for one in group]
        for group in self._groups:
            group[:] = [one for one in group if all(one is not other for other in found)]
        return found[-1].parsed if found else None


def _identity(item: Given) -> Any:
    if not isinstance(item, Tensor):
        return item
    if item.is_nested:
        return _NestedIdentity(item, TensorIdentity.of(item.values()), TensorIdentity.of(item.offsets()))  # type: ignore[attr-defined]
    return TensorIdentity.of(item)


def _matches(known: Any, item: Given) -> bool:
    if isinstance(known, (TensorIdentity, _NestedIdentity)):
        return isinstance(item, Tensor) and known.matches(item)
    return not isinstance(item, Tensor) and known == item


def as_arguments(given: Any) -> tuple[Any, ...]:
    """The arguments of forward: a tuple holds several."""
    return given if isinstance(given, tuple) and not isinstance(given, PrefetchedInput) else (given,)


def prefetch_loop(
    loader: Iterable[T],
    ids: Callable[[T], Any] | None,
    prefetch: Callable[[list[tuple[Any, ...]]], None] | None,
    at_once: int,
) -> Iterator[tuple[T, PrefetchedInput]]:
    """The loop behind `prefetched` of local and sharded modules, which have one signature:

        prefetched(loader, ids=None, at_once=AT_ONCE) -> Iterator[(batch, rows)]

    Args:
        loader: batches, on the device of the tables.
        ids: the input that forward gets of a batch (a tensor, a dict, or a tuple of several arguments); by default the batch.
        prefetch: starts the prefetch of a group of inputs; None where there is nothing to prefetch.
        at_once: batches whose rows are copied together; sharded modules exchange one batch at a time.

    Yields:
        Each batch and its `PrefetchedInput`, which forward takes in place of its arguments.
    """
    if at_once < 1:
        raise BadInput(f"at_once is {at_once}; use 1 or more batches", parameter="at_once", value=at_once)

    def pair(batch: T) -> tuple[T, PrefetchedInput]:
        return batch, PrefetchedInput(as_arguments(batch if ids is None else ids(batch)))

    upcoming = map(pair, loader)
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
