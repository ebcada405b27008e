"""The excess work of the owner of the hottest row."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.heat.curve import Curve
from thermocline.plan.cost.memory import RowPrecision
from thermocline.plan.cost.step_cost import Cluster
from thermocline.plan.cost.step_work import TableWork, Workload
from thermocline.plan.make import make_plan
from thermocline.plan.solve.hot_owner import GRADIENTS, LOOKUP, PARTS, SYNC
from thermocline.plan.solve.solver import Problem
from thermocline.plan.solve.tiers import OWNER_POOLED
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology

FLAT, PER_NODE = 0, 1


def problem(nodes, cards, tables=1, lookups=1000.0, rows=100_000):
    cluster = Cluster(nodes, cards, 4e12, 4e11, 4e10, 1e-5, 2e-5)
    works = tuple(
        TableWork(f"table{n}", 64, True, lookups, 50.0, Curve.zipf(rows, 1.05), RowPrecision("int8"), 4) for n in range(tables)
    )
    return Problem.of(Workload(cluster, works, 1 << 34, 1e-3, "fp32"))


def excess(of, choice, second=0):
    tables = len(of.workload.tables)
    return of.hot_owner.loads(np.full(tables, choice), np.full(tables, second)).excess()


@pytest.mark.parametrize("nodes, cards", [(1, 1), (1, 8), (2, 4), (4, 8), (32, 8)])
def test_no_excess_while_no_row_exceeds_the_share_of_a_rank(nodes, cards):
    found = problem(nodes, cards)
    assert not excess(found, FLAT).any() and not excess(found, PER_NODE).any()


def test_owner_of_a_hot_row_is_requested_by_every_rank():
    found = problem(512, 8)
    asked = float(found.grid.requested.rank[0, 0]) * (7 / 4e11 + 4088 / 4e10) * 256  # gradients of 64 columns
    mean = float((found.grid.requested.rank * found.grid.rows).sum()) * (7 / 4e11 + 4088 / 4e10) * 256 / 4096
    assert asked - mean < excess(found, FLAT)[GRADIENTS] < asked
    assert excess(found, PER_NODE)[GRADIENTS] < excess(found, FLAT)[GRADIENTS] / 8  # once a node


def test_hottest_rows_of_two_tables_have_different_owners():
    one, two = (excess(problem(512, 8, tables), FLAT)[GRADIENTS] for tables in (1, 2))
    assert 0 < two < one  # as hot, and the mean is twice as high


def test_replicas_move_the_excess_to_the_next_row_and_to_sync():
    found = problem(512, 8)
    few, many = (excess(found, FLAT, second=copies) for copies in (5, 200))
    assert many[GRADIENTS] < 0.1 * few[GRADIENTS] and many[SYNC] < few[SYNC]
    home = (found.grid.requested.node + found.grid.requested.any)[0, 0] * (4 + 256) * 511 / 4e10
    assert few[SYNC] == pytest.approx(home, rel=0.01)


def test_owners_that_pool_serve_every_lookup():
    found = problem(4, 8)
    taken = float(found.grid.share[0, 0]) * (1 - 1 / 32)
    assert excess(found, OWNER_POOLED)[LOOKUP] == pytest.approx(1000 * 32 * taken * float(found.grid.row[0]) / 4e12, rel=1e-9)


def test_excess_with_one_changed_table_equals_the_changed_solution():
    found, rng = problem(512, 8, tables=4), np.random.default_rng(0)
    for _ in range(20):
        now, then = rng.choice([FLAT, PER_NODE, OWNER_POOLED], (2, 4))
        ends = rng.integers(0, 9, (2, 4)) * (np.stack([now, then]) != OWNER_POOLED)
        instead = found.hot_owner.loads(now, ends[0]).excess_with(found.hot_owner.loads(then, ends[1]))
        assert instead.shape == (PARTS, 4)
        for table in range(4):
            choice, second = now.copy(), ends[0].copy()
            choice[table], second[table] = then[table], ends[1, table]
            np.testing.assert_allclose(instead[:, table], found.hot_owner.loads(choice, second).excess(), atol=1e-18)


@pytest.mark.parametrize("nodes, exchange", [(32, "flat"), (512, "node")])
def test_plan_exchanges_per_node_if_hot_owners_are_too_busy(nodes, exchange):
    item = TableConfig(name="item", rows=1_000_000, dim=128, pooling="none", precision="int8", cache=0, lookups=8)
    tables = TablesConfig(batch=256, dense=4e-3, tables=(item,))
    plan = make_plan(tables, {"item": Curve.zipf(1_000_000, 1.2)}, Topology.load("hgx-h200", nodes=nodes), backend="gloo")
    assert plan.table("item").exchange == exchange
