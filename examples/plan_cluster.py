"""Plan a cluster from a log: which rows are on every GPU, once per node or once in the cluster, and why.

python examples/plan_cluster.py         needs no GPU and no torch
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import thermocline
from thermocline.heat import profile_batches
from thermocline.plan import TableConfig, TablesConfig, explain


def batches(count: int) -> Iterator[dict[str, np.ndarray]]:
    """A synthetic log: ids of each feature, batch after batch, in the order of training."""
    draw = np.random.default_rng(0)
    for _ in range(count):
        yield {"user": draw.integers(0, 1_000_000, 2048), "item": draw.zipf(1.2, (2048, 20)) % 500_000}


def main(count: int = 50) -> None:
    heat = profile_batches(batches(count), samples=count * 2048)  # or HeatProfile.load("heat.tc")
    tables = TablesConfig(
        batch=2048,
        dense=4e-3,
        tables=(
            TableConfig(name="user", rows=1_000_000, dim=128),
            TableConfig(name="item", rows=500_000, dim=128, pooling="none", lookups=20),
        ),
    )
    plan = thermocline.make_plan(tables, heat, "hgx-h200", budget="64MiB")
    print(explain(plan))
    for table in plan.tables:
        tiers = ", ".join(f"tier {tier.tier}: {tier.rows:,} rows in {tier.precision}" for tier in table.tiers)
        print(f"{table.name}: {table.placement}; {tiers}")


if __name__ == "__main__":
    main()
