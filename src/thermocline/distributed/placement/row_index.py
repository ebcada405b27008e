"""Global row numbers of a collection, and the location of every global row.

A *global row* is the row's index in the arena that one process would have (tables by dimension and precision, one after
another). It is the id that ranks exchange, and rounding bits are drawn for it, so that a row is rounded the same on every rank
that holds it and the same as in one process.

A *part* is the rows of one table in one tier. Every rank stores its rows of a part as one table of its arena, in the same order
on all ranks. Every part has its own cache slots, so its cache depends only on lookups of the part. Replicated parts come first
in the arena, so that a replica has the same arena row on all ranks: the cache draws rounding bits for that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.exchange.fields import COLUMN_BYTES, vector_bytes
from thermocline.plan.cost.memory import id_bytes
from thermocline.plan.model import Exchange, TablePlan
from thermocline.rows.arena import Arena
from thermocline.rows.precision import bytes_per_row, format_of
from thermocline.rows.table_spec import TableSpec

from .table_map import SIGNED_MULTIPLIERS, TableMap


@dataclass(frozen=True)
class TablePart:
    """The rows of one table in one tier."""

    table: int
    name: str  # of the table
    tier: int
    dim: int
    precision: str
    local_rows: int  # on one rank
    exchange: Exchange
    gradient: str  # precision of gradients in messages: fp32, bf16 or int8
    fp32_slots: int = 0  # of the cache, on each rank that holds rows of the part
    int8_slots: int = 0
    is_local: bool = True  # False: a whole table on another rank
    owner_pooled: bool = False  # the owners of rows pool bags (`exchange/owner_pooling.py`)
    sums: str = "fp32"  # precision of pooled sums in messages: fp32, bf16 or int8

    @property
    def format(self) -> int:
        return format_of(self.precision)

    @property
    def row_bytes(self) -> int:
        return bytes_per_row(self.precision, self.dim)

    @property
    def slots(self) -> int:
        return self.fp32_slots + self.int8_slots

    @property
    def migrated_bytes(self) -> int:
        """Bytes of a migrated row: as stored, and its fp32 value if it may be cached."""
        return self.row_bytes + (4 * self.dim if self.slots else 0)

    @property
    def gradient_bytes(self) -> int:
        return vector_bytes(self.dim, COLUMN_BYTES[self.gradient])

    @property
    def sum_bytes(self) -> int:
        return vector_bytes(self.dim, COLUMN_BYTES[self.sums])


class RowLocations(NamedTuple):
    """Part, home rank and index in the part of some rows."""

    part_N: Tensor
    home_N: Tensor
    index_N: Tensor

    def at(self, at: Tensor | slice) -> RowLocations:
        """The locations of a subset."""
        return RowLocations(self.part_N[at], self.home_N[at], self.index_N[at])


class RowIndex:
    """Where every row of a collection lies. `first` is the first global row of each table.

    With a `rank`, `parts` are as that rank stores them; a whole table on another rank takes one row that is never looked up.
    """

    def __init__(
        self, plans: Sequence[TablePlan], maps: Sequence[TableMap], nodes: int, local_size: int, device: torch.device,
        rank: int | None = None,
    ) -> None:  # fmt: skip
        self.maps, self.device = tuple(maps), device
        self._nodes, self._local_size = nodes, local_size
        specs = [TableSpec(t.rows, t.dim, t.precision, t.name) for t in plans]
        fields = Arena(specs, device="meta").layout.tables.features  # of all rows, without memory
        self.first = tuple(field[F.ROW] for field in fields)
        self.rows = sum(t.rows for t in plans)
        self.id_bytes = id_bytes(self.rows)
        self.parts: list[TablePart] = []
        number = torch.full((len(plans), 4), -1, dtype=torch.int64)
        for table, (plan, map) in enumerate(zip(plans, maps, strict=True)):
            for part in self._parts_of(table, plan, map, rank):
                number[table, part.tier] = len(self.parts)
                self.parts.append(part)
        order = sorted(range(len(plans)), key=lambda t: self.first[t])
        self._number = number.to(device)
        self._begins = torch.tensor([self.first[t] for t in order], dtype=torch.int64, device=device)
        self._order = torch.tensor(order, dtype=torch.int64, device=device)
        lines = [[self.first[t], self.first[t] + plans[t].rows, *maps[t].fields(), *number[t, 1:].tolist()] for t in order]
        self._fields_TM = torch.tensor(lines, dtype=torch.int64, device=device)
        self.tier_K = torch.tensor([part.tier for part in self.parts], dtype=torch.int64, device=device)
        whole = all(part.tier == 3 and part.local_rows == maps[part.table].rows for part in self.parts)
        self.unsharded = whole and nodes * local_size == 1  # one process holds every table whole

    def _parts_of(self, table: int, plan: TablePlan, map: TableMap, rank: int | None) -> list[TablePart]:
        precisions = {tier.tier: tier.precision for tier in plan.tiers}
        elsewhere = None not in (map.owner, rank) and map.owner != rank
        gradient = plan.wire_gradients if plan.wire_gradients in COLUMN_BYTES else "fp32"
        found = []
        for tier in (1, 2, 3):
            if rows := map.local_rows(tier):
                exchange: Exchange = "node" if tier == 2 or (plan.exchange == "node" and self._nodes > 1) else "flat"
                slots = _slots(plan, map, tier)
                precision, rows = precisions.get(tier, plan.precision), 1 if elsewhere else rows
                part = TablePart(table, plan.name, tier, plan.dim, precision, rows, exchange, gradient, *slots, not elsewhere)
                pooled = tier == 3 and plan.pooled_by == "owner"
                sums = plan.wire_rows if pooled and plan.wire_rows in COLUMN_BYTES else "fp32"
                found.append(replace(part, owner_pooled=pooled, sums=sums))
        return found

    @property
    def bytes(self) -> int:
        return sum(map.bytes for map in self.maps)

    def tables_of(self, rows_N: Tensor) -> Tensor:
        """The table of each global row."""
        return self._order[torch.searchsorted(self._begins, rows_N, right=True) - 1]

    def locate(self, rows_N: Tensor) -> RowLocations:
        """The locations of global rows."""
        locate = implementation_for("exchange", rows_N).locate
        return RowLocations(*locate(self._fields_TM, SIGNED_MULTIPLIERS, self._nodes, self._local_size, rows_N))

    def locate_by_table(self, rows_N: Tensor) -> RowLocations:
        """`locate` in plain PyTorch: the reference."""
        table_N = self.tables_of(rows_N)
        part_N, home_N, index_N = (torch.zeros_like(rows_N) for _ in range(3))
        counts_T = torch.bincount(table_N, minlength=len(self.maps)).tolist()
        for (table, map), at in zip(enumerate(self.maps), table_N.argsort(stable=True).split(counts_T), strict=True):
            if at.numel():
                tier, home_N[at], index_N[at] = map.locate(rows_N[at] - self.first[table])
                part_N[at] = self._number[table, tier]
        return RowLocations(part_N, home_N, index_N)

    def stored_by(self, rank: int | Tensor, where: RowLocations) -> Tensor:
        """Which rows a rank stores, replicas included: [row], or for ranks [C, 1] [rank, row]."""
        tier_N, same_local_rank_N = self.tier_K[where.part_N], where.home_N % self._local_size == rank % self._local_size
        return (tier_N == 1) | (where.home_N == rank) | ((tier_N == 2) & same_local_rank_N)

    def held_by(self, rank: int, where: RowLocations) -> list[tuple[int, Tensor, Tensor]]:
        """The rows among some that a rank stores, replicas included: (part, positions, indices in the part)."""
        here_N, found = self.stored_by(rank, where), []
        for k in range(len(self.parts)):
            at_K = (here_N & (where.part_N == k)).nonzero()[:, 0]
            if at_K.numel():
                found.append((k, at_K, where.index_N[at_K]))
        return found

    def specs(self) -> list[TableSpec]:
        """The arena tables of one rank. If any part has slots, groups are by tier, and one for each part with slots."""
        groups = [part.tier << 32 | (1 + k if part.slots else 0) for k, part in enumerate(self.parts)]
        if not any(part.slots for part in self.parts):
            groups = [0] * len(self.parts)
        return [
            TableSpec(part.local_rows, part.dim, part.precision, f"{part.name}, tier {part.tier}", group)
            for part, group in zip(self.parts, groups, strict=True)
        ]

    def same_as(self, other: RowIndex) -> bool:
        """Whether all rows have the same locations."""
        digests = [[map.digest() for map in each.maps] for each in (self, other)]
        return self.parts == other.parts and digests[0] == digests[1]


def _slots(plan: TablePlan, map: TableMap, tier: int) -> tuple[int, int]:
    """The fp32 and int8 cache slots of a tier on each rank that shares its rows."""
    for each in plan.tiers:
        if each.tier == tier:
            fp32 = min(-(-each.cached // map.sharing(tier)), map.local_rows(tier))
            return fp32, min(-(-each.near // map.sharing(tier)), map.local_rows(tier) - fp32)
    return 0, 0
