"""The location of every row of a table: its tier, its home rank, and its index in the shard there.

    tier 1    on every rank, in row order                                          index = rank over the bitmap of tier 1
    tier 2    once per node; the i-th row on local rank i mod L of every node      index = i // L
    tier 3    once; owner and index by the fixed bijection of `plan/balance.py`    stores only the rotation of each block
    whole     the whole table on one rank                                          index = row

Every row has one *home* rank: the owner in tier 3, and for replicated rows the rank that sums their gradients (in tier 2, one
of the ranks that hold the row). One home gives all replicas one order of summation.

Every rank builds the maps from the plan and the heat file; ranks compare the `digest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.errors import BadInput, IdOutOfRange
from thermocline.heat.profile import HeatProfile, add_up
from thermocline.ids.idmap import IdMap
from thermocline.ids.keyed_map import KeyedMap
from thermocline.kernels.exchange import fields as K
from thermocline.kernels.ids.bitmap import RankBitmap
from thermocline.plan.balance import MULTIPLIERS, Placement, PlacementInput, place, request_probability
from thermocline.plan.model import TablePlan

Counts = NDArray[np.int64]
SIGNED_MULTIPLIERS = tuple(m - (1 << 64) if m >= 1 << 63 else m for m in MULTIPLIERS)


class TableMap:
    """The map of one table. `tier1_H` are the rows of tier 1."""

    def __init__(
        self, plan: TablePlan, placement: Placement, tier1_H: Counts, nodes: int, local_size: int, device: torch.device
    ) -> None:
        counts = {tier.tier: tier.rows for tier in plan.tiers}
        self.rows, self.nodes, self.local_size = plan.rows, nodes, local_size
        self.tier1, self.tier2 = counts.get(1, 0), counts.get(2, 0)  # rows
        self.owner = plan.rank if plan.placement == "card" else None  # of the whole table
        self.tier3 = self.rows - self.tier1 - self.tier2 if self.owner is None else 0
        replicated_H = placement.copied_H
        some = 0 < len(replicated_H) < self.rows
        self._replicated = RankBitmap(self.rows, replicated_H, device) if some else None
        self._tier1 = RankBitmap(self.rows, tier1_H, device) if self.tier1 and self.tier2 else None
        turns_B = placement.rotations_B if nodes * local_size > 1 else placement.rotations_B[:0]
        self.turns_B = torch.from_numpy(turns_B.astype(np.uint8 if nodes * local_size <= 256 else np.int16)).to(device)

    def sharing(self, tier: int) -> int:
        """The number of ranks that share the rows of a tier."""
        return 1 if self.owner is not None else {1: 1, 2: self.local_size, 3: self.nodes * self.local_size}[tier]

    def local_rows(self, tier: int) -> int:
        """Rows of a tier on one rank, rounded up."""
        return -(-self.count(tier) // self.sharing(tier))

    def count(self, tier: int) -> int:
        """Rows of a tier."""
        if self.owner is not None:
            return self.rows if tier == 3 else 0
        return {1: self.tier1, 2: self.tier2, 3: self.tier3}[tier]

    def locate(self, rows_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tier, home rank and index in the shard of rows."""
        if self.owner is not None:
            return torch.full_like(rows_N, 3), torch.full_like(rows_N, self.owner), rows_N
        if not self.tier1 and not self.tier2:
            return torch.full_like(rows_N, 3), *self._owner_and_index(rows_N)
        replicated_N, below_N = self._replicated_below(rows_N)
        first_N, first_below_N = self._tier1_below(rows_N, replicated_N, below_N)
        second_N = below_N - first_below_N
        tier_N = torch.where(first_N, 1, torch.where(replicated_N, 2, 3))
        home_N, index_N = self._owner_and_index(rows_N - below_N)
        node_N, local_rank_N = second_N // self.local_size % self.nodes, second_N % self.local_size
        home_N = torch.where(replicated_N, node_N * self.local_size + local_rank_N, home_N)
        home_N = torch.where(first_N, first_below_N % (self.nodes * self.local_size), home_N)
        index_N = torch.where(first_N, first_below_N, torch.where(replicated_N, second_N // self.local_size, index_N))
        return tier_N, home_N, index_N

    def _replicated_below(self, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """Whether rows have replicas, and how many replicated rows are below each."""
        if self._replicated is not None:
            return self._replicated.rank(rows_N)
        every = self.tier3 == 0
        return torch.full_like(rows_N, every, dtype=torch.bool), rows_N if every else torch.zeros_like(rows_N)

    def _tier1_below(self, rows_N: Tensor, replicated_N: Tensor, below_N: Tensor) -> tuple[Tensor, Tensor]:
        """Whether rows are in tier 1, and how many rows of tier 1 are below each."""
        if self._tier1 is not None:
            return self._tier1.rank(rows_N)
        if self.tier1:
            return replicated_N, below_N
        return torch.zeros_like(replicated_N), torch.zeros_like(below_N)

    def _owner_and_index(self, cold_N: Tensor) -> tuple[Tensor, Tensor]:
        """Owner and index of rows of tier 3, numbered among themselves; arbitrary for other rows."""
        if not self.tier3:
            return torch.zeros_like(cold_N), torch.zeros_like(cold_N)
        ranks = self.nodes * self.local_size
        position_N = scatter(cold_N.clamp(max=self.tier3 - 1), self.tier3)
        if ranks == 1:
            return torch.zeros_like(cold_N), position_N
        block_N = position_N // ranks
        return (position_N + self.turns_B[block_N].long()) % ranks, block_N

    def fields(self) -> list[int]:
        """The fields of `kernels/exchange/fields.py` from OWNER to BITS, with addresses of tensors that this map owns."""
        none = self.owner is not None or not (self.tier1 or self.tier2)
        replicated = K.SOME if self._replicated is not None else K.NONE if none else K.ALL
        everywhere = K.SOME if self._tier1 is not None else K.ALL if self.tier1 else K.NONE
        bitmaps: list[int] = []
        for each in (self._replicated, self._tier1):
            bitmaps += (0, 0) if each is None else (each.words.data_ptr(), each.counts.data_ptr())
        owner = -1 if self.owner is None else self.owner
        turns, bits = (self.turns_B.data_ptr(), self.turns_B.element_size()), max(1, (self.tier3 - 1).bit_length())
        return [owner, self.tier3, replicated, everywhere, *bitmaps, *turns, bits]

    @property
    def bytes(self) -> int:
        maps = [each.bytes for each in (self._replicated, self._tier1) if each is not None]
        return sum(maps) + (self.turns_B.numel() * self.turns_B.element_size() if self.tier3 else 0)

    def digest(self) -> str:
        """A sha256 that is equal for equal maps."""
        found = hashlib.sha256(repr((self.rows, self.tier1, self.tier2, self.owner, self.nodes, self.local_size)).encode())
        maps = [t for each in (self._replicated, self._tier1) if each is not None for t in (each.words, each.counts)]
        for tensor in [*maps, self.turns_B]:
            found.update(tensor.cpu().numpy().tobytes())
        return found.hexdigest()


def scatter(index_N: Tensor, count: int) -> Tensor:
    """`balance.scatter` on tensors: the same bijection of 0 .. count - 1."""
    bits = max(1, (count - 1).bit_length())
    mask, fold = (1 << bits) - 1, max(1, bits // 2)

    def once(at_N: Tensor) -> Tensor:
        for multiplier in SIGNED_MULTIPLIERS:
            at_N = ((at_N ^ (at_N >> fold)) * multiplier) & mask
        return at_N ^ (at_N >> fold)

    at_N = once(index_N)
    left = (at_N >= count).nonzero()[:, 0]
    while left.numel():
        at_N[left] = once(at_N[left])
        left = left[at_N[left] >= count]
    return at_N


def make_maps(
    tables: Sequence[TablePlan], heat: HeatProfile | None, ids: Mapping[str, IdMap], nodes: int, local_size: int,
    device: torch.device,
) -> list[TableMap]:  # fmt: skip
    """The maps of all tables of a collection. `ids` maps the raw ids of the heat file to rows, by feature."""
    known = [_hottest(table, heat, ids) for table in tables]
    placements, _ = place([each for each, _ in known], nodes * local_size)
    return [
        TableMap(table, placement, tier1_H, nodes, local_size, device)
        for table, placement, (_, tier1_H) in zip(tables, placements, known, strict=True)
    ]


def _hottest(table: TablePlan, heat: HeatProfile | None, ids: Mapping[str, IdMap]) -> tuple[PlacementInput, Counts]:
    """The input of `balance.place`, and the rows of tier 1."""
    counts = {tier.tier: tier.rows for tier in table.tiers}
    first, replicated = counts.get(1, 0), counts.get(1, 0) + counts.get(2, 0)
    rows_H, counts_H = hottest_rows(table.features, None if table.placement == "card" else heat, ids)
    if heat is None and (0 < first < table.rows or 0 < replicated < table.rows):
        raise BadInput(
            f"table {table.name!r} is planned in several tiers, which hold the hottest rows of a heat file; give the heat file "
            "of the plan, as in shard_(model, plan, heat='heat.tc')",
            parameter="heat", table=table.name,
        )  # fmt: skip
    if len(rows_H) < replicated:  # rows without lookups tie at 0 and follow in row order
        unseen = np.setdiff1d(np.arange(table.rows), rows_H)[: replicated - len(rows_H)]
        rows_H, counts_H = np.concatenate([rows_H, unseen]), np.concatenate([counts_H, np.zeros(len(unseen), np.int64)])
    return PlacementInput(table.rows, rows_H, request_probability(counts_H, table.lookups), replicated), np.sort(rows_H[:first])


def rows_of_ids(ids: Mapping[str, IdMap], feature: str, ids_N: Counts) -> Counts:
    """The rows of raw ids of a feature; `IdOutOfRange` names the feature."""
    try:
        rows_N: Counts = ids[feature](torch.from_numpy(np.ascontiguousarray(ids_N))).numpy()
    except IdOutOfRange as error:
        raise error.named(feature, feature) from None
    return rows_N


def hottest_rows(features: Sequence[str], heat: HeatProfile | None, ids: Mapping[str, IdMap]) -> tuple[Counts, Counts]:
    """Rows that features looked up, hottest first and ties by row, and their lookup counts. Elastic ids need their keys."""
    none = np.zeros(0, np.int64)
    if heat is None:
        return none, none
    known = [name for name in features if not ids[name].is_elastic or isinstance(ids[name], KeyedMap)]
    seen = [(name, heat.tables[name]) for name in known if name in heat.tables]
    rows = [rows_of_ids(ids, name, each.ids_H) for name, each in seen]
    return add_up(np.concatenate([none, *rows]), np.concatenate([none, *(each.counts_H for _, each in seen)]))
