"""A heat profile for people and programs: numbers of each table, a sparkline, and the change between two profiles.

A letter of the sparkline is a share of the lookups: of the hottest 0.001% of the rows, and so on in even logarithmic steps up
to all rows. A table with a few very hot rows is high from the left; an even table is a ramp at the right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .profile import HOT, HeatProfile, TableHeat

PARTS = (0.001, 0.01, 0.1)
_LETTERS = "▁▂▃▄▅▆▇█"
_PLAIN = ("name", "samples", "lookups", "missing", "distinct", "exact", "error", "slack", "per_sample")
_STEPS = tuple(10 ** (-5 + 5 * i / 11) for i in range(12))


def small_curve(table: TableHeat) -> str:
    """The curve as a sparkline of twelve letters."""
    return "".join(_LETTERS[min(7, int(8 * table.hottest(part)))] for part in _STEPS) if table.lookups else ""


def numbers(profile: HeatProfile) -> dict[str, Any]:
    """Everything but the ids, for `json.dumps`."""
    return {
        "source": profile.source,
        "created": profile.created,
        "sha256": profile.sha256,
        "tables": [_numbers(table) for table in profile.tables.values()],
    }


def _numbers(table: TableHeat) -> dict[str, Any]:
    curve = table.curve()
    return {
        **{name: getattr(table, name) for name in _PLAIN},
        "lengths": {name: length(table, part) for name, part in (("least", 0), ("median", 0.5), ("p99", 0.99), ("most", 1))},
        "hottest": {str(part): table.hottest(part) for part in PARTS},
        "repeats": {str(size): share for size, share in table.repeats.items()},
        "kept": {str(part): share for part, share in table.kept.items()},
        "slices": [each._asdict() for each in table.slices],
        "curve": {"rows": curve.rows_K.tolist(), "lookups": curve.lookups_K.tolist()},
    }


def length(table: TableHeat, part: float) -> int:
    """The ids per sample that a share `part` of the samples does not exceed."""
    if len(table.bags_L) == 0:
        return 0
    return int(table.lengths_L[np.searchsorted(np.cumsum(table.bags_L), part * table.bags_L.sum())])


@dataclass(frozen=True)
class HotSetChange:
    """The hot rows of an old profile in the lookups of a new one."""

    table: str
    part: float  # of the old profile's ids
    rows: int  # number of the hottest rows
    changed: float  # share of the rows that the new profile would choose, and the old one does not have
    best: float  # share of the new lookups that the new choice takes
    kept: float  # and that the old one still takes

    @property
    def lost(self) -> float:
        """Share of all lookups lost by keeping the old choice."""
        return self.best - self.kept


def compare_profiles(old: HeatProfile, new: HeatProfile) -> list[HotSetChange]:
    """Compare the hot sets of the tables in two profiles.

    Args:
        old: The older profile.
        new: The newer profile.

    Returns:
        For each common table and each hot set (1% and 5% of the ids): changed rows, and the share of lookups of the new and of
        the old choice.

    Example::

        [change.lost for change in compare_profiles(HeatProfile.load("monday.tc"), HeatProfile.load("tuesday.tc"))]
    """
    names = [name for name in old.tables if name in new.tables]
    return [_change(old.tables[name], new.tables[name], part) for name in names for part in HOT]


def _change(old: TableHeat, new: TableHeat, part: float) -> HotSetChange:
    # A sketch may know fewer rows than the part has.
    rows = min(max(1, round(part * old.distinct)), len(old.ids_H), len(new.ids_H))
    stays_H = np.isin(new.ids_H, old.ids_H[:rows])
    lookups = max(1, new.lookups)
    best, kept = int(new.counts_H[:rows].sum()) / lookups, int(new.counts_H[stays_H].sum()) / lookups
    return HotSetChange(old.name, part, rows, 1 - int(stays_H[:rows].sum()) / max(1, rows), best, kept)
