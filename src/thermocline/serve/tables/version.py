"""One version of the tables on their cards, as readers see it: a value that never changes.

Whoever looks rows up takes a `Version` once and uses it to the end: its base pointers, its id maps, its segments. A new
version, or a delta, is another `Version`, put in its place by one assignment. So all rows of a request are of one version, and
nothing is locked. Segments belong to the versions that point at them: memory is given back when the last reader of the last
such version has let it go.

**Deltas** (rows that an incremental checkpoint changed) go to an *overlay*: a segment of its own that has all rows changed
since the tables were loaded, in the order of their numbers, written anew with each delta. Rows under readers are never written.
Rejected: pages copied on write and a swap of page tables, where one hot row costs 4,096 bytes; and an overlay that grows in
place, which needs a place for every row beside the set. Writing it anew costs as many bytes as have changed since the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput, IdOutOfRange
from thermocline.ids.feature_maps import IdMaps
from thermocline.ids.idmap import IdMap
from thermocline.ids.kept_ids import Kept
from thermocline.kernels.ids.fields import BLOCK_WORDS
from thermocline.kernels.serve import fields as S
from thermocline.kernels.serve import gather_pool
from thermocline.kernels.serve.fields import Bags, CardMissing, Placed
from thermocline.serve.errors import CardDown

from .row_split import Rows
from .segments import Arrangement, Bytes, Segment, Shelf, TableInfo, Words, strides

if TYPE_CHECKING:
    from thermocline.kernels.serve.cpu import Rows as RowsOf
    from thermocline.serve.remote.remote_hosts import Far, Fetch


@dataclass(frozen=True)
class Changed:
    """Rows of one table that a delta changed, rising and each once, and their bytes as stored."""

    rows_K: Rows
    codes_KB: Bytes
    meta_KW: Words


@dataclass(frozen=True, eq=False)
class Overlay:
    """All rows that deltas have changed, by table, and where each table's lie in the overlay's segment."""

    changed: Mapping[str, Changed]
    segment: Tensor
    codes: Mapping[str, int]
    meta: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Version:
    """Tables in place, ready to be looked up."""

    name: str
    arrangement: Arrangement
    segments: tuple[Tensor | Far | None, ...]  # one a card; None where it is down
    id_maps: Mapping[str, IdMap]
    modes: Mapping[str, int]  # of pooling, by feature
    features: tuple[str, ...]
    tables: tuple[int, ...]  # of each feature, which shelf
    placed: Placed
    maps: IdMaps | None
    dense: Mapping[str, Tensor]  # what the checkpoint has beside rows: the parameters of the model around them
    overlay: Overlay | None = None
    fetch: Fetch | None = None  # of rows that lie on other hosts

    @classmethod
    def of(
        cls, name: str, arrangement: Arrangement, segments: Sequence[Tensor | Far | None], id_maps: Mapping[str, IdMap],
        modes: Mapping[str, int], dense: Mapping[str, Tensor] | None = None, fetch: Fetch | None = None,
    ) -> Version:  # fmt: skip
        """Tables whose rows are in place."""
        pairs = [(feature, n) for n, shelf in enumerate(arrangement.shelves) for feature in shelf.table.features]
        device = next((segment.device for segment in segments if isinstance(segment, Tensor)), torch.device("cpu"))
        shelves = arrangement.shelves
        needed = [_needed(id_maps.get(feature), shelves[n].table, feature) for feature, n in pairs]
        maps = IdMaps(needed, device) if any(each is not None for each in needed) else None
        features, tables = tuple(feature for feature, _ in pairs), tuple(n for _, n in pairs)
        placed = make_placed(arrangement, tables, tuple(segments), None, device)
        about = (name, arrangement, tuple(segments), dict(id_maps), dict(modes), features, tables, placed, maps, dense or {})
        return cls(*about, fetch=fetch)

    @property
    def device(self) -> torch.device:
        return self.placed.fields_FN.device

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Of features, by their name."""
        return {feature: n for n, feature in enumerate(self.features)}

    @cached_property
    def dims(self) -> list[int]:
        """Of each feature."""
        return [self.arrangement.shelves[n].table.dim for n in self.tables]

    @cached_property
    def plain(self) -> dict[str, RowsOf]:
        """Features whose ids are rows, on a CPU: the shortest way to them."""
        from thermocline.kernels.serve.cpu import Rows as RowsOf

        if self.device.type != "cpu" or self.maps is not None or self.fetch is not None:
            return {}
        return {feature: RowsOf(self.placed, n) for n, feature in enumerate(self.features)}

    @property
    def bytes(self) -> int:
        return self.arrangement.bytes + (0 if self.overlay is None else self.overlay.segment.numel())

    def look_up(self, ids_N: Tensor, bags: Bags, out: Tensor) -> Tensor:
        """Answers to the bags of all features, written to `out`; lookups of each card and of the overlay. Ids are raw."""
        try:
            return self._look_up(ids_N, bags, out) if self.device.type != "cuda" else self._look_up_apart(ids_N, bags, out)
        except IdOutOfRange as error:
            starts_F1 = bags.ends_F1 if bags.offsets_B1 is None else bags.offsets_B1[bags.ends_F1]
            position = error.position - int(starts_F1[error.feature])
            raise BadInput(
                f"feature {self.features[error.feature]!r} has ids 0 to {error.rows - 1}, but the id at position {position} is "
                f"{error.id}"
            ) from None
        except CardMissing as error:
            raise CardDown(error.card) from None

    def _look_up(self, ids_N: Tensor, bags: Bags, out: Tensor) -> Tensor:
        rows_N = ids_N
        if self.maps is not None:
            starts_F1 = bags.ends_F1 if bags.offsets_B1 is None else bags.offsets_B1[bags.ends_F1]
            rows_N = self.maps(ids_N, starts_F1)
        return gather_pool(self.placed, bags._replace(rows_N=rows_N), out, self.fetch)

    def _look_up_apart(self, ids_N: Tensor, bags: Bags, out: Tensor) -> Tensor:
        """On a GPU, where kernels do not wait to be asked what they have found: of other models, other threads hear it."""
        from thermocline.kernels.gpu.errors import error_buffer, thread_error_buffer

        with thread_error_buffer(self.device):
            tally_C = self._look_up(ids_N, bags, out)
            torch.cuda.synchronize(self.device)
            error_buffer(out).raise_pending()
        return tally_C

    def with_changes(
        self, name: str, changed: Mapping[str, Changed], dense: Mapping[str, Tensor] | None = None
    ) -> Version:  # fmt: skip
        """This version with some rows changed, and the dense part if one is given. The rows of this one stay as they are."""
        everything = dict(self.overlay.changed) if self.overlay is not None else {}
        for table, rows in changed.items():
            everything[table] = merged([everything[table], rows]) if table in everything else rows
        overlay = _overlay(self.arrangement, everything, self.device)
        placed = make_placed(self.arrangement, self.tables, self.segments, overlay, self.device)
        return replace(self, name=name, placed=placed, overlay=overlay, dense=self.dense if dense is None else dense)

    def on(self, segments: Sequence[Tensor | Far | None]) -> Version:
        """This version where other cards are there."""
        placed = make_placed(self.arrangement, self.tables, tuple(segments), self.overlay, self.device)
        return replace(self, segments=tuple(segments), placed=placed)


def _needed(map: IdMap | None, table: TableInfo, feature: str) -> IdMap | None:
    """The map of a feature, unless ids are rows."""
    if map is None or (map.is_identity and map.rows == table.rows):
        return None
    if map.rows > table.rows:
        raise BadInput(f"the id map of feature {feature!r} has {map.rows} rows, and table {table.name!r} {table.rows}")
    return map


# -- overlays -----------------------------------------------------------------------------------------------------------------


def merged(parts: Sequence[Changed]) -> Changed:
    """Changes one after another as one: of a row that is in several, the last."""
    rows_K = np.concatenate([part.rows_K for part in parts])
    _, last_K = np.unique(rows_K[::-1], return_index=True)  # of each row, the first from the end
    at_K = len(rows_K) - 1 - last_K
    codes_KB, meta_KW = (np.concatenate(arrays) for arrays in zip(*((p.codes_KB, p.meta_KW) for p in parts), strict=True))
    return Changed(rows_K[at_K], codes_KB[at_K], meta_KW[at_K])


def _overlay(arrangement: Arrangement, changed: Mapping[str, Changed], device: torch.device) -> Overlay:
    """A fresh segment with all changed rows."""
    records, size = device.type == "cpu", 0
    codes: dict[str, int] = {}
    meta: dict[str, int] = {}
    shelves = {shelf.table.name: shelf for shelf in arrangement.shelves}
    for name, rows in changed.items():
        table, count, begin = shelves[name].table, len(rows.rows_K), -(-size // 128) * 128
        stride, meta_stride = strides(table.format, table.dim, records)
        codes[name] = begin + (4 * F.META_WORDS[table.format] if records else 0)
        meta[name] = begin if records else -(-(begin + count * stride) // 128) * 128
        size = begin + count * stride if records else meta[name] + count * meta_stride
    memory = Segment(size + 128, "overlay").memory if records else np.zeros(size + 128, np.uint8)
    for name, rows in changed.items():
        codes_KB, meta_KW = shelves[name].views_at(memory, len(rows.rows_K), codes[name], meta[name])
        codes_KB[:] = rows.codes_KB
        meta_KW[:] = rows.meta_KW
    return Overlay(dict(changed), torch.from_numpy(memory).to(device), codes, meta)


# -- what kernels take -------------------------------------------------------------------------------------------------------


class _Sets:
    """Sets of rows, end to end."""

    def __init__(self) -> None:
        self.words: list[Tensor] = []
        self.counts: list[Tensor] = []

    def add(self, rows_H: Rows) -> list[int]:
        """The fields of a set."""
        if not len(rows_H):
            return [S.NOTHING, 0, 0, 0, 0, 0]
        kept = Kept.of(rows_H)
        if gap := -sum(map(len, self.words)) % BLOCK_WORDS:
            self.words.append(torch.zeros(gap, dtype=torch.int64))  # bitmaps lie on cache lines
        places = sum(map(len, self.words)), sum(map(len, self.counts))
        self.words.append(kept.words)
        self.counts.append(kept.block_counts)
        return [S.BITMAP if kept.form == "bitmap" else S.SORTED, kept.count, *places, kept.low, kept.high]


def make_placed(
    arrangement: Arrangement, tables: Sequence[int], segments: tuple[Tensor | Far | None, ...], overlay: Overlay | None,
    device: torch.device,
) -> Placed:  # fmt: skip
    """The numbers of every feature, and the table of base pointers."""
    sets, turns, turns_at, fields = _Sets(), [np.zeros(0, np.uint8)], 0, []
    for shelf in arrangement.shelves:
        split, table = shelf.split, shelf.table
        field = [0] * S.FIELDS
        field[S.ROWS], field[S.DIM], field[S.FORMAT] = table.rows, table.dim, table.format
        field[S.STRIDE], field[S.META_STRIDE] = shelf.stride, shelf.meta_stride
        field[S.WAY] = S.RANGES if split.way == "ranges" else S.BLOCKS
        field[S.FIRST], field[S.PER], field[S.KEY] = split.first, split.per, split.key
        field[S.TURNS] = S.HASHED
        if split.turns_B is not None:
            field[S.TURNS] = turns_at
            turns.append(split.turns_B)
            turns_at += len(split.turns_B)
        field[S.COPY_PLACE] = split.owned
        changed = None if overlay is None else overlay.changed.get(table.name)
        field[S.COPIED : S.OVERLAY] = sets.add(split.copied_H)
        field[S.OVERLAY :] = sets.add(np.zeros(0, np.int64) if changed is None else changed.rows_K)
        fields.append(field)
    everything = (*segments, None if overlay is None else overlay.segment)
    codes_FC, meta_FC = _begins(arrangement.shelves, overlay)
    one_a_feature = torch.tensor(tables)
    bases_FC, meta_bases_FC = (_bases(everything, each[one_a_feature], device) for each in (codes_FC, meta_FC))
    return Placed(
        arrangement.cards,
        tuple(sorted({(shelf.table.dim, shelf.table.format) for shelf in arrangement.shelves})),
        _ways(arrangement.shelves),
        bool(sets.words),
        torch.tensor(fields, dtype=torch.int64)[one_a_feature].to(device),
        torch.from_numpy(np.concatenate(turns)).to(device),
        torch.cat([torch.zeros(0, dtype=torch.int64), *sets.words]).to(device),
        torch.cat([torch.zeros(0, dtype=torch.int32), *sets.counts]).to(device),
        tuple(segment if isinstance(segment, Tensor) else None for segment in everything),
        codes_FC[one_a_feature],
        meta_FC[one_a_feature],
        bases_FC.to(device),
        meta_bases_FC.to(device),
    )


def _ways(shelves: Sequence[Shelf]) -> int:
    """What all splits have in common."""
    ways = {
        S.ALL_RANGES if shelf.split.way == "ranges" else S.ALL_HASHED if shelf.split.turns_B is None else S.ALL_TURNED
        for shelf in shelves
    }
    return ways.pop() if len(ways) == 1 else S.MIXED


def _begins(shelves: Sequence[Shelf], overlay: Overlay | None) -> tuple[Tensor, Tensor]:
    """Where each table begins in each segment, the overlay's last: codes, and meta words."""
    codes, meta = ({}, {}) if overlay is None else (overlay.codes, overlay.meta)
    codes_TC = [[*shelf.codes_C, codes.get(shelf.table.name, 0)] for shelf in shelves]
    meta_TC = [[*shelf.meta_C, meta.get(shelf.table.name, 0)] for shelf in shelves]
    return torch.tensor(codes_TC, dtype=torch.int64), torch.tensor(meta_TC, dtype=torch.int64)


def _bases(segments: Sequence[Tensor | Far | None], begins_FC: Tensor, device: torch.device) -> Tensor:
    """Addresses; on a GPU, bytes from the first segment on, since pointers there are made by adding to one that is known."""
    if device.type == "cpu":
        starts = [0 if segment is None else segment.data_ptr() for segment in segments]
        down_C = torch.tensor([segment is None for segment in segments])
        return torch.where(down_C, 0, torch.tensor(starts) + begins_FC)
    anchor = segments[0]
    assert anchor is not None
    starts = [0 if segment is None else segment.data_ptr() - anchor.data_ptr() for segment in segments]
    return torch.tensor(starts) + begins_FC
