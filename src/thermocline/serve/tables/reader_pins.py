"""Which replaced versions are still read: each has a pin, and whatever may read rows of the version refers to it.

A reader counts by the reference it holds anyway, so lookups take no lock and no counter. Rejected: epochs that each request
enters and leaves, which cost every lookup what only a publish needs.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .segments import SharedSegment
    from .shard_group import ShardGroup
    from .version import TableVersion

_POLL_S = 2e-4


class ReaderPin:
    """Alive as long as a lookup of its version may read rows."""

    __slots__ = ("__weakref__",)


class VersionReaders(Protocol):
    """Other processes that look up in the memory of a group. Calls return when all of them have done it."""

    def show(self, group: ShardGroup, version: TableVersion, held: int, segments: Sequence[SharedSegment]) -> None:
        """Serve a version. `held` changes with the segments."""

    def settle(self, group: ShardGroup, seconds: float) -> bool:
        """Whether none reads an earlier version any more."""
        ...

    def hide(self, group: ShardGroup) -> None:
        """Stop serving."""


class RetiredVersions:
    """Pins of replaced versions."""

    def __init__(self) -> None:
        self._pins: list[weakref.ref[ReaderPin]] = []

    def add(self, pin: ReaderPin) -> None:
        self._pins.append(weakref.ref(pin))

    def wait(self, seconds: float) -> bool:
        """Whether no replaced version is read any more; waits for that. Polls: a callback could run inside of a wait."""
        end = time.monotonic() + seconds
        while not self._all_gone():
            if time.monotonic() > end:
                gc.collect(1)  # an error in a reference cycle may hold the frame of a lookup
                return self._all_gone()
            time.sleep(_POLL_S)
        return True

    def _all_gone(self) -> bool:
        self._pins = [pin for pin in self._pins if pin() is not None]
        return not self._pins
