"""The plan predicts the traffic of the busiest rank."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.plan.baselines import make_baseline_plan
from thermocline.distributed.simulation.simulator import RankBatches, simulate
from thermocline.heat.log_columns import LogIds
from thermocline.heat.profiler import profile_batches
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology

ROWS, BATCH, LENGTH = 20_011, 16, 40
DIRECTIONS = ("ids", "rows", "gradients", "sync")


def drawn(cards):
    """LogIds of one step of some ranks, by Zipf's law, with shuffled rows."""
    rng = np.random.default_rng(3)
    share = np.arange(1, ROWS + 1) ** -1.1
    row = rng.permutation(ROWS)
    return row[np.searchsorted(np.cumsum(share / share.sum()), rng.random(cards * BATCH * LENGTH))]


def planned(name, nodes):
    ids = drawn(nodes * 8)
    item = TableConfig(name="item", rows=ROWS, dim=64, pooling="sum", precision="int8", cache=0, lookups=LENGTH)
    tables = TablesConfig(batch=BATCH, dense=4e-3, tables=(item,))
    heat = profile_batches([{"item": ids.reshape(-1, LENGTH)}])
    plan = make_baseline_plan(name, tables, heat, Topology.load("hgx-h200", nodes=nodes))
    bags = LogIds(ids, np.arange(0, len(ids) + 1, LENGTH))
    return plan, simulate(plan, heat, [[RankBatches({"item": bags}, np.full(nodes * 8, BATCH))]])


@pytest.mark.parametrize("nodes", [32, 128, 512])
@pytest.mark.parametrize("name", ["row-wise", "row-wise, per node", "row-wise, summed by owners"])
def test_a_row_that_all_ranks_request_takes_its_owner_as_long_as_planned(name, nodes):
    plan, found = planned(name, nodes)
    assert plan.step.exposed == pytest.approx(found.step - plan.dense, rel=0.1)
    for part in DIRECTIONS:
        assert plan.step.parts[part] == pytest.approx(found.seconds[part], rel=0.15), part
