"""All rows of a collection by one number, and from that number to where they lie.

The number is the row's place in the arena that one process would have (tables by dimension and precision, one after another):
a *global row*. It goes over the wire as an id, and rounding bits are drawn for it, so that a row is rounded the same on every
card that holds it, and the same as in one process.

A *part* is the rows of one table in one tier. Every card keeps its share of a part as one table of its own arena, in the same
order on all cards.

Parts have slots of their own: which rows of a part are cached depends on nothing but what was looked up of it. Parts with
copies come first in the arena, so that a copy has the same arena row on all cards: the cache draws rounding bits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.exchange.cpu import locate
from thermocline.plan.balance import MULTIPLIERS
from thermocline.plan.cost.memory import id_bytes
from thermocline.plan.model import Exchange, TablePlan
from thermocline.rows.arena import Arena
from thermocline.rows.precision import bytes_per_row, format_of
from thermocline.rows.table_spec import TableSpec

from .table_map import TableMap

_MULTIPLIERS = np.array(MULTIPLIERS, dtype=np.uint64).view(np.int64)


@dataclass(frozen=True)
class Part:
    """The rows of one table in one tier."""

    table: int
    name: str  # of the table
    tier: int
    dim: int
    precision: str
    held: int  # places on one card
    exchange: Exchange
    gradient: str  # as it travels, fp32 or bf16
    full: int = 0  # fp32 slots on a card that holds some of it
    near: int = 0  # int8 slots
    here: bool = True  # False: a whole table on another card
    summed: bool = False  # who owns rows pools them (`shares.py`)

    @property
    def format(self) -> int:
        return format_of(self.precision)

    @property
    def row_bytes(self) -> int:
        return bytes_per_row(self.precision, self.dim)

    @property
    def slots(self) -> int:
        return self.full + self.near

    @property
    def moved_bytes(self) -> int:
        """Of a row that migrates: as it is stored, and its value if it may be in a slot."""
        return self.row_bytes + (4 * self.dim if self.slots else 0)

    @property
    def gradient_bytes(self) -> int:
        return self.dim * (4 if self.gradient == "fp32" else 2)


class Where(NamedTuple):
    """Part, home and place of some rows."""

    part_N: Tensor
    home_N: Tensor
    place_N: Tensor

    def at(self, at: Tensor) -> Where:
        """Of some of them."""
        return Where(self.part_N[at], self.home_N[at], self.place_N[at])


class Atlas:
    """The tables of a collection. `first` is the first global row of each; `order` are the tables by that.

    With a `rank` parts are what that card holds; of a whole table on another card it holds one row, which nobody looks up.
    """

    def __init__(
        self, plans: Sequence[TablePlan], maps: Sequence[TableMap], nodes: int, cards: int, device: torch.device,
        rank: int | None = None,
    ) -> None:  # fmt: skip
        self.maps, self.device = tuple(maps), device
        specs = [TableSpec(t.rows, t.dim, t.precision, t.name) for t in plans]
        fields = Arena(specs, device="meta").layout.tables.features  # of all rows, in no memory
        self.first = tuple(field[F.ROW] for field in fields)
        self.rows = sum(t.rows for t in plans)
        self.id_bytes = id_bytes(self.rows)
        self.order = sorted(range(len(plans)), key=lambda t: self.first[t])
        self.parts: list[Part] = []
        number = torch.full((len(plans), 4), -1)
        for table, (plan, map) in enumerate(zip(plans, maps, strict=True)):
            precisions = {tier.tier: tier.precision for tier in plan.tiers}
            elsewhere = None not in (map.card, rank) and map.card != rank
            for tier in (1, 2, 3):
                if held := map.held(tier):
                    slots = _slots(plan, map, tier, nodes, cards)
                    number[table, tier] = len(self.parts)
                    exchange: Exchange = "node" if tier == 2 or (plan.exchange == "node" and nodes > 1) else "flat"
                    whole = precisions.get(tier, plan.precision)
                    gradient = "bf16" if plan.wire_gradients == "bf16" else "fp32"
                    held = 1 if elsewhere else held
                    summed = tier == 3 and plan.pooled_by == "owner"
                    part = Part(table, plan.name, tier, plan.dim, whole, held, exchange, gradient, *slots, not elsewhere)
                    self.parts.append(replace(part, summed=summed))
        self._number = number.to(device)
        self._begins = torch.tensor([self.first[t] for t in self.order], device=device)
        self._order = torch.tensor(self.order, device=device)
        self._fields: NDArray[np.int64] | None = None
        if device.type == "cpu":
            lines = [
                [self.first[t], self.first[t] + plans[t].rows, *maps[t].fields(), *number[t, 1:].tolist()] for t in self.order
            ]
            self._fields = np.array(lines, dtype=np.int64)
        self._nodes, self._cards = nodes, cards
        self.tier_K = torch.tensor([part.tier for part in self.parts], device=device)
        self.by_node_K = torch.tensor([part.exchange == "node" for part in self.parts], device=device)

    @property
    def bytes(self) -> int:
        return sum(map.bytes for map in self.maps)

    def tables_of(self, rows_N: Tensor) -> Tensor:
        """The table of each global row."""
        return self._order[torch.searchsorted(self._begins, rows_N, right=True) - 1]

    def __call__(self, rows_N: Tensor) -> Where:
        """Where global rows lie."""
        if self._fields is not None:
            return Where(*locate(self._fields, _MULTIPLIERS, self._nodes, self._cards, rows_N))
        return self.by_map(rows_N)

    def by_map(self, rows_N: Tensor) -> Where:
        """The same, table by table."""
        table_N = self.tables_of(rows_N)
        part_N, home_N, place_N = (torch.zeros_like(rows_N) for _ in range(3))
        counts_T = torch.bincount(table_N, minlength=len(self.maps)).tolist()
        for (table, map), at in zip(enumerate(self.maps), table_N.argsort(stable=True).split(counts_T), strict=True):
            if at.numel():
                tier, home_N[at], place_N[at] = map(rows_N[at] - self.first[table])
                part_N[at] = self._number[table, tier]
        return Where(part_N, home_N, place_N)

    def held_by(self, rank: int, where: Where) -> list[tuple[int, Tensor, Tensor]]:
        """Of some rows those that lie on a card, copies too: (part, which, their places)."""
        tier_N, cards = self.tier_K[where.part_N], self._cards
        here_N = (tier_N == 1) | (where.home_N == rank) | ((tier_N == 2) & (where.home_N % cards == rank % cards))
        found = []
        for k in range(len(self.parts)):
            at_K = (here_N & (where.part_N == k)).nonzero()[:, 0]
            if at_K.numel():
                found.append((k, at_K, where.place_N[at_K]))
        return found

    def specs(self) -> list[TableSpec]:
        """What one card holds."""
        return [
            TableSpec(part.held, part.dim, part.precision, f"{part.name}, tier {part.tier}", group)
            for part, group in zip(self.parts, self._groups(), strict=True)
        ]

    def _groups(self) -> list[int]:
        """Of each part: by tier, and each with slots for itself."""
        if not any(part.slots for part in self.parts):
            return [0] * len(self.parts)
        return [part.tier << 32 | (1 + k if part.slots else 0) for k, part in enumerate(self.parts)]


def _slots(plan: TablePlan, map: TableMap, tier: int, nodes: int, cards: int) -> tuple[int, int]:
    """Full and near slots of a tier on one of the cards that share its rows."""
    sharing = 1 if map.card is not None else {1: 1, 2: cards, 3: nodes * cards}[tier]
    for each in plan.tiers:
        if each.tier == tier:
            full = min(-(-each.cached // sharing), map.held(tier))
            return full, min(-(-each.near // sharing), map.held(tier) - full)
    return 0, 0
