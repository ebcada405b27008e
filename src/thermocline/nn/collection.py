"""`EmbeddingCollection`: many tables and features in one module and one kernel launch.

All tables lie in one arena with one optimizer. A launch pools one way, so features that are pooled otherwise belong in a second
collection. Raw ids of a feature become rows by its `IdMap` (`docs/ids.md`); `get_rows`, `set_rows` and `warm` take rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap, check_map
from thermocline.kernels.checks import raise_bad_offsets
from thermocline.rows.table_spec import check_sizes

from .config import UNCACHED, RowConfig, TableRequest, TorchArguments, cache_share, check_rows, read_torch_arguments
from .elastic_maps import maps_for
from .heat_profile import counts_of_table
from .inputs import Given, JaggedIds, Pooled, Unpooled, read_features, tensors_of
from .precision_tiers import Precision, Tiers
from .prefetch import PrefetchedInput, PrefetchRequest
from .rows_module import RowsModule

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Table:
    """One table of a collection.

    Args:
        name: name of the table.
        rows: number of rows.
        dim: columns of a row.
        features: features that look up the table; by default one of the table's name.
        row_config: precision and cache of this table, where they differ from the collection's `rows`. The other fields are
            shared by all tables of a collection: leave them out.
        ids: map from raw ids to rows, for all features or by feature; by default ids are rows.

    Raises:
        BadInput: an argument has a wrong type or value; `error.parameter` names it.

    Example::

        shop = thermocline.Table("shop", 5_000, 16, features=("shop", "last_shop"), row_config=thermocline.RowConfig("fp32"))
    """

    name: str
    rows: int
    dim: int
    features: Sequence[str] = ()
    row_config: RowConfig | None = None
    ids: IdMap | Mapping[str, IdMap] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise BadInput(f"the name of a table is {self.name!r}; use a str", parameter="name", value=self.name)
        if isinstance(self.features, str):
            message = f"features of table {self.name!r} is {self.features!r}; use a tuple, as in ({self.features!r},)"
            raise BadInput(message, parameter="features", table=self.name, value=self.features)
        for field, size in zip(("rows", "dim"), check_sizes(self.name, self.rows, self.dim), strict=True):
            object.__setattr__(self, field, size)
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))
        if isinstance(self.ids, Mapping) and (unknown := [name for name in self.ids if name not in self.features]):
            message = f"table {self.name!r} has id maps for {', '.join(unknown)}; its features: {', '.join(self.features)}"
            raise BadInput(message, parameter="ids", table=self.name, value=unknown)
        for feature in self.features:
            if (map := self.map_of(feature)) is not None:
                check_map(map, self.rows, self.name, feature)

    @property
    def precision(self) -> Precision | None:
        """The table's own precision, with its cache as a share of fp32 rows; None for that of the collection."""
        own = self.row_config
        if own is None or own.cache is None or own.precision in UNCACHED:
            return None if own is None else own.precision
        assert isinstance(own.precision, str), "RowConfig refuses a cache beside tiers"
        return Tiers(own.precision, cache_share(own.cache, [TableRequest(self.rows, self.dim, own.precision)])).precision

    def precision_in(self, rows: RowConfig) -> Precision:
        """The table's precision in a collection with these settings."""
        for field in fields(RowConfig) if self.row_config is not None else ():
            own, given = getattr(self.row_config, field.name), getattr(rows, field.name)
            if field.name not in ("precision", "cache") and own not in (field.default, given):
                message = f"table {self.name!r} has {field.name}={own!r} in row_config; set it in the collection's rows"
                raise BadInput(message, parameter="row_config", table=self.name, value=field.name)
        return rows.precision if (mine := self.precision) is None else mine

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
    """Concatenate tables of the same dimension and `row_config` into one table for the same features.

    Row r of a table becomes row `first + r`, where `first` counts the rows of the tables before it.

    Args:
        name: name of the new table.
        tables: tables in the order of their rows.

    Returns:
        The table, with an id map for each feature.

    Raises:
        BadInput: dimensions or row configs differ, or two tables have a feature of the same name.

    Example::

        small = thermocline.unify("small", [thermocline.Table("shop", 500, 16), thermocline.Table("hour", 24, 16)])
    """
    if not tables or any((table.dim, table.row_config) != (tables[0].dim, tables[0].row_config) for table in tables):
        kinds = ", ".join(f"{t.name!r} has {t.dim} columns and row_config {t.row_config}" for t in tables)
        message = f"{kinds or 'no table'}; tables that become one need the same dimension and row_config"
        raise BadInput(message, parameter="tables")
    maps: dict[str, IdMap] = {}
    rows = 0
    for table in tables:
        for feature in table.features:
            maps[feature] = (table.map_of(feature) or IdMap.identity(table.rows)).offset(rows)
        rows += table.rows
    features = [feature for table in tables for feature in table.features]
    _check_distinct("feature", features)
    return Table(name, rows, tables[0].dim, features, tables[0].row_config, maps)


class EmbeddingCollection(RowsModule):
    """Many tables and features in one module and one kernel launch.

    Args:
        tables: the tables; their names differ, and those of their features.
        mode: pooling of all features: "sum", "mean", "max", or "none" for a row of each id.
        rows: how rows are stored and trained; a table may differ by its `row_config`.
        torch_arguments: `device`, and `dtype` of the output.

    Raises:
        BadInput: an argument has a wrong type or value; `error.parameter` names it.

    Example::

        tables = [thermocline.Table("user", 1_000_000, 32), thermocline.Table("item", 50_000, 32, features=("seen", "bought"))]
        collection = thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig(cache=0.02))
        out = collection(torch.zeros(8, 3, dtype=torch.long))  # a column of ids for each feature: user, seen, bought
        out["bought"].shape  # [8, 32]
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        mode: str = "sum",
        rows: RowConfig = RowConfig(),
        **torch_arguments: Unpack[TorchArguments],
    ) -> None:
        device, dtype = read_torch_arguments(type(self).__name__, torch_arguments)
        check_rows(rows)
        if mode not in F.MODES:
            raise BadInput(f"mode is {mode!r}; use one of {', '.join(F.MODES)}", parameter="mode", value=mode)
        _check_tables(tables)
        features = [(feature, index) for index, table in enumerate(tables) for feature in table.features]
        _check_distinct("table", [table.name for table in tables])
        _check_distinct("feature", [feature for feature, _ in features])
        shapes = [TableRequest(t.rows, t.dim, t.precision_in(rows), t.name) for t in tables]
        super().__init__(shapes, [index for _, index in features], rows, device, dtype)
        self.mode, self.tables = mode, tuple(tables)
        self.features = tuple(feature for feature, _ in features)
        self.arena.rename([table.name for table in tables], self.features)
        self._dims = tuple(tables[index].dim for _, index in features)
        maps = [tables[index].map_of(feature) for feature, index in features]
        counts = [tables[index].rows for _, index in features]
        owners = [index for _, index in features]
        self.maps = maps_for(self.features, maps, counts, self.arena.device, owners)
        self.arena.cache_small_tables([[part for part in t.parts if not self._elastic(n, part)] for n, t in enumerate(tables)])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw rows from U(-1/sqrt(n), 1/sqrt(n)), where n is the number of rows of the table or part."""
        if self.maps is not None and self.maps.elastic:
            self.maps.start(self)
        for index, table in enumerate(self.tables):
            for begin, end in (part for part in table.parts if not self._elastic(index, part)):
                bound = (end - begin) ** -0.5
                self.draw_rows(index, begin, end, partial(nn.init.uniform_, a=-bound, b=bound))

    def _elastic(self, table: int, part: tuple[int, int]) -> bool:
        """Whether ids come and go in a part of a table."""
        return self.maps is not None and self.maps.holds(table, part[0])

    def forward(self, input: Any) -> Pooled | Unpooled:
        """Look up a batch.

        Args:
            input: a dict of feature -> (values, offsets) or nested jagged tensor, a tensor [batch, features], or a
                KeyedJaggedTensor.

        Returns:
            A `Pooled` output, or `Unpooled` with mode "none": `out[feature]`, `out.values()`, `out.to_dict()`.

        Raises:
            BadInput: the input has another form, or other features than the collection.
            IdOutOfRange: an id is not a row of its table.
        """
        if isinstance(input, PrefetchedInput):
            return self.forward(*input.arguments)
        bags, offsets = self.take_prefetched(self._tensors(input)) or self._read(input)
        out = self.look_up(bags.ids_N, offsets, bags.weights_N, self.mode)
        if self.mode != "none":
            return Pooled(out, self.features, self._dims)
        return Unpooled(out, bags.offsets, self.features, self._dims)

    def _read(self, input: Any) -> tuple[JaggedIds, Tensor]:
        """The ids of an input, and the offsets of its bags or, unpooled, of its features."""
        bags = read_features(self.features, input)
        if self.mode != "none":
            return bags, bags.offsets
        if bags.weights_N is not None:
            raise BadInput("weights need mode='sum'; this collection has mode='none'", parameter="mode", value=self.mode)
        if bags.batch == 0:
            return bags, bags.offsets.new_zeros(len(self.features) + 1)
        if bags.offsets.device.type == "cpu" and not torch.compiler.is_compiling():
            raise_bad_offsets(bags.offsets, bags.ids_N.shape[0])  # the lookup reads one of each feature
        return bags, bags.offsets[:: bags.batch].contiguous()

    def _tensors(self, input: Any) -> list[Given]:
        return tensors_of(self.features, input) if self.arena.prefetches else []

    def prefetch_request(self, input: Any) -> PrefetchRequest:
        bags, offsets = self._read(input)
        read = None if bags.weights_N is not None else (bags, offsets)  # forward reads the weights that it trains
        return PrefetchRequest(self._tensors(input), bags.ids_N, offsets, read)

    def warm(self, heat: Mapping[str, Tensor] | HeatProfile | Path | str) -> None:
        """Fill the cache with the hottest rows. Call it before rows are set: it flushes the cache first.

        Args:
            heat: lookup counts of each row by table, or a heat profile of features or tables, or the path of its file.

        Raises:
            BadInput: counts of a table are missing or have another shape.
        """
        heat = HeatProfile.load(heat) if isinstance(heat, (str, Path)) else heat
        if isinstance(heat, HeatProfile):
            maps = self.id_maps
            heat = {t.name: counts_of_table(heat, t.name, t.rows, {f: maps[f] for f in t.features}) for t in self.tables}
        if not isinstance(heat, Mapping):
            message = f"heat is a {type(heat).__name__}; use a heat profile, or a dict of counts by table"
            raise BadInput(message, parameter="heat", value=type(heat).__name__)
        known = {self._index(table): heat_R for table, heat_R in heat.items()}
        if missing := [t.name for n, t in enumerate(self.tables) if n not in known]:
            message = f"heat has no counts for {', '.join(missing)}; use zeros for tables that stay out of the cache"
            raise BadInput(message, parameter="heat", missing=missing)
        self.arena.warm([known[n] for n in range(len(self.tables))])

    @property
    def id_maps(self) -> dict[str, IdMap]:
        """The id map of each feature."""
        tables = {feature: table for table in self.tables for feature in table.features}
        return {feature: table.map_of(feature) or IdMap.identity(table.rows) for feature, table in tables.items()}

    def get_rows(self, table: str, ids: Tensor | None = None) -> Tensor:
        """Rows of a table by row number (not by raw id), dequantized to fp32; by default all rows."""
        return self.read_table(self._index(table), ids)

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> None:
        """Set rows of a table by row number, rounded to nearest."""
        self.write_table(self._index(table), values, ids)

    def extra_repr(self) -> str:
        lines = [f"{t.name}: {t.rows} x {t.dim} {tiers}" for t, tiers in zip(self.tables, self.tiers, strict=True)]
        if self.maps is not None:
            lines += [f"{feature} -> {map}" for feature, map in self.id_maps.items()]
        return "\n".join([*lines, f"mode={self.mode!r}, optimizer={self.rows.optimizer}, update={self.rows.update!r}"])

    def _index(self, table: str) -> int:
        names = [t.name for t in self.tables]
        if table not in names:
            raise BadInput(f"the collection has no table {table!r}, only {', '.join(names)}", table=table, available=names)
        return names.index(table)

    def weight_keys(self) -> Mapping[str, int]:
        return {f"{table.name}.weight": index for index, table in enumerate(self.tables)}


def _check_tables(tables: Any) -> None:
    for table in tables if isinstance(tables, Sequence) else [tables]:
        if not isinstance(table, Table) or table is tables:
            message = f"tables has a {type(table).__name__}; use a list of thermocline.Table, as in [Table('user', 1000, 16)]"
            raise BadInput(message, parameter="tables", value=type(table).__name__)


def _check_distinct(what: str, names: Sequence[str]) -> None:
    if not names or len(set(names)) < len(names):
        twice = next((name for name in names if names.count(name) > 1), None)
        message = f"{what} {twice!r} is named {names.count(twice)} times" if names else f"a collection needs a {what}"
        raise BadInput(message, parameter="tables", value=twice)
