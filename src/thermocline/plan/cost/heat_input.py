"""Access statistics of every table: the heat curve over all its rows, and the lookups per sample.

A log is a sample: lookups are moved from rows seen once to unseen rows, and lookups per sample are those of its last three
eighths (docs/planner.md has the reasons and the errors).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from thermocline.errors import BadInput
from thermocline.heat.curve import Curve
from thermocline.heat.profile import HeatProfile, Ints, TableHeat, add_up
from thermocline.plan.tables import TableConfig

from .step_cost import INDEPENDENT, BagLengths, Cluster, EffectiveShare, request_probability

HeatInput = HeatProfile | Mapping[str, Curve]
_WAY_OUT = "profile its column, or name the table's features in the tables file"
LENGTHS = 32  # groups of bag lengths
_ONE_RANK = Cluster(1, 1, 1.0, 1.0, 1.0)


class AccessStats(NamedTuple):
    """How one table is accessed: its rows by heat (rows never seen as the last step), and lookups per sample."""

    curve: Curve
    per_sample: float
    folded: int = 0  # ids seen, if they are more than the rows and share them
    repeats: tuple[tuple[float, float], ...] = ()  # (samples of a batch, share of its lookups that counts as independent)
    id_map_bytes: int = 0  # on every rank
    unseen: int = 0  # rows that the log has not shown
    rare: tuple[int, int] = (0, 0)  # rows seen once and twice
    lengths: BagLengths = ()  # of bags

    def effective_share(self, batch: int, gpus_per_node: int, nodes: int) -> EffectiveShare:
        """The share of independent lookups in the batches of a rank, a node and the cluster, interpolated in log(samples)."""
        if not self.repeats:
            return INDEPENDENT
        sizes, shares = np.array(self.repeats).T
        batches = [batch, batch * gpus_per_node, batch * gpus_per_node * nodes]
        rank, node, any_ = np.interp(np.log(batches), np.log(sizes), shares)
        node = max(node, rank / gpus_per_node)
        return EffectiveShare(float(rank), float(node), float(max(any_, node / nodes)))


def row_stats_of(heat: HeatInput, table: TableConfig, shuffled: bool = False) -> AccessStats:
    """The statistics of the rows of one table, of all its features together. `shuffled`: batches repeat ids only by chance."""
    return row_stats(id_stats_of(heat, table, shuffled), table.rows)


def id_stats_of(heat: HeatInput, table: TableConfig, shuffled: bool = False) -> AccessStats:
    """The statistics of the ids that look up one table, for any number of rows."""
    if not isinstance(heat, HeatProfile):
        lookups = float(len(table.feature_names)) if table.lookups is None else table.lookups
        return AccessStats(_given_curve(heat, table), lookups)
    if missing := [name for name in table.feature_names if name not in heat.tables]:
        counted = f"the heat file has not counted; it has {', '.join(heat.tables)}"
        message = f"table {table.name!r} is looked up by {', '.join(missing)}, which {counted}: {_WAY_OUT}"
        raise BadInput(message, table=table.name, missing=tuple(missing))
    parts = [heat.tables[name] for name in table.feature_names]
    curve, rare = _joint_curve(heat, parts)
    repeats: tuple[tuple[float, float], ...] = ()
    if len(parts) == 1 and not shuffled:
        complete = with_unseen(curve, table.rows, rare) if round(curve.rows) < table.rows else curve
        repeats = effective_shares(parts[0], complete)
    per_sample = sum(part.per_sample if shuffled else part.recent for part in parts)
    lookups = per_sample if table.lookups is None else table.lookups
    return AccessStats(curve, lookups, repeats=repeats, rare=rare, lengths=_bag_lengths(parts))


def _bag_lengths(parts: Sequence[TableHeat]) -> BagLengths:
    """Lengths of the bags of all features and the share of the bags with each; of many lengths, means of equal shares."""
    length_L = np.concatenate([part.lengths_L for part in parts]).astype(np.float64)
    bags_L = np.concatenate([part.bags_L for part in parts]).astype(np.float64)
    order = np.argsort(length_L, kind="stable")
    length_L, bags_L = length_L[order], bags_L[order]
    if not bags_L.sum():
        return ()
    reach_L = np.cumsum(bags_L) / bags_L.sum()
    group_L = np.minimum(((reach_L - 0.5 * bags_L / bags_L.sum()) * LENGTHS).astype(np.int64), LENGTHS - 1)
    share_G = np.bincount(group_L, bags_L, minlength=LENGTHS)
    mean_G = np.bincount(group_L, bags_L * length_L, minlength=LENGTHS) / np.maximum(share_G, 1e-300)
    return tuple((float(mean), float(share)) for mean, share in zip(mean_G, share_G / bags_L.sum(), strict=True) if share)


def row_stats(ids: AccessStats, rows: int) -> AccessStats:
    """The statistics of the rows of a table, from those of its ids: some rows were never seen, or ids share rows."""
    seen = round(ids.curve.rows)
    if seen > rows:
        return ids._replace(curve=fold(ids.curve, rows), folded=seen)
    if seen < rows:
        return ids._replace(curve=with_unseen(ids.curve, rows, ids.rare), unseen=rows - seen)
    return ids


def with_unseen(curve: Curve, rows: int, rare: tuple[int, int]) -> Curve:
    """The curve of a table with more rows than were seen; `rare` are the rows seen once and twice."""
    left = rows - round(curve.rows)
    once, twice = rare
    some = round(min(left, once * once / max(2 * twice, 1)))
    # An unseen row must not be hotter than a row seen once: tiers count from the hottest row of the heat file.
    discount = min(once / (once + 2 * twice), some / (some + curve.rows)) if some else 0.0
    rows_K = np.append(curve.rows_K, [some, left - some])
    lookups_K = np.append(curve.lookups_K - discount * curve.rows_K, [discount * curve.rows, 0.0])
    return Curve(rows_K[rows_K > 0], lookups_K[rows_K > 0])


def effective_shares(table: TableHeat, curve: Curve) -> tuple[tuple[float, float], ...]:
    """For each counted batch size: the share of independent lookups that has as many distinct ids."""
    found = []
    for batch in sorted(table.batches):
        lookups = table.per_sample * batch.size
        distinct = lookups * (1 - batch.repeats / max(batch.lookups, 1))
        low, high = 0.0, 1.0
        for _ in range(40):
            share = (low + high) / 2
            expected = float((curve.rows_K * request_probability(curve.share_K, share * lookups, _ONE_RANK).rank).sum())
            low, high = (low, share) if expected > distinct else (share, high)
        found.append((float(batch.size), high))
    return tuple(found)


def _given_curve(heat: Mapping[str, Curve], table: TableConfig) -> Curve:
    found = [heat[name] for name in (table.name, *table.feature_names) if name in heat]
    if not found:
        features, there = ", ".join(table.feature_names), ", ".join(sorted(heat)) or "none"
        message = f"heat has no curve for table {table.name!r} (features {features}); it has {there}: {_WAY_OUT}"
        raise BadInput(message, table=table.name)
    return found[0]


def hottest_ids(heat: HeatProfile, features: Sequence[str]) -> tuple[Ints, Ints]:
    """Ids that look up a table, with counts summed over its features: hottest first, ties by id."""
    parts = [heat[name] for name in features]
    if len(parts) == 1:
        return parts[0].ids_H, parts[0].counts_H
    return add_up(np.concatenate([part.ids_H for part in parts]), np.concatenate([part.counts_H for part in parts]))


def _joint_curve(heat: HeatProfile, parts: list[TableHeat]) -> tuple[Curve, tuple[int, int]]:
    """One curve of all features of a table, whose equal ids are one row; and the rows seen once and twice, if exact."""
    _, counts_H = hottest_ids(heat, [part.name for part in parts])
    if all(part.exact for part in parts):
        return Curve.of_counts(counts_H), (int((counts_H == 1).sum()), int((counts_H == 2).sum()))
    if len(parts) == 1:
        return parts[0].curve(), (0, 0)
    rows = max(max(p.distinct for p in parts), len(counts_H))
    return Curve.with_tail(counts_H, rows, sum(p.lookups for p in parts)), (0, 0)


def fold(curve: Curve, rows: int) -> Curve:
    """An estimate of the curve after hashing ids to fewer rows: the hottest keep their heat, the others are spread evenly."""
    before_K = np.cumsum(curve.rows_K) - curve.rows_K
    rows_K = np.clip(rows - before_K, 0.0, curve.rows_K)
    kept = rows_K > 0
    lookups_K = curve.lookups_K * rows_K / curve.rows_K
    spread = (curve.lookups - lookups_K.sum()) / rows
    return Curve(rows_K[kept], lookups_K[kept] + spread * rows_K[kept])
