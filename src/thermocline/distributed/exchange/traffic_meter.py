"""Exact bytes that a rank sent by table, tier, direction and link class, and messages by direction and link class.

    ids         requested rows, 4 or 8 bytes each
    rows        the answers, as stored
    gradients   summed gradients on their way to the owner
    sync        gradients of replicated rows, to the rank that sums them and from it to all replicas, ids included

Counts that announce message sizes, 4 bytes each, belong to no table (name "", tier 0). A message is what one rank sends to
another in one exchange, whatever tables it covers. Empty messages do not count; a message with gradients and sync counts as
gradients. The link class `card` has the bytes of requests that a rank answers itself, as plans count them, and no messages;
`host` has the codes that a GPU reads and writes in host memory.

`waited` is the time of exchanges that callers waited for, by direction.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.distributed.placement.table_map import Counts
from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, Direction, LinkClass

_SYNC = DIRECTIONS.index("sync")


class TrafficRecord(NamedTuple):
    """Bytes sent for one table and tier, in one direction over one link class."""

    table: str
    tier: int
    direction: Direction
    link: LinkClass
    bytes: int


class TrafficMeter:
    """Traffic of one rank. `parts` are (table, tier) of the exchanged rows."""

    def __init__(self, parts: Sequence[tuple[str, int]]) -> None:
        self.parts = (*parts, ("", 0))
        self.bytes_DLK = np.zeros((len(DIRECTIONS), len(LINK_CLASSES), len(self.parts)), np.int64)
        self.messages_DL = np.zeros((len(DIRECTIONS), len(LINK_CLASSES)), np.int64)
        self.held_D = np.zeros(len(DIRECTIONS), np.int64)  # bytes of messages in memory, own requests included
        self._background: list[tuple[Direction, float, float]] | None = None  # exchanges since the last wait
        self.reset()

    def reset(self) -> None:
        """Start counting at zero."""
        self.bytes_DLK[:], self.messages_DL[:], self.held_D[:] = 0, 0, 0
        self.steps = self.prefetched = 0  # steps, and batches whose rows were prefetched
        self.waited = dict.fromkeys(DIRECTIONS, 0.0)

    @contextlib.contextmanager
    def timed(self, direction: Direction) -> Iterator[None]:
        """Measure one exchange."""
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        if self._background is None:
            self.waited[direction] += end - begin
        else:
            self._background.append((direction, begin, end))

    def start_background(self) -> None:
        """Exchanges from here on run in the background."""
        self._background = [] if self._background is None else self._background

    def end_background(self, begin: float) -> None:
        """A caller waited for background exchanges from `begin` until now."""
        for direction, first, last in self._background or ():
            self.waited[direction] += max(0.0, last - max(first, begin))
        self._background = None

    def add(
        self, direction: Direction, links: Sequence[LinkClass], bytes_PK: Counts, sync_K: NDArray[np.bool_], own: bool = False
    ) -> None:
        """Count bytes to each member of a group, by part. Parts in `sync_K` count as sync.

        `own` counts the bytes of this rank to itself.
        """
        d = DIRECTIONS.index(direction)
        for link, bytes_K in zip(links, bytes_PK, strict=True):
            at, count_K = LINK_CLASSES.index(link), np.where(sync_K, 0, bytes_K)
            if link != "card":
                self.bytes_DLK[d, at, : len(bytes_K)] += count_K
                self.bytes_DLK[_SYNC, at, : len(bytes_K)] += bytes_K - count_K
                self.messages_DL[d if count_K.any() else _SYNC, at] += bool(bytes_K.any())
            elif own:
                self.bytes_DLK[d, at, : len(bytes_K)] += count_K

    def add_untabled(self, direction: Direction, links: Sequence[LinkClass], bytes_P: Counts) -> None:
        """Count message sizes, or flags that precede rows, sent to each member of a group."""
        d = DIRECTIONS.index(direction)
        for link, size in zip(links, bytes_P.tolist(), strict=True):
            if link != "card" and size:
                self.bytes_DLK[d, LINK_CLASSES.index(link), -1] += size
                self.messages_DL[d, LINK_CLASSES.index(link)] += 1

    def add_host(self, read_K: Counts, updated_K: Counts) -> None:
        """Count bytes over the host link, by part: of rows read for lookups, and of rows updated."""
        for direction, bytes_K in (("rows", read_K), ("gradients", updated_K)):
            self.bytes_DLK[DIRECTIONS.index(direction), LINK_CLASSES.index("host"), : len(bytes_K)] += bytes_K

    def hold(self, direction: Direction, size: int) -> None:
        """Count the memory of a message, sent and received."""
        self.held_D[DIRECTIONS.index(direction)] += size

    def buffers(self, batches: int) -> int:
        """Bytes of the messages of a step, with ids and rows of `batches` batches, as plans count them."""
        ids, rows, gradients, sync = self.held_D.tolist()
        return int((batches * (ids + rows) + gradients + sync) / max(1, self.steps))

    def records(self) -> list[TrafficRecord]:
        """All records with bytes."""
        return traffic_records(self.parts, self.bytes_DLK)


def traffic_records(parts: Sequence[tuple[str, int]], bytes_DLK: Counts) -> list[TrafficRecord]:
    """Counted bytes [direction, link class, part] as records."""
    return [
        TrafficRecord(parts[k][0], parts[k][1], DIRECTIONS[d], LINK_CLASSES[at], int(bytes_DLK[d, at, k]))
        for d, at, k in np.argwhere(bytes_DLK).tolist()
    ]
