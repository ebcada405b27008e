"""The counter of one table while a log is read, and the memory that all counters share.

A counter grows with its ids. When the shared memory is used up, a counter that needs more becomes a sketch and keeps its size.
A counter below its fair share may still grow: then the largest other counter becomes a sketch of half its size. Each table
gets its share in the end, independent of the order, and small tables stay exact beside huge ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import hash_counter as H
from .cardinality import REGISTERS, estimate
from .profile import HOT, BatchRepeats, Ints, LogSlice, TableHeat, hottest_first

SMALLEST, SMALL = 1 << 10, 1 << 14  # cells
FULL = 0.75  # of the cells may be in use
CELL, LATE = 24, 8  # bytes
# A counter that grows, is purged or gives its result needs a fifth more for a moment.
MOMENT = 0.2


class IdCounter:
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
        self.slices: list[LogSlice] = []
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
        """Counts ids from `start` on, as `hash_counter.count`."""
        tables = (self.cells, self.late, self.registers, self.tally)
        return int(H.count(ids_N, start, ends_K, batch, self.per_node, *tables))

    def note_bags(self, samples: int, offsets: Ints | None) -> None:
        """Records the bag lengths of samples with these offsets, or with one id each."""
        if offsets is None:
            self.bags[1] = self.bags.get(1, 0) + samples
            return
        lengths_L, many_L = np.unique(np.diff(offsets), return_counts=True)
        for length, many in zip(lengths_L.tolist(), many_L.tolist(), strict=True):
            self.bags[length] = self.bags.get(length, 0) + many

    def turn(self) -> None:
        """Ends a slice of the log and begins the next."""
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
        samples = sum(self.bags.values()) - sum(each.samples for each in self.slices)
        self.slices.append(LogSlice(int(seen.sum()), kept_1, kept_5, not self.slices, samples))
        self.tally[H.SEEN :] = 0

    # -- memory --

    @property
    def larger(self) -> int:
        """Cells after the next growth. Small counters grow fast, because every growth moves all cells."""
        return len(self.cells) * (4 if len(self.cells) <= SMALL else 2)

    def grow(self) -> None:
        old, self.cells = self.cells, np.zeros((self.larger, 3), np.int64)
        H.move(old, self.late, self.cells, self.late)
        self.tally[H.MOST] = int(FULL * len(self.cells))

    def purge(self, cells: int) -> None:
        """Becomes a sketch of `cells` cells, as many as now or half. The colder half of the ids is dropped, or more to fit."""
        if not self.sketched:
            self.late = np.zeros(len(self.cells), np.int64)
            self.registers = np.zeros(REGISTERS, np.uint8)
            H.note_all(self.cells[:, H.ID], self.cells[:, H.COUNT], self.registers)
        used = int(self.tally[H.USED])
        kept = min(used, int(FULL * cells)) // 2
        totals_H = np.empty(used, np.int64)
        H.totals(self.cells, self.late, totals_H)
        totals_H.partition(used - kept - 1)
        threshold = int(totals_H[used - kept - 1])
        del totals_H
        self.tally[H.USED] = H.drop(self.cells, self.late, threshold)
        self.tally[H.SLACK] = max(int(self.tally[H.SLACK]), threshold)
        if cells != len(self.cells):
            self._shrink(cells)

    def _shrink(self, cells: int) -> None:
        used, _ = H.gather(self.cells, self.late, 0)
        old, old_late = self.cells[:used].copy(), self.late[:used].copy()
        del self.cells, self.late  # before there are others
        self.cells, self.late = np.zeros((cells, 3), np.int64), np.zeros(cells, np.int64)
        H.move(old, old_late, self.cells, self.late)
        self.tally[H.MOST] = int(FULL * cells)

    # -- result --

    def result(self, samples: int) -> TableHeat:
        """The heat of the table. Empties the counter, because there is no memory for both."""
        if self.tally[H.SEEN :].any():
            self._note_slice()
        registers = self.registers if self.sketched else None
        # Of a sketch, ids that are surely hotter than all that were purged. The others are a chance sample of the tail, and are
        # left to it; they may have had a little more than those purged.
        used, slack = H.gather(self.cells, self.late, self.tally[H.SLACK])
        ids_H, counts_H = self.cells[:used, H.ID].copy(), self.cells[:used, H.COUNT].copy()
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
            batches=tuple(BatchRepeats(size, lookups, many) for size, many in repeats.items()),
            slices=tuple(self.slices),
            slack=int(slack),
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
        self.slices, self.ties = [LogSlice(*each) for each in text["slices"]], tuple(text["ties"])


def reserved(cells: int) -> int:
    """Bytes of a counter with this many cells, once it is a sketch."""
    return (CELL + LATE) * cells + REGISTERS


def make_room(counter: IdCounter, counters: Sequence[IdCounter], memory: int) -> None:
    """Lets a full counter continue: larger, or as a sketch. `memory` are the bytes of all counters."""
    share = memory // len(counters)
    wanted = reserved(counter.larger)
    while not counter.sketched:
        sizes = [reserved(len(each.cells)) for each in counters if each is not counter]
        if sum(sizes) + wanted + MOMENT * max([wanted, *sizes]) <= memory:
            return counter.grow()
        largest = max(counters, key=lambda each: len(each.cells))
        if wanted > share or reserved(len(largest.cells)) <= share:
            break
        largest.purge(len(largest.cells) // 2)
    counter.purge(len(counter.cells))


def _hot_sets(recent_H: NDArray[np.int32]) -> list[tuple[int, float]]:
    """For each hot set: the least lookups of an id in it, and the share of the ids with exactly that many lookups that are in
    it."""
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
