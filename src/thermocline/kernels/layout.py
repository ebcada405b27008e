"""Where each feature's table lies in the arena: the same numbers on the device, for kernels, and on the host, for launches.

One row of fields for each feature (names in `formats.py`). Features that share a table repeat its fields but for COLUMN. All
tables lie in one arena: one array of codes, one of meta words, one or two of optimizer state. ROW numbers the rows of the arena
without gaps or overlaps, so an arena row names a (table, row) pair in one integer; sorting by it brings a table's rows
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from thermocline import formats as F

Fields = tuple[int, int, int, int, int, int, int, int]


class TableRun(NamedTuple):
    """Tables of one dimension and format that follow each other without a gap: addressed by the arena row alone."""

    dim: int
    format: int
    row: int
    rows: int
    codes: int
    meta: int
    element: int


class Pool(NamedTuple):
    """Cache slots that the tables of one dimension and format share.

    A row points at its slot by a number that counts from `base`; the values of slot n begin at element n * dim of the
    cache's values, whatever the pool. What is kept for each slot lies from `slot` on.

    Of the slots the last `near` hold int8 rows. They have numbers of their own, from `near_base` on: near slot n begins at word
    n * near_words(dim) of the cache's near words.
    """

    dim: int
    format: int
    row: int
    rows: int
    codes: int
    meta: int
    slots: int
    slot: int
    base: int
    near: int = 0
    near_base: int = 0

    @property
    def full(self) -> int:
        """Slots that hold fp32 rows; they come first."""
        return self.slots - self.near


class Cache(NamedTuple):
    """The tensors of the cache of an arena, all pools in one."""

    values: Tensor  # fp32: the rows in full slots
    near: Tensor  # int32: the rows in near slots, each a scale and int8 codes; often none
    rows: Tensor  # int64 a slot: its arena row, with DIRTY if it was updated since it came; or EMPTY
    scores: Tensor  # int32 a slot: how much its row is worth keeping
    words: Tensor  # int32 a slot: the meta word that the pointer displaced
    sketch: Tensor  # int32, 4 words a slot: 16-bit counters of rows that are not cached
    ledger: Tensor  # int64 [pools, LEDGER_FIELDS]
    clock: Tensor  # int64: as the optimizer's, for the rounding bits of rows that leave
    steps: Tensor  # int64, one number, always on the CPU: training steps so far
    home: Tensor = torch.empty(0, dtype=torch.int64)  # int64, always on the CPU: `StagingArea.home`, 0 while no row is staged

    @property
    def staged(self) -> bool:
        """Whether rows of the tables may be staged."""
        return self.home.numel() > 0 and int(self.home[0]) > 0


class Staging(NamedTuple):
    """Where rows of a table in host memory wait on the card (`stage/reference.py`), all pools in one.

    The places of a pool lie from `first[pool]` on; rows name a place by a number that counts from there. Its part of the lists
    begins at `listed[pool]`, that of `chosen` at so many times `slices`.
    """

    area: Tensor  # int64: AREA_FIELDS of each pool, then the meta words and codes of its places
    rows: Tensor  # int64 a place: its arena row, or EMPTY
    until: Tensor  # int32 a place: the number of the last prefetched batch that has its row, or that it was opened at
    ages: Tensor  # uint8 a place: how long ago that was, when rows were last told to leave
    free: Tensor  # int32: FREE places without a row; the first TAKEN of them were given to the last prefetched batch
    chosen: Tensor  # int32: CHOSEN places that are to be opened, in the order of their rows; those without a row come last
    leaving: Tensor  # int32: OPEN of them whose turn came last. OPENED are open, LEFT rows leave, all before END; see NO_ROW
    counts: Tensor  # int64 [pools, COUNT_FIELDS]
    places: tuple[int, ...]  # of each pool
    most: tuple[int, ...]  # rows of each pool that come, and that leave, at a time
    slices: int  # batches that one choice of places serves

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.area, self.rows, self.until, self.ages, self.free, self.chosen, self.leaving, self.counts

    @property
    def first(self) -> tuple[int, ...]:
        return tuple(sum(self.places[:pool]) for pool in range(len(self.places)))

    @property
    def rounds(self) -> int:
        """Decisions that it takes until every row has left."""
        return max((-(-places // most) for places, most in zip(self.places, self.most, strict=True) if places), default=0)

    @property
    def listed(self) -> tuple[int, ...]:
        return tuple(sum(self.most[:pool]) for pool in range(len(self.most)))


@dataclass(frozen=True, eq=False)
class TableLayout:
    """The host's side of a layout. Compared and hashed by identity, so that launches can be cached by it."""

    features: tuple[Fields, ...]
    distinct: tuple[Fields, ...]  # one for each table, by ROW; COLUMN has no meaning here
    runs: tuple[TableRun, ...]
    groups: tuple[tuple[int, int], ...]  # distinct (DIM, FORMAT) pairs
    group_of: tuple[int, ...]  # one for each feature
    max_dim: int
    width: int  # columns of a pooled output
    rows: int  # rows of the arena
    spec: str  # the text that it was parsed from, as operators carry it
    pools: tuple[Pool, ...] = ()  # of the cache; none where there is no cache
    policy: int = F.LFU
    names: tuple[tuple[int, str], ...] = ()  # first arena row and name of each table, by row
    feature_names: tuple[str, ...] = ()  # none where they have none

    def table_of(self, row: int) -> tuple[str | None, int]:
        """The table of an arena row, if tables have names, and the table's first row."""
        first, name = max((n for n in self.names if n[0] <= row), default=(0, None))
        return name, first

    def names_of(self, feature: int) -> tuple[str | None, str | None]:
        """The names of the table that a feature looks up, and of the feature, as far as they have names."""
        table, _ = self.table_of(self.features[feature][F.ROW])
        return table, self.feature_names[feature] if self.feature_names else None


class Layout(NamedTuple):
    """What kernels take: fields_F8 is int64 and lies where the codes lie."""

    fields_F8: Tensor
    tables: TableLayout

    @classmethod
    def of(cls, fields_F8: Tensor, spec: str) -> Layout:
        return cls(fields_F8, parse(spec))


# Part of every spec, so that graphs which torch.compile keeps on disk are not reused when the operators change their meaning:
# PyTorch's cache sees the arguments of an operator, not the Python behind it. Raise it with every such change.
REVISION = 8


def write_spec(
    features: Iterable[Sequence[int]],
    pools: Iterable[Pool] = (),
    policy: int = F.LFU,
    names: Iterable[tuple[int, str]] = (),
    feature_names: Iterable[str] = (),
) -> str:
    """The fields of all features as text: operators carry it, because a list of numbers is slow to pass at every call."""
    named = ";".join(f"{row},{quote(name, safe=' ')}" for row, name in names)
    by_feature = ";".join(quote(str(name), safe=" ") for name in feature_names)
    return "|".join((str(REVISION), _write(features), _write(pools), str(policy), named, by_feature))


def _write(lines: Iterable[Sequence[int]]) -> str:
    return ";".join(",".join(str(n) for n in line) for line in lines)


def _read(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in line.split(",")) for line in text.split(";") if line)


@lru_cache(maxsize=1024)
def parse(spec: str) -> TableLayout:
    """What `write_spec` wrote, as `TableLayout`."""
    _, written, pools, policy, names, feature_names = spec.split("|")
    features = _read(written)
    distinct = tuple(sorted({(*f[: F.COLUMN], 0) for f in features}, key=lambda f: f[F.ROW]))
    groups = tuple(sorted({(f[F.DIM], f[F.FORMAT]) for f in features}))
    return TableLayout(
        features=features,  # type: ignore[arg-type]
        distinct=distinct,  # type: ignore[arg-type]
        runs=_runs(distinct),  # type: ignore[arg-type]
        groups=groups,
        group_of=tuple(groups.index((f[F.DIM], f[F.FORMAT])) for f in features),
        max_dim=max((f[F.DIM] for f in features), default=0),
        width=max((f[F.COLUMN] + f[F.DIM] for f in features), default=0),
        rows=max((f[F.ROW] + f[F.ROWS] for f in features), default=0),
        spec=spec,
        pools=tuple(Pool(*pool) for pool in _read(pools)),
        policy=int(policy),
        names=tuple((int(row), unquote(name)) for row, _, name in (n.partition(",") for n in names.split(";") if n)),
        feature_names=tuple(unquote(name) for name in feature_names.split(";")) if feature_names else (),
    )


def per_feature(layout: Layout, offsets: Tensor) -> int:
    """Bags of one feature (1 where lookups are unpooled: then a feature is one run of ids)."""
    return (offsets.numel() - 1) // max(1, len(layout.tables.features))


def output_shape(tables: TableLayout, ids_N: Tensor, offsets: Tensor, mode: int) -> tuple[int, int]:
    """Of what a lookup returns: a row of all features for each bag or, unpooled, one of the largest dimension for each id."""
    if mode == F.NONE:
        return ids_N.shape[0], tables.max_dim
    return (offsets.shape[0] - 1) // max(1, len(tables.features)), tables.width


def winners_shape(tables: TableLayout, ids_N: Tensor, offsets: Tensor, mode: int) -> tuple[int, ...]:
    """Of the winners: that of the output with max pooling, else there are none."""
    return output_shape(tables, ids_N, offsets, mode) if mode == F.MAX else (0,)


def _runs(distinct: tuple[Fields, ...]) -> tuple[TableRun, ...]:
    runs: list[TableRun] = []
    for field in distinct:
        codes, meta, row, element, rows, dim, format, _ = field
        if runs and _follows(runs[-1], field):
            runs[-1] = runs[-1]._replace(rows=runs[-1].rows + rows)
        else:
            runs.append(TableRun(dim, format, row, rows, codes, meta, element))
    return tuple(runs)


def _follows(run: TableRun, field: Fields) -> bool:
    ends = (
        run.codes + run.rows * F.row_bytes(run.format, run.dim),
        run.meta + run.rows * F.META_WORDS[run.format],
        run.row + run.rows,
        run.element + run.rows * run.dim,
    )
    return ends == field[: F.ROWS] and (run.dim, run.format) == (field[F.DIM], field[F.FORMAT])
