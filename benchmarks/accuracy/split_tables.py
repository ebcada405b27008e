"""Tables whose hot rows have one precision and whose cold rows have another, each row stored once.

`precision={"int8": ..., "int4": ...}` of a module stores every row in the lowest precision and hot rows again above it, so
that rows can move between precisions. Where heat is known in advance, the second copy can be saved: the rows of a feature, in
the order of heat, form consecutive tables, and a comparison finds the table of a row. The order takes four bytes for each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.rows.memory import MemoryUsage


class SplitTables(nn.Module):
    """Takes ids [batch, features], returns [batch, features * dim]. `precision`: shares of all rows, the hottest first."""

    def __init__(self, heat: Sequence[Tensor], dim: int, precision: Mapping[str, float], rows: RowConfig, device: str) -> None:
        super().__init__()
        self.dim, counts = dim, [len(heat_R) for heat_R in heat]
        rank_R = torch.cat(list(heat)).argsort(descending=True, stable=True).argsort()
        ends_P = (torch.tensor(list(precision.values())).cumsum(0) * sum(counts)).round().long()
        self.ranks, self.cuts = [], []  # by feature: rank of each row by heat, and first rank of each precision
        for of_all_R in rank_R.split(counts):
            self.ranks.append(of_all_R.argsort().argsort().int())
            self.cuts.append([0, *((of_all_R < end).sum().item() for end in ends_P[:-1].tolist()), len(of_all_R)])
        tables = [
            Table(self._name(feature, part), max(1, last - first), dim, row_config=RowConfig(kind))
            for feature, cuts in enumerate(self.cuts)
            for part, (kind, (first, last)) in enumerate(zip(precision, pairwise(cuts), strict=True))
        ]
        self.parts, self.collection = (
            len(precision),
            EmbeddingCollection(tables, mode="sum", rows=replace(rows, cache=0.0), device=device),
        )

    @staticmethod
    def _name(feature: int, part: int) -> str:
        return f"{feature}/{part}"

    def _split(self, feature: int, ids_N: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """(table, which of the ids are in it, their rows there) of every table of a feature."""
        rank_N, found = self.ranks[feature][ids_N].long(), []
        for part, (first, last) in enumerate(pairwise(self.cuts[feature])):
            mine_N = (rank_N >= first) & (rank_N < last)
            found.append((self._name(feature, part), mine_N, rank_N[mine_N] - first))
        return found

    def forward(self, ids_BF: Tensor) -> Tensor:
        batch, features = ids_BF.shape
        split = [each for feature in range(features) for each in self._split(feature, ids_BF[:, feature])]
        given = {name: (rows_N, pad(mine_B.cumsum(0), (1, 0))) for name, mine_B, rows_N in split}
        out: Tensor = self.collection(given).values()
        return out.view(batch, features, self.parts, self.dim).sum(2).flatten(1)

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> None:
        """`table`: the number of a feature."""
        for name, mine_N, rows_N in self._split(int(table), ids):
            self.collection.set_rows(name, rows_N, values[mine_N])

    @property
    def fused_optimizer(self) -> torch.optim.Optimizer:
        return self.collection.fused_optimizer

    def memory(self) -> MemoryUsage:
        memory = self.collection.memory()
        memory.parts["maps"] += sum(4 * rank_R.numel() for rank_R in self.ranks)
        return memory

    def stats(self) -> dict[str, int]:
        return self.collection.stats()
