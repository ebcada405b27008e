"""Changed rows of a module, copied as a checkpoint of this moment would be served.

A cached row is served rounded to nearest, as a checkpoint's is; a table with rows in several precisions is served in fp32. Rows
that left the cache have other bits than the rounded value that was published, and no change was counted: slots are compared
with those of the publish before.

A rank of a sharded module sends the rows whose home it is. It keeps the number of each of its rows in the table, four bytes a
row: computing it from the place would need the inverse of every map.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline import formats as F
from thermocline.checkpoint.format.module_entries import NamedModule
from thermocline.checkpoint.publishes.part import PublishedTable
from thermocline.checkpoint.publishes.row_delta import RowDelta
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.kernels import dequantize_rows, quantize_rows
from thermocline.kernels.layout import Cache
from thermocline.kernels.slots import read_pointed, slots_of
from thermocline.nn.elastic_maps import ElasticMaps
from thermocline.nn.rows_module import blocks
from thermocline.rows.arena import Arena
from thermocline.rows.change_bitmap import UpdateCounts
from thermocline.rows.precision import format_of

from .selection import RowAges


class ModuleRows:
    """Tracks one module."""

    def __init__(self, found: NamedModule) -> None:
        self._found, self.module = found, found.module
        served = [t.precision if len(t.precisions) == 1 else "fp32" for t in found.tables]
        self.tables = [
            PublishedTable(t.name, t.rows, t.dim, format_of(name)) for t, name in zip(found.tables, served, strict=True)
        ]
        maps = found.module.maps
        self._elastic = maps if isinstance(maps, ElasticMaps) else None
        if self._elastic is not None:
            self._elastic.record_moves(True)
        self._attach()

    def _attach(self) -> None:
        arena = self.arena = self.module.arena
        arena.unpublished = self.counts = UpdateCounts(arena.rows, arena.device)
        self.ages = RowAges(0)  # `waiting` makes it as large as it must be
        self._slots_S = self._slots()
        self._numbers, self._tables = list[Tensor](), list(range(len(arena.tables)))
        if isinstance(self.module, ShardedCollection):
            self._numbers = _numbers_of(self.module)
            self._tables = [part.table for part in self.module.row_index.parts]

    def attach(self, run: int, number: int) -> None:
        """Continue at a publish. After a replanning the module has another arena: all of its rows are sent again."""
        if self.module.arena is not self.arena:
            self._attach()
            self.counts.publish_first(torch.arange(self.arena.rows))
        self.counts.run, self.counts.number = run, number

    def detach(self) -> None:
        """Count changes no longer."""
        self.arena.unpublished = self.module.arena.unpublished = None  # a replanned module has another arena
        if self._elastic is not None:
            self._elastic.record_moves(False)

    def _slots(self) -> Tensor:
        """The row of each cache slot, or EMPTY."""
        if not self.arena.cache:
            return torch.zeros(0, dtype=torch.int64)
        rows_S = Cache(*self.arena.cache).rows
        return torch.where(rows_S == F.EMPTY, rows_S, rows_S & ~F.DIRTY)

    def changed(self) -> Tensor:
        """Arena rows that changed since they were published, ascending. Waits for pending updates."""
        if isinstance(self.module, ShardedCollection):
            self.module.wait_for_exchange()
        arena = self.arena
        arena.settle()
        if arena.cache:
            now_S = self._slots()
            left_S = (self._slots_S != now_S) & (self._slots_S != F.EMPTY)
            self.counts.mark(self._slots_S[left_S])
            self._slots_S = now_S
        rows_K = self.counts.changed()
        return rows_K[: int(torch.searchsorted(rows_K, arena.rows))]

    def row_bytes(self, rows_K: Tensor) -> Tensor:
        """Bytes that each row takes in a publish, with its number."""
        found_K = torch.zeros(len(rows_K), dtype=torch.int64)
        for index, _ in enumerate(self.arena.tables):
            first, last = self._span(index)
            table = self.tables[self._tables[index]]
            size = 8 + F.row_bytes(table.format, table.dim) + 4 * F.META_WORDS[table.format]
            begin, end = torch.searchsorted(rows_K, torch.tensor([first, last])).tolist()
            found_K[begin:end] = size
        return found_K

    def waiting(self, rows_K: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.float64], NDArray[np.int64]]:
        """Updates and ages of changed rows, and the bytes that each takes: what a budget goes by."""
        if self.ages.rows < self.arena.rows:
            self.ages = RowAges(self.arena.rows)
        counts_K = self.counts.counts_R[rows_K.to(self.counts.counts_R.device)].cpu()
        return counts_K.numpy(), self.ages.seconds(rows_K.numpy()), self.row_bytes(rows_K).numpy()

    def _span(self, index: int) -> tuple[int, int]:
        first = self.arena.views(index)[2]
        return first, first + self.arena.tables[index].rows

    def take_ids(self) -> dict[str, Any]:
        """The rows that got other ids, by table, and forget that they did. Their values are among those that go first."""
        found = [] if self._elastic is None else self._elastic.take_moved()
        self._ids, parts = found, dict[str, Any]()
        for index, moved in found:
            name = self.tables[index].name
            parts[name] = parts[name].merged(moved) if name in parts else moved
        return parts

    def give_back(self) -> None:
        """Send what was taken last again: its publish failed."""
        if self.module.arena is self.arena:
            self.counts.publish_first(self._taken_K)
        if self._elastic is not None:
            self._elastic.give_back_moved(self._ids)

    def take(self, rows_K: Tensor) -> dict[str, RowDelta]:
        """Copy rows, ascending arena rows, and forget their changes."""
        self._taken_K = rows_K
        self.counts.clear(rows_K)
        parts: dict[str, list[RowDelta]] = {}
        for index, _ in enumerate(self.arena.tables):
            first, last = self._span(index)
            begin, end = torch.searchsorted(rows_K, torch.tensor([first, last])).tolist()
            if end > begin:
                table = self.tables[self._tables[index]]
                parts.setdefault(table.name, []).append(self._copy(index, table, rows_K[begin:end] - first))
        return {name: _joined(each) for name, each in parts.items()}

    def _copy(self, index: int, table: PublishedTable, places_K: Tensor) -> RowDelta:
        number_K = places_K
        if self._numbers:
            number_K = self._numbers[index][places_K].long()
            home_K = number_K >= 0
            number_K, places_K = number_K[home_K], places_K[home_K]
        codes_KB, meta_KW = read_rows(self.arena, index, places_K, table.format)
        return RowDelta(number_K.numpy(), codes_KB.numpy(), meta_KW.numpy())


def read_rows(arena: Arena, index: int, places_K: Tensor, served: int) -> tuple[Tensor, Tensor]:
    """Codes and meta words of rows as a checkpoint of this moment would be served in a format, on the CPU."""
    codes_RB, meta_RW, first, format, dim = arena.views(index)
    codes_KB = codes_RB[places_K.to(codes_RB.device)].to(arena.device)
    meta_KW = meta_RW[places_K.to(meta_RW.device)]
    dirty_K, values_KD = places_K[:0], torch.zeros(0, dim)
    if F.META_WORDS[format] and arena.cache:
        cached_K = (meta_KW[:, 0] < 0).nonzero()[:, 0]
        cache, word_K = Cache(*arena.cache), meta_KW[cached_K, 0]
        pool = next((p for p in arena.pools if p.row <= first < p.row + p.rows), None)
        if pool is not None and cached_K.numel():
            slot_K = pool.slot + slots_of(pool, word_K)
            meta_KW[cached_K, 0] = cache.words[slot_K]
            updated_K = (cache.rows[slot_K] & F.DIRTY) != 0
            dirty_K, values_KD = cached_K[updated_K], read_pointed(cache, word_K[updated_K], dim)
    if served != format:
        found_KD = dequantize_rows(codes_KB, meta_KW, format, dim)
        found_KD[dirty_K] = values_KD
        codes_KB, meta_KW = quantize_rows(found_KD, served)
    elif dirty_K.numel():
        codes_KB[dirty_K], meta_KW[dirty_K] = quantize_rows(values_KD, format)
    return codes_KB.cpu(), meta_KW.cpu()


def _joined(parts: list[RowDelta]) -> RowDelta:
    """Parts of one table, by row: tiers lie one after another."""
    if len(parts) == 1 and bool((np.diff(parts[0].rows_K) > 0).all()):
        return parts[0]
    rows_K, codes_KB, meta_KW = (np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS)
    order_K = rows_K.argsort()
    return RowDelta(rows_K[order_K], codes_KB[order_K], meta_KW[order_K])


_FIELDS = ("rows_K", "codes_KB", "meta_KW")


def _numbers_of(module: ShardedCollection) -> list[Tensor]:
    """By arena table, the row in its table of each place whose home is this rank; -1 for others."""
    index, rank = module.row_index, module.groups.rank
    small = all(map.rows < 1 << 31 for map in index.maps)
    dtype = torch.int32 if small else torch.int64
    found = [torch.full((part.local_rows,), -1, dtype=dtype) for part in index.parts]
    for rows_N, part_N, place_N in _home_rows(module, rank):
        for k in part_N.unique().tolist():
            at = part_N == k
            found[k][place_N[at]] = rows_N[at].to(dtype)
    return found


def _home_rows(module: ShardedCollection, rank: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows whose home is a rank, numbered in their tables: parts and places, a block at a time."""
    index = module.row_index
    for table, map in enumerate(index.maps):
        for begin, end in blocks(map.rows):
            rows_N = torch.arange(begin, end, device=index.device)
            where = index.locate(rows_N + index.first[table])
            mine = (where.home_N == rank).nonzero()[:, 0]
            yield rows_N[mine].cpu(), where.part_N[mine].cpu(), where.index_N[mine].cpu()
