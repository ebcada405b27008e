"""A heat profile for people and programs: numbers of each table, a curve of a few letters, and what changed between two.

The letters of a curve are shares of the lookups: of the hottest 0.001% of the rows, and so on in even steps of a logarithmic
scale up to all of them. A table with a few very hot rows is high from the left, one without is a ramp at the right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .profile import HOT, HeatProfile, TableHeat

PARTS = (0.001, 0.01, 0.1)
_LETTERS = "▁▂▃▄▅▆▇█"
_STEPS = tuple(10 ** (-5 + 5 * i / 11) for i in range(12))


def small_curve(table: TableHeat) -> str:
    """The curve in twelve letters."""
    return "".join(_LETTERS[min(7, int(8 * table.hottest(part)))] for part in _STEPS) if table.lookups else ""


def numbers(profile: HeatProfile) -> dict[str, Any]:
    """Everything but the ids, as JSON has it."""
    return {
        "source": profile.source,
        "created": profile.created,
        "sha256": profile.sha256,
        "tables": [_numbers(table) for table in profile.tables.values()],
    }


def _numbers(table: TableHeat) -> dict[str, Any]:
    curve = table.curve()
    return {
        "name": table.name,
        "samples": table.samples,
        "lookups": table.lookups,
        "missing": table.missing,
        "distinct": table.distinct,
        "exact": table.exact,
        "error": table.error,
        "slack": table.slack,
        "per_sample": table.per_sample,
        "lengths": {name: length(table, part) for name, part in (("least", 0), ("median", 0.5), ("p99", 0.99), ("most", 1))},
        "hottest": {str(part): table.hottest(part) for part in PARTS},
        "repeats": {str(size): share for size, share in table.repeats.items()},
        "kept": {str(part): share for part, share in table.kept.items()},
        "slices": [each._asdict() for each in table.slices],
        "curve": {"rows": curve.rows_K.tolist(), "lookups": curve.lookups_K.tolist()},
    }


def length(table: TableHeat, part: float) -> int:
    """Ids per sample that so great a part of the samples does not exceed."""
    if len(table.bags_L) == 0:
        return 0
    return int(table.lengths_L[np.searchsorted(np.cumsum(table.bags_L), part * table.bags_L.sum())])


@dataclass(frozen=True)
class Change:
    """What became of the hot rows of a table: those that took most lookups in an old profile, in the lookups of a new one."""

    table: str
    part: float  # of the old profile's ids
    rows: int  # that are so many
    changed: float  # share of the rows that the new profile would choose, and the old one does not have
    best: float  # share of the new lookups that the new choice takes
    kept: float  # and that the old one still takes

    @property
    def lost(self) -> float:
        """Share of all lookups that are lost by keeping the old choice."""
        return self.best - self.kept


def compare(old: HeatProfile, new: HeatProfile) -> list[Change]:
    """What changed in the tables that both profiles have."""
    names = [name for name in old.tables if name in new.tables]
    return [_change(old.tables[name], new.tables[name], part) for name in names for part in HOT]


def _change(old: TableHeat, new: TableHeat, part: float) -> Change:
    # A sketch may know fewer rows than the part has.
    rows = min(max(1, round(part * old.distinct)), len(old.ids_H), len(new.ids_H))
    stays_H = np.isin(new.ids_H, old.ids_H[:rows])
    lookups = max(1, new.lookups)
    best, kept = int(new.counts_H[:rows].sum()) / lookups, int(new.counts_H[stays_H].sum()) / lookups
    return Change(old.name, part, rows, 1 - int(stays_H[:rows].sum()) / max(1, rows), best, kept)
