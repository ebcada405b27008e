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

    def turns_in(self, begin: int, end: int) -> Rows:
        """Turns of the runs that rows begin to end - 1 are of."""
        return self.turn_of(np.arange(begin // self.cards, -(-end // self.cards)))

    def owned_by(self, card: int, begin: int, end: int, turns_B: Rows | None = None) -> tuple[Rows | slice, slice]:
        """Of rows begin to end - 1: those that a card owns, counted from `begin`, and their places there. Who asks for several
        cards has `turns_in` at hand."""
        if self.everywhere:
            return slice(0, 0), slice(0, 0)
        if self.way == "ranges":
            base = (card - self.first) * self.per
            low, high = max(begin, base), max(begin, base, min(end, base + self.per))
            low = min(low, high)
            return slice(low - begin, high - begin), slice(low - base, high - base)
        turns_B = self.turns_in(begin, end) if turns_B is None else turns_B
        first, inside_B = begin // self.cards, card - turns_B
        inside_B += self.cards * (inside_B < 0)  # where in its run the row of this card is
        rows_B = np.arange(0, self.cards * len(turns_B), self.cards) + inside_B - (begin - first * self.cards)
        low, high = 0, len(rows_B)
        if high and rows_B[0] < 0:  # at the two ends runs may be cut
            low = 1
        if high > low and rows_B[-1] >= end - begin:
            high -= 1
        return rows_B[low:high], slice(first + low, first + high) if high > low else slice(0, 0)

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
