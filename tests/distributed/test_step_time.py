"""Plans predict the simulated time where latency dominates a step, and the chosen plan is the fastest."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.plan.baselines import make_baseline_plan
from thermocline import make_plan
from thermocline.distributed.simulation.simulator import RankBatches, simulate
from thermocline.heat.log_columns import LogIds
from thermocline.heat.profiler import profile_batches
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology

ROWS, BATCH, LOOKUPS = {"item": 5003, "user": 997}, 16, 4
CLUSTERS = [(1, 8), (2, 2), (2, 8), (4, 2)]
PLAINS = ["row-wise", "row-wise, per node", "one copy a node", "full replication", "row-wise, summed by owners"]


def bags(rng, samples):
    """Samples of both tables, skewed."""
    return {name: rng.zipf(1.2, (samples, LOOKUPS)) % rows for name, rows in ROWS.items()}


@cache
def heat(cards):
    rng = np.random.default_rng(cards)
    return profile_batches((bags(rng, BATCH * cards) for _ in range(30)), batch=BATCH, cards_per_node=cards)


def h200s(nodes, cards):
    """Links so fast that next to nothing but their latency counts."""
    return Topology.load("hgx-h200", nodes=nodes).model_copy(update={"gpus_per_node": cards})


def tables(dense=0.0, cache=0.0):
    made = [
        TableConfig(name=name, rows=rows, dim=16, lookups=LOOKUPS, precision="int8", cache=cache) for name, rows in ROWS.items()
    ]
    return TablesConfig(batch=BATCH, dense=dense, tables=tuple(made))


def simulated(plan, nodes, cards):
    """New steps of the same distribution."""
    rng, samples, steps = np.random.default_rng(99), nodes * cards * BATCH, []
    for _ in range(3):
        looked_up = {
            name: LogIds(ids.reshape(-1), np.arange(samples + 1) * LOOKUPS) for name, ids in bags(rng, samples).items()
        }
        steps.append([RankBatches(looked_up, np.full(nodes * cards, BATCH))])
    return simulate(plan, heat(cards), steps)


@pytest.mark.parametrize("dense", [0.0, 1e-3])
@pytest.mark.parametrize("slots", [0.0, 0.05])
@pytest.mark.parametrize("nodes, cards", CLUSTERS)
def test_plain_plans_take_as_long_as_the_simulator_says(nodes, cards, slots, dense):
    for name in PLAINS:
        if nodes > 1 or "node" not in name:
            plan = make_baseline_plan(name, tables(dense, slots), heat(cards), h200s(nodes, cards))
            found = simulated(plan, nodes, cards)
            assert plan.step.total - dense == pytest.approx(found.step - dense, rel=0.03), name
            for part in ("ids", "rows", "gradients", "sync"):
                assert plan.step.parts[part] == pytest.approx(found.seconds[part], rel=0.05, abs=1e-6), (name, part)
            assert found.latency > 0.9 * (sum(found.seconds.values()) - dense), name


@pytest.mark.parametrize("dense", [0.0, 1e-3])
@pytest.mark.parametrize("nodes, cards", CLUSTERS)
def test_the_chosen_plan_is_no_slower_in_the_simulator_than_plain_plans(nodes, cards, dense):
    best = make_plan(tables(dense), heat(cards), h200s(nodes, cards))
    chosen = simulated(best, nodes, cards)
    assert best.step.total - dense == pytest.approx(chosen.step - dense, rel=0.03)
    for name in PLAINS:
        if nodes > 1 or "node" not in name:
            other = simulated(make_baseline_plan(name, tables(dense), heat(cards), h200s(nodes, cards)), nodes, cards)
            assert chosen.step - dense <= 1.01 * (other.step - dense), name
