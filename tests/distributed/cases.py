"""Small models, plans, heat and batches for tests on several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

import thermocline as tc
from thermocline.heat.profile import HeatProfile, TableHeat
from thermocline.plan.model import StepPlan, TablePlan, Tier
from thermocline.plan.topology import GpuSpec, Link, Links, Topology

# name: rows, dimension, features. Odd sizes, two tables of one dimension, one table with two features.
TABLES = {"user": (97, 8, ("user",)), "item": (61, 8, ("item", "history")), "shop": (23, 5, ("shop",))}
FEATURES = tuple(feature for _, _, features in TABLES.values() for feature in features)

Tiers = Mapping[str, tuple[int, int]]  # rows of tier 1 and tier 2, by table; the others are tier 3


def topology(nodes: int, cards: int) -> Topology:
    link = Link(bandwidth=1e9, latency=1e-5)
    card = GpuSpec(memory=1 << 30, bandwidth=1e10)
    return Topology(nodes=nodes, gpus_per_node=cards, gpu=card, links=Links(node=link, cluster=link))


def table_plan(
    name: str,
    first: int,
    second: int,
    precision: str,
    exchange: str = "flat",
    card: int | None = None,
    first_precision: str = "",
    shape: tuple[int, int, tuple[str, ...]] | None = None,
) -> TablePlan:
    rows, dim, features = shape or TABLES[name]
    counts = {1: first, 2: second, 3: rows - first - second}
    precisions = {1: first_precision or precision, 2: precision, 3: precision}
    tiers = [
        Tier(tier=n, rows=count, threshold=0, lookups=0, precision=precisions[n])  # type: ignore[arg-type]
        for n, count in counts.items()
        if count
    ]
    return TablePlan(
        name=name, rows=rows, dim=dim, pooling="sum", features=features, lookups=8, precision=precision, cache=0, near=0,
        placement="card" if card is not None else "tiers", card=card, tiers=tuple(tiers), exchange=exchange,  # type: ignore[arg-type]
        pooled_by="asker", wire_rows=precision, wire_gradients="fp32", bytes={}, traffic=(), time={}, runner_up=None,
        binding="", curve=(),
    )  # fmt: skip


def with_slots(table: TablePlan, slots: Mapping[int, tuple[int, int]]) -> TablePlan:
    """The same with fp32 and int8 slots in some tiers, at most one for each row."""
    tiers = []
    for tier in table.tiers:
        cached, near = slots.get(tier.tier, (0, 0))
        cached = min(cached, tier.rows)
        tiers.append(tier.model_copy(update={"cached": cached, "near": min(near, tier.rows - cached)}))
    return table.model_copy(update={"tiers": tuple(tiers)})


def plan_of(nodes: int, cards: int, tables: Sequence[TablePlan], heat: HeatProfile | None = None) -> tc.Plan:
    step = StepPlan(parts={"dense": 0.0}, overlaps=(), hidden=0, total=1, throughput=1)
    return tc.Plan(
        goal="train", objective="", heat="" if heat is None else heat.sha256, topology=topology(nodes, cards), budget=1 << 30,
        batch=4, dense=0, optimizer="rowwise_adagrad", gradients="fp32", tables=tuple(tables), cards=(), traffic=(), step=step,
        balance=1, binding="", marginals=(), candidates=(),
    )  # fmt: skip


def heat_of(seed: int = 3) -> HeatProfile:
    """Not all rows of every table were seen."""
    rng = np.random.default_rng(seed)
    tables = {}
    for rows, _, features in TABLES.values():
        for feature in features:
            ids, counts = np.unique(rng.zipf(1.3, 300) % rows, return_counts=True)
            order = np.lexsort((ids, -counts))
            none = np.zeros(0, np.int64)
            tables[feature] = TableHeat(
                feature, 100, int(counts.sum()), len(ids), True, ids[order].astype(np.int64), counts[order].astype(np.int64),
                none, none,
            )  # fmt: skip
    return HeatProfile(tables, created="then")


class Model(nn.Module):
    """A model of tables only."""

    def __init__(
        self, precision: str = "int8", mode: str = "sum", optimizer: object = None, cache: float = 0.0, policy: str = "lfu",
        residency: str = "device",
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(11)
        tables = [tc.Table(name, rows, dim, features) for name, (rows, dim, features) in TABLES.items()]
        self.tables = tc.EmbeddingCollection(
            tables,
            mode=mode,
            rows=tc.RowConfig(
                precision,
                cache=cache,
                policy=policy,
                optimizer=optimizer or tc.RowwiseAdagrad(lr=0.125),
                seed=5,
                residency=residency,
            ),
        )

    def forward(self, batch: object) -> object:
        return self.tables(batch)


def dense_part() -> nn.Module:
    torch.manual_seed(13)
    return nn.Linear(sum(dim * len(features) for _, dim, features in TABLES.values()), 1)


BatchTable = dict[str, tuple[torch.Tensor, torch.Tensor]]


def batches(step: int, sizes: Sequence[int]) -> list[BatchTable]:
    """One batch per rank with the given numbers of samples; skewed ids, bags of 0 to 4."""
    rng = np.random.default_rng((step, 17))
    found: list[BatchTable] = []
    for size in sizes:
        batch: BatchTable = {}
        for rows, _, features in TABLES.values():
            for feature in features:
                lengths = rng.integers(0, 5, size)
                ids = rng.zipf(1.3, lengths.sum()) % rows
                offsets = np.concatenate([[0], np.cumsum(lengths)])
                batch[feature] = torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(offsets.astype(np.int64))
        found.append(batch)
    return found


def joined(parts: Sequence[BatchTable]) -> BatchTable:
    """The batches of all ranks as one, in their order."""
    batch: BatchTable = {}
    for feature in FEATURES:
        lengths = torch.cat([part[feature][1].diff() for part in parts])
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        batch[feature] = torch.cat([part[feature][0] for part in parts]), offsets
    return batch


def sizes_of(step: int, ranks: int) -> list[int]:
    """Uneven; now and then a rank has nothing, and once none has."""
    rng = np.random.default_rng((step, 29))
    return [0] * ranks if step == 7 else [int(n) for n in rng.integers(0, 6, ranks)]


def exact_loss(out: torch.Tensor, step: int, first: int) -> torch.Tensor:
    """A loss whose gradients are small integers: their sums are exact in any order. `first`: number of the first sample."""
    total = first + out.shape[0]
    factors = torch.from_numpy(np.random.default_rng((step, 41)).integers(-3, 4, (total, out.shape[1])).astype(np.float32))
    return (out * factors[first:]).sum()


def smooth_loss(out: torch.Tensor, step: int, first: int) -> torch.Tensor:
    total = first + out.shape[0]
    targets = torch.from_numpy(np.random.default_rng((step, 43)).normal(size=(total, out.shape[1])).astype(np.float32))
    return ((out - targets[first:]) ** 2).sum()
