"""Three levers before sharding: fewer rows for the same lookups, decided from heat alone, with the bytes they save.

    hash_sizes(curves, budget, ...)     so many bytes (or rows) in all: how many rows for each feature
    prune(heat, seen=1, ...)            no row for ids that were seen at most so often
    unify(columns, ...)                 features that share a table

**Hash sizes.** Every feature is given two numbers: its `kept` hottest ids have rows of their own, and all others are hashed to
`shared` rows. `kept=0` is the plain hash, `shared=1` a pruned table with one fallback row. A kept id costs its row and its
place in the map, a shared row only itself; what either buys is the harm of collisions that it takes away (`collisions.py`),
times the lookups of the feature. Choices of one feature are points (bytes, harm); only those on the lower convex hull can be
best for a price of a byte. From the cheapest point of every feature on, the step that takes away most harm for a byte is taken,
until the budget is spent: at every moment this is the optimum for the bytes spent. The last step is taken in part.

A hash alone (`keep_hot=False`) has no map: one gives it features whose ids cannot be known before. There, too, a feature that
is cheaper to list than to hash gets a row for each id.

**Bytes** are those of rows and maps, `row_bytes` for a row (with its optimizer state, where that is counted) and `id_bytes` for
a kept id: 8 in a sorted list; less where ids are dense and a bitmap is smaller. With `row_bytes=1, id_bytes=0` they are rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from thermocline.errors import BadInput
from thermocline.heat.curve import Curve
from thermocline.heat.profile import TableHeat
from thermocline.plan.cost.collisions import Floats, harm, harms

ID_BYTES = 8.0  # of a kept id in a sorted list
_SIZES, _SIZES_ALONE = 24, 96  # numbers of shared rows tried, with kept ids and without
SMALL = 1 << 14  # rows of a table that is better a part of another


@dataclass(frozen=True)
class FeatureRows:
    """The rows of one feature: its `kept` hottest ids have one each, all others are hashed to `shared` rows."""

    name: str
    ids: int  # seen
    kept: int
    shared: int
    lookups: float
    fallback: float  # share of its lookups that go to shared rows
    harm: float  # share of its effects lost to collisions
    bytes: float  # of rows and map
    bytes_before: float  # with a row for each id

    @property
    def rows(self) -> int:
        return self.kept + self.shared

    @property
    def id_map(self) -> dict[str, Any]:
        """The id map that does it, by its numbers; kept ids are the first of the feature's heat."""
        if not self.kept:
            return {"hashed": {"rows": self.shared}}
        return {"pruned": {"kept": self.kept, "fallback": self.shared}}


@dataclass(frozen=True)
class Fewer:
    """What a lever does to the rows of all features."""

    features: tuple[FeatureRows, ...]
    price: float = 0.0  # lookups that one byte more would save from harm

    @property
    def bytes(self) -> float:
        return sum(feature.bytes for feature in self.features)

    @property
    def saved(self) -> float:
        """Bytes, against a row for each id."""
        return sum(feature.bytes_before - feature.bytes for feature in self.features)

    @property
    def rows(self) -> int:
        return sum(feature.rows for feature in self.features)

    @property
    def harm(self) -> float:
        """Share of the effects of all lookups that is lost."""
        return self._mean([feature.harm for feature in self.features])

    @property
    def fallback(self) -> float:
        """Share of all lookups that go to shared rows."""
        return self._mean([feature.fallback for feature in self.features])

    def _mean(self, values: Sequence[float]) -> float:
        lookups = [feature.lookups for feature in self.features]
        return sum(value * each for value, each in zip(values, lookups, strict=True)) / max(sum(lookups), 1.0)

    def __getitem__(self, name: str) -> FeatureRows:
        return next(feature for feature in self.features if feature.name == name)


# -- hash sizes --


def hash_sizes(
    curves: Mapping[str, Curve],
    budget: float,
    row_bytes: Mapping[str, float] | float = 1.0,
    id_bytes: float = ID_BYTES,
    keep_hot: bool = True,
) -> Fewer:
    """The rows of each feature that lose least to collisions for `budget` bytes of rows and maps in all."""
    return Sizes.of(curves, row_bytes, id_bytes, keep_hot).within(budget)


@dataclass(frozen=True)
class Sizes:
    """The choices of every feature that are best at some price: found once, for any budget."""

    costs: Mapping[str, _Costs]
    hulls: Mapping[str, list[_Point]]

    @classmethod
    def of(
        cls,
        curves: Mapping[str, Curve],
        row_bytes: Mapping[str, float] | float = 1.0,
        id_bytes: float = ID_BYTES,
        keep_hot: bool = True,
    ) -> Sizes:
        costs = {name: _Costs(curve, _of(row_bytes, name), id_bytes, keep_hot) for name, curve in curves.items()}
        return cls(costs, {name: cost.hull() for name, cost in costs.items()})

    def within(self, budget: float) -> Fewer:
        """The rows of each feature for so many bytes in all."""
        least = sum(cost.row for cost in self.costs.values())
        if budget < least:
            raise BadInput(
                f"the budget is {budget:.0f} bytes; {len(self.costs)} features with one row each take {least:.0f}: give that "
                "much, or prune whole features"
            )
        chosen, price = _descend(self.hulls, self.costs, budget)
        return Fewer(tuple(cost.rows(name, *chosen[name]) for name, cost in self.costs.items()), price)


class _Point(NamedTuple):
    """One choice: what it costs in bytes, and what it loses in lookups."""

    bytes: float
    lost: float
    kept: int
    shared: int


@dataclass(frozen=True)
class _Costs:
    """What choices cost one feature."""

    curve: Curve
    row: float
    id: float
    keep_hot: bool = True

    def bytes(self, kept: int, shared: int) -> float:
        return kept * (self.row + self.id) + shared * self.row

    def point(self, kept: int, shared: int) -> _Point:
        return _Point(self.bytes(kept, shared), harm(self.curve, kept, shared) * self.curve.lookups, kept, shared)

    def hull(self) -> list[_Point]:
        """The choices that are best at some price, cheapest first."""
        if not self.curve.lookups:
            return [_Point(self.row, 0.0, 0, 1)]
        ids = round(self.curve.rows)
        sizes = np.geomspace(1, max(ids, 1), _SIZES if self.keep_hot else _SIZES_ALONE)
        shared_N = np.unique(np.round(sizes)).astype(np.float64)
        lost_KN = harms(self.curve, shared_N) * self.curve.lookups
        kept_K = np.round(np.concatenate([[0.0], np.cumsum(self.curve.rows_K)]))
        if not self.keep_hot:
            lost_KN, kept_K = lost_KN[[0, -1]], kept_K[[0, -1]]
        kept_KN, shared_KN = np.broadcast_arrays(kept_K[:, None], shared_N[None, :])
        sensible_KN = (shared_KN <= ids - kept_KN) | (shared_KN == 1)  # more shared rows than ids that share them are waste
        bytes_KN = kept_KN * (self.row + self.id) + shared_KN * self.row
        points = np.stack([bytes_KN, lost_KN, kept_KN, shared_KN], axis=-1)[sensible_KN]
        return _lower_hull(points)

    def rows(self, name: str, kept: int, shared: int) -> FeatureRows:
        ids = round(self.curve.rows)
        reach_K, taken_K = np.cumsum(self.curve.rows_K), np.cumsum(self.curve.lookups_K)
        apart = float(np.interp(kept, np.append(0.0, reach_K), np.append(0.0, taken_K))) / (self.curve.lookups or 1.0)
        lost = harm(self.curve, kept, shared)
        return FeatureRows(
            name, ids, kept, shared, self.curve.lookups, 1 - apart, lost, self.bytes(kept, shared), ids * self.row
        )


def _lower_hull(points_P4: Floats) -> list[_Point]:
    """From the cheapest point on, those below all lines between others, as far as harm falls."""
    points_P4 = points_P4[np.lexsort((points_P4[:, 1], points_P4[:, 0]))]
    lowest_P = np.minimum.accumulate(points_P4[:, 1])
    falls_P = np.append(True, points_P4[1:, 1] < lowest_P[:-1])
    hull: list[_Point] = []
    for bytes, lost, kept, shared in points_P4[falls_P]:
        point = _Point(float(bytes), float(lost), int(kept), int(shared))
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(here: _Point, there: _Point) -> float:
    """Lookups saved for a byte."""
    return (here.lost - there.lost) / (there.bytes - here.bytes)


def _descend(
    hulls: Mapping[str, list[_Point]], costs: Mapping[str, _Costs], budget: float
) -> tuple[dict[str, tuple[int, int]], float]:
    """The step that saves most for a byte, again and again. Slopes fall along a hull, so sorting all steps once will do."""
    at = {name: hull[0] for name, hull in hulls.items()}
    left = budget - sum(point.bytes for point in at.values())
    steps = [(_slope(a, b), name, a, b) for name, hull in hulls.items() for a, b in pairwise(hull)]
    price = 0.0
    for slope, name, here, there in sorted(steps, key=lambda step: -step[0]):
        if at[name] != here:
            continue  # a step of this feature before it was too large
        if there.bytes - here.bytes > left:
            price = price or slope
            there = _part_of_the_way(costs[name], here, there, left)
        left -= there.bytes - here.bytes
        at[name] = there
    return {name: (point.kept, point.shared) for name, point in at.items()}, price


def _part_of_the_way(cost: _Costs, here: _Point, there: _Point, left: float) -> _Point:
    """The best that `left` bytes buy between two points: more kept ids, more shared rows, or both; or nothing."""
    part = left / (there.bytes - here.bytes)
    ids = round(cost.curve.rows)
    ways = [(here.kept, here.shared + int(left / cost.row))]
    if cost.keep_hot:
        ways.append((here.kept + int(left / (cost.row + cost.id)), here.shared))
        ways.append((int(here.kept + part * (there.kept - here.kept)), int(here.shared + part * (there.shared - here.shared))))
    points = [cost.point(kept, shared) for kept, shared in ways if kept <= ids and (shared <= ids - kept or shared == 1)]
    return min([here, *points], key=lambda point: (point.lost, point.bytes))


# -- pruning --


def prune(
    heat: Mapping[str, TableHeat], seen: int = 1, row_bytes: Mapping[str, float] | float = 1.0, id_bytes: float = ID_BYTES
) -> Fewer:
    """No rows for ids that were seen at most `seen` times; each feature has one row for all of them.

    Of a table that outgrew exact counting the heavy hitters are kept that were surely seen more often.
    """
    if seen < 0:
        raise BadInput(f"seen is {seen}; 0 drops what was never looked up, 1 what was looked up once")
    features = []
    for name, table in heat.items():
        cost = _Costs(table.curve(), _of(row_bytes, name), id_bytes)
        often_H = table.counts_H > seen
        fallback = 1 - int(table.counts_H[often_H].sum()) / max(table.lookups, 1)  # the curve has averages only
        features.append(replace(cost.rows(name, int(often_H.sum()), 1), fallback=fallback))
    return Fewer(tuple(features))


# -- unified tables --


@dataclass(frozen=True)
class Column:
    """A feature with a table of its own, so far. Features whose ids mean the same thing name the same `space`."""

    name: str
    rows: int
    dim: int
    precision: str = "fp32"
    space: str | None = None


@dataclass(frozen=True)
class UnifiedTable:
    """One table for several features: `first` is the row that the ids of each begin at."""

    name: str
    rows: int
    dim: int
    precision: str
    first: dict[str, int]
    rows_before: int


@dataclass(frozen=True)
class Unified:
    """All tables after unification; those that stayed alone serve one feature."""

    tables: tuple[UnifiedTable, ...]
    saved: float  # bytes

    @property
    def launches_saved(self) -> int:
        """Lookups, and exchanges, fewer in a step, where every table is a module of its own."""
        return sum(len(table.first) - 1 for table in self.tables)


def unify(columns: Sequence[Column], row_bytes: Mapping[str, float] | float = 1.0, small: int = SMALL) -> Unified:
    """Features of one id space share their rows; features of at most `small` rows share a table, each with rows of its own.

    Only tables of one dimension and precision are joined. A shared space has as many rows as its largest feature.
    """
    groups: dict[tuple[str, int, str], list[Column]] = {}
    for column in columns:
        together = column.space or ("small" if column.rows <= small else column.name)
        groups.setdefault((together, column.dim, column.precision), []).append(column)
    names = [together for together, _, _ in groups]
    tables: list[UnifiedTable] = []
    saved = 0.0
    for (together, dim, precision), members in groups.items():
        name = together if names.count(together) == 1 else f"{together}_{precision}_{dim}"
        name = members[0].name if len(members) == 1 else name
        shares = members[0].space is not None
        sizes = [column.rows for column in members]
        first = dict.fromkeys((c.name for c in members), 0) if shares else _after_each_other(members)
        table = UnifiedTable(name, max(sizes) if shares else sum(sizes), dim, precision, first, sum(sizes))
        saved += (table.rows_before - table.rows) * max(_of(row_bytes, column.name) for column in members)
        tables.append(table)
    return Unified(tuple(tables), saved)


def _after_each_other(columns: Sequence[Column]) -> dict[str, int]:
    begins = np.cumsum([0, *(column.rows for column in columns)])
    return {column.name: int(begin) for column, begin in zip(columns, begins, strict=False)}


def _of(value: Mapping[str, float] | float, name: str) -> float:
    return value[name] if isinstance(value, Mapping) else value
