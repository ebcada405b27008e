"""The rows of a module as sections: ranges of rows that are made one at a time, when they are written.

One process writes its tables as they lie, in ranges. A rank of many writes the rows it is the *home* of (every row has one,
however many copies it has), range by range with their numbers, in rising order; and so does an incremental save with the rows
that have changed. What the cache keeps of a row does not show here: a cached row has the meta word that its pointer displaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import formats as F
from ..distributed.sharded import ShardedCollection
from ..kernels.slots import slots_of
from ..nn.base import RowsModule, blocks
from ..rows.arena import Arena
from ..rows.changes import marked
from ..rows.precision import bytes_per_row, format_of
from .describe import Found
from .manifest import Section, TableEntry
from .tensors import Entry, Lot

SECTION_BYTES = 1 << 25
_WHOLE = 1 << 10  # rows of a section are a multiple


@dataclass(frozen=True)
class Pending:
    """A section that is to be written: `make` gives its tensors in the order of `entries`."""

    table: TableEntry
    precision: str
    first: int
    end: int
    count: int
    scattered: bool
    states: int
    by_row: bool
    make: Callable[[], list[Tensor]]
    mark: str = ""

    @property
    def key(self) -> str:
        return f"{self.table.name}/{self.first}-{self.end}/{self.precision}{self.mark}"

    def entries(self) -> list[Entry]:
        """Rows first, codes last: the types from large to small."""
        format, n, dim = format_of(self.precision), self.count, self.table.dim
        found = [Entry(f"{self.key}/rows", row_type(self.table.rows), (n,))] if self.scattered else []
        for state in range(self.states):
            found.append(Entry(f"{self.key}/state{state}", torch.float32, (n,) if self.by_row else (n, dim)))
        if words := F.META_WORDS[format]:
            found.append(Entry(f"{self.key}/meta", torch.int32, (n, words)))
        return [*found, Entry(f"{self.key}/codes", torch.uint8, (n, F.row_bytes(format, dim)))]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries())

    def lot(self) -> Lot:
        return self.entries(), self.make

    def written(self, file: str) -> Section:
        return Section(
            table=self.table.name, precision=self.precision, first=self.first, end=self.end, count=self.count,
            scattered=self.scattered, file=file, key=self.key,
        )  # fmt: skip


def row_type(rows: int) -> torch.dtype:
    """Of the numbers of a table's rows in files."""
    return torch.int32 if rows <= 1 << 31 else torch.int64


def sections(found: Found, bits: Tensor | None = None) -> Iterator[Pending]:
    """The rows of a module that this rank writes; with `bits`, those that they mark."""
    module = found.module
    module.arena.settle()
    for index, table in enumerate(found.tables):
        for first, end in ranges(module, index, table):
            if isinstance(module, ShardedCollection):
                yield from _at_home(module, index, table, first, end, bits)
            elif bits is None:
                yield _whole(module, index, table, first, end)
            else:
                row = module.arena.views(index)[2]
                rows_K = first + marked(bits, row + first, row + end)
                if rows_K.numel():
                    yield _some(module, index, table, first, end, rows_K)


def ranges(module: RowsModule, index: int, table: TableEntry) -> Iterator[tuple[int, int]]:
    """First and end row of the sections of a table, the same on every rank."""
    optimizer, ranks = module.trainer.optimizer, 1
    if isinstance(module, ShardedCollection) and module.atlas.maps[index].card is None:
        ranks = module.world.size  # of a range each of them has a part
    states = 4 * optimizer.states_per_row + 4 * table.dim * optimizer.states_per_column
    each = max(bytes_per_row(precision, table.dim) for precision in table.precisions) + states
    size = max(_WHOLE, ranks * SECTION_BYTES // each // _WHOLE * _WHOLE)
    return ((first, min(first + size, table.rows)) for first in range(0, table.rows, size))


def _whole(module: RowsModule, index: int, table: TableEntry, first: int, end: int) -> Pending:
    by_row = module.trainer.optimizer.states_per_row > 0

    def make() -> list[Tensor]:
        arena = module.arena
        codes_RB, meta_RW, _, format, dim = arena.views(index)
        states = [state[first:end] for state in arena.state_views(index, module.trainer.states, by_row)]
        meta = [stored_words(arena, meta_RW[first:end], format, dim)] if F.META_WORDS[format] else []
        return [*states, *meta, codes_RB[first:end]]

    states = len(module.trainer.states)
    return Pending(table, table.precision, first, end, end - first, False, states, by_row, make)


def _some(module: RowsModule, index: int, table: TableEntry, first: int, end: int, rows_K: Tensor) -> Pending:
    """Some rows of a range."""
    by_row = module.trainer.optimizer.states_per_row > 0

    def make() -> list[Tensor]:
        arena = module.arena
        codes_RB, meta_RW, _, format, dim = arena.views(index)
        at_K = rows_K.to(arena.device)
        states = [state[at_K] for state in arena.state_views(index, module.trainer.states, by_row)]
        meta = [stored_words(arena, meta_RW[at_K], format, dim)] if F.META_WORDS[format] else []
        return [rows_K.to(row_type(table.rows)), *states, *meta, codes_RB[rows_K.to(codes_RB.device)]]

    states = len(module.trainer.states)
    return Pending(table, table.precision, first, end, rows_K.numel(), True, states, by_row, make)


def stored_words(arena: Arena, meta_KW: Tensor, format: int, dim: int) -> Tensor:
    """Meta words of rows of one format and dimension, as they would be if nothing were cached."""
    cached_K = meta_KW[:, 0] < 0
    pools = [pool for pool in arena.pools if (pool.dim, pool.format) == (dim, format)]
    if not pools or not bool(cached_K.any()):
        return meta_KW
    words = arena.cache[4]
    meta_KW = meta_KW.clone()
    meta_KW[cached_K, 0] = words[pools[0].slot + slots_of(pools[0], meta_KW[cached_K, 0])]
    return meta_KW


Kind = tuple[str, bool]  # precision, and whether rows have copies


def _at_home(
    module: ShardedCollection, index: int, table: TableEntry, first: int, end: int, bits: Tensor | None
) -> Iterator[Pending]:
    """What this rank writes of a range: a section for each kind of rows. Those without copies are of no use to other ranks."""
    by_row, states = module.trainer.optimizer.states_per_row > 0, len(module.trainer.states)
    counts: dict[Kind, int] = {}
    for _, part_K, _ in homes(module, index, first, end, bits):
        for k, count in zip(*(each.tolist() for each in part_K.unique(return_counts=True)), strict=True):
            kind = _kind(module, k)
            counts[kind] = counts.get(kind, 0) + count
    for kind, count in sorted(counts.items()):

        def make(kind: Kind = kind) -> list[Tensor]:
            return _gathered(module, table, kind, homes(module, index, first, end, bits))

        yield Pending(table, kind[0], first, end, count, True, states, by_row, make, "/copied" if kind[1] else "")


def _kind(module: ShardedCollection, k: int) -> Kind:
    part = module.atlas.parts[k]
    return part.precision, part.tier < 3


Homes = Iterator[tuple[Tensor, Tensor, Tensor]]


def homes(module: ShardedCollection, index: int, first: int, end: int, bits: Tensor | None) -> Homes:
    """Rows of a range whose home is this rank, in rising order: their numbers, parts and places, a block at a time.

    With `bits`, of them those that are marked.
    """
    begins_K = torch.tensor([module.arena.views(k)[2] for k in range(len(module.atlas.parts))], device=module.arena.device)
    for begin, last in blocks(end - first):
        rows_N = torch.arange(first + begin, first + last, device=module.arena.device)
        where = module.atlas(rows_N + module.atlas.first[index])
        mine_N = where.home_N == module.world.rank
        if bits is not None:
            at_N = torch.where(mine_N, begins_K[where.part_N] + where.place_N, 0)
            mine_N &= (bits[at_N >> 5] >> (at_N & 31).int()) & 1 != 0
        mine = mine_N.nonzero()[:, 0]
        if mine.numel():
            yield rows_N[mine], where.part_N[mine], where.place_N[mine]


def _gathered(module: ShardedCollection, table: TableEntry, kind: Kind, homes: Homes) -> list[Tensor]:
    lots: list[list[Tensor]] = []
    for rows_K, part_K, place_K in homes:
        for k in part_K.unique().tolist():
            if _kind(module, k) != kind:
                continue
            at = (part_K == k).nonzero()[:, 0]
            codes_RB, meta_RW, _, format, _ = module.arena.views(k)
            states = [state[place_K[at]] for state in module.held.states(k)]
            meta = [meta_RW[place_K[at]]] if F.META_WORDS[format] else []
            lots.append([rows_K[at].to(row_type(table.rows)), *states, *meta, codes_RB[place_K[at]]])
    tensors = [torch.cat(each) for each in zip(*lots, strict=True)]
    order = tensors[0].argsort()  # tiers 1 and 2 came one after the other
    return [tensor[order] for tensor in tensors]
