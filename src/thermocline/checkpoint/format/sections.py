"""The rows of a module as sections: ranges of rows that are made one at a time, when they are written.

One process writes its tables as they lie, in ranges. A rank of many writes the rows it is the *home* of (every row has one,
however many copies it has), range by range with their numbers, in rising order; and so does an incremental save with the rows
that have changed. What the cache keeps of a row does not show here: a cached row has the meta word that its pointer displaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.checkpoint.live_rows import At, Live
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.nn.rows_module import blocks
from thermocline.rows.change_bitmap import marked
from thermocline.rows.precision import bytes_per_row, format_of

from .manifest import Section, TableEntry
from .module_entries import Found
from .tensor_files import Entry, Lot

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


def sections(found: Found, source: Live, bits: Tensor | None = None) -> Iterator[Pending]:
    """The rows of a module that this rank writes, read from `source`; with `bits`, those that they mark."""
    module = found.module
    for index, table in enumerate(found.tables):
        for first, end in ranges(source, index, table):
            if isinstance(module, ShardedCollection):
                yield from _at_home(module, source, index, table, (first, end), bits)
            elif bits is None:
                yield _pending(source, table, (first, end), None, partial(_alone, source, index, slice(first, end)))
            else:
                row = source.arena.views(index)[2]
                rows_K = first + marked(bits, row + first, row + end)
                if rows_K.numel():
                    yield _pending(source, table, (first, end), rows_K, partial(_alone, source, index, rows_K))


def ranges(source: Live, index: int, table: TableEntry) -> Iterator[tuple[int, int]]:
    """First and end row of the sections of a table, the same on every rank."""
    module, optimizer, ranks = source.module, source.optimizer, 1
    if isinstance(module, ShardedCollection) and source.row_index.maps[index].owner is None:
        ranks = module.groups.size  # of a range each of them has a part
    states = 4 * optimizer.states_per_row + 4 * table.dim * optimizer.states_per_column
    each = max(bytes_per_row(precision, table.dim) for precision in table.precisions) + states
    size = max(_WHOLE, ranks * SECTION_BYTES // each // _WHOLE * _WHOLE)
    return ((first, min(first + size, table.rows)) for first in range(0, table.rows, size))


def _pending(
    source: Live, table: TableEntry, range: tuple[int, int], rows_K: Tensor | None, read: Callable[[], list[Tensor]]
) -> Pending:
    """All rows of a range, or some."""
    numbers = [] if rows_K is None else [rows_K.to(row_type(table.rows))]
    count = range[1] - range[0] if rows_K is None else rows_K.numel()
    scattered, states = rows_K is not None, len(source.states)
    return Pending(table, table.precision, *range, count, scattered, states, source.by_row, lambda: [*numbers, *read()])


def _alone(source: Live, table: int, at: At) -> list[Tensor]:
    """Some rows; those of the section before have been written."""
    source.release()
    return source.read(table, at)


Kind = tuple[str, bool]  # precision, and whether rows have copies


def _at_home(
    module: ShardedCollection, source: Live, index: int, table: TableEntry, range: tuple[int, int], bits: Tensor | None
) -> Iterator[Pending]:
    """What this rank writes of a range: a section for each kind of rows. Those without copies are of no use to other ranks."""
    counts: dict[Kind, int] = {}
    for _, part_K, _ in homes(module, source, index, *range, bits):
        for k, count in zip(*(each.tolist() for each in part_K.unique(return_counts=True)), strict=True):
            kind = _kind(source, k)
            counts[kind] = counts.get(kind, 0) + count
    for kind, count in sorted(counts.items()):

        def make(kind: Kind = kind) -> list[Tensor]:
            return _gathered(source, table, kind, homes(module, source, index, *range, bits))

        mark = "/copied" if kind[1] else ""
        yield Pending(table, kind[0], *range, count, True, len(source.states), source.by_row, make, mark)


def _kind(source: Live, k: int) -> Kind:
    part = source.row_index.parts[k]
    return part.precision, part.tier < 3


Homes = Iterator[tuple[Tensor, Tensor, Tensor]]


def homes(module: ShardedCollection, source: Live, index: int, first: int, end: int, bits: Tensor | None) -> Homes:
    """Rows of a range whose home is this rank, in rising order: their numbers, parts and places, a block at a time.

    With `bits`, of them those that are marked.
    """
    arena, row_index = source.arena, source.row_index
    begins_K = torch.tensor([arena.views(k)[2] for k in range(len(row_index.parts))], device=arena.device)
    for begin, last in blocks(end - first):
        rows_N = torch.arange(first + begin, first + last, device=arena.device)
        where = row_index.locate(rows_N + row_index.first[index])
        mine_N = where.home_N == module.groups.rank
        if bits is not None:
            at_N = torch.where(mine_N, begins_K[where.part_N] + where.index_N, 0)
            mine_N &= (bits[at_N >> 5] >> (at_N & 31).int()) & 1 != 0
        mine = mine_N.nonzero()[:, 0]
        if mine.numel():
            yield rows_N[mine], where.part_N[mine], where.index_N[mine]


def _gathered(source: Live, table: TableEntry, kind: Kind, homes: Homes) -> list[Tensor]:
    source.release()
    lots: list[list[Tensor]] = []
    for rows_K, part_K, place_K in homes:
        for k in part_K.unique().tolist():
            if _kind(source, k) == kind:
                at = (part_K == k).nonzero()[:, 0]
                lots.append([each.cpu() for each in (rows_K[at].to(row_type(table.rows)), *source.read(k, place_K[at]))])
    tensors = [torch.cat(each) for each in zip(*lots, strict=True)]
    order = tensors[0].argsort()  # tiers 1 and 2 came one after the other
    return [tensor[order] for tensor in tensors]
