"""Where the rows of a table lie that is split over cards: owner and place by a few operations on the number of a row.

    ranges    card = first + row // per,  place = row % per
    blocks    runs of `cards` rows, one for each card, each run turned by a number of its own: hashed, or chosen from heat

The same as in the kernels (`kernels/serve/fields.py`), for whoever puts rows in place. Besides, some rows are *copied*: they
lie on every card, after the places of the rows that it owns. There is no list of owners. A turned run rather than a hash for
each row: places stay dense, so nothing is lost, and neighbours, which are often hot together, are never on the same card.

This module needs no torch, so that a card that only loads rows starts in a tenth of a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
_MASK, _MIX1, _MIX2 = 0xFFFFFFFF, 0x85EBCA6B, 0xC2B2AE35


@dataclass(frozen=True, eq=False)
class TableSplit:
    """Where the rows of one table lie. `turns_B`: of each run, or None where they are hashed."""

    rows: int
    cards: int
    way: Literal["ranges", "blocks"]
    first: int = 0  # ranges: the card of row 0
    per: int = 1  # ranges: rows of a card
    key: int = 0  # blocks: of the hash
    turns_B: NDArray[np.uint8] | None = None
    copied_H: Rows = field(default_factory=lambda: np.zeros(0, np.int64))  # rising

    @property
    def everywhere(self) -> bool:
        """Whether every row lies on every card."""
        return len(self.copied_H) == self.rows

    @property
    def owned(self) -> int:
        """Places of a card for rows that it owns; copies come after."""
        if self.everywhere:
            return 0
        return self.per if self.way == "ranges" else -(-self.rows // self.cards)

    def places(self, card: int) -> int:
        """Places that the table has on a card, with copies."""
        begins = self.way == "ranges" and not 0 <= card - self.first < -(-self.rows // self.per)
        return (0 if begins else self.owned) + len(self.copied_H)

    def turn_of(self, block_N: Rows) -> Rows:
        if self.turns_B is not None:
            return self.turns_B[block_N].astype(np.int64)
        return hashed_turn(block_N, self.key, self.cards)

    def owner_and_place(self, rows_N: Rows) -> tuple[Rows, Rows]:
        """The card that owns rows, and where on it they are; copies are not looked at."""
        if self.way == "ranges":
            return self.first + rows_N // self.per, rows_N % self.per
        block_N = rows_N // self.cards
        return (rows_N + self.turn_of(block_N)) % self.cards, block_N

    def owned_by(self, card: int, begin: int, end: int) -> tuple[Rows | slice, slice]:
        """Of rows begin to end - 1: those that a card owns, counted from `begin`, and their places there."""
        if self.everywhere:
            return slice(0, 0), slice(0, 0)
        if self.way == "ranges":
            base = (card - self.first) * self.per
            low, high = max(begin, base), max(begin, base, min(end, base + self.per))
            low = min(low, high)
            return slice(low - begin, high - begin), slice(low - base, high - base)
        block_N = np.arange(begin // self.cards, -(-end // self.cards))
        rows_N = block_N * self.cards + (card - self.turn_of(block_N)) % self.cards
        inside_N = (rows_N >= begin) & (rows_N < end)  # false at the two ends at most
        kept_N = np.flatnonzero(inside_N)
        low, high = (int(kept_N[0]), int(kept_N[-1]) + 1) if len(kept_N) else (0, 0)
        return rows_N[low:high] - begin, slice(int(block_N[0]) + low, int(block_N[0]) + high) if high else slice(0, 0)

    def copied_in(self, begin: int, end: int) -> tuple[Rows, slice]:
        """Of rows begin to end - 1: those with copies, counted from `begin`, and the places of the copies."""
        low, high = np.searchsorted(self.copied_H, [begin, end])
        return self.copied_H[low:high] - begin, slice(self.owned + int(low), self.owned + int(high))


def hashed_turn(block_N: Rows, key: int, cards: int) -> Rows:
    """Turns of runs, by a 32-bit mixer (that of `kernels/quantize/reference.py`)."""
    x = (block_N & _MASK) ^ key
    x = ((x ^ (x >> 16)) * _MIX1) & _MASK
    x = ((x ^ (x >> 13)) * _MIX2) & _MASK
    turn_N: Rows = ((x ^ (x >> 16)) * cards) >> 32
    return turn_N
