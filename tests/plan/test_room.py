"""What fits, what is said where nothing does, and what memory bounds; a plan fits into as many bytes as it says it takes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from some_tables import COUNTRY, HEAT, ITEM, USER, cluster, tables

from thermocline.errors import BadInput
from thermocline.heat.curve import Curve
from thermocline.heat.profiler import profile_batches
from thermocline.plan.make import make_plain, make_plan
from thermocline.plan.report.reasons import FREE
from thermocline.plan.solve.precisions import LADDER, choose
from thermocline.plan.tables import TableFile, Tables
from thermocline.plan.topology import Host, Links

CLUSTERS = [(1, 1), (1, 3), (2, 2), (3, 2)]


def given(rows, batch, nodes, cards):
    heat = profile_batches([{"item": np.random.default_rng(rows).zipf(1.3, 4099) % rows}], batch=batch, cards_per_node=cards)
    item = TableFile(name="item", rows=rows, dim=5, pooling="none", precision="fp32", cache=0.0)
    return Tables(batch=batch, dense=1e-4, tables=(item,)), heat, cluster(nodes, cards)


@pytest.mark.parametrize("nodes, cards", CLUSTERS)
@pytest.mark.parametrize("rows", [1, 63, 1000, 4099])
def test_a_plan_fits_into_the_bytes_that_a_plain_one_says_it_takes(rows, nodes, cards):
    for batch in (7, 64, 331):
        asked = given(rows, batch, nodes, cards)
        room = make_plain("row-wise", *asked).fullest.total
        made = make_plan(*asked, budget=room)
        assert made.fullest.total <= room
        assert make_plan(*asked, budget=made.fullest.total).fullest.total <= made.fullest.total


@pytest.mark.parametrize("rows, batch, nodes, cards", [(63, 7, 2, 2), (1000, 7, 2, 2), (61, 5, 1, 3)])
def test_what_is_missing_is_a_byte_at_least(rows, batch, nodes, cards):
    asked = given(rows, batch, nodes, cards)
    least = min(made.bytes for made in make_plan(*asked).candidates)
    with pytest.raises(BadInput, match=r": 1 B too much"):
        make_plan(*asked, budget=least - 1)


def test_precision_goes_down_only_as_far_as_memory_forces_it():
    assert {t.precision for t in make_plan(tables(), HEAT, cluster()).tables} == {"int8"}
    small = make_plan(tables(), HEAT, cluster(), budget="8MiB")
    assert small.table("user").precision in ("int4", "int2") and small.table("country").precision == "int8"
    named = make_plan(tables(ITEM, USER | {"precision": "fp32"}, COUNTRY), HEAT, cluster())
    assert named.table("user").precision == "fp32" and named.table("user").cache == 0


def test_the_table_that_frees_most_for_its_lookups_goes_down_first():
    assert choose([LADDER[:2]] * 3, [[10.0, 5.0], [100.0, 50.0], [100.0, 50.0]], [1.0, 1.0, 100.0], 170.0) == [0, 1, 0]
    assert choose([LADDER[:2]] * 2, [[10.0, 5.0], [10.0, 5.0]], [1.0, 1.0], 1.0) == [1, 1]


def test_what_does_not_fit_is_an_error_with_numbers_and_ways_out():
    with pytest.raises(BadInput) as caught:
        make_plan(tables(ITEM, USER | {"rows": 50_000_000, "precision": "fp32"}, COUNTRY), HEAT, cluster(), budget="100MiB")
    text = str(caught.value)
    assert "card 0" in text and "too much" in text and "100.00 MiB" in text
    for way in ("let the plan choose the precision", "prune rows", "cards instead of 8", "a budget of"):
        assert way in text


@pytest.mark.parametrize("nodes, cards", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("goal", ["train", "serve"])
def test_tables_that_do_not_fit_are_said_to_be_too_much_by_more_than_nothing(nodes, cards, goal):
    given, where = tables(COUNTRY | {"pooling": "none", "precision": "int2", "cache": 0.0}), cluster(nodes, cards)
    least = make_plan(given, HEAT, where, goal=goal)
    told = 0
    for share in (0.97, 0.8, 0.5, 0.2):
        try:
            make_plan(given, HEAT, where, budget=int(share * min(c.bytes or 1 for c in least.candidates)), goal=goal)
        except BadInput as error:
            told += 1
            assert re.search(r"may hold [\d.]+ K?i?B: [\d.]+ K?i?B too much", str(error)), error
    assert told == 4


def test_one_card_has_no_buffers_for_an_exchange_with_itself():
    plan = make_plan(tables(), HEAT, cluster(1, 1))
    assert plan.cards[0].bytes["buffers"] == 0 and plan.bytes_over("card") == 0


def test_maps_are_not_taken_for_buffers_where_rows_do_not_fit():
    huge = {"name": "item", "rows": 10**11, "dim": 8, "precision": "int2"}
    with pytest.raises(BadInput, match=r"buffers of the exchange are \d+\.\d+ KiB") as told:
        make_plan(tables(huge), {"item": Curve.zipf(10**11, 1.0)}, cluster())
    assert "lower the batch" not in str(told.value)


def test_pruning_rows_that_were_never_seen_is_a_way_out_with_all_that_they_take():
    huge = {"name": "item", "rows": 10**12, "dim": 64, "precision": "int8"}
    with pytest.raises(BadInput, match=r"of the table that names one .*prune rows .* never saw \([\d.]+ TiB less a card\)"):
        make_plan(tables(huge), {"item": Curve.zipf(80_000, 1.0)}, cluster())


def test_a_budget_beyond_the_card_is_refused():
    with pytest.raises(BadInput, match=r"90\.00 GiB a card, and a card has 74\.51 GiB"):
        make_plan(tables(), HEAT, cluster(), budget="90GiB")


def test_codes_go_to_host_memory_only_where_the_cards_are_too_small_for_them():
    links = {"node": {"bandwidth": "450GB/s"}, "cluster": {"bandwidth": "50GB/s"}, "host": {"bandwidth": "55GB/s"}}
    small = cluster().model_copy(update={"host": Host(memory=10**9), "links": Links.model_validate(links)})
    given = tables(ITEM, USER | {"rows": 40_000_000, "precision": "int8", "cache": 0.0}, COUNTRY)
    plan = make_plan(given, HEAT, small, budget="100MiB")
    assert {t.name for t in plan.tables if t.residency == "host"} == {"user"} and "host memory" in plan.notes[0]
    assert plan.cards[0].host == 40_000_000 * 32 // 8 and plan.fullest.total <= plan.budget
    assert plan.bytes_over("host", "rows") > 0
    assert plan.step.total == pytest.approx(plan.candidates[0].time, rel=1e-9)
    assert plan.step.total > 0.998 * make_plan(given, HEAT, small, budget="1GiB").step.total
    with pytest.raises(BadInput, match="do not fit"):
        make_plan(given, HEAT, small.model_copy(update={"host": Host(memory=10**8)}), budget="100MiB")


def test_a_plan_that_fills_its_cards_is_bound_by_their_memory():
    made = make_plan(tables(), HEAT, cluster(), budget="12MiB", goal="serve")
    assert made.fullest.total > 0.97 * made.budget and made.binding.startswith("the memory of the cards")


@pytest.mark.parametrize("budget", ["250MiB", "180MiB", "160MiB"])
def test_a_plan_that_more_memory_would_not_change_is_not_said_to_be_bound_by_it(budget):
    # Row-wise is the best with any memory, for the latency of keeping copies equal; prices of rows alone would have copies.
    many = [ITEM | {"name": f"item {n}", "precision": "fp32", "cache": 0.0, "rows": 2_000_000} for n in range(3)]
    heat = {table["name"]: Curve.zipf(2_000_000, 1.1, 1e8) for table in many}
    made = make_plan(tables(*many, batch=3000, dense="0s"), heat, cluster(4, 4), gradients="bf16", budget=budget)
    assert made.marginals[0].saves == 0 and made.binding.startswith("the links")
    assert {table.binding for table in made.tables} == {FREE}


@pytest.mark.parametrize("cards", [1, 4])
def test_tables_in_host_memory_are_not_said_to_be_bound_by_that_of_cards_which_have_room(cards):
    links = {"node": {"bandwidth": "450GB/s"}, "host": {"bandwidth": "50GB/s"}}
    one = cluster(1, cards, memory="1GB").model_copy(
        update={"host": Host(memory=9 * 10**11), "links": Links.model_validate(links)}
    )
    item = {"name": "item", "rows": 60_000_000, "dim": 64, "precision": "int8", "cache": 0.01, "lookups": 20}
    made = make_plan(tables(item), {"item": Curve.zipf(60_000_000, 1.1, 1e8)}, one)
    assert made.tables[0].residency == "host" and made.fullest.total < 0.7 * made.budget
    assert "memory of the cards" not in made.binding
