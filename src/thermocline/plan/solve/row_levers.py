"""Levers that reduce the rows of features before sharding, decided from heat, with the bytes that they save (docs/levers.md).

Hash sizes: the choices (kept, shared) of one feature are points (bytes, loss); only those on the lower convex hull are
optimal for some price of a byte. From the cheapest point of every feature, the step with the largest reduction per byte is
taken until the budget is spent; the last in part. With `row_bytes=1, id_bytes=0` bytes are rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from thermocline.errors import BadInput
from thermocline.heat.curve import Curve
from thermocline.heat.profile import TableHeat
from thermocline.plan.cost.collisions import Floats, harm, harms

ID_BYTES = 8.0  # of a kept id in a sorted list
_SIZES, _SIZES_ALONE = 24, 96  # numbers of shared rows that are tried, with kept ids and without
SMALL = 1 << 14  # most rows of a table that is joined with others


@dataclass(frozen=True)
class FeatureRows:
    """The rows of one feature: one for each of its `kept` hottest ids, and `shared` rows to which all others are hashed."""

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


@dataclass(frozen=True)
class ReducedRows:
    """The rows of all features after a lever."""

    features: tuple[FeatureRows, ...]

    @property
    def bytes(self) -> float:
        return sum(feature.bytes for feature in self.features)

    @property
    def saved(self) -> float:
        """Bytes saved against one row per id."""
        return sum(feature.bytes_before - feature.bytes for feature in self.features)

    @property
    def rows(self) -> int:
        return sum(feature.rows for feature in self.features)

    @property
    def harm(self) -> float:
        """Share of the effects of all lookups lost to collisions."""
        return self._mean("harm")

    @property
    def fallback(self) -> float:
        """Share of all lookups that use shared rows."""
        return self._mean("fallback")

    def _mean(self, field: str) -> float:
        lookups = sum(feature.lookups for feature in self.features)
        return float(sum(getattr(feature, field) * feature.lookups for feature in self.features) / max(lookups, 1.0))

    def __getitem__(self, name: str) -> FeatureRows:
        return next(feature for feature in self.features if feature.name == name)


# -- hash sizes --


def hash_sizes(
    curves: Mapping[str, Curve],
    budget: float,
    row_bytes: Mapping[str, float] | float = 1.0,
    id_bytes: float = ID_BYTES,
    keep_hot: bool = True,
) -> ReducedRows:
    """Choose the rows of each feature with the least loss by collisions for a budget of bytes.

    Args:
        curves: Heat curve of each feature.
        budget: Bytes of all rows and maps together.
        row_bytes: Bytes of a row, for all features or by name.
        id_bytes: Bytes of a kept id in the map.
        keep_hot: Whether hot ids may have rows of their own. False gives plain hashes.

    Returns:
        Kept and shared rows of each feature, with the predicted loss (`harm`) and the bytes.

    Raises:
        BadInput: The budget is below one row per feature.

    Example::

        hash_sizes(profile.curves(), budget=20e9, row_bytes=136).harm
    """
    return HashSizes.of(curves, row_bytes, id_bytes, keep_hot).within(budget)


@dataclass(frozen=True)
class HashSizes:
    """The optimal choices of every feature, computed once for any budget."""

    costs: Mapping[str, _FeatureCost]
    hulls: Mapping[str, list[_Point]]

    @classmethod
    def of(
        cls, curves: Mapping[str, Curve], row_bytes: Mapping[str, float] | float, id_bytes: float, keep_hot: bool = True
    ) -> HashSizes:
        costs = {name: _FeatureCost(curve, _of(row_bytes, name), id_bytes, keep_hot) for name, curve in curves.items()}
        return cls(costs, {name: cost.hull() for name, cost in costs.items()})

    def within(self, budget: float) -> ReducedRows:
        """The rows of each feature for a budget of bytes."""
        least = sum(cost.row for cost in self.costs.values())
        if budget < least:
            message = (
                f"the budget is {budget:.0f} bytes, but {len(self.costs)} features with one row each take {least:.0f} bytes: "
                "raise the budget, or drop features"
            )
            raise BadInput(message, parameter="budget", available=budget, needed=least)
        chosen = _descend(self.hulls, self.costs, budget)
        return ReducedRows(tuple(cost.rows(name, chosen[name].kept, chosen[name].shared) for name, cost in self.costs.items()))


class _Point(NamedTuple):
    """One choice: its bytes, and its loss in lookups."""

    bytes: float
    lost: float
    kept: int
    shared: int


@dataclass(frozen=True)
class _FeatureCost:
    """The costs of the choices of one feature."""

    curve: Curve
    row: float
    id: float
    keep_hot: bool = True

    def bytes(self, kept: int, shared: int) -> float:
        return kept * (self.row + self.id) + shared * self.row

    def point(self, kept: int, shared: int) -> _Point:
        return _Point(self.bytes(kept, shared), harm(self.curve, kept, shared) * self.curve.lookups, kept, shared)

    def hull(self) -> list[_Point]:
        """The choices that are optimal at some price, cheapest first."""
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
        useful_KN = (shared_KN <= ids - kept_KN) | (shared_KN == 1)  # no more shared rows than ids that share them
        bytes_KN = kept_KN * (self.row + self.id) + shared_KN * self.row
        points = np.stack([bytes_KN, lost_KN, kept_KN, shared_KN], axis=-1)[useful_KN]
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
    """The lower convex hull from the cheapest point on, while the loss falls."""
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
    """Lookups saved per byte."""
    return (here.lost - there.lost) / (there.bytes - here.bytes)


def _descend(hulls: Mapping[str, list[_Point]], costs: Mapping[str, _FeatureCost], budget: float) -> dict[str, _Point]:
    """Takes the steps with the largest reduction per byte. Slopes fall along a hull, so all steps are sorted once."""
    at = {name: hull[0] for name, hull in hulls.items()}
    left = budget - sum(point.bytes for point in at.values())
    steps = [(_slope(a, b), name, a, b) for name, hull in hulls.items() for a, b in pairwise(hull)]
    for _, name, here, there in sorted(steps, key=lambda step: -step[0]):
        if at[name] != here:
            continue  # an earlier step of this feature did not fit
        if there.bytes - here.bytes > left:
            there = _part_of_the_way(costs[name], here, there, left)
        left -= there.bytes - here.bytes
        at[name] = there
    return at


def _part_of_the_way(cost: _FeatureCost, here: _Point, there: _Point, left: float) -> _Point:
    """The best use of `left` bytes between two points: more kept ids, more shared rows, both, or neither."""
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
) -> ReducedRows:
    """Drop the rows of ids seen at most `seen` times; each feature has one row for all of them.

    Args:
        heat: Heat of each feature.
        seen: Ids seen at most this often lose their row; 0 drops ids never seen.
        row_bytes: Bytes of a row, for all features or by name.
        id_bytes: Bytes of a kept id in the map.

    Returns:
        Kept rows of each feature. A sketched table keeps the heavy hitters that were surely seen more often.

    Raises:
        BadInput: `seen` is negative.

    Example::

        prune(profile.tables, seen=1, row_bytes=136).saved
    """
    if seen < 0:
        message = f"seen is {seen}; use 0 to drop ids never looked up, 1 to drop ids looked up once"
        raise BadInput(message, parameter="seen", value=seen)
    features = []
    for name, table in heat.items():
        cost = _FeatureCost(table.curve(), _of(row_bytes, name), id_bytes)
        often_H = table.counts_H > seen
        fallback = 1 - int(table.counts_H[often_H].sum()) / max(table.lookups, 1)  # exact: the curve has averages
        features.append(replace(cost.rows(name, int(often_H.sum()), 1), fallback=fallback))
    return ReducedRows(tuple(features))


# -- unified tables --


@dataclass(frozen=True)
class FeatureColumn:
    """A feature with a table of its own.

    Args:
        name: Name of the feature.
        rows: Rows of its table.
        dim: Columns of a row.
        precision: Precision of the rows.
        space: Name of the id space, which features whose ids mean the same thing share.

    Example::

        columns = [FeatureColumn("seen", 50_000, 16, space="item"), FeatureColumn("bought", 40_000, 16, space="item")]
    """

    name: str
    rows: int
    dim: int
    precision: str = "fp32"
    space: str | None = None


@dataclass(frozen=True)
class UnifiedTable:
    """One table for several features: `first` is the first row of each feature."""

    name: str
    rows: int
    dim: int
    precision: str
    first: dict[str, int]


@dataclass(frozen=True)
class Unified:
    """All tables after unification; a table that was not joined serves one feature."""

    tables: tuple[UnifiedTable, ...]
    saved: float  # bytes

    @property
    def launches_saved(self) -> int:
        """Fewer lookups and exchanges per step, if every table is a module of its own."""
        return sum(len(table.first) - 1 for table in self.tables)


def unify(columns: Sequence[FeatureColumn], row_bytes: Mapping[str, float] | float = 1.0, small: int = SMALL) -> Unified:
    """Join features into shared tables.

    Features of one id space share rows; features of at most `small` rows share a table, each with rows of its own. Only tables
    of equal dimension and precision are joined. A shared space has the rows of its largest feature.

    Args:
        columns: The features, each with its own table.
        row_bytes: Bytes of a row, for all features or by name.
        small: Most rows of a table that is joined with others.

    Returns:
        The joined tables, the first row of each feature in its table, and the bytes saved.

    Example::

        unify([FeatureColumn("country", 200, 16), FeatureColumn("device", 40, 16)]).tables
    """
    groups: dict[tuple[str, int, str], list[FeatureColumn]] = {}
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
        begins = [0] * len(members) if shares else accumulate(sizes, initial=0)
        first = {column.name: begin for column, begin in zip(members, begins, strict=False)}
        rows = max(sizes) if shares else sum(sizes)
        saved += (sum(sizes) - rows) * max(_of(row_bytes, column.name) for column in members)
        tables.append(UnifiedTable(name, rows, dim, precision, first))
    return Unified(tuple(tables), saved)


def _of(value: Mapping[str, float] | float, name: str) -> float:
    return value[name] if isinstance(value, Mapping) else value
