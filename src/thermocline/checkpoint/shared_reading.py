"""Ranks read a checkpoint together: each reads a share of the rows, and sends every row to the ranks that hold it.

Rows of one saved shard are scattered over all shards of another plan, so a rank that read what it needs would read the whole
folder. Here the cluster reads it once. With as many ranks as have saved, a rank reads what the rank of its number wrote: under
an equal plan these are its own rows, and only copied rows travel. Otherwise blocks are dealt out in turn.

    round     every rank reads one block; counts, then records, go to the holders of the rows
    record    row number (8 bytes), state, meta words and codes, as they are in the file

A rank that cannot read announces it in place of its counts, and all ranks raise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thermocline.distributed.placement.table_map import Counts
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import FormatError

from .format.manifest import SaveEntry, Section, TableEntry
from .format.section_tensors import Shapes, section_shapes
from .reader import Checkpoint, SectionRows, block_rows

_FAILED = -1  # in place of a count
_WRITER = re.compile(r"rows-(\d+)-")


class SectionRange(NamedTuple):
    """Rows `begin` to `end` (exclusive) of a section."""

    section: Section
    begin: int
    end: int


def read_together(
    checkpoint: Checkpoint, table: TableEntry, states: int, module: ShardedCollection, index: int, remap_R: Tensor | None = None
) -> Iterator[SectionRows]:
    """The rows of a table that this rank holds, in the order of their saves. Collective.

    `remap_R`: the new row of each saved row, or -1 for those that are dropped; by default they keep their numbers.

    Raises:
        FormatError: a rank could not read its share; raised on all ranks.
    """
    groups = module.groups
    for save in checkpoint.manifest.saves:
        for precision in table.precisions:
            shapes: Shapes = {"rows": (torch.int64, ())}
            shapes |= section_shapes(precision, table.dim, checkpoint.state_shapes(table)[:states])
            ranges = [
                SectionRange(section, begin, min(begin + size, section.count))
                for section in save.sections
                if (section.table, section.precision) == (table.name, precision)
                for size in (block_rows(table, states),)
                for begin in range(0, section.count, size)
            ]
            for mine in dealt(ranges, save, groups.rank, groups.size):
                records_MB = _exchanged(checkpoint, mine, shapes, states, module, index, remap_R)
                yield _rows_of(records_MB, shapes, states, precision)


def dealt(ranges: list[SectionRange], save: SaveEntry, rank: int, ranks: int) -> list[SectionRange | None]:
    """The ranges that a rank reads, one per round; None in rounds without one."""
    each: list[list[SectionRange | None]] = [[] for _ in range(ranks)]
    for turn, range_ in enumerate(ranges):
        writer = _WRITER.search(range_.section.file)
        reader = int(writer[1]) if writer is not None and save.ranks == ranks else turn
        each[reader % ranks].append(range_)
    rounds = max(map(len, each))
    return [*each[rank], *[None] * (rounds - len(each[rank]))]


def _exchanged(
    checkpoint: Checkpoint, mine: SectionRange | None, shapes: Shapes, states: int, module: ShardedCollection, index: int,
    remap_R: Tensor | None,
) -> Tensor:  # fmt: skip
    """One round: the records of the rows that this rank holds."""
    groups, width = module.groups, sum(_widths(shapes))
    records_SB, sent_P = torch.empty((0, width), dtype=torch.uint8), np.zeros(groups.size, np.int64)
    failed: FormatError | None = None
    try:
        if mine is not None:
            records_SB, sent_P = _addressed(_moved(checkpoint.read_section(*mine, states), remap_R), shapes, module, index)
    except FormatError as error:
        failed, sent_P = error, np.full(groups.size, _FAILED)
    received_P = groups.world.exchange_counts(sent_P[:, None])[:, 0]
    if failed is not None:
        raise failed
    if (received_P == _FAILED).any():
        rank = int(np.flatnonzero(received_P == _FAILED)[0])
        raise FormatError(f"rank {rank} could not read its share of '{checkpoint.folder}'; its error says why", rank=rank)
    return groups.world.all_to_all(records_SB.to(module.arena.device), sent_P.tolist(), received_P.tolist()).cpu()


def _moved(part: SectionRows, remap_R: Tensor | None) -> SectionRows:
    """The rows under their new numbers, without those that are dropped."""
    if remap_R is None:
        return part
    rows_R = remap_R[part.rows_R]
    kept_K = (rows_R >= 0).nonzero()[:, 0]
    states = [state[kept_K] for state in part.states]
    return SectionRows(rows_R[kept_K], part.codes_RB[kept_K], part.meta_RW[kept_K], states, part.precision)


def _addressed(part: SectionRows, shapes: Shapes, module: ShardedCollection, index: int) -> tuple[Tensor, Counts]:
    """Records of some rows in the order of the receiving ranks, and how many each receives."""
    row_index, ranks = module.row_index, module.groups.size
    where = row_index.locate(part.rows_R.to(row_index.device) + row_index.first[index])
    ranks_C = torch.arange(ranks, device=row_index.device)
    rank_S, at_S = (each.cpu() for each in row_index.stored_by(ranks_C[:, None], where).nonzero(as_tuple=True))
    given = {"rows": part.rows_R, "meta": part.meta_RW, "codes": part.codes_RB}
    given |= {f"state{n}": state for n, state in enumerate(part.states)}
    columns = [given[name].reshape(len(part.rows_R), -1).contiguous().view(torch.uint8) for name in shapes]
    return torch.cat(columns, dim=1)[at_S], torch.bincount(rank_S, minlength=ranks).numpy()


def _widths(shapes: Shapes) -> list[int]:
    """Bytes of each tensor in a record."""
    return [dtype.itemsize * int(np.prod(shape)) for dtype, shape in shapes.values()]


def _rows_of(records_MB: Tensor, shapes: Shapes, states: int, precision: str) -> SectionRows:
    """Records as rows."""
    parts = records_MB.split(_widths(shapes), dim=1)
    found = {
        name: part.clone(memory_format=torch.contiguous_format).view(dtype).reshape(len(part), *shape)
        for (name, (dtype, shape)), part in zip(shapes.items(), parts, strict=True)
    }
    none = torch.zeros((len(records_MB), 0), dtype=torch.int32)
    own = [found[f"state{n}"] for n in range(states)]
    return SectionRows(found["rows"], found["codes"], found.get("meta", none), own, precision)
