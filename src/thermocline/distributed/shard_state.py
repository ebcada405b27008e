"""`ShardState`: everything of a sharded collection that depends on the plan, and that a migration replaces as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thermocline.errors import BadGradient, BadInput, IdOutOfRange
from thermocline.nn.collection import Table
from thermocline.nn.config import TableRequest
from thermocline.nn.id_maps import FeatureMaps
from thermocline.rows.arena import Arena
from thermocline.rows.training import Trainer

from .exchange.batch_table import BatchTableLayout
from .exchange.context import ExchangeContext
from .exchange.traffic_meter import TrafficMeter
from .placement.local_shard import LocalShard
from .placement.row_index import RowIndex
from .process_groups import ProcessGroups


class ShardState:
    """Row locations, local rows, exchange context and batch layout of one plan. `table_F` is the table of each feature."""

    def __init__(
        self, row_index: RowIndex, groups: ProcessGroups, arena: Arena, trainer: Trainer, tables: Sequence[Table],
        table_F: Sequence[int],
    ) -> None:  # fmt: skip
        self.row_index, self.shard = row_index, LocalShard(arena, trainer, row_index, groups.rank)
        self.meter = TrafficMeter([(part.name, part.tier) for part in row_index.parts])
        self.context = ExchangeContext(groups, self.shard, self.meter)
        self.tables = tables
        names = [(table.name, feature) for table in tables for feature in table.features]
        rows = [(tables[t].rows, row_index.first[t], tables[t].dim) for t in table_F]
        pooled = self.context.is_owner_pooled if self.context.routes.owner_pooled else None
        self.batch_layout = BatchTableLayout(names, rows, row_index.device, pooled)

    @contextmanager
    def named_errors(self, maps: FeatureMaps | None) -> Iterator[None]:
        """Name tables and features in errors that kernels report."""
        names = self.batch_layout.names
        try:
            yield
        except BadGradient as error:
            raise self.with_table(error) from None
        except IdOutOfRange as error:
            if maps is not None:
                raise maps.name(error, [name for name, _ in names]) from None
            if error.name is not None:
                raise
            raise IdOutOfRange(error.feature, error.position, error.id, error.rows, *names[error.feature]) from None

    def with_table(self, error: BadGradient) -> BadGradient:
        """The same error with the name of the table."""
        row_index = self.row_index
        table = int(row_index.tables_of(torch.tensor([error.row], dtype=torch.int64, device=row_index.device)))
        return BadGradient(error.row, error.step, self.tables[table].name, row_index.first[table])


def arena_shapes(row_index: RowIndex) -> list[TableRequest]:
    """The arena tables of a rank: one for each part."""
    slots = [(part.fp32_slots, part.int8_slots) if part.is_local else (0, 0) for part in row_index.parts]
    return [
        TableRequest(spec.rows, spec.dim, spec.precision, spec.name, of_part, spec.group)
        for spec, of_part in zip(row_index.specs(), slots, strict=True)
    ]


def check_rows(tables: Sequence[Table], table: str, ids: Tensor | None, device: torch.device) -> tuple[int, Tensor]:
    """The number of a table by name, and checked rows of it; all rows by default."""
    names = [t.name for t in tables]
    if table not in names:
        raise BadInput(f"table {table!r} is not in this collection, which has {', '.join(names)}", table=table)
    number = names.index(table)
    rows = tables[number].rows
    rows_N = (torch.arange(rows) if ids is None else ids.reshape(-1).long()).to(device)
    low, high = (int(rows_N.min()), int(rows_N.max())) if rows_N.numel() else (0, 0)
    if low < 0 or high >= rows:
        words = f"table {table!r} has rows 0 to {rows - 1}; ids run from {low} to {high}"
        raise BadInput(words, table=table, rows=rows, low=low, high=high)
    return number, rows_N
