"""Where every row of a table lies: its tier, the card that answers for it, and its place there.

    tier 1    on every card, in the order of the rows                        place = rank over the bitmap of tier 1
    tier 2    once a node; the i-th such row on card i mod G of every node   place = i // G
    tier 3    once; owner and place by the fixed bijection of `plan/balance.py`, nothing stored but its turns
    whole     the whole table on one card                                    place = row

Every row has one *home*, a rank: for tier 3 the owner; for copied rows the card that sums their gradients (of tier 2 it is one
of those that hold the row), so that the order of summation is one and the same for all copies.

Every rank makes the maps by itself, from the plan and the heat file; `digest` is what they compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile, add_up
from thermocline.ids.idmap import IdMap
from thermocline.kernels.exchange import fields as K
from thermocline.plan.balance import MULTIPLIERS, Placement, PlacementInput, place, request_probability
from thermocline.plan.model import TablePlan

from .bitmap import Bitmap

Rows = NDArray[np.int64]
_SIGNED = tuple(m - (1 << 64) if m >= 1 << 63 else m for m in MULTIPLIERS)


class Located(NamedTuple):
    """Tier, home and place of some rows."""

    tier_N: Tensor
    home_N: Tensor
    place_N: Tensor


class TableMap:
    """The map of one table."""

    def __init__(self, plan: TablePlan, placement: Placement, nodes: int, cards: int, device: torch.device) -> None:
        counts = {tier.tier: tier.rows for tier in plan.tiers}
        self.rows, self.nodes, self.cards = plan.rows, nodes, cards
        self.first, self.second = counts.get(1, 0), counts.get(2, 0)
        self.card = plan.rank if plan.placement == "card" else None
        self.cold = self.rows - self.first - self.second if self.card is None else 0
        copied_H = placement.copied_H
        self._copied = Bitmap(self.rows, copied_H, device) if 0 < len(copied_H) < self.rows else None
        self._first: Bitmap | None = None
        turns_B = placement.rotations_B if nodes * cards > 1 else placement.rotations_B[:0]  # of one card there are none
        self.turns_B = torch.from_numpy(turns_B.astype(np.uint8 if nodes * cards <= 256 else np.int16)).to(device)

    def with_first(self, first_H: Rows, device: torch.device) -> TableMap:
        """The same with the rows of tier 1, where there are others in tier 2."""
        self._first = Bitmap(self.rows, first_H, device)
        return self

    def held(self, tier: int) -> int:
        """Places of a tier on one card; on some cards the last one stays empty."""
        if self.card is not None:
            return self.rows if tier == 3 else 0
        return {1: self.first, 2: -(-self.second // self.cards), 3: -(-self.cold // (self.nodes * self.cards))}[tier]

    def count(self, tier: int) -> int:
        """Rows of a tier."""
        if self.card is not None:
            return self.rows if tier == 3 else 0
        return {1: self.first, 2: self.second, 3: self.cold}[tier]

    def __call__(self, rows_N: Tensor) -> Located:
        """Where rows lie."""
        if self.card is not None:
            return Located(torch.full_like(rows_N, 3), torch.full_like(rows_N, self.card), rows_N)
        if not self.first and not self.second:
            return Located(torch.full_like(rows_N, 3), *self._owner_and_place(rows_N))
        copied_N, below_N = self._copied_below(rows_N)
        first_N, first_below_N = self._first_below(rows_N, copied_N, below_N)
        second_N = below_N - first_below_N
        tier_N = torch.where(first_N, 1, torch.where(copied_N, 2, 3))
        home_N, place_N = self._owner_and_place(rows_N - below_N)
        node_N, card_N = second_N // self.cards % self.nodes, second_N % self.cards
        home_N = torch.where(copied_N, node_N * self.cards + card_N, home_N)
        home_N = torch.where(first_N, first_below_N % (self.nodes * self.cards), home_N)
        place_N = torch.where(first_N, first_below_N, torch.where(copied_N, second_N // self.cards, place_N))
        return Located(tier_N, home_N, place_N)

    def _copied_below(self, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """Whether rows have copies, and how many rows with copies are below them."""
        if self._copied is not None:
            return self._copied(rows_N)
        every = self.cold == 0
        return torch.full_like(rows_N, every, dtype=torch.bool), rows_N if every else torch.zeros_like(rows_N)

    def _first_below(self, rows_N: Tensor, copied_N: Tensor, below_N: Tensor) -> tuple[Tensor, Tensor]:
        """The same of tier 1."""
        if self._first is not None:
            return self._first(rows_N)
        if self.first:
            return copied_N, below_N
        return torch.zeros_like(copied_N), torch.zeros_like(below_N)

    def _owner_and_place(self, index_N: Tensor) -> tuple[Tensor, Tensor]:
        """Of cold rows, by their number among the cold rows; any number for others."""
        if not self.cold:
            return torch.zeros_like(index_N), torch.zeros_like(index_N)
        cards = self.nodes * self.cards
        position_N = scatter(index_N.clamp(max=self.cold - 1), self.cold)
        if cards == 1:
            return torch.zeros_like(index_N), position_N
        block_N = position_N // cards
        return (position_N + self.turns_B[block_N].long()) % cards, block_N

    def fields(self) -> list[int]:
        """What `kernels/exchange/cpu.py` takes from CARD on, but for parts; addresses of what this map keeps."""
        nothing = self.card is not None or not (self.first or self.second)
        copied = K.SOME if self._copied is not None else K.NONE if nothing else K.ALL
        everywhere = K.SOME if self._first is not None else K.ALL if self.first else K.NONE
        bitmaps = [
            address
            for each in (self._copied, self._first)
            for address in ((each.words_BW.data_ptr(), each.below_B.data_ptr()) if each is not None else (0, 0))
        ]
        card = -1 if self.card is None else self.card
        return [card, self.cold, copied, everywhere, *bitmaps, self.turns_B.data_ptr(), self.turns_B.element_size()]

    @property
    def bytes(self) -> int:
        maps = [each.bytes for each in (self._copied, self._first) if each is not None]
        return sum(maps) + (self.turns_B.numel() * self.turns_B.element_size() if self.cold else 0)

    def digest(self) -> str:
        """The same on all ranks that made the same map."""
        found = hashlib.sha256(repr((self.rows, self.first, self.second, self.card, self.nodes, self.cards)).encode())
        maps = [t for each in (self._copied, self._first) if each is not None for t in (each.words_BW, each.below_B)]
        for tensor in [*maps, self.turns_B]:
            found.update(tensor.cpu().numpy().tobytes())
        return found.hexdigest()


def scatter(index_N: Tensor, count: int) -> Tensor:
    """`balance.scatter` on tensors: the same bijection of 0 .. count - 1."""
    bits = max(1, (count - 1).bit_length())
    mask, fold = (1 << bits) - 1, max(1, bits // 2)

    def once(at_N: Tensor) -> Tensor:
        for multiplier in _SIGNED:
            at_N = ((at_N ^ (at_N >> fold)) * multiplier) & mask
        return at_N ^ (at_N >> fold)

    at_N = once(index_N)
    left = (at_N >= count).nonzero()[:, 0]
    while left.numel():
        at_N[left] = once(at_N[left])
        left = left[at_N[left] >= count]
    return at_N


def make_maps(
    tables: Sequence[TablePlan], heat: HeatProfile | None, ids: Mapping[str, IdMap], nodes: int, cards: int,
    device: torch.device,
) -> list[TableMap]:  # fmt: skip
    """The maps of all tables of a collection. `ids`: how the ids that heat has counted become rows, by feature."""
    known = [_hottest(table, heat, ids) for table in tables]
    placements, _ = place([each for each, _ in known], nodes * cards)
    maps = []
    for table, placement, (_, first_H) in zip(tables, placements, known, strict=True):
        made = TableMap(table, placement, nodes, cards, device)
        maps.append(made.with_first(first_H, device) if made.first and made.second else made)
    return maps


def _hottest(table: TablePlan, heat: HeatProfile | None, ids: Mapping[str, IdMap]) -> tuple[PlacementInput, Rows]:
    """What `balance.place` takes, and the rows of tier 1."""
    counts = {tier.tier: tier.rows for tier in table.tiers}
    first, copies = counts.get(1, 0), counts.get(1, 0) + counts.get(2, 0)
    rows_H, counts_H = counted(table.features, None if table.placement == "card" else heat, ids)
    if heat is None and (0 < first < table.rows or 0 < copies < table.rows):
        raise BadInput(
            f"table {table.name!r} is planned in several tiers, which are the hottest rows of a heat file; give the file "
            "that the plan was made with, as in shard_(model, plan, heat='heat.tc')"
        )
    if len(rows_H) < copies:  # rows never seen tie at 0, and go by their numbers
        unseen = np.setdiff1d(np.arange(table.rows), rows_H)[: copies - len(rows_H)]
        rows_H, counts_H = np.concatenate([rows_H, unseen]), np.concatenate([counts_H, np.zeros(len(unseen), np.int64)])
    return PlacementInput(table.rows, rows_H, request_probability(counts_H, table.lookups), copies), np.sort(rows_H[:first])


def counted(features: Sequence[str], heat: HeatProfile | None, ids: Mapping[str, IdMap]) -> tuple[Rows, Rows]:
    """Rows of a table that features have looked up, hottest first, ties by row, and how often."""
    none = np.zeros(0, np.int64)
    if heat is None:
        return none, none
    seen = [(name, heat.tables[name]) for name in features if name in heat.tables]
    rows = [ids[name](torch.from_numpy(np.ascontiguousarray(each.ids_H))).numpy() for name, each in seen]
    return add_up(np.concatenate([none, *rows]), np.concatenate([none, *(each.counts_H for _, each in seen)]))
