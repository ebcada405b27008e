"""One version of the served tables: an immutable value.

A lookup takes a `TableVersion` once and uses it to the end: base pointers, id maps, segments. A new version, or a delta, is
another value, published by one assignment. So all rows of a request come from one version, without locks. Segments are freed
with the last version that refers to them.

**Deltas** (rows that a publish or an incremental save changed) go to an *overlay*: a segment with the changed rows in
ascending order, which lookups of the new version read instead. After the last lookup of an earlier version, rows are written
to the shards, and a version without the overlay follows (`in_place.py`). Ids that moved wait beside their key table likewise.
So memory holds two copies of a row only while a lookup needs the old one, and rows that a lookup may read are never written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.checkpoint.publishes.row_delta import RowDelta, merge_deltas
from thermocline.errors import BadInput, IdOutOfRange
from thermocline.ids.feature_maps import IdMaps
from thermocline.ids.idmap import IdMap
from thermocline.ids.kept_ids import KeptIds
from thermocline.ids.keyed_map import KeyedMap
from thermocline.ids.moved_ids import MovedIds
from thermocline.kernels.ids.fields import BLOCK_WORDS
from thermocline.kernels.serve import fields as S
from thermocline.kernels.serve import gather_pool
from thermocline.kernels.serve.fields import ServedBags, ShardedTables, ShardMissing
from thermocline.serve.errors import ShardDown
from thermocline.serve.served_model import ElasticCounts

from .reader_pins import ReaderPin
from .row_split import Rows, TableSplit
from .segments import ServedTable, ShardedTableLayout, ShardLayout, SharedSegment, make_layout

if TYPE_CHECKING:
    from thermocline.kernels.serve.wire_cpu import WireLookup
    from thermocline.serve.remote.remote_hosts import RemoteFetch, RemoteSegment

Tally = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DeltaOverlay:
    """All changed rows by table, and their layout in the overlay's segment, which is laid out as a single shard."""

    changed: Mapping[str, RowDelta]
    segment: Tensor
    layouts: Mapping[str, ShardedTableLayout]


@dataclass(frozen=True, eq=False)
class TableVersion:
    """Loaded tables, ready for lookups. `tally_S`: lookups of each shard and of the overlay, counted here."""

    name: str
    layout: ShardLayout
    segments: tuple[Tensor | RemoteSegment | None, ...]  # one for each shard; None while it is down
    modes: Mapping[str, int]  # pooling mode by feature
    features: tuple[str, ...]
    tables: tuple[int, ...]  # table number of each feature
    maps: IdMaps | None
    dense: Mapping[str, Tensor]  # dense parameters of the model around the tables
    tally_S: Tally
    fetch: RemoteFetch | None = None  # for rows on other hosts
    overlay: DeltaOverlay | None = None
    placed: ShardedTables = field(init=False)
    pin: ReaderPin = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "placed", _make_placed(self))
        object.__setattr__(self, "pin", ReaderPin())  # of this version alone: `replace` does not copy it

    @classmethod
    def of(
        cls,
        name: str,
        layout: ShardLayout,
        segments: Sequence[Tensor | RemoteSegment | None],
        id_maps: Mapping[str, IdMap],
        modes: Mapping[str, int],
        dense: Mapping[str, Tensor] | None = None,
        tally_S: Tally | None = None,
        fetch: RemoteFetch | None = None,
    ) -> TableVersion:
        """The version of tables whose rows are loaded."""
        pairs = [(feature, n) for n, each in enumerate(layout.tables) for feature in each.table.features]
        maps = _make_maps(layout, id_maps, _device_of(segments))
        features, tables = tuple(feature for feature, _ in pairs), tuple(n for _, n in pairs)
        tally_S = np.zeros(layout.shards + 1, np.int64) if tally_S is None else tally_S
        return cls(name, layout, tuple(segments), modes, features, tables, maps, dense or {}, tally_S, fetch)

    @property
    def device(self) -> torch.device:
        return self.placed.fields_FN.device

    @property
    def overlay_rows(self) -> Mapping[str, RowDelta]:
        """Rows that are not written in place yet, by table."""
        return {} if self.overlay is None else self.overlay.changed

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Feature numbers by name."""
        return {feature: n for n, feature in enumerate(self.features)}

    @cached_property
    def dims(self) -> list[int]:
        """Columns of each feature."""
        return [self.layout.tables[n].table.dim for n in self.tables]

    @cached_property
    def wire_lookup(self) -> WireLookup | None:
        """The kernels of the server's fast path, for tables on this machine's CPU without elastic ids."""
        if self.device.type != "cpu" or self.fetch is not None or self.elastic:
            return None
        maps = self.maps
        from thermocline.kernels.serve.wire_cpu import WireLookup  # deferred: imports numba, which a GPU server does not need

        arrays = None if maps is None else (maps.fields_FM, maps.words, maps.counts)
        modes = [self.modes[each] for each in self.features]
        return WireLookup(self.placed, self.features, modes, arrays, self.tally_S, self.pin)

    def known(self, feature: int, ids_N: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which ids of an elastic feature have rows of their own."""
        assert self.maps is not None
        found: NDArray[np.bool_] = self.maps.keyed[feature].find(torch.from_numpy(ids_N.astype(np.int64)))[1].numpy()
        return found

    @cached_property
    def elastic(self) -> frozenset[int]:
        """Numbers of the features with elastic ids."""
        return frozenset(() if self.maps is None else self.maps.keyed)

    @property
    def id_counts(self) -> dict[str, ElasticCounts]:
        """Lookups of the features with elastic ids, since these ids were loaded."""
        keyed = {} if self.maps is None else self.maps.keyed
        return {self.features[n]: ElasticCounts._make([*each.looked_up.tolist(), each.used]) for n, each in keyed.items()}

    def look_up(self, bags: ServedBags, out: Tensor) -> None:
        """Pool the bags of all features into `out`, and count their lookups. Ids are raw.

        Raises:
            BadInput: an id has no row
            ShardDown: a shard with a row of the request is down
        """
        try:
            if self.maps is not None:
                bags = bags._replace(rows_N=self.maps(bags.rows_N, _starts(bags)))
            if self.device.type == "cpu":
                self.tally_S[:] += gather_pool(self.placed, bags, out, self.fetch).numpy()
            else:
                self._look_up_on_gpu(bags, out)
        except IdOutOfRange as error:
            position, feature = error.position - int(_starts(bags)[error.feature]), self.features[error.feature]
            raise id_without_row(feature, error.rows, position, error.id) from None
        except ShardMissing as error:
            raise ShardDown(error.shard) from None

    def _look_up_on_gpu(self, bags: ServedBags, out: Tensor) -> None:
        """Wait for the kernels and raise their errors here: other threads look up other models on the same GPU."""
        from thermocline.kernels.gpu.errors import error_buffer, thread_error_buffer  # deferred: imports triton

        with thread_error_buffer(self.device):
            gather_pool(self.placed, bags, out)
            torch.cuda.synchronize(self.device)
            error_buffer(out).raise_pending()

    def with_deltas(
        self, name: str, deltas: Mapping[str, RowDelta], dense: Mapping[str, Tensor] | None = None,
        id_maps: Mapping[str, IdMap] | None = None, moved: Mapping[str, MovedIds] | None = None,
    ) -> TableVersion:  # fmt: skip
        """A version with changed rows, and other dense parameters and ids if given. This version stays as it is.

        `id_maps` replaces all ids, `moved` has the rows of each table that have other ids.
        """
        changed = dict(self.overlay.changed) if self.overlay is not None else {}
        for table, delta in deltas.items():
            changed[table] = merge_deltas([changed[table], delta]) if table in changed else delta
        overlay = _make_overlay(self.layout, changed, self.device) if changed else None
        maps = self.maps if id_maps is None else _make_maps(self.layout, id_maps, self.device)
        if moved and maps is not None:
            by_feature = [moved.get(self.layout.tables[table].table.name) for table in self.tables]
            maps = maps.with_keyed(
                {f: map if (m := by_feature[f]) is None else map.with_moved(m) for f, map in maps.keyed.items()}
            )
        return replace(self, name=name, overlay=overlay, dense=self.dense if dense is None else dense, maps=maps)

    @property
    def key_maps(self) -> dict[tuple[str, int], KeyedMap]:
        """The elastic map of each part of a table, by table and first row."""
        keyed = {} if self.maps is None else self.maps.keyed
        return {(self.layout.tables[self.tables[f]].table.name, map.first): map for f, map in keyed.items()}

    @property
    def is_in_place(self) -> bool:
        """Whether all rows and ids are in the shards and key tables."""
        return self.overlay is None and all(map.moved is None for map in self.key_maps.values())

    def in_place(self) -> TableVersion:
        """The version after its changed rows and ids were written in place."""
        if self.maps is None or all(map.moved is None for map in self.maps.keyed.values()):
            return replace(self, overlay=None)  # the same maps, which fronts have
        keyed = {f: replace(map, moved=None) for f, map in self.maps.keyed.items()}
        return replace(self, overlay=None, maps=self.maps.with_keyed(keyed))


def id_without_row(feature: str, rows: int, position: int, id: int) -> BadInput:
    """The error of an id, given its position among the ids of its feature in a request."""
    words = f"feature {feature!r} has ids 0 to {rows - 1}, but the id at position {position} is {id}"
    return BadInput(words, feature=feature, rows=rows, position=position, id=id)


def _device_of(segments: Sequence[Tensor | RemoteSegment | None]) -> torch.device:
    return next((segment.device for segment in segments if isinstance(segment, Tensor)), torch.device("cpu"))


def _starts(bags: ServedBags) -> Tensor:
    """The first id of each feature."""
    return bags.ends_F1 if bags.offsets_B1 is None else bags.offsets_B1[bags.ends_F1]


def _make_maps(layout: ShardLayout, id_maps: Mapping[str, IdMap], device: torch.device) -> IdMaps | None:
    """The id maps of all features, or None if ids are row numbers."""
    tables = [each.table for each in layout.tables]
    needed = [_needed_map(id_maps.get(feature), table, feature) for table in tables for feature in table.features]
    return IdMaps(needed, device) if any(each is not None for each in needed) else None


def _needed_map(map: IdMap | None, table: ServedTable, feature: str) -> IdMap | None:
    """The id map of a feature, unless ids are row numbers."""
    if map is None or (map.is_identity and map.rows == table.rows):
        return None
    if map.rows > table.rows:
        rows = f"{map.rows} rows, and table {table.name!r} {table.rows}"
        raise BadInput(f"the id map of feature {feature!r} has {rows}", feature=feature, table=table.name)
    return map


# -- overlays -----------------------------------------------------------------------------------------------------------------


def _make_overlay(layout: ShardLayout, changed: Mapping[str, RowDelta], device: torch.device) -> DeltaOverlay:
    """A new segment with all changed rows."""
    records = device.type == "cpu"
    tables = [t.table._replace(rows=len(changed[t.table.name].rows_K)) for t in layout.tables if t.table.name in changed]
    own = make_layout(tables, [TableSplit(t.rows, 1, "ranges", per=max(t.rows, 1)) for t in tables], records)
    memory = SharedSegment(own.sizes_S[0], "overlay").memory if records else np.zeros(own.sizes_S[0], np.uint8)
    for each in own.tables:
        codes_KB, meta_KW = each.views(memory, 0)
        codes_KB[:], meta_KW[:] = changed[each.table.name].codes_KB, changed[each.table.name].meta_KW
    return DeltaOverlay(dict(changed), torch.from_numpy(memory).to(device), {each.table.name: each for each in own.tables})


# -- kernel arguments --------------------------------------------------------------------------------------------------------


class _RowSets:
    """Sets of rows, concatenated."""

    def __init__(self) -> None:
        self.words: list[Tensor] = []
        self.counts: list[Tensor] = []

    def add(self, rows_H: Rows) -> list[int]:
        """The fields of a set (`kernels/serve/fields.py`)."""
        if not len(rows_H):
            return [S.NOTHING, 0, 0, 0, 0, 0]
        kept = KeptIds.of(rows_H)
        if gap := -sum(map(len, self.words)) % BLOCK_WORDS:
            self.words.append(torch.zeros(gap, dtype=torch.int64))  # bitmaps begin on cache lines
        places = sum(map(len, self.words)), sum(map(len, self.counts))
        self.words.append(kept.words)
        self.counts.append(kept.block_counts)
        return [S.BITMAP if kept.form == "bitmap" else S.SORTED, kept.count, *places, kept.low, kept.high]


def _make_placed(version: TableVersion) -> ShardedTables:
    """The kernel arguments that stay the same for all lookups of a version: fields of features, and base pointers."""
    layout, overlay, device = version.layout, version.overlay, _device_of(version.segments)
    sets, rotations, fields, codes, meta = _RowSets(), [np.zeros(0, np.uint8)], [], [], []
    for each in layout.tables:
        split, table = each.split, each.table
        row = [0] * S.FIELDS
        row[S.ROWS], row[S.DIM], row[S.FORMAT] = table.rows, table.dim, table.format
        row[S.STRIDE], row[S.META_STRIDE] = each.stride, each.meta_stride
        row[S.SCHEME] = S.RANGES if split.scheme == "ranges" else S.BLOCKS
        row[S.FIRST], row[S.PER], row[S.KEY] = split.first, split.per, split.key
        row[S.ROTATIONS] = S.HASHED
        if split.rotations_B is not None:
            row[S.ROTATIONS] = sum(map(len, rotations))
            rotations.append(split.rotations_B)
        row[S.COPY_PLACE] = split.owned
        row[S.COPIED : S.OVERLAY] = sets.add(split.copied_H)
        own = None if overlay is None else overlay.layouts.get(table.name)
        row[S.OVERLAY :] = sets.add(
            np.zeros(0, np.int64) if overlay is None or own is None else overlay.changed[table.name].rows_K
        )
        fields.append(row)
        codes.append([*each.codes_S, 0 if own is None else own.codes_S[0]])
        meta.append([*each.meta_S, 0 if own is None else own.meta_S[0]])
    segments = (*version.segments, None if overlay is None else overlay.segment)
    fields_FN, codes_FC, meta_FC = (
        torch.tensor(each, dtype=torch.int64)[torch.tensor(version.tables, dtype=torch.int64)] for each in (fields, codes, meta)
    )
    return ShardedTables(
        layout.shards,
        tuple(sorted({(each.table.dim, each.table.format) for each in layout.tables})),
        _common_scheme(layout.tables),
        bool(sets.words),
        fields_FN.to(device),
        torch.from_numpy(np.concatenate(rotations)).to(device),
        torch.cat([torch.zeros(0, dtype=torch.int64), *sets.words]).to(device),
        torch.cat([torch.zeros(0, dtype=torch.int32), *sets.counts]).to(device),
        tuple(segment if isinstance(segment, Tensor) else None for segment in segments),
        codes_FC,
        meta_FC,
        *(_base_pointers(segments, each, device).to(device) for each in (codes_FC, meta_FC)),
    )


def _common_scheme(layouts: Sequence[ShardedTableLayout]) -> int:
    schemes = {
        S.ALL_RANGES if each.split.scheme == "ranges" else S.ALL_HASHED if each.split.rotations_B is None else S.ALL_ROTATED
        for each in layouts
    }
    return schemes.pop() if len(schemes) == 1 else S.MIXED


def _base_pointers(segments: Sequence[Tensor | RemoteSegment | None], offsets_FC: Tensor, device: torch.device) -> Tensor:
    """Addresses on a CPU; on a GPU, offsets from the first segment, because kernels add them to its pointer."""
    origin = 0 if device.type == "cpu" or segments[0] is None else segments[0].data_ptr()
    starts = [0 if segment is None else segment.data_ptr() - origin for segment in segments]
    down_C = torch.tensor([segment is None for segment in segments], dtype=torch.bool)
    return torch.where(down_C, 0, torch.tensor(starts, dtype=torch.int64) + offsets_FC)
