"""Training on several ranks equals training in one process on the batches of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from cases import TABLES, heat_of, plan_of, table_plan

import thermocline as tc

ROWS = sum(rows for rows, _, _ in TABLES.values())
STEPS = 50


def tiers_plan(nodes, cards, tiers, precision, exchange="flat"):
    heat = heat_of()
    return plan_of(nodes, cards, [table_plan(name, *tiers[name], precision, exchange) for name in TABLES], heat), heat


ALL_FIRST = {name: (rows, 0) for name, (rows, _, _) in TABLES.items()}
ALL_THIRD = dict.fromkeys(TABLES, (0, 0))
MIXED = {"user": (13, 0), "item": (61, 0), "shop": (5, 0)}


@pytest.mark.parametrize("nodes, cards", [(1, 2), (1, 3), (1, 4)])
@pytest.mark.parametrize("tiers", [ALL_FIRST, ALL_THIRD, MIXED], ids=["tier 1", "tier 3", "mixed"])
def test_int8_rows_equal_those_of_one_process_bit_for_bit(on_ranks, nodes, cards, tiers):
    plan, heat = tiers_plan(nodes, cards, tiers, "int8")
    found = on_ranks("train", nodes * cards, plan, heat, {"precision": "int8", "exact": True}, STEPS)
    assert [each["different"] for each in found] == [0] * len(found)
    assert sum(each["rows"] for each in found) >= ROWS


TWO = {"user": (13, 30), "item": (0, 61), "shop": (5, 11)}


@pytest.mark.parametrize("exchange", ["flat", "node"])
@pytest.mark.parametrize("nodes, cards", [(2, 2), (3, 1), (1, 3)])
def test_one_copy_a_node_and_asking_once_a_node_change_no_bit(on_ranks, nodes, cards, exchange):
    plan, heat = tiers_plan(nodes, cards, TWO, "int8", exchange)
    found = on_ranks("train", nodes * cards, plan, heat, {"precision": "int8", "exact": True}, STEPS)
    assert [each["different"] for each in found] == [0] * len(found)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_tiers_change_no_bit(on_ranks, seed):
    rng = np.random.default_rng(seed)
    nodes, cards = [(2, 2), (1, 4), (4, 1), (1, 2), (2, 1)][rng.integers(5)]
    heat, tables = heat_of(), []
    for name, (rows, _, _) in TABLES.items():
        first, second = sorted(rng.integers(0, rows + 1, 2))
        card = int(rng.integers(nodes * cards)) if rng.random() < 0.2 else None
        tiers = (0, 0) if card is not None else (int(first), int(second - first))
        tables.append(table_plan(name, *tiers, "int4", ["flat", "node"][rng.integers(2)], card))
    settings = {"precision": "int4", "exact": True, "optimizer": tc.Adagrad(lr=0.25)}
    found = on_ranks("train", nodes * cards, plan_of(nodes, cards, tables, heat), heat, settings, STEPS)
    assert [each["different"] for each in found] == [0] * len(found)


@pytest.mark.parametrize("tiers, exchange", [(ALL_FIRST, "flat"), (ALL_THIRD, "flat"), (ALL_THIRD, "node"), (TWO, "node")])
def test_fp32_rows_equal_those_of_one_process_but_for_the_order_of_sums(on_ranks, tiers, exchange):
    plan, heat = tiers_plan(2, 2, tiers, "fp32", exchange)
    found = on_ranks("train", 4, plan, heat, {"precision": "fp32", "exact": False, "optimizer": tc.Adam(lr=0.01)}, STEPS)
    assert max(each["worst"] for each in found) < 3e-5
