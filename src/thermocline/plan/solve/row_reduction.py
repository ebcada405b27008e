"""Levers pulled before tables are placed: which ids keep a row, how many rows the others share, which tables become one.

A lever changes what a model learns, so it is pulled only where it was asked for:

    prune=1          no rows for ids seen at most once: they share one row a table
    hash=0.125       rows by heat within an eighth of the bytes of all rows (or within "20GiB"), by `levers.Sizes`
    unify=4096       tables of at most so many rows, of one dimension, pooling and precision, become one

They follow each other in this order: ids that were pruned are never kept by the hash, and tables are as small as both left
them when they are joined. Features of one table share an id space, so their counts are added up first.

**Maps.** Kept ids are a list or a bitmap on *every* card. Where all rows fit on every card too, an id costs 8 bytes beside each
copy of its row. Where they do not, most rows are in the cluster once, and a kept id costs 32 KiB of 4,096 cards: hash sizes
count that, keep fewer ids and hash the rest.

A table of which no fewer rows would be left stays as it is, without a map.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from thermocline.errors import BadInput
from thermocline.heat.curve import Curve, edges
from thermocline.heat.profile import HeatProfile
from thermocline.plan.cost.collisions import harm
from thermocline.plan.cost.heat_input import HeatOfTables, Seen, hottest, over_rows
from thermocline.plan.cost.memory import state_bytes, tier_map_bytes
from thermocline.plan.cost.step_work import FINE_TABLES
from thermocline.plan.model import Lever
from thermocline.plan.tables import TableFile, Tables
from thermocline.plan.units import read_bytes

from .precisions import ladder_of, stored_bytes
from .row_levers import ID_BYTES, Column, Sizes, unify

COARSE = 48  # steps of a curve that hash sizes look at where tables are many
_BLOCK = 512  # ids of a block of a bitmap


@dataclass(frozen=True)
class Asked:
    """The levers that were asked for. `hash` is a share of the bytes of all rows, or bytes, as 20e9 or "20GiB"."""

    prune: int | None = None
    hash: float | str | None = None
    unify: int | None = None

    def __post_init__(self) -> None:
        if self.prune is not None and self.prune < 0:
            raise BadInput(f"prune is {self.prune}; 0 drops ids that were never seen, 1 those seen at most once")
        if self.unify is not None and self.unify < 1:
            raise BadInput(f"unify is {self.unify}; it is the most rows that a table may have to become a part of another")

    def hash_bytes(self, whole: float) -> float:
        """The bytes that hash sizes may take, of `whole` that all rows take."""
        assert self.hash is not None
        try:
            number = float(self.hash)
        except ValueError:
            return float(read_bytes(self.hash))
        if not number > 0:
            raise BadInput(f'hash is {self.hash}; it is a share of the bytes of all rows, as 0.125, or bytes, as "20GiB"')
        return number * whole if number <= 1 else number


class Cut(NamedTuple):
    """The `kept` hottest ids have rows of their own, all others share `shared`."""

    kept: int
    shared: int

    @property
    def rows(self) -> int:
        return self.kept + self.shared


class Pulled(NamedTuple):
    """The tables that are left, their heat, what was done to each, and which of the tables given each is made of."""

    tables: tuple[TableFile, ...]
    seen: tuple[Seen, ...]
    levers: tuple[tuple[Lever, ...], ...]
    members: tuple[tuple[int, ...], ...]
    cuts: tuple[Cut | None, ...]  # of the tables given


@dataclass(frozen=True)
class Puller:
    """The tables as they were given, and the heat of their ids (not of their rows)."""

    tables: Tables
    heat: HeatOfTables
    ids: tuple[Seen, ...]
    cards: int
    room: float  # bytes of a card for tables
    trains: bool
    sizes: dict[int | None, Sizes] = field(default_factory=dict)  # by what was pruned before: worked out once

    def pull(self, asked: Asked) -> Pulled:
        """The tables after the levers."""
        kept = [None if asked.prune is None else self._often(table, asked.prune) for table in self.tables.tables]
        hashed = self._hashed(asked, kept) if asked.hash is not None else [None] * len(kept)
        tables, seen, levers, cuts = [], [], [], []
        for n, table in enumerate(self.tables.tables):
            done: list[Lever] = []
            cut = None
            pruned = None if kept[n] is None else Cut(kept[n] or 0, 1)
            for kind, next_cut in _kinds(pruned, hashed[n]):
                if next_cut.rows < (cut.rows if cut else table.rows):
                    done.append(self._lever(kind, table, cut.rows if cut else table.rows, next_cut))
                    cut = next_cut
            found = self._after(n, cut, done)
            if found.folded:
                said = f"{found.folded:,} ids share {table.rows:,} rows"
                done = [_hash(table, rows=found.folded, shared=table.rows, detail=said)]
            tables.append(table if cut is None else table.model_copy(update={"rows": cut.rows}))
            seen.append(found)
            levers.append(tuple(done))
            cuts.append(cut)
        one = tuple((n,) for n in range(len(tables)))
        pulled = Pulled(tuple(tables), tuple(seen), tuple(levers), one, tuple(cuts))
        return pulled if asked.unify is None else _unified(pulled, asked.unify)

    def harm(self, pulled: Pulled) -> float:
        """The share of the effects of all lookups that collisions would take, as `collisions.py` predicts it."""
        each = zip(self.ids, pulled.cuts, strict=True)
        lost = sum(ids.per_sample * harm(ids.curve, *cut) for ids, cut in each if cut is not None and ids.curve.lookups)
        return lost / max(sum(ids.per_sample for ids in self.ids), 1e-9)

    def _often(self, table: TableFile, seen: int) -> int:
        """How many ids of a table were seen more than so often."""
        if not isinstance(self.heat, HeatProfile):
            raise BadInput(f"pruning ids seen at most {seen} times needs counts of ids; give a heat file (--heat FILE.tc)")
        return int((hottest(self.heat, table.looked_up_by)[1] > seen).sum())

    def row_bytes(self) -> dict[str, float]:
        """What a row of each table takes in its best precision, with optimizer state."""
        optimizer = self.tables.optimizer if self.trains else None
        return {t.name: stored_bytes(1, t.dim, ladder_of(t)[0], state_bytes(t.dim, optimizer)) for t in self.tables.tables}

    def _hashed(self, asked: Asked, kept: Sequence[int | None]) -> list[Cut | None]:
        """Hash sizes of all tables, among the ids that pruning has left."""
        tables, rows = self.tables.tables, self.row_bytes()
        whole = sum(table.rows * rows[table.name] for table in tables)
        if asked.prune not in self.sizes:
            curves = {}
            for table, ids, most in zip(tables, self.ids, kept, strict=True):
                curve = ids.curve if most is None else _apart(ids.curve, most)[0]
                curves[table.name] = curve if len(tables) <= FINE_TABLES else _coarser(curve, COARSE)
            maps = 1 if whole <= self.room else self.cards  # beside each copy of a row
            self.sizes[asked.prune] = Sizes.of(curves, rows, ID_BYTES * maps)  # of a list; a bitmap may turn out smaller
        found = self.sizes[asked.prune].within(asked.hash_bytes(whole))
        cuts: list[Cut | None] = []
        for table, feature in zip(tables, found.features, strict=True):
            listed = len(hottest(self.heat, table.looked_up_by)[0]) if isinstance(self.heat, HeatProfile) else feature.kept
            beyond = max(feature.kept - listed, 0)  # ids of a sketched tail: how many there are is known, not which
            cuts.append(Cut(feature.kept - beyond, feature.shared + beyond))
        return cuts

    def _map(self, table: TableFile, kept: int) -> int:
        """Bytes of the map that keeps the hottest ids: of a list or a bitmap, whichever is smaller (as `ids/kept_ids.py`)."""
        span = table.rows  # of ids that are not known: from 0 on
        if isinstance(self.heat, HeatProfile) and kept:
            ids_H = hottest(self.heat, table.looked_up_by)[0][:kept]
            span = int(ids_H.max()) - int(ids_H.min()) + 1 if len(ids_H) else 0
        return round(min(ID_BYTES * kept, tier_map_bytes(-(-span // _BLOCK) * _BLOCK)))

    def _lever(self, kind: Literal["hash", "prune"], table: TableFile, rows: int, cut: Cut) -> Lever:
        said = f"{cut.kept:,} ids have rows of their own, the others share {cut.shared:,}"
        lever = _hash(table, rows=rows, shared=cut.shared, detail=said)
        return lever.model_copy(update={"kind": kind, "kept": cut.kept, "map": self._map(table, cut.kept)})

    def _after(self, n: int, cut: Cut | None, done: Sequence[Lever]) -> Seen:
        """The heat of a table's rows."""
        ids = self.ids[n]
        if cut is None:
            return over_rows(ids, self.tables.tables[n].rows)
        kept, others = _apart(ids.curve, cut.kept)
        shared = over_rows(ids._replace(curve=others), cut.shared).curve  # hot ids make hot rows of those, too
        return ids._replace(curve=_falling([kept, shared]), map=done[-1].map)


def _kinds(pruned: Cut | None, hashed: Cut | None) -> list[tuple[Literal["hash", "prune"], Cut]]:
    found: list[tuple[Literal["hash", "prune"], Cut]] = []
    if pruned is not None:
        found.append(("prune", pruned))
    if hashed is not None:
        found.append(("hash", hashed))
    return found


def _hash(table: TableFile, rows: int, shared: int, detail: str) -> Lever:
    """Salted by the table's name: tables that hash the same ids do not collide alike."""
    salt = zlib.crc32(table.name.encode())
    return Lever(kind="hash", features=table.looked_up_by, rows=rows, shared=shared, salt=salt, detail=detail)


def _apart(curve: Curve, rows: float) -> tuple[Curve, Curve]:
    """The hottest rows of a curve, and the others."""
    hot_K = np.clip(rows - (np.cumsum(curve.rows_K) - curve.rows_K), 0.0, curve.rows_K)
    parts = []
    for rows_K in (hot_K, curve.rows_K - hot_K):
        some_K = rows_K > 0
        parts.append(Curve(rows_K[some_K], (curve.lookups_K * rows_K / curve.rows_K)[some_K]))
    return parts[0], parts[1]


def _falling(curves: Sequence[Curve]) -> Curve:
    """Rows of several curves as one, hottest first."""
    rows_K = np.concatenate([curve.rows_K for curve in curves])
    lookups_K = np.concatenate([curve.lookups_K for curve in curves])
    order = np.argsort(-lookups_K / rows_K, kind="stable")
    return Curve(rows_K[order], lookups_K[order])


def _coarser(curve: Curve, steps: int) -> Curve:
    """The same curve with neighbouring steps joined, to so many at most."""
    if len(curve.rows_K) <= steps:
        return curve
    at = np.unique(np.linspace(0, len(curve.rows_K), steps + 1).astype(np.int64))[:-1]
    return Curve(np.add.reduceat(curve.rows_K, at), np.add.reduceat(curve.lookups_K, at))


# -- unified tables --


def _unified(pulled: Pulled, small: int) -> Pulled:
    """Small tables of one kind as one table each: the first keeps the place, the others are gone."""
    kinds = [str((table.pooling, table.precision, table.cache)) for table in pulled.tables]
    columns = [Column(table.name, table.rows, table.dim, kind) for table, kind in zip(pulled.tables, kinds, strict=True)]
    at = {table.name: n for n, table in enumerate(pulled.tables)}
    tables, seen, levers, members = [], [], [], []
    taken = set(at)
    for one in unify(columns, small=small).tables:
        parts = tuple(at[name] for name in one.first)
        table, done = pulled.tables[parts[0]], list(pulled.levers[parts[0]])
        if len(parts) > 1:
            done = []
            for n, offset in zip(parts, one.first.values(), strict=True):
                part = pulled.tables[n]
                said = f"{part.name}: rows {offset:,} to {offset + part.rows - 1:,}"
                lever = Lever(kind="unify", features=part.looked_up_by, rows=part.rows, offset=offset, detail=said)
                done += [*pulled.levers[n], lever]
            features = tuple(feature for n in parts for feature in pulled.tables[n].looked_up_by)
            named = _new_name(f"small_{table.dim}_{table.pooling}", taken)
            table = table.model_copy(update={"name": named, "rows": one.rows, "features": features, "lookups": None})
        tables.append(table)
        seen.append(_joined([pulled.seen[n] for n in parts]))
        levers.append(tuple(done))
        members.append(parts)
    return Pulled(tuple(tables), tuple(seen), tuple(levers), tuple(members), pulled.cuts)


def _new_name(wanted: str, taken: set[str]) -> str:
    name, n = wanted, 2
    while name in taken:
        name, n = f"{wanted}_{n}", n + 1
    taken.add(name)
    return name


def _joined(parts: Sequence[Seen]) -> Seen:
    """The heat of tables that become one: every curve in the same number of samples, and its rows among the others'."""
    if len(parts) == 1:
        return parts[0]
    per_sample = sum(part.per_sample for part in parts)
    samples = sum(part.curve.lookups for part in parts) / max(per_sample, 1e-300)
    scales = [part.per_sample * samples / max(part.curve.lookups, 1e-300) for part in parts]
    curves = [Curve(part.curve.rows_K, part.curve.lookups_K * scale) for part, scale in zip(parts, scales, strict=True)]
    return Seen(_evened(_falling(curves)), per_sample, map=sum(part.map for part in parts))


def _evened(curve: Curve) -> Curve:
    """Steps of many curves joined to about as many as one curve of all these rows would have."""
    before_K = np.cumsum(curve.rows_K) - curve.rows_K
    step_K = np.searchsorted(edges(round(curve.rows)), before_K + 0.5)
    at = np.flatnonzero(np.diff(step_K, prepend=-1))
    return Curve(np.add.reduceat(curve.rows_K, at), np.add.reduceat(curve.lookups_K, at))
