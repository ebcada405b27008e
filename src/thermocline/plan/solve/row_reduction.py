"""Row reduction: applies the requested levers to the tables before they are placed: prune, then hash, then unify.

Kept ids are a list or bitmap on *every* rank, so on 4,096 ranks a kept id costs 32 KiB unless rows are replicated too; hash
sizes count that and keep fewer ids. A table that a lever would not make smaller stays as it is, without a map.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from thermocline.errors import BadInput
from thermocline.heat.curve import Curve, edges
from thermocline.heat.profile import HeatProfile, Ints
from thermocline.plan.cost.collisions import harm, split_curve
from thermocline.plan.cost.heat_input import AccessStats, HeatInput, hottest_ids, row_stats
from thermocline.plan.cost.memory import state_bytes, tier_map_bytes
from thermocline.plan.cost.step_work import FINE_TABLES
from thermocline.plan.model import Lever
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.units import read_bytes

from .precisions import precisions_of, stored_bytes
from .row_levers import ID_BYTES, FeatureColumn, HashSizes, unify

COARSE_STEPS = 48  # of a curve, for hash sizes of many tables
_BLOCK = 512  # ids of a bitmap block

HashOrPrune = Literal["hash", "prune"]


@dataclass(frozen=True)
class ReductionOptions:
    """The requested levers. `hash` is a share of the bytes of all rows, or bytes, as 20e9 or "20GiB"."""

    prune: int | None = None
    hash: float | str | None = None
    unify: int | None = None

    def __post_init__(self) -> None:
        if self.prune is not None and self.prune < 0:
            message = f"prune is {self.prune}; use 0 to drop ids never seen, 1 to drop ids seen at most once"
            raise BadInput(message, parameter="prune", value=self.prune)
        if self.unify is not None and self.unify < 1:
            message = f"unify is {self.unify}; give the most rows of a table that may be joined, 1 or more"
            raise BadInput(message, parameter="unify", value=self.unify)

    def hash_bytes(self, total: float) -> float:
        """The byte budget of hash sizes, if all rows take `total` bytes."""
        assert self.hash is not None
        try:
            number = float(self.hash)
        except ValueError:
            return float(read_bytes(self.hash))
        if not number > 0:
            message = f'hash is {self.hash}; give a share of the bytes of all rows, as 0.125, or bytes, as "20GiB"'
            raise BadInput(message, parameter="hash", value=self.hash)
        return number * total if number <= 1 else number


class RowCut(NamedTuple):
    """The `kept` hottest ids have rows of their own, all others share `shared` rows."""

    kept: int
    shared: int

    @property
    def rows(self) -> int:
        return self.kept + self.shared


class ReducedTables(NamedTuple):
    """The reduced tables, their access statistics, the levers of each, and the given tables that each consists of."""

    tables: tuple[TableConfig, ...]
    stats: tuple[AccessStats, ...]
    levers: tuple[tuple[Lever, ...], ...]
    members: tuple[tuple[int, ...], ...]
    cuts: tuple[RowCut | None, ...]  # of the given tables


@dataclass(frozen=True)
class RowReducer:
    """The given tables, and the access statistics of their ids (not rows)."""

    tables: TablesConfig
    heat: HeatInput
    id_stats: tuple[AccessStats, ...]
    world_size: int
    budget: float  # bytes per GPU for tables
    trains: bool
    hash_sizes: dict[int | None, HashSizes] = field(default_factory=dict)  # cache, by the prune option

    def reduce(self, options: ReductionOptions) -> ReducedTables:
        """The tables after the levers."""
        kept = [None if options.prune is None else self._ids_above(table, options.prune) for table in self.tables.tables]
        hashed = self._hash_cuts(options, kept) if options.hash is not None else [None] * len(kept)
        tables, stats, levers, cuts = [], [], [], []
        for n, table in enumerate(self.tables.tables):
            done: list[Lever] = []
            cut = None
            pruned = None if kept[n] is None else RowCut(kept[n] or 0, 1)
            kinds: tuple[tuple[HashOrPrune, RowCut | None], ...] = (("prune", pruned), ("hash", hashed[n]))
            for kind, next_cut in kinds:
                before = cut.rows if cut else table.rows
                if next_cut is not None and next_cut.rows < before:
                    detail = f"{next_cut.kept:,} ids have rows of their own, the others share {next_cut.shared:,}"
                    done.append(_lever(table, before, next_cut, detail, kind, self._map_bytes(table, next_cut.kept)))
                    cut = next_cut
            found = self._stats_after(n, cut, done)
            if found.folded:
                detail = f"{found.folded:,} ids share {table.rows:,} rows"
                done = [_lever(table, found.folded, RowCut(0, table.rows), detail)]
            tables.append(table if cut is None else table.model_copy(update={"rows": cut.rows}))
            stats.append(found)
            levers.append(tuple(done))
            cuts.append(cut)
        one_each = tuple((n,) for n in range(len(tables)))
        reduced = ReducedTables(tuple(tables), tuple(stats), tuple(levers), one_each, tuple(cuts))
        return reduced if options.unify is None else _unified(reduced, options.unify)

    def loss(self, reduced: ReducedTables) -> float:
        """The predicted share of the effects of all lookups lost to collisions (`collisions.py`)."""
        each = zip(self.id_stats, reduced.cuts, strict=True)
        lost = sum(ids.per_sample * harm(ids.curve, *cut) for ids, cut in each if cut is not None and ids.curve.lookups)
        return lost / max(sum(ids.per_sample for ids in self.id_stats), 1e-9)

    def _ids_above(self, table: TableConfig, seen: int) -> int:
        """The number of ids of a table seen more than `seen` times."""
        if not isinstance(self.heat, HeatProfile):
            message = f"pruning ids seen at most {seen} times needs counts of ids; give a heat file (--heat FILE.tc)"
            raise BadInput(message, parameter="heat")
        return int((hottest_ids(self.heat, table.feature_names)[1] > seen).sum())

    def row_bytes(self) -> dict[str, float]:
        """Bytes of a row of each table in its best precision, with optimizer state."""
        optimizer = self.tables.optimizer if self.trains else None
        return {t.name: stored_bytes(1, t.dim, precisions_of(t)[0], state_bytes(t.dim, optimizer)) for t in self.tables.tables}

    def _hash_cuts(self, options: ReductionOptions, kept: Sequence[int | None]) -> list[RowCut | None]:
        """Hash sizes of all tables, among the ids that pruning has left."""
        tables, row_bytes = self.tables.tables, self.row_bytes()
        total = sum(table.rows * row_bytes[table.name] for table in tables)
        if options.prune not in self.hash_sizes:
            curves = {}
            for table, ids, most in zip(tables, self.id_stats, kept, strict=True):
                curve = ids.curve if most is None else split_curve(ids.curve, most)[0]
                curves[table.name] = curve if len(tables) <= FINE_TABLES else _coarser(curve, COARSE_STEPS)
            maps = 1 if total <= self.budget else self.world_size  # per copy of a row
            self.hash_sizes[options.prune] = HashSizes.of(curves, row_bytes, ID_BYTES * maps)  # a bitmap may be smaller
        found = self.hash_sizes[options.prune].within(options.hash_bytes(total))
        cuts: list[RowCut | None] = []
        for table, feature in zip(tables, found.features, strict=True):
            listed = feature.kept
            if isinstance(self.heat, HeatProfile):
                listed = len(hottest_ids(self.heat, table.feature_names)[0])
            unlisted = max(feature.kept - listed, 0)  # ids of a sketched tail are counted but not known
            cuts.append(RowCut(feature.kept - unlisted, feature.shared + unlisted))
        return cuts

    def _map_bytes(self, table: TableConfig, kept: int) -> int:
        """Bytes of the map of the kept ids: a list or a bitmap, whichever is smaller (as `ids/kept_ids.py`)."""
        span = table.rows  # unknown ids are taken to start at 0
        if isinstance(self.heat, HeatProfile) and kept:
            ids_H = hottest_ids(self.heat, table.feature_names)[0][:kept]
            span = int(ids_H.max()) - int(ids_H.min()) + 1 if len(ids_H) else 0
        return round(min(ID_BYTES * kept, tier_map_bytes(-(-span // _BLOCK) * _BLOCK)))

    def _stats_after(self, n: int, cut: RowCut | None, done: Sequence[Lever]) -> AccessStats:
        """The access statistics of the rows of a table."""
        ids = self.id_stats[n]
        if cut is None:
            return row_stats(ids, self.tables.tables[n].rows)
        kept, others = split_curve(ids.curve, cut.kept)
        shared = row_stats(ids._replace(curve=others), cut.shared).curve  # hot ids make hot shared rows
        return ids._replace(curve=_merge_curves([kept, shared]), id_map_bytes=done[-1].map)


def _lever(table: TableConfig, rows: int, cut: RowCut, detail: str, kind: HashOrPrune = "hash", map: int = 0) -> Lever:
    """Salted with the table's name, so that tables that hash the same ids do not collide alike."""
    salt, (kept, shared) = zlib.crc32(table.name.encode()), cut
    features = table.feature_names
    return Lever(kind=kind, features=features, rows=rows, kept=kept, shared=shared, salt=salt, map=map, detail=detail)


def _merge_curves(curves: Sequence[Curve]) -> Curve:
    """The rows of several curves as one curve, hottest first."""
    rows_K = np.concatenate([curve.rows_K for curve in curves])
    lookups_K = np.concatenate([curve.lookups_K for curve in curves])
    order = np.argsort(-lookups_K / rows_K, kind="stable")
    return Curve(rows_K[order], lookups_K[order])


def _coarser(curve: Curve, steps: int) -> Curve:
    """The same curve with neighbouring steps joined, to at most `steps`."""
    if len(curve.rows_K) <= steps:
        return curve
    return _join_steps(curve, np.unique(np.linspace(0, len(curve.rows_K), steps + 1).astype(np.int64))[:-1])


# -- unified tables --


def _unified(reduced: ReducedTables, small: int) -> ReducedTables:
    """Joins small tables of one kind; the joined table takes the place of the first."""
    kinds = [str((table.pooling, table.precision, table.cache)) for table in reduced.tables]
    columns = [
        FeatureColumn(table.name, table.rows, table.dim, kind) for table, kind in zip(reduced.tables, kinds, strict=True)
    ]
    at = {table.name: n for n, table in enumerate(reduced.tables)}
    tables, stats, levers, members = [], [], [], []
    taken = set(at)
    for one in unify(columns, small=small).tables:
        parts = tuple(at[name] for name in one.first)
        table, done = reduced.tables[parts[0]], list(reduced.levers[parts[0]])
        if len(parts) > 1:
            done = []
            for n, offset in zip(parts, one.first.values(), strict=True):
                part = reduced.tables[n]
                detail = f"{part.name}: rows {offset:,} to {offset + part.rows - 1:,}"
                lever = Lever(kind="unify", features=part.feature_names, rows=part.rows, offset=offset, detail=detail)
                done += [*reduced.levers[n], lever]
            features = tuple(feature for n in parts for feature in reduced.tables[n].feature_names)
            name = _unused_name(f"small_{table.dim}_{table.pooling}", taken)
            table = table.model_copy(update={"name": name, "rows": one.rows, "features": features, "lookups": None})
        tables.append(table)
        stats.append(_joined_stats([reduced.stats[n] for n in parts]))
        levers.append(tuple(done))
        members.append(parts)
    return ReducedTables(tuple(tables), tuple(stats), tuple(levers), tuple(members), reduced.cuts)


def _unused_name(wanted: str, taken: set[str]) -> str:
    name, n = wanted, 2
    while name in taken:
        name, n = f"{wanted}_{n}", n + 1
    taken.add(name)
    return name


def _joined_stats(parts: Sequence[AccessStats]) -> AccessStats:
    """The statistics of joined tables: their curves, scaled to the same number of samples, as one."""
    if len(parts) == 1:
        return parts[0]
    per_sample = sum(part.per_sample for part in parts)
    samples = sum(part.curve.lookups for part in parts) / max(per_sample, 1e-300)
    scales = [part.per_sample * samples / max(part.curve.lookups, 1e-300) for part in parts]
    curves = [Curve(part.curve.rows_K, part.curve.lookups_K * scale) for part, scale in zip(parts, scales, strict=True)]
    return AccessStats(_rebinned(_merge_curves(curves)), per_sample, id_map_bytes=sum(part.id_map_bytes for part in parts))


def _rebinned(curve: Curve) -> Curve:
    """Steps of several curves joined to about the steps that one curve of all rows has."""
    before_K = np.cumsum(curve.rows_K) - curve.rows_K
    step_K = np.searchsorted(edges(round(curve.rows)), before_K + 0.5)
    return _join_steps(curve, np.flatnonzero(np.diff(step_K, prepend=-1)))


def _join_steps(curve: Curve, at: Ints) -> Curve:
    """The same curve with its steps joined from each of the positions `at` to the next."""
    return Curve(np.add.reduceat(curve.rows_K, at), np.add.reduceat(curve.lookups_K, at))
