"""What the owner of the hottest row does more than others."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.heat.curve import Curve
from thermocline.plan.cost.hot_owner import GRADIENTS, LOOKUP, PARTS, SYNC
from thermocline.plan.cost.memory import Store
from thermocline.plan.cost.step_cost import Machine
from thermocline.plan.cost.step_work import Job, Work
from thermocline.plan.make import make_plan
from thermocline.plan.solve.solver import Problem
from thermocline.plan.solve.tiers import OWNER
from thermocline.plan.tables import TableFile, Tables
from thermocline.plan.topology import Topology

FLAT, PER_NODE = 0, 1


def problem(nodes, cards, tables=1, lookups=1000.0, rows=100_000):
    machine = Machine(nodes, cards, 4e12, 4e11, 4e10, 1e-5, 2e-5)
    works = tuple(Work(f"table{n}", 64, True, lookups, 50.0, Curve.zipf(rows, 1.05), Store("int8"), 4) for n in range(tables))
    return Problem.of(Job(machine, works, 1 << 34, 1e-3, "fp32"))


def more(of, choice, second=0):
    tables = len(of.job.works)
    return of.owners.standing(np.full(tables, choice), np.full(tables, second)).more()


@pytest.mark.parametrize("nodes, cards", [(1, 1), (1, 8), (2, 4), (4, 8), (32, 8)])
def test_where_no_row_is_more_than_the_share_of_a_card_owners_are_equally_busy(nodes, cards):
    found = problem(nodes, cards)
    assert not more(found, FLAT).any() and not more(found, PER_NODE).any()


def test_where_one_is_its_owner_hears_of_it_from_everyone():
    found = problem(512, 8)
    asked = float(found.grid.asked.card[0, 0]) * (7 / 4e11 + 4088 / 4e10) * 256  # gradients of 64 columns
    mean = float((found.grid.asked.card * found.grid.rows).sum()) * (7 / 4e11 + 4088 / 4e10) * 256 / 4096
    assert asked - mean < more(found, FLAT)[GRADIENTS] < asked
    assert more(found, PER_NODE)[GRADIENTS] < more(found, FLAT)[GRADIENTS] / 8  # once a node


def test_hottest_rows_of_two_tables_lie_on_different_cards():
    one, two = (more(problem(512, 8, tables), FLAT)[GRADIENTS] for tables in (1, 2))
    assert 0 < two < one  # as hot, and the mean is twice as high


def test_copies_of_the_hottest_rows_leave_their_owners_the_next_and_one_card_their_sync():
    found = problem(512, 8)
    few, many = (more(found, FLAT, second=copies) for copies in (5, 200))
    assert many[GRADIENTS] < 0.1 * few[GRADIENTS] and many[SYNC] < few[SYNC]
    home = (found.grid.asked.node + found.grid.asked.any)[0, 0] * (4 + 256) * 511 / 4e10
    assert few[SYNC] == pytest.approx(home, rel=0.01)


def test_owners_that_make_sums_are_asked_as_often_as_rows_are_looked_up():
    found = problem(4, 8)
    taken = float(found.grid.share[0, 0]) * (1 - 1 / 32)
    assert more(found, OWNER)[LOOKUP] == pytest.approx(1000 * 32 * taken * float(found.grid.row[0]) / 4e12, rel=1e-9)


def test_one_table_instead_is_what_the_solution_with_it_has():
    found, rng = problem(512, 8, tables=4), np.random.default_rng(0)
    for _ in range(20):
        now, then = rng.choice([FLAT, PER_NODE, OWNER], (2, 4))
        ends = rng.integers(0, 9, (2, 4)) * (np.stack([now, then]) != OWNER)
        instead = found.owners.standing(now, ends[0]).instead(found.owners.standing(then, ends[1]))
        assert instead.shape == (PARTS, 4)
        for table in range(4):
            choice, second = now.copy(), ends[0].copy()
            choice[table], second[table] = then[table], ends[1, table]
            np.testing.assert_allclose(instead[:, table], found.owners.standing(choice, second).more(), atol=1e-18)


@pytest.mark.parametrize("nodes, exchange", [(32, "flat"), (512, "node")])
def test_a_plan_asks_once_a_node_where_owners_of_hot_rows_would_be_too_busy(nodes, exchange):
    item = TableFile(name="item", rows=1_000_000, dim=128, pooling="none", precision="int8", cache=0, lookups=8)
    tables = Tables(batch=256, dense=4e-3, tables=(item,))
    plan = make_plan(tables, {"item": Curve.zipf(1_000_000, 1.2)}, Topology.load("hgx-h200", nodes=nodes))
    assert plan.table("item").exchange == exchange
