"""How evenly cards share the lookups of real logs: predicted, replayed later than profiled, and replayed after a replan.

A log is a model: each of its columns of ids a table, with as many rows as the log has ids. Heat is that of its first half.
Copies of the hottest rows add a tenth to its bytes, the other rows lie where `plan.balance` puts them. Then the second half is
replayed: in a step every card takes its next samples, about 5,120 lookups of all tables together, and asks once for each
distinct row that it has no copy of. A window is two steps, 10,240 lookups a card; the worst window counts. A replan takes the
heat of everything before its window, old heat fading by half every two windows, as a running job would count it.

    balance/globo_clicks_first80/32/predicted   maximum over mean of what cards serve, from the heat alone
    balance/globo_clicks_first80/32/later       the worst window of the second half, placed by the first
    balance/globo_clicks_first80/32/replanned   the worst of up to 8 windows there, each placed by what came before it

Beside them stands `every_lookup`: the same if a row that a card asks for twice in a step were served twice by its owner, which
the exchange does not do; rows are placed for that then. Samples of logs that have no order of time are shuffled first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.plan.replay import copies_within, predicted_imbalance, replay
from thermocline.plan.balance import Placement, PlacementInput, place, request_probability

CARDS = (8, 32)
EXTRA = 0.10
LOOKUPS, WINDOW = 5120, 10_000
FADING = 2.0  # windows in which heat halves
REPLANS = 8  # windows of a log that are planned again, evenly over its second half
ASKED = {"predicted": 1.05, "later": 1.15, "replanned": 1.05}

_CRITEO = tuple(f"C{n}" for n in range(1, 27))
# file -> columns
LOGS: dict[str, tuple[str, ...]] = {
    "globo_clicks_first80": ("item", "user"),
    "retail_baskets": ("items",),
    "gowalla_bags": ("items",),
    "diginetica_sessions": ("items",),
    "amazon_sports_seq": ("items",),
    "amazon_beauty_seq": ("items",),
    "amazon_toys_seq": ("items",),
    "movielens1m_pairs": ("item", "user"),
    "criteo_kaggle_uniform_0p3pct": _CRITEO,
    "criteo_kaggle_head10k": _CRITEO,
    "criteo_1tb_day0_head10k": _CRITEO,
}
# Samples (users) of these stand in no order of time: shuffled.
SHUFFLED = ("movielens1m_pairs", "gowalla_bags", "amazon_sports_seq", "amazon_beauty_seq", "amazon_toys_seq")
SINGLE = ("globo_clicks_first80", "movielens1m_pairs")  # whose columns are looked at one by one too

Rows = NDArray[np.int64]


class LookupLog(NamedTuple):
    """The lookups of each table, in order, as rows from 0."""

    name: str
    tables: list[Rows]


class Balance(NamedTuple):
    """Maximum over mean; NaN where the log is too short for a window."""

    predicted: float
    later: float
    replanned: float
    windows: int


def read(folder: Path, name: str, columns: tuple[str, ...]) -> LookupLog:
    """The ids of some columns of a log, as rows; lists are looked up one by one."""
    from pyarrow import compute, parquet, types

    table = parquet.read_table(folder / f"{name}.parquet", columns=list(columns))
    if name in SHUFFLED:
        table = table.take(np.random.default_rng(0).permutation(len(table)))
    tables = []
    for column in columns:
        values = table[column]
        values = compute.list_flatten(values) if types.is_list(values.type) else values
        tables.append(np.unique(values.drop_null().to_numpy(), return_inverse=True)[1].astype(np.int64))
    return LookupLog(name, tables)


def logs(folder: Path) -> Iterator[LookupLog]:
    """All available logs of a folder; some columns also alone."""
    for name, columns in LOGS.items():
        if not (folder / f"{name}.parquet").is_file():
            continue
        log = read(folder, name, columns)
        yield log
        if name in SINGLE:
            for column, rows in zip(columns, log.tables, strict=True):
                yield LookupLog(f"{name}.{column}", [rows])


@dataclass(frozen=True)
class Replay:
    """A log replayed on `cards` ranks."""

    log: LookupLog
    cards: int

    @property
    def lookups(self) -> list[int]:
        """Of each table, a card and step: about LOOKUPS in all, in the tables' proportion."""
        sizes = np.array([len(rows) for rows in self.log.tables], np.float64)
        return [max(1, round(LOOKUPS * size / sizes.sum())) for size in sizes]

    @property
    def steps(self) -> int:
        """Steps of the log."""
        return min(len(rows) // (count * self.cards) for rows, count in zip(self.log.tables, self.lookups, strict=True))

    def part(self, begin: int, end: int) -> list[Rows]:
        """The lookups of some steps."""
        return [
            rows[begin * count * self.cards : end * count * self.cards]
            for rows, count in zip(self.log.tables, self.lookups, strict=True)
        ]

    def placed(self, parts: list[Rows], fading: float = np.inf, once: bool = True) -> tuple[list[Placement], float]:
        """Placements by the heat of some lookups, which halves every `fading` steps, and how even they predict to be. `once`: a
        card asks once a step for a row; else every lookup is work of the row's owner."""
        seen = []
        for rows, whole, count in zip(parts, self.log.tables, self.lookups, strict=True):
            age = np.arange(len(rows))[::-1] / (count * self.cards)
            heat = np.bincount(rows, 0.5 ** (age / fading))
            ids = np.flatnonzero(heat)
            ids = ids[np.lexsort((ids, -heat[ids]))]
            weights = request_probability(heat[ids], count) if once else heat[ids] * (count / heat.sum())
            seen.append((int(whole.max()) + 1, ids, weights))
        tables = {str(n): (rows, weights, 1.0) for n, (rows, _, weights) in enumerate(seen)}
        copies = copies_within(tables, self.cards, EXTRA)
        heats = [PlacementInput(rows, ids, weights, copies[str(n)]) for n, (rows, ids, weights) in enumerate(seen)]
        placements, load_C = place(heats, self.cards)
        return placements, predicted_imbalance(self.cards * load_C, self.cards * float(sum(self.lookups)))

    def measure(self, once: bool = True) -> Balance:
        """A log that is too short for a window still has a prediction."""
        window = -(-WINDOW // sum(self.lookups))
        half = self.steps // 2
        placements, expected = self.placed([rows[: len(rows) // 2] for rows in self.log.tables], once=once)
        later = self.replay(placements, half, self.steps, once)
        replanned = []
        begins = range(max(half, self.steps % window), self.steps - window + 1, window)
        for begin in begins[:: -(-len(begins) // REPLANS) or 1]:
            again, _ = self.placed(self.part(0, begin), FADING * window, once)
            replanned += self.replay(again, begin, begin + window, once)
        return Balance(expected, max(later, default=math.nan), max(replanned, default=math.nan), len(later))

    def replay(self, placements: list[Placement], begin: int, end: int, once: bool) -> list[float]:
        """Maximum over mean in each window of some steps."""
        if once:
            return replay(placements, self.part(begin, end), self.lookups, WINDOW)
        return self.every_lookup(placements, begin, end)

    def every_lookup(self, placements: list[Placement], begin: int, end: int) -> list[float]:
        """The same windows with every lookup of a row that has no copies served by its owner."""
        found = []
        window = -(-WINDOW // sum(self.lookups))
        for start in range(begin, end - window + 1, window):
            load_C = np.zeros(self.cards)
            for placement, rows in zip(placements, self.part(start, start + window), strict=True):
                copied = placement.has_copies(rows)
                load_C += np.bincount(placement.owner_and_place(rows[~copied])[0], minlength=self.cards)
                load_C += copied.sum() / self.cards
            found.append(float(load_C.max() / load_C.mean()))
        return found
