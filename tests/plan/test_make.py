"""What plans decide and say: of tables, cards, the step and its traffic."""

from __future__ import annotations

import numpy as np
import pytest
from some_tables import HEAT, ITEM, cluster, tables

from thermocline.errors import BadInput
from thermocline.heat.curve import Curve
from thermocline.heat.profiler import profile_batches
from thermocline.plan.cost.step_cost import Machine, askers
from thermocline.plan.make import make_plain, make_plan
from thermocline.plan.model import MEMORY_PARTS, STEP_PARTS, Plan
from thermocline.plan.report.explain import explain
from thermocline.plan.report.page import page


@pytest.fixture(scope="module")
def plan():
    return make_plan(tables(), HEAT, cluster(), budget="40MiB")


def test_a_plan_is_the_same_after_a_trip_through_its_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_rows_of_tiers_add_up_and_thresholds_fall(plan):
    for table in plan.tables:
        assert sum(tier.rows for tier in table.tiers) == table.rows
        assert sum(tier.lookups for tier in table.tiers) == pytest.approx(1)
        assert [t.threshold for t in table.tiers] == sorted((t.threshold for t in table.tiers), reverse=True)


def test_a_plan_holds_counts_and_never_lists_of_rows(plan):
    assert len(plan.model_dump_json()) < 40_000


def test_the_curve_of_a_plan_is_flat_behind_the_last_row_that_was_seen():
    made = make_plan(tables({"name": "a", "rows": 40_700, "dim": 16}), {"a": Curve.of_counts(np.arange(1, 701))}, cluster())
    assert (700.0, 1.0) in made.tables[0].curve and made.tables[0].curve[-1] == (40_700.0, 1.0)


def test_every_card_has_room_and_its_parts_add_up(plan):
    assert sum(card.count for card in plan.cards) == 8
    for card in plan.cards:
        assert set(card.bytes) == set(MEMORY_PARTS) and card.total <= plan.budget
    by_table = sum(sum(table.bytes.values()) for table in plan.tables)
    assert by_table == pytest.approx(sum(card.total * card.count for card in plan.cards), rel=1e-3)


def test_the_parts_of_a_step_add_up_to_the_predicted_time(plan):
    step = plan.step
    assert tuple(step.parts) == STEP_PARTS
    assert step.total == pytest.approx(sum(step.parts.values()) - step.hidden)
    assert step.total == pytest.approx(plan.candidates[0].time, rel=1e-9)
    assert step.parts["ids"] <= step.hidden <= min(step.parts["ids"] + step.parts["rows"], 2e-3)


def test_traffic_of_tables_adds_up_to_that_of_the_plan(plan):
    for link in ("card", "node", "cluster"):
        for direction in ("ids", "rows", "gradients", "sync"):
            found = sum(t.bytes for table in plan.tables for t in table.traffic if (t.link, t.direction) == (link, direction))
            assert found == pytest.approx(plan.bytes_over(link, direction))


def test_plain_plans_are_among_the_candidates_and_none_is_better(plan):
    names = {other.name: other for other in plan.candidates}
    assert {"row-wise", "table-wise", "full replication"} <= set(names)
    assert all(other.time is None or other.time >= plan.step.total * (1 - 1e-9) for other in plan.candidates)
    assert all((other.time is None) == (other.bytes > plan.budget) for other in plan.candidates)


def test_every_table_has_a_runner_up_that_is_no_better(plan):
    for table in plan.tables:
        assert table.runner_up is not None and table.binding
        if table.runner_up.time is not None:
            assert table.runner_up.time >= plan.step.total * (1 - 1e-6)


def test_a_small_table_is_on_every_card_where_nothing_has_to_be_kept_equal():
    assert make_plan(tables(), HEAT, cluster(), budget="40MiB", goal="serve").table("country").placement == "replicated"


def test_more_memory_buys_a_shorter_request_and_the_plan_says_how_much():
    tight = make_plan(tables(), HEAT, cluster(), budget="24MiB", goal="serve")
    roomy = make_plan(tables(), HEAT, cluster(), budget="64MiB", goal="serve")
    assert roomy.step.total < tight.step.total
    (gib, node) = tight.marginals
    assert gib.saves > 0 and gib.time <= roomy.step.total * 1.01
    assert node.what == "one node more" and "instead of" in node.detail


def test_a_table_of_one_row_is_planned_for_though_no_lever_can_make_it_smaller():
    heat = profile_batches([{"one": np.zeros(13, np.int64)}], batch=4, cards_per_node=2)
    plan = make_plan(tables({"name": "one", "rows": 1, "dim": 3}), heat, cluster(1, 1))
    assert plan.table("one").rows == 1 and not [offer for offer in plan.offers if offer.option.startswith("--hash")]


def test_replicas_train_where_a_row_is_wider_on_the_wire_than_its_gradient_and_only_there():
    copied = {}
    for precision, batch in (("fp32", 65_536), ("int8", 65_536), ("fp32", 2048)):
        given = tables(ITEM | {"precision": precision, "cache": 0.0}, batch=batch, dense="0s")
        tiers = make_plan(given, HEAT, cluster(4, 4), gradients="bf16").table("item").tiers
        copied[precision, batch] = sum(tier.rows for tier in tiers if tier.tier < 3)
    assert copied["fp32", 65_536] > 0 and copied["int8", 65_536] == 0
    assert copied["fp32", 2048] == 0  # what they save is less than the waits that keep them equal


def test_replicas_can_be_forced_where_they_do_not_pay_and_the_plan_then_predicts_that():
    given = tables(ITEM | {"precision": "int8", "cache": 0.0}, batch=64, dense="0s")
    chosen = make_plan(given, HEAT, cluster(4, 4), gradients="bf16")
    share_K = HEAT["item"].share_K
    hot = HEAT["item"].rows_K[askers(share_K, 64 * 20.0, Machine.of(cluster(4, 4))).node >= 0.5].sum()
    for name, tier in (("hot rows once a node", 2), ("hot rows on every card", 1)):
        forced = make_plain(name, given, HEAT, cluster(4, 4), "bf16")
        rows = {each.tier: each.rows for each in forced.table("item").tiers}
        assert rows[tier] == pytest.approx(hot, rel=0.2) and rows[tier] + rows[3] == 100_000
        assert forced.step.total > chosen.step.total
        assert any(line.direction == "sync" and line.link == "cluster" and line.bytes for line in forced.traffic)
    with pytest.raises(BadInput, match="no plain plan 'hot rows once a node'"):
        make_plain("hot rows once a node", given, HEAT, cluster(1, 4), "bf16")


def test_a_heat_curve_turns_level_where_the_rows_that_were_seen_end(plan):
    reach, taken = np.array(plan.table("item").curve).T
    assert reach[-1] == 100_000 and taken[reach == 80_000] == pytest.approx([1.0], abs=1e-5)


def test_serving_has_no_gradients_no_state_and_no_sync():
    plan = make_plan(tables(), HEAT, cluster(), budget="40MiB", goal="serve")
    assert plan.step.parts["sync"] == plan.step.parts["gradients"] == plan.step.hidden == 0
    assert all(card.bytes["optimizer state"] == 0 for card in plan.cards)
    assert plan.step.throughput >= 512 * 8 / plan.step.total


def test_gradients_in_half_precision_take_less_of_the_wire():
    full, half = (make_plan(tables(), HEAT, cluster(), budget="40MiB", gradients=g) for g in ("fp32", "bf16"))
    assert half.step.exposed < full.step.exposed


@pytest.mark.parametrize("nodes, cards", [(1, 1), (1, 8), (3, 1)])
def test_one_card_one_node_and_one_card_a_node_can_be_planned_for(nodes, cards):
    plan = make_plan(tables(), HEAT, cluster(nodes, cards), budget="200MiB")
    assert all(tier.tier != 2 for table in plan.tables for tier in table.tiers)
    assert (plan.bytes_over("cluster") > 0) <= (nodes > 1)
    if nodes * cards == 1:
        assert plan.bytes_over("node") == 0 and plan.balance == 1


def test_a_plan_explains_itself_as_text_and_as_a_page(plan):
    for shown in (explain(plan), page(plan)):
        assert all(name in shown for name in ("item", "user", "country", "row-wise"))


def test_a_plan_for_serving_speaks_of_no_gradients_and_no_sync():
    text = explain(make_plan(tables(), HEAT, cluster(), budget="40MiB", goal="serve"))
    assert "gradients" not in text and "sync" not in text and "as none" not in text


def test_what_a_model_computes_below_its_lookup_hides_gradients_and_sync():
    first, below = (make_plan(tables(below=part), HEAT, cluster(), budget="40MiB").step for part in ("0s", "10us"))
    assert below.total == pytest.approx(first.total - 10e-6, abs=1e-7) and "gradients" in below.overlaps
    with pytest.raises(ValueError, match="more than dense"):
        tables(below="3ms")
