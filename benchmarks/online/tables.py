"""The arms of the online benchmark: which row an id reads and trains.

    unbounded    fp32, a row for each id of the whole log: the ceiling; its map is not counted
    static       fp32, rows for the ids most frequent before the warm-up ends, and one row for all others
    hashed       fp32, a hash
    two-hash     fp32, the sum of two rows by two hashes
    mch-lfu, mch-distance-lfu
                 TorchRec's MCHManagedCollisionModule in front of fp32 rows; evicted rows begin anew, as TorchRec does it
    elastic      IdMap.elastic, fp32
    elastic-int8 the same with int8 rows and 5% of them cached in fp32

Bounded arms get 1/8 of the bytes of the ceiling, table by table: rows, optimizer state, cache, keys and counters counted.
Tables of fewer than 1,000 ids have a row for each id in every arm. First values are uniform in [-INIT, INIT) everywhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.online.logs import OnlineLog
from thermocline.data.random_bits import key_of
from thermocline.ids.idmap import IdMap
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.rows.optimizers import RowwiseAdagrad

INIT = 0.05
CEILING_ROW = 4  # bytes of optimizer state of a row, beside its values


@dataclass(frozen=True)
class OnlineArm:
    """One way to find rows for ids."""

    name: str
    precision: str = "fp32"
    share: float = 1 / 8  # of the bytes of the ceiling

    @property
    def is_elastic(self) -> bool:
        return self.name.startswith("elastic")

    @property
    def row_config(self) -> RowConfig:
        return RowConfig(self.precision, cache=0.05 if self.precision == "int8" else None)


CEILING = OnlineArm("unbounded", share=1.0)
ARMS = (
    CEILING,
    OnlineArm("static"),
    OnlineArm("hashed"),
    OnlineArm("two-hash"),
    OnlineArm("mch-lfu"),
    OnlineArm("mch-distance-lfu"),
    OnlineArm("elastic"),
    OnlineArm("elastic-int8", "int8"),
)


def has_torchrec() -> bool:
    return importlib.util.find_spec("torchrec") is not None


class OnlineTables(nn.Module):
    """The tables of an arm: features of a batch -> [batch, features, dim]."""

    def __init__(self, arm: OnlineArm, log: OnlineLog, settings: Any, warm_up: int) -> None:
        super().__init__()
        self.arm, self.log, self.settings, self.dim = arm, log, settings, settings.dim
        dim, lr, seed = settings.dim, settings.lr, settings.seed
        self.remaps: dict[str, Any] = {}
        tables = []
        for table, features in log.tables.items():
            known = IdMap.pruned(log.distinct[table])
            budget = int(arm.share * len(log.distinct[table]) * (4 * dim + CEILING_ROW))
            map = self._map(table, budget, warm_up) if table in log.large and arm != CEILING else {"": known}
            names = [f"{feature}{which}" for which in map for feature in features]
            maps = {f"{feature}{which}": each for which, each in map.items() for feature in features}
            small = None if table in log.large else RowConfig("fp32")
            tables.append(Table(table, max(each.rows for each in maps.values()), dim, names, small, maps))
        rows = RowConfig(arm.precision, arm.row_config.cache, optimizer=RowwiseAdagrad(lr=lr), seed=seed)
        self.rows = EmbeddingCollection(tables, mode="mean", rows=rows)
        generator = torch.Generator().manual_seed(seed)
        for each in tables:
            if not (each.name in log.large and arm.is_elastic):
                values = torch.empty(each.rows, dim).uniform_(-INIT, INIT, generator=generator)
                self.rows.set_rows(each.name, torch.arange(each.rows), values)

    def _map(self, table: str, budget: int, warm_up: int) -> Mapping[str, IdMap]:
        """The id maps of a bounded table, by suffix of its features."""
        salt, row = key_of(self.settings.seed, sum(table.encode())), 4 * self.dim + CEILING_ROW
        kind, features = self.arm.name, len(self.log.tables[table])
        if kind == "hashed":
            return {"": IdMap.hashed(budget // row, salt)}
        if kind == "two-hash":
            return {"": IdMap.hashed(budget // row, salt), "~": IdMap.hashed(budget // row, salt + 1)}
        if kind == "static":
            return {"": _kept(self.log, table, warm_up, budget, row)}
        if kind.startswith("mch"):
            from benchmarks.online import torchrec_ids

            self.remaps[table] = torchrec_ids.Remapped(
                kind, budget, row, self.settings.interval, self.settings.batch * features
            )
            return {"": IdMap.identity(self.remaps[table].rows)}
        rows = _rows_within(budget, self.arm, self.dim)
        return {"": IdMap.elastic(rows, half_life=self.settings.half_life, salt=salt, init=INIT)}

    def forward(self, ids: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        ids = dict(ids)
        for table, remap in self.remaps.items():
            features = self.log.tables[table]
            rows, reset = remap([ids[feature][0] for feature in features], self.training)
            ids |= {feature: (each, ids[feature][1]) for feature, each in zip(features, rows, strict=True)}
            if reset.numel():
                self.rows.set_rows(table, reset, torch.empty(len(reset), self.dim).uniform_(-INIT, INIT))
        both = {name: ids[name.removesuffix("~")] for name in self.rows.features}
        out = self.rows(both)
        known = [f for features in self.log.tables.values() for f in features]
        return torch.stack([out[f] + out[f"{f}~"] if f"{f}~" in both else out[f] for f in known], dim=1)

    @property
    def bytes(self) -> int:
        """Rows, optimizer state, cache and maps."""
        total: int = self.rows.memory().total + sum(remap.bytes for remap in self.remaps.values())
        return total

    def shared(self) -> float:
        """Share of the lookups of bounded tables in training that read a row of other ids too; elastic and mch arms only."""
        states = (
            [self.rows.elastic(self.log.tables[table][0]).state() for table in self.log.large] if self.arm.is_elastic else []
        )
        counts = [(state["shared_lookups"], state["lookups"]) for state in states]
        counts += [(remap.shared, remap.lookups) for remap in self.remaps.values()]
        return sum(shared for shared, _ in counts) / max(1, sum(lookups for _, lookups in counts))


def _kept(log: OnlineLog, table: str, warm_up: int, budget: int, row: int) -> IdMap:
    """The vocabulary that fits, its map included."""
    count = budget // row - 1
    while True:
        map = IdMap.pruned(log.vocabulary(table, warm_up, count))
        if (over := map.rows * row + map.bytes - budget) <= 0:
            return map
        count = min(count, map.rows - 1) - -(-over // row)


def _rows_within(budget: int, arm: OnlineArm, dim: int) -> int:
    """Rows of an elastic table that take at most `budget` bytes."""

    def size(rows: int) -> int:
        return EmbeddingCollection([Table("t", rows, dim, ids=IdMap.elastic(rows))], rows=arm.row_config).memory().total

    low, high = 32, max(33, budget // dim)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= budget else (low, middle)
    return low
