"""The counts of one table while a log is read, and the memory that all tables share.

A counter grows as ids come. When the memory of all of them is used up, whoever would need more becomes a sketch and stays as
large as it is. Only a counter below its fair share may still grow: then the largest of the others is made a sketch of half its
size. So each table has its share in the end, no matter which came first, and small tables are exact beside huge ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import hashed as H
from .cardinality import estimate, registers_of
from .profile import HOT, Batches, Ints, Slice, TableHeat, hottest_first

SMALLEST = 1 << 10
FULL = 0.75  # of the cells may be in use
CELL, LATE = 24, 8  # bytes
# While a counter grows or is purged, it needs so much of its new size for a moment.
MOMENT = 1.75


class Counter:
    """Lookups of one table, or column."""

    def __init__(self, name: str, batch: int, per_node: int) -> None:
        self.name, self.batch, self.per_node = name, batch, per_node
        self.cells: Ints = np.zeros((SMALLEST, 3), np.int64)
        self.late: Ints = np.zeros(0, np.int64)  # of a sketch
        self.registers: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.tally: Ints = np.zeros(H.TALLY, np.int64)
        self.tally[H.MOST] = int(FULL * SMALLEST)
        self.bags: dict[int, int] = {}  # samples by the number of their ids
        self.missing = 0
        self.slices: list[Slice] = []
        self.ties = (0.0, 0.0)  # of the ids that tie for a hot set, how many are in it

    @property
    def sketched(self) -> bool:
        return len(self.late) > 0

    @property
    def bytes(self) -> int:
        return self.cells.nbytes + self.late.nbytes + self.registers.nbytes

    @property
    def lookups(self) -> int:
        return sum(length * many for length, many in self.bags.items())

    # -- counting --

    def count(self, ids_N: Ints, start: int, ends_K: Ints, batch: int) -> int:
        """Count ids from `start` on, as `hashed.count` does."""
        tables = (self.cells, self.late, self.registers, self.tally)
        return int(H.count(ids_N, start, ends_K, batch, self.per_node, *tables))

    def note_bags(self, samples: int, offsets: Ints | None) -> None:
        """Samples came in, with these offsets, or with one id each."""
        if offsets is None:
            self.bags[1] = self.bags.get(1, 0) + samples
            return
        lengths_L, many_L = np.unique(np.diff(offsets), return_counts=True)
        for length, many in zip(lengths_L.tolist(), many_L.tolist(), strict=True):
            self.bags[length] = self.bags.get(length, 0) + many

    def turn(self) -> None:
        """A slice of the log ends here, and another begins."""
        self._note_slice()
        recent_H = np.empty(int(self.tally[H.USED]), np.int32)
        recent_H = recent_H[: H.recent(self.cells, recent_H)]
        (least_1, tie_1), (least_5, tie_5) = _hot_sets(recent_H)
        self.ties = (tie_1, tie_5)
        H.turn(self.cells, least_1, least_5)

    def _note_slice(self) -> None:
        seen = self.tally[H.SEEN :].astype(np.float64)
        tied_1, tied_5 = seen[H.TIED_1] + seen[H.TIED_BOTH], seen[H.TIED_5] + seen[H.TIED_BOTH]
        kept_1 = float(seen[H.IN_1] + self.ties[0] * tied_1)
        kept_5 = float(seen[H.IN_1] + seen[H.TIED_1] + seen[H.IN_5] + self.ties[1] * tied_5)
        self.slices.append(Slice(int(seen.sum()), kept_1, kept_5, first=not self.slices))
        self.tally[H.SEEN :] = 0

    # -- memory --

    def grown(self) -> int:
        """Bytes it would need to be twice as large."""
        return int(2 * MOMENT * self.cells.nbytes)

    def grow(self) -> None:
        old = self.cells
        self.cells = np.zeros((2 * len(old), 3), np.int64)
        H.move(old, self.late, 0, self.cells, self.late)
        self.tally[H.MOST] = int(FULL * len(self.cells))

    def purge(self, cells: int) -> None:
        """Become a sketch of so many cells, with the colder half of the ids dropped, or as many as do not fit."""
        if not self.sketched:
            used = self.cells[:, H.COUNT] > 0
            self.registers = registers_of(self.cells[used, H.ID])
            self.late = np.zeros(len(self.cells), np.int64)
        used_H = np.flatnonzero(self.cells[:, H.COUNT])
        kept = min(len(used_H), int(FULL * cells)) // 2
        total_H = self.cells[used_H, H.COUNT] + self.late[used_H]
        threshold = int(np.partition(total_H, len(total_H) - kept - 1)[len(total_H) - kept - 1])
        stays_H = used_H[total_H > threshold]
        old, old_late = self.cells[stays_H], self.late[stays_H]
        if cells == len(self.cells):
            self.cells.fill(0)
            self.late.fill(0)
        else:
            self.cells, self.late = np.zeros((cells, 3), np.int64), np.zeros(cells, np.int64)
        self.tally[H.USED] = H.move(old, old_late, threshold, self.cells, self.late)
        self.tally[H.MOST] = int(FULL * cells)
        self.tally[H.SLACK] = max(int(self.tally[H.SLACK]), threshold)

    # -- result --

    def result(self, samples: int) -> TableHeat:
        """What was counted. The counter is empty after it: there is not memory for both."""
        if self.tally[H.SEEN :].any():
            self._note_slice()
        slack, registers = int(self.tally[H.SLACK]), self.registers if self.sketched else None
        counts = self.cells[:, H.COUNT]
        kept_H = np.flatnonzero(counts > slack)
        if self.sketched:
            # Of a sketch, ids that are surely hotter than all that were purged. The others are a chance sample of the tail,
            # and are left to it; they may have had a little more than those purged.
            cut_H = np.flatnonzero((counts > 0) & (counts <= slack))
            slack = int((counts[cut_H] + self.late[cut_H]).max(initial=slack))
        ids_H, counts_H = self.cells[kept_H, H.ID], self.cells[kept_H, H.COUNT]
        self.cells, self.late = np.zeros((0, 3), np.int64), np.zeros(0, np.int64)
        ids_H, counts_H = hottest_first(ids_H, counts_H)
        lookups, lengths = self.lookups, sorted(self.bags)
        repeats = {self.batch: int(self.tally[H.REPEATS]), self.batch * self.per_node: int(self.tally[H.NODE_REPEATS])}
        return TableHeat(
            name=self.name,
            samples=samples,
            lookups=lookups,
            distinct=len(ids_H) if registers is None else max(len(ids_H), estimate(registers)),
            exact=registers is None,
            ids_H=ids_H,
            counts_H=counts_H,
            lengths_L=np.array(lengths, np.int64),
            bags_L=np.array([self.bags[length] for length in lengths], np.int64),
            missing=self.missing,
            batches=tuple(Batches(size, lookups, many) for size, many in repeats.items()),
            slices=tuple(self.slices),
            slack=slack,
            registers=registers,
        )

    # -- state, to go on later --

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        arrays = {name: getattr(self, name) for name in ("cells", "late", "registers", "tally")}
        bags = [list(self.bags.keys()), list(self.bags.values())]
        return arrays, {"bags": bags, "missing": self.missing, "slices": self.slices, "ties": self.ties}

    def restore(self, arrays: dict[str, NDArray[Any]], text: dict[str, Any]) -> None:
        for name, array in arrays.items():
            setattr(self, name, array)
        self.bags, self.missing = dict(zip(*text["bags"], strict=True)), text["missing"]
        self.slices, self.ties = [Slice(*each) for each in text["slices"]], tuple(text["ties"])


def make_room(counter: Counter, counters: Sequence[Counter], memory: int) -> None:
    """Let a counter that is full go on: larger, or as a sketch. `memory`: bytes of all counters."""
    share = memory // len(counters)
    while not counter.sketched:
        if sum(each.bytes for each in counters) - counter.bytes + counter.grown() <= memory:
            return counter.grow()
        larger = max(counters, key=lambda each: each.bytes)
        if counter.grown() > share or larger.bytes <= max(share, counter.bytes) or len(larger.cells) == SMALLEST:
            break
        larger.purge(len(larger.cells) // 2)
    counter.purge(len(counter.cells))


def _hot_sets(recent_H: NDArray[np.int32]) -> list[tuple[int, float]]:
    """Of each hot set, the least lookups of an id in it, and the share of the ids with just so many that are in it."""
    if len(recent_H) == 0:
        return [(1, 0.0) for _ in HOT]
    sizes = [max(1, math.floor(part * len(recent_H) + 0.5)) for part in HOT]
    recent_H.partition([len(recent_H) - size for size in sizes])
    found = []
    for size in sizes:
        hottest = recent_H[-size:]
        least = hottest[0]
        found.append((int(least), float((hottest == least).sum() / (recent_H == least).sum())))
    return found
