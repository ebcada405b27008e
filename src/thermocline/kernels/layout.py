"""Where each feature's table lies in the arena: the same numbers on the device, for kernels, and on the host, for launches."""

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
    """Adjacent tables of one dimension and format: the arena row alone gives the address of a row."""

    dim: int
    format: int
    row: int
    rows: int
    codes: int
    meta: int
    element: int


class Pool(NamedTuple):
    """Cache slots that the tables of one dimension and format share: fp32 slots first, then int8 slots.

    A row points at its fp32 slot by a number that counts from `base`: the values of slot n begin at element n * dim of
    `Cache.values`, in every pool. Int8 slots are numbered separately from `int8_base` on: slot n begins at word
    n * int8_slot_words(dim) of `Cache.near`. Owners, scores and displaced words of all slots begin at `slot`.
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
    int8_slots: int = 0
    int8_base: int = 0

    @property
    def fp32_slots(self) -> int:
        return self.slots - self.int8_slots


class Cache(NamedTuple):
    """The tensors of the cache of an arena, for all pools. State dicts and checkpoints store them by these names."""

    values: Tensor  # fp32: rows in fp32 slots
    near: Tensor  # int32: rows in int8 slots, each a scale and its codes; often empty
    rows: Tensor  # int64 a slot: its arena row, with DIRTY if it was updated since its admission; or EMPTY
    scores: Tensor  # int32 a slot: the value of keeping its row
    words: Tensor  # int32 a slot: the meta word that the pointer displaced
    sketch: Tensor  # int32, 4 words a slot: 16-bit counters of uncached rows
    ledger: Tensor  # int64 [pools, LEDGER_FIELDS]
    clock: Tensor  # int64: as the optimizer's, for the rounding bits of evicted rows
    steps: Tensor  # int64, one number, always on the CPU: training steps so far
    home: Tensor = torch.empty(0, dtype=torch.int64)  # int64, always on the CPU: `StagingArea.home`, 0 while no row is staged

    @property
    def staged(self) -> bool:
        """Whether rows of the tables may be staged."""
        return self.home.numel() > 0 and int(self.home[0]) > 0


class Staging(NamedTuple):
    """The tensors of a staging area (`stage/reference.py`), for all pools.

    The places of a pool begin at `first[pool]`; rows point at a place by a number that counts from there. Its part of the lists
    begins at `listed[pool]`, its part of `chosen` at `slices * listed[pool]`.
    """

    area: Tensor  # int64: AREA_FIELDS of each pool, then the meta words and codes of its places
    rows: Tensor  # int64 a place: its arena row, or EMPTY
    until: Tensor  # int32 a place: the number of the last prefetched batch with its row, or of the batch that opened it
    ages: Tensor  # uint8 a place: its age at the last choice
    free: Tensor  # int32: FREE places without a row; the last prefetched batch got the first TAKEN of them
    chosen: Tensor  # int32: CHOSEN places to open, in the order of their rows; empty places come last
    leaving: Tensor  # int32: OPEN of them, opened last. OPENED are open, LEFT rows leave, all before END; see NO_ROW
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
    """The host's side of a layout. Compares and hashes by identity, so that caches can be keyed by it."""

    features: tuple[Fields, ...]
    distinct: tuple[Fields, ...]  # one for each table, by ROW; COLUMN has no meaning here
    runs: tuple[TableRun, ...]
    groups: tuple[tuple[int, int], ...]  # distinct (DIM, FORMAT) pairs
    group_of: tuple[int, ...]  # one for each feature
    max_dim: int
    width: int  # columns of a pooled output
    rows: int  # rows of the arena
    sizes: tuple[int, int, int, int, int]  # least code bytes, meta words, cached values, words of int8 slots, state elements
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
        """(name of the feature's table, name of the feature); None where there is no name."""
        table, _ = self.table_of(self.features[feature][F.ROW])
        return table, self.feature_names[feature] if self.feature_names else None


class Layout(NamedTuple):
    """A layout as kernels take it: `fields_F8` (int64) lies on the device of the lookups."""

    fields_F8: Tensor
    tables: TableLayout

    @classmethod
    def of(cls, fields_F8: Tensor, spec: str) -> Layout:
        return cls(fields_F8, parse(spec))


# Part of every spec: torch.compile's disk cache sees the arguments of an operator, not the Python behind it. Raise the number
# whenever the meaning of an operator changes.
REVISION = 9


def write_spec(
    features: Iterable[Sequence[int]], pools: Iterable[Pool] = (), policy: int = F.LFU,
    names: Iterable[tuple[int, str]] = (), feature_names: Iterable[str] = (),
) -> str:  # fmt: skip
    """The fields of all features as text, for operators: a list of numbers is slow to pass at every call."""
    named = ";".join(f"{row},{quote(name, safe=' ')}" for row, name in names)
    by_feature = ";".join(quote(str(name), safe=" ") for name in feature_names)
    return "|".join((str(REVISION), _write(features), _write(pools), str(policy), named, by_feature))


def _write(lines: Iterable[Sequence[int]]) -> str:
    return ";".join(",".join(str(n) for n in line) for line in lines)


def _read(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in line.split(",")) for line in text.split(";") if line)


@lru_cache(maxsize=1024)
def parse(spec: str) -> TableLayout:
    """A `TableLayout` from the text of `write_spec`."""
    _, written, pools, policy, names, feature_names = spec.split("|")
    features, cached = _read(written), tuple(Pool(*pool) for pool in _read(pools))
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
        sizes=_sizes(distinct, cached),  # type: ignore[arg-type]
        spec=spec,
        pools=cached,
        policy=int(policy),
        names=tuple((int(row), unquote(name)) for row, _, name in (n.partition(",") for n in names.split(";") if n)),
        feature_names=tuple(unquote(name) for name in feature_names.split(";")) if feature_names else (),
    )


def per_feature(layout: Layout, offsets: Tensor) -> int:
    """Bags of one feature; 1 for unpooled lookups."""
    return (offsets.numel() - 1) // max(1, len(layout.tables.features))


def output_shape(tables: TableLayout, ids_N: Tensor, offsets: Tensor, mode: int) -> tuple[int, int]:
    """Shape of the output: a row of all features for each bag; unpooled, a row of the largest dimension for each id."""
    if mode == F.NONE:
        return ids_N.shape[0], tables.max_dim
    return (offsets.shape[0] - 1) // max(1, len(tables.features)), tables.width


def winners_shape(tables: TableLayout, ids_N: Tensor, offsets: Tensor, mode: int) -> tuple[int, ...]:
    """Shape of the winners: that of the output for max pooling, else (0,)."""
    return output_shape(tables, ids_N, offsets, mode) if mode == F.MAX else (0,)


def _sizes(distinct: tuple[Fields, ...], pools: tuple[Pool, ...]) -> tuple[int, int, int, int, int]:
    """Lengths that the arrays of an arena must have for kernels to stay inside them."""
    runs = [TableRun(f[F.DIM], f[F.FORMAT], f[F.ROW], f[F.ROWS], f[F.CODES], f[F.META], f[F.ELEMENT]) for f in distinct]
    return (
        max((r.codes + r.rows * F.row_bytes(r.format, r.dim) for r in runs), default=0),
        max((r.meta + r.rows * F.META_WORDS[r.format] for r in runs), default=0),
        max(((p.base + p.fp32_slots) * p.dim for p in pools), default=0),
        max(((p.int8_base + p.int8_slots) * F.int8_slot_words(p.dim) for p in pools if p.int8_slots), default=0),
        max((r.element + r.rows * r.dim for r in runs), default=0),
    )


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
