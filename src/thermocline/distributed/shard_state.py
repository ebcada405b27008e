"""`ShardState`: everything of a sharded collection that depends on the plan, and that a migration replaces as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thermocline.errors import BadInput
from thermocline.nn.collection import Table
from thermocline.nn.config import TableRequest
from thermocline.rows.arena import Arena
from thermocline.rows.training import Trainer

from .exchange.batch_table import BatchTableLayout
from .exchange.context import ExchangeContext
from .exchange.traffic_meter import TrafficMeter
from .placement.local_shard import LocalShard
from .placement.row_index import RowIndex
from .process_groups import ProcessGroups


@dataclass(frozen=True)
class ShardState:
    """Row locations, local rows, exchange context and batch layouts of one plan."""

    row_index: RowIndex
    shard: LocalShard
    context: ExchangeContext
    batch_layout: BatchTableLayout
    unsharded: bool  # one process that holds every table whole

    @property
    def meter(self) -> TrafficMeter:
        return self.context.meter

    @classmethod
    def make(
        cls, row_index: RowIndex, groups: ProcessGroups, arena: Arena, trainer: Trainer, tables: Sequence[Table],
        table_F: Sequence[int],
    ) -> ShardState:  # fmt: skip
        """The state of a rank. `table_F` is the table of each feature."""
        shard = LocalShard(arena, trainer, row_index, groups.rank)
        context = ExchangeContext(groups, shard, TrafficMeter([(part.name, part.tier) for part in row_index.parts]))
        names = [(table.name, feature) for table in tables for feature in table.features]
        rows = [(tables[t].rows, row_index.first[t], tables[t].dim) for t in table_F]
        pooled = context.is_owner_pooled if context.routes.owner_pooled else None
        layout = BatchTableLayout(names, rows, row_index.device, pooled)
        return cls(row_index, shard, context, layout, is_unsharded(row_index, groups))


def is_unsharded(row_index: RowIndex, groups: ProcessGroups) -> bool:
    """Whether one process holds every table whole."""
    return groups.size == 1 and all(
        part.tier == 3 and part.local_rows == row_index.maps[part.table].rows for part in row_index.parts
    )


def arena_shapes(row_index: RowIndex) -> list[TableRequest]:
    """The arena tables of a rank: one for each part."""
    found = []
    for spec, part in zip(row_index.specs(), row_index.parts, strict=True):
        slots = (part.fp32_slots, part.int8_slots) if part.is_local else (0, 0)
        found.append(TableRequest(spec.rows, spec.dim, spec.precision, spec.name, slots, spec.group))
    return found


def check_rows(tables: Sequence[Table], table: str, ids: Tensor | None, device: torch.device) -> tuple[int, Tensor]:
    """The number of a table by name, and checked rows of it; all rows by default."""
    names = [t.name for t in tables]
    if table not in names:
        raise BadInput(f"table {table!r} is not in this collection, which has {', '.join(names)}", table=table)
    number = names.index(table)
    rows = tables[number].rows
    rows_N = (torch.arange(rows) if ids is None else ids.reshape(-1).long()).to(device)
    if rows_N.numel() and not (int(rows_N.min()) >= 0 and int(rows_N.max()) < rows):
        low, high = int(rows_N.min()), int(rows_N.max())
        raise BadInput(
            f"table {table!r} has rows 0 to {rows - 1}; ids run from {low} to {high}",
            table=table,
            rows=rows,
            low=low,
            high=high,
        )
    return number, rows_N
