"""What every card has sent: exact bytes by table, tier, direction and link class, and messages by direction and link class.

    ids         rows that are asked for, 4 or 8 bytes each
    rows        the answers, as stored
    gradients   summed gradients on their way to the owner
    sync        gradients of copied rows, to the card that sums and from it to all copies, ids included

Also counted are the numbers by which a card tells another how much will come, 4 bytes each; they belong to no table (its name
is "", tier 0). A message is what one card sends another in one exchange, however many tables it has rows of; nothing is no
message, and one with gradients of both kinds counts once, as gradients. The link class `card` has the rows that a card finds
with itself when it asks, as the plan counts them, and no messages.

And how long exchanges took, by direction: `busy` all of them, `waited` those that somebody waited for. What a lane does while
nobody waits is hidden.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, Direction, LinkClass

from .routes import SIZE_BYTES, Counts

_SYNC = DIRECTIONS.index("sync")


class Sent(NamedTuple):
    """One line of the meter."""

    table: str
    tier: int
    direction: Direction
    link: LinkClass
    bytes: int


class Meter:
    """Counts of one card. `parts` are (table, tier) of the rows that are exchanged."""

    def __init__(self, parts: Sequence[tuple[str, int]]) -> None:
        self.parts = (*parts, ("", 0))
        self.bytes_DLK = np.zeros((len(DIRECTIONS), len(LINK_CLASSES), len(self.parts)), np.int64)
        self.messages_DL = np.zeros((len(DIRECTIONS), len(LINK_CLASSES)), np.int64)
        self.held_D = np.zeros(len(DIRECTIONS), np.int64)  # bytes of messages in memory, what a card sends itself included
        self.steps = 0
        self.ahead = 0  # batches whose rows came ahead of them
        self.busy = dict.fromkeys(DIRECTIONS, 0.0)
        self.waited = dict.fromkeys(DIRECTIONS, 0.0)
        self._behind: list[tuple[Direction, float, float]] | None = None  # exchanges of a lane since it was waited for

    @contextlib.contextmanager
    def timed(self, direction: Direction) -> Iterator[None]:
        """An exchange."""
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        self.busy[direction] += end - begin
        if self._behind is None:
            self.waited[direction] += end - begin
        else:
            self._behind.append((direction, begin, end))

    def go_behind(self) -> None:
        """Exchanges from here on are those of a lane."""
        self._behind = [] if self._behind is None else self._behind

    def waited_since(self, begin: float) -> None:
        """Somebody has waited for the lane, until now."""
        for direction, first, last in self._behind or ():
            self.waited[direction] += max(0.0, last - max(first, begin))
        self._behind = None

    def add(
        self, direction: Direction, links: Sequence[LinkClass], bytes_PK: Counts, sync_K: NDArray[np.bool_], own: bool = False
    ) -> None:
        """Count what was sent to each card of a group, by part; what this card has sent itself only if it is its `own`.

        `sync_K`: parts of which it is sync, whatever the direction of the others.
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

    def add_flags(self, links: Sequence[LinkClass], bytes_P: Counts) -> None:
        """Count bits that say which rows come later."""
        d = DIRECTIONS.index("rows")
        for link, size in zip(links, bytes_P.tolist(), strict=True):
            if link != "card" and size:
                at = LINK_CLASSES.index(link)
                self.bytes_DLK[d, at, -1] += size
                self.messages_DL[d, at] += 1

    def add_sizes(self, direction: Direction, links: Sequence[LinkClass], numbers: int) -> None:
        """Count so many numbers that were told each other card of a group."""
        d = DIRECTIONS.index(direction)
        for link in links:
            if link != "card":
                at = LINK_CLASSES.index(link)
                self.bytes_DLK[d, at, -1] += numbers * SIZE_BYTES
                self.messages_DL[d, at] += 1

    def hold(self, direction: Direction, size: int) -> None:
        """Count the bytes of a message, sent and received, that lie in memory."""
        self.held_D[DIRECTIONS.index(direction)] += size

    def buffers(self, ahead: int) -> int:
        """Bytes of the messages of a step; ids and rows of `ahead` batches, as plans count them."""
        ids, rows, gradients, sync = self.held_D.tolist()
        return int((ahead * (ids + rows) + gradients + sync) / max(1, self.steps))

    def lines(self) -> list[Sent]:
        """All that is not zero."""
        return [
            Sent(self.parts[k][0], self.parts[k][1], DIRECTIONS[d], LINK_CLASSES[at], int(self.bytes_DLK[d, at, k]))
            for d, at, k in np.argwhere(self.bytes_DLK).tolist()
        ]

    def reset(self) -> None:
        """Begin anew, as after the first steps of a run."""
        self.bytes_DLK[:], self.messages_DL[:], self.held_D[:], self.steps = 0, 0, 0, 0
        self.ahead = 0
        self.busy, self.waited = dict.fromkeys(DIRECTIONS, 0.0), dict.fromkeys(DIRECTIONS, 0.0)
