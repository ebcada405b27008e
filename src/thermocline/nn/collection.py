"""Many tables and features in one module and one launch.

Tables may differ in rows, dimension and precision; features name the table they look up, and several may share one. All tables
lie in one arena with one optimizer. Pooling is one for the whole collection, because one launch pools one way; features that
are pooled otherwise belong in a second collection.

Ids of a feature become rows by its `IdMap` (`docs/ids.md`), of all features in one launch; `get_rows`, `set_rows` and `warm`
speak of rows. `unify` makes one table of several: each keeps its rows, in a part of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.kernels.checks import raise_bad_offsets
from thermocline.rows.optimizers import RowOptimizer
from thermocline.rows.table_spec import check_sizes

from .config import DEFAULT_OPTIMIZER, Shape, Storage
from .heat_profile import counts_of_table
from .id_maps import FeatureMaps, check_map
from .inputs import Bags, Given, Pooled, Unpooled, read_features, tensors_of
from .precision_tiers import Precision
from .prefetch import PrefetchedInput, PrefetchRequest
from .pretrained import load_folder
from .rows_module import RowsModule, blocks


@dataclass(frozen=True)
class Table:
    """One table of a collection. `features`: what looks it up, by default a feature of the table's own name.

    `ids`: how raw ids become its rows: a map for all its features, or a map by feature. Without one, ids are rows.
    """

    name: str
    rows: int
    dim: int
    features: Sequence[str] = ()
    precision: Precision | None = None  # the collection's
    ids: IdMap | Mapping[str, IdMap] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise BadInput(f"the name of a table is {self.name!r}; use a str")
        if isinstance(self.features, str):
            raise BadInput(f"features of table {self.name!r} is {self.features!r}; use a tuple, as in ({self.features!r},)")
        for field, size in zip(("rows", "dim"), check_sizes(self.name, self.rows, self.dim), strict=True):
            object.__setattr__(self, field, size)
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))
        if isinstance(self.ids, Mapping) and (unknown := [name for name in self.ids if name not in self.features]):
            raise BadInput(
                f"table {self.name!r} has id maps for {', '.join(unknown)}; its features: {', '.join(self.features)}"
            )
        for feature in self.features:
            if (map := self.map_of(feature)) is not None:
                check_map(map, self.rows, self.name, feature)

    def map_of(self, feature: str) -> IdMap | None:
        """The id map of a feature; None where ids are rows."""
        return self.ids.get(feature) if isinstance(self.ids, Mapping) else self.ids

    @property
    def parts(self) -> list[tuple[int, int]]:
        """First and end row of each part; a part begins wherever the rows of a feature do."""
        maps = [self.map_of(feature) for feature in self.features]
        begins = sorted({0, *(0 if map is None else map.first for map in maps)})
        return list(zip(begins, [*begins[1:], self.rows], strict=True))


def unify(name: str, tables: Sequence[Table]) -> Table:
    """One table of several with the same dimension and precision, for the same features: one after another, at offsets.

    Nothing changes but the names under which rows are read: row r of the table that began at row `first` is row `first + r`.
    """
    if not tables or len({(table.dim, str(table.precision)) for table in tables}) > 1:
        kinds = ", ".join(f"{t.name!r} has {t.dim} columns, precision {t.precision}" for t in tables)
        raise BadInput(f"{kinds or 'no table'}; tables that become one need the same dimension and precision")
    maps: dict[str, IdMap] = {}
    rows = 0
    for table in tables:
        for feature in table.features:
            maps[feature] = (table.map_of(feature) or IdMap.identity(table.rows)).offset(rows)
        rows += table.rows
    features = [feature for table in tables for feature in table.features]
    _check_distinct("feature", features)
    return Table(name, rows, tables[0].dim, features, tables[0].precision, maps)


class EmbeddingCollection(RowsModule):
    """Rows of many tables for many features; the output has a column block for each feature, in the order of the tables."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        mode: str = "sum",
        precision: Precision = "int8",
        cache: float | int | str | None = None,
        budget: int | str | None = None,
        policy: str = "lfu",
        optimizer: RowOptimizer = DEFAULT_OPTIMIZER,
        residency: str = "device",
        staged: float | int | str | None = None,
        update: str = "backward",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        if mode not in F.MODES:
            raise BadInput(f"mode is {mode!r}; use one of {', '.join(F.MODES)}")
        _check_tables(tables)
        features = [(feature, index) for index, table in enumerate(tables) for feature in table.features]
        _check_distinct("table", [table.name for table in tables])
        _check_distinct("feature", [feature for feature, _ in features])
        shapes = [Shape(t.rows, t.dim, precision if t.precision is None else t.precision, t.name) for t in tables]
        storage = Storage(precision, cache, policy, optimizer, residency, update, seed, budget, staged)
        super().__init__(shapes, [index for _, index in features], storage, device, dtype)
        self.mode, self.tables = mode, tuple(tables)
        self.features = tuple(feature for feature, _ in features)
        self.arena.rename([table.name for table in tables], self.features)
        self._dims = tuple(tables[index].dim for _, index in features)
        maps = [tables[index].map_of(feature) for feature, index in features]
        rows = [tables[index].rows for _, index in features]
        self.maps = FeatureMaps.needed(self.features, maps, rows, self.arena.device)
        self.arena.seat_small([table.parts for table in tables])
        self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, device: torch.device | str | None = None, precision: Precision | None = None
    ) -> EmbeddingCollection:
        """A collection that was saved alone, by `save_pretrained` or `thermocline.save`."""
        return load_folder(cls, folder, device=device, precision=precision)

    def reset_parameters(self) -> None:
        """Rows uniform in +-1/sqrt(rows), table by table and part by part, as recommenders commonly begin."""
        device = self.arena.device
        if device.type == "meta":
            return
        for index, table in enumerate(self.tables):
            for begin, end in table.parts:
                bound = (end - begin) ** -0.5
                for first, last in blocks(end - begin):
                    rows_N = torch.arange(begin + first, begin + last, device=device)
                    values_ND = torch.empty(last - first, table.dim, device=device, dtype=torch.float32)
                    self.arena.write(index, rows_N, values_ND.uniform_(-bound, bound))

    def forward(self, input: Any) -> Pooled | Unpooled:
        """`input`: see `features.py` for its forms. Unpooled where mode is "none"."""
        if isinstance(input, PrefetchedInput):
            return self.forward(*input.arguments)
        bags, offsets = self.take_prefetched(self._tensors(input)) or self._read(input)
        out = self.look_up(bags.ids_N, offsets, bags.weights_N, self.mode)
        if self.mode != "none":
            return Pooled(out, self.features, self._dims)
        return Unpooled(out, bags, self.features, self._dims)

    def _read(self, input: Any) -> tuple[Bags, Tensor]:
        """The bags of an input, and the offsets that a lookup takes: of all bags or, unpooled, of features."""
        bags = read_features(self.features, input)
        if self.mode != "none":
            return bags, bags.offsets
        if bags.weights_N is not None:
            raise BadInput("weights need pooling by sum; this collection has mode='none'")
        if bags.batch == 0:
            return bags, bags.offsets.new_zeros(len(self.features) + 1)
        if bags.offsets.device.type == "cpu" and not torch.compiler.is_compiling():
            raise_bad_offsets(bags.offsets, bags.ids_N.shape[0])  # the lookup reads one of each feature
        return bags, bags.offsets[:: bags.batch].contiguous()

    def _tensors(self, input: Any) -> list[Given]:
        return tensors_of(self.features, input) if self.arena.prefetches else []

    def prefetch(self, input: Any) -> None:
        """Bring the rows of a later batch to the card while others are worked on (residency="host"; else does nothing).

        `prefetched` does so for all batches of a loop, several at a time.
        Until the backward of that batch its ids must not be changed behind autograd's back: by collectives, through `.data`
        or DLPack, by kernels of others.
        """
        if self.arena.prefetches:
            self.prefetch_rows(self.prefetch_request(input))

    def prefetch_request(self, input: Any) -> PrefetchRequest:
        bags, offsets = self._read(input)
        read = None if bags.weights_N is not None else (bags, offsets)  # weights are read by the forward that trains them
        return PrefetchRequest(self._tensors(input), bags.ids_N, offsets, read)

    def warm(self, heat: Mapping[str, Tensor] | HeatProfile | Path | str) -> None:
        """Fill the cache with the hottest rows, by how often each row of a table was looked up before (counts, one a row).

        `heat` may also be a heat profile, or the path of a heat file: of the raw ids of features, or of tables.
        Call it before rows are set: what is in the cache by then is rounded into the tables first, as by `flush`.
        """
        heat = HeatProfile.load(heat) if isinstance(heat, (str, Path)) else heat
        if isinstance(heat, HeatProfile):
            maps = self.id_maps
            heat = {t.name: counts_of_table(heat, t.name, t.rows, {f: maps[f] for f in t.features}) for t in self.tables}
        if not isinstance(heat, Mapping):
            raise BadInput(f"heat is a {type(heat).__name__}; a collection takes a heat profile, or a dict of counts by table")
        known = {self._index(table): heat_R for table, heat_R in heat.items()}
        if missing := [t.name for n, t in enumerate(self.tables) if n not in known]:
            raise BadInput(f"heat has no counts for {', '.join(missing)}; give zeros for tables that stay out of the cache")
        self.arena.warm([known[n] for n in range(len(self.tables))])

    @property
    def id_maps(self) -> dict[str, IdMap]:
        """How the ids of each feature become rows: what a manifest should hold beside the rows."""
        tables = {feature: table for table in self.tables for feature in table.features}
        return {feature: table.map_of(feature) or IdMap.identity(table.rows) for feature, table in tables.items()}

    def get_rows(self, table: str, ids: Tensor | None = None) -> Tensor:
        """Rows of a table by their numbers (not by raw ids), dequantized to fp32; all of them without any."""
        return self.read_table(self._index(table), ids)

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> None:
        """Set rows by their numbers; rounds to nearest."""
        self.write_table(self._index(table), values, ids)

    def extra_repr(self) -> str:
        lines = [f"{t.name}: {t.rows} x {t.dim} {tiers}" for t, tiers in zip(self.tables, self.tiers, strict=True)]
        if self.maps is not None:
            lines += [f"{feature} -> {map}" for feature, map in self.id_maps.items()]
        return "\n".join([*lines, f"mode={self.mode!r}, optimizer={self.storage.optimizer}, update={self.storage.update!r}"])

    def _index(self, table: str) -> int:
        names = [t.name for t in self.tables]
        if table not in names:
            raise BadInput(f"table {table!r} is not in this collection; it has {', '.join(names)}")
        return names.index(table)

    def _weight_keys(self) -> Mapping[str, int]:
        return {f"{table.name}.weight": index for index, table in enumerate(self.tables)}


def _check_tables(tables: Any) -> None:
    many = isinstance(tables, Sequence)
    if wrong := [table for table in tables if not isinstance(table, Table)] if many else [tables]:
        what = f"tables {'has' if many else 'is'} a {type(wrong[0]).__name__}"
        raise BadInput(f"{what}; give a list of thermocline.Table, as in [Table('user', 1000, 16)]")


def _check_distinct(what: str, names: Sequence[str]) -> None:
    if not names:
        raise BadInput(f"a collection needs at least one {what}")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise BadInput(f"{what} {twice[0]!r} is named {names.count(twice[0])} times; names must be distinct")
