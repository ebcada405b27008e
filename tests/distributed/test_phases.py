"""Planner and simulator list the exchanges of real processes."""

from __future__ import annotations

from collections import Counter

import pytest
from cases import TABLES, heat_of, plan_of, table_plan, with_slots

from thermocline.plan.cost.phases import RowKinds, exchange_phases, prefetch_latency
from thermocline.plan.cost.step_cost import Cluster

# name: rows of tiers 1 and 2 of each table, how tier 3 is asked for, and what the plan then uses
PLANS = {
    "row-wise": ({}, "flat", RowKinds(flat=True)),
    "per node": ({}, "node", RowKinds(relayed=True)),
    "on every card": ({name: (rows, 0) for name, (rows, _, _) in TABLES.items()}, "flat", RowKinds(first=True)),
    "once a node": ({name: (0, rows) for name, (rows, _, _) in TABLES.items()}, "flat", RowKinds(second=True)),
    "tiers 1 and 2": ({n: (9, rows - 9) for n, (rows, _, _) in TABLES.items()}, "flat", RowKinds(first=True, second=True)),
    "tiers 1 and 3": ({"user": (9, 0), "item": (7, 0)}, "flat", RowKinds(flat=True, first=True)),
    "tiers 2 and 3": ({"user": (0, 9)}, "flat", RowKinds(flat=True, second=True)),
    "tiers 2 and 3 per node": ({"user": (0, 9)}, "node", RowKinds(relayed=True, second=True)),
    "all tiers per node": ({"user": (5, 9), "shop": (3, 0)}, "node", RowKinds(relayed=True, first=True, second=True)),
}


def planned(nodes, cards, plan, heat, slots=False, owners=0):
    tiers, exchange, _ = PLANS[plan]
    tables = [table_plan(name, *tiers.get(name, (0, 0)), "int8", exchange) for name in TABLES]
    if slots:
        tables = [with_slots(table, {tier.tier: (2, 0) for tier in table.tiers}) for table in tables]
    pooled = [table.model_copy(update={"pooled_by": "owner", "wire_rows": "fp32"}) for table in tables[:owners]]
    tables = [*pooled, *tables[owners:]]
    return plan_of(nodes, cards, tables, heat)


def expected(uses, nodes, cards, ahead):
    """Turns by the group whose members exchange. The first hop is everyone's, even if all that it carries stays in nodes."""
    found = exchange_phases(uses, nodes, cards, prefetch=ahead)
    return Counter((t.part, "everyone" if t.scope == "node" and t.part != "sync" else t.scope) for t in found)


def check(on_ranks, nodes, cards, plan, uses, ahead, **how):
    heat = heat_of()
    given = planned(nodes, cards, plan, heat, **how)
    for known, found in on_ranks("phase_ranks.exchanged", nodes * cards, given, heat, {}, ahead):
        assert known == uses
        assert found == expected(uses, nodes, cards, ahead)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_nodes_of_cards_exchange_as_often_as_the_list_says(on_ranks, plan, ahead):
    check(on_ranks, 2, 2, plan, PLANS[plan][2], ahead)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("plan", ["row-wise", "per node", "tiers 1 and 3", "all tiers per node"])
def test_flags_of_cached_rows_precede_the_rows(on_ranks, plan, ahead):
    check(on_ranks, 2, 2, plan, PLANS[plan][2]._replace(slots=True), ahead, slots=True)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("plan", ["row-wise", "tiers 1 and 3"])
def test_sums_of_owners_go_beside_the_rest(on_ranks, plan, ahead):
    check(on_ranks, 2, 2, plan, PLANS[plan][2]._replace(summed=True), ahead, owners=1)


@pytest.mark.parametrize("ahead", [False, True])
def test_where_all_is_summed_by_owners_no_rows_come(on_ranks, ahead):
    check(on_ranks, 2, 2, "row-wise", RowKinds(summed=True), ahead, owners=len(TABLES))


@pytest.mark.parametrize("nodes, cards", [(1, 3), (3, 1)])
@pytest.mark.parametrize("plan", ["row-wise", "on every card", "tiers 1 and 3"])
def test_one_node_and_nodes_of_one_card_do_too(on_ranks, nodes, cards, plan):
    for ahead in (False, True):
        check(on_ranks, nodes, cards, plan, PLANS[plan][2], ahead)


def test_one_rank_does_not_wait():
    assert not list(exchange_phases(RowKinds(flat=True, first=True, slots=True), 1, 1))


def test_tier_1_takes_ten_exchanges_where_tier_3_takes_four():
    count = {
        name: len(list(exchange_phases(PLANS[name][2], 2, 8, prefetch=False)))
        for name in ("row-wise", "per node", "on every card")
    }
    assert count == {"row-wise": 4, "per node": 8, "on every card": 10}


def test_a_batch_that_comes_ahead_waits_three_times_more_behind_the_dense_part():
    machine = Cluster(2, 8, 1e12, 1e11, 1e10, node_latency=1.0, cluster_latency=10.0)
    assert prefetch_latency(machine, RowKinds(flat=True)) == 30.0  # how much, which rows are late, and those that are not
    assert prefetch_latency(machine, RowKinds(flat=True, slots=True)) == 30.0  # which are in slots is told with the late ones
    assert prefetch_latency(machine, RowKinds(second=True)) == 12.0  # how much goes to everyone
    assert prefetch_latency(machine, RowKinds(flat=True), trains=False) == 0.0
    assert prefetch_latency(Cluster(1, 1, 1e12, 1e11, 1e10), RowKinds(flat=True)) == 0.0
