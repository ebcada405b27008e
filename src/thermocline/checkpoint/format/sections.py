"""Rows of a module as sections: ranges of rows, each read when it is written.

One process writes its tables in ranges. Each rank of a sharded collection writes the rows whose *home* it is (every row has one
home, however many copies it has), range by range, with row numbers in rising order. An incremental save does the same with the
rows that changed. A cached row is written with the meta word that its cache pointer displaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from thermocline.checkpoint.live_rows import LiveRows
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.nn.rows_module import blocks
from thermocline.rows.change_bitmap import marked
from thermocline.rows.precision import bytes_per_row

from .manifest import Section, TableEntry
from .module_entries import NamedModule
from .section_tensors import row_dtype, section_shapes
from .tensor_files import TensorGroup, TensorInfo

SECTION_BYTES = 1 << 25
_MULTIPLE = 1 << 10  # rows of a section


@dataclass(frozen=True)
class PendingSection:
    """A section to be written; `read` gives its tensors in the order of `tensors`."""

    table: TableEntry
    precision: str
    first: int
    end: int
    count: int
    scattered: bool
    state_shapes: list[tuple[int, ...]]  # of each optimizer state array, without the row dimension
    read: Callable[[], list[Tensor]]
    suffix: str = ""

    @property
    def key(self) -> str:
        return f"{self.table.name}/{self.first}-{self.end}/{self.precision}{self.suffix}"

    def group(self) -> TensorGroup:
        """Row numbers first, codes last: element types from large to small."""
        shapes = section_shapes(self.precision, self.table.dim, self.state_shapes)
        found = [TensorInfo(f"{self.key}/rows", row_dtype(self.table.rows), (self.count,))] if self.scattered else []
        found += [TensorInfo(f"{self.key}/{name}", dtype, (self.count, *shape)) for name, (dtype, shape) in shapes.items()]
        return TensorGroup(found, self.read)

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.group().tensors)

    def written(self, file: str) -> Section:
        return Section(
            table=self.table.name, precision=self.precision, first=self.first, end=self.end, count=self.count,
            scattered=self.scattered, file=file, key=self.key,
        )  # fmt: skip


def pending_sections(found: NamedModule, source: LiveRows, bits: Tensor | None = None) -> Iterator[PendingSection]:
    """Sections that this rank writes, read from `source`; with `bits`, only rows that they mark."""
    for index, table in enumerate(found.tables):
        for first, end in _ranges(source, index, table):
            if isinstance(found.module, ShardedCollection):
                yield from _home_sections(found.module, source, index, table, (first, end), bits)
                continue
            row = source.arena.views(index)[2]
            rows_K = None if bits is None else first + marked(bits, row + first, row + end)
            if rows_K is None or rows_K.numel():
                yield _unsharded(source, index, table, (first, end), rows_K)


def _ranges(source: LiveRows, index: int, table: TableEntry) -> Iterator[tuple[int, int]]:
    """First and end row of the sections of a table, equal on every rank."""
    module, optimizer, ranks = source.module, source.optimizer, 1
    if isinstance(module, ShardedCollection) and source.row_index.maps[index].owner is None:
        ranks = module.groups.size  # each rank has a part of a range
    states = 4 * optimizer.states_per_row + 4 * table.dim * optimizer.states_per_column
    each = max(bytes_per_row(precision, table.dim) for precision in table.precisions) + states
    size = max(_MULTIPLE, ranks * SECTION_BYTES // each // _MULTIPLE * _MULTIPLE)
    return ((first, min(first + size, table.rows)) for first in range(0, table.rows, size))


def _unsharded(
    source: LiveRows, index: int, table: TableEntry, range: tuple[int, int], rows_K: Tensor | None
) -> PendingSection:
    """All rows of a range, or `rows_K`."""
    count = range[1] - range[0] if rows_K is None else rows_K.numel()

    def read() -> list[Tensor]:
        source.release()  # the section before has been written
        if rows_K is None:
            return source.read(index, slice(*range))
        return [rows_K.to(row_dtype(table.rows)), *source.read(index, rows_K)]

    return PendingSection(table, table.precision, *range, count, rows_K is not None, source.state_shapes(table.dim), read)


Kind = tuple[str, bool]  # precision, and whether rows have copies on other ranks
Homes = Iterator[tuple[Tensor, Tensor, Tensor]]


def _home_sections(
    module: ShardedCollection, source: LiveRows, index: int, table: TableEntry, range: tuple[int, int], bits: Tensor | None
) -> Iterator[PendingSection]:
    """Sections of a range that this rank writes, one for each kind: only copied rows are read by other ranks too."""
    counts, homes = Counter[Kind](), partial(_homes, module, source, index, *range, bits)
    for _, part_K, _ in homes():
        for k, count in zip(*(each.tolist() for each in part_K.unique(return_counts=True)), strict=True):
            counts[_kind(source, k)] += count
    shapes = source.state_shapes(table.dim)
    for kind, count in sorted(counts.items()):
        read = partial(_gathered, source, table, kind, homes)
        yield PendingSection(table, kind[0], *range, count, True, shapes, read, "/copied" if kind[1] else "")


def _kind(source: LiveRows, k: int) -> Kind:
    part = source.row_index.parts[k]
    return part.precision, part.tier < 3


def _homes(module: ShardedCollection, source: LiveRows, index: int, first: int, end: int, bits: Tensor | None) -> Homes:
    """Rows of a range whose home is this rank, in rising order: numbers, parts and places, a block at a time.

    With `bits`, only rows that they mark.
    """
    arena, row_index = source.arena, source.row_index
    begins_K = torch.tensor([arena.views(k)[2] for k in range(len(row_index.parts))], dtype=torch.int64, device=arena.device)
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


def _gathered(source: LiveRows, table: TableEntry, kind: Kind, homes: Callable[[], Homes]) -> list[Tensor]:
    source.release()
    pieces: list[list[Tensor]] = []
    for rows_K, part_K, place_K in homes():
        for k in part_K.unique().tolist():
            if _kind(source, k) == kind:
                at = (part_K == k).nonzero()[:, 0]
                pieces.append([each.cpu() for each in (rows_K[at].to(row_dtype(table.rows)), *source.read(k, place_K[at]))])
    tensors = [torch.cat(each) for each in zip(*pieces, strict=True)]
    order = tensors[0].argsort()  # tiers 1 and 2 came one after the other
    return [tensor[order] for tensor in tensors]
