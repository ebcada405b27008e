"""The decisions and predictions of plans: tables, ranks, the step and its traffic."""

from __future__ import annotations

import numpy as np
import pytest
from example_tables import HEAT, ITEM, cluster, tables
from pydantic import ValidationError

from benchmarks.plan.baselines import make_baseline_plan
from support import contradicts, has
from thermocline.errors import BadInput
from thermocline.heat.curve import Curve
from thermocline.heat.profiler import profile_batches
from thermocline.plan.cost.step_cost import Cluster, request_probability
from thermocline.plan.make import make_plan
from thermocline.plan.model import MEMORY_PARTS, STEP_PARTS, Plan
from thermocline.plan.report.explain import explain
from thermocline.plan.report.page import plan_page


@pytest.fixture(scope="module")
def plan():
    return make_plan(tables(), HEAT, cluster(), budget="40MiB")


def test_plan_round_trips_through_its_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_rows_of_tiers_add_up_and_thresholds_fall(plan):
    for table in plan.tables:
        assert sum(tier.rows for tier in table.tiers) == table.rows
        assert sum(tier.lookups for tier in table.tiers) == pytest.approx(1)
        assert [t.threshold for t in table.tiers] == sorted((t.threshold for t in table.tiers), reverse=True)


def test_a_plan_holds_counts_and_never_lists_of_rows(plan):
    assert len(plan.model_dump_json()) < 40_000


def test_curve_of_a_plan_is_flat_after_the_last_seen_row():
    made = make_plan(tables({"name": "a", "rows": 40_700, "dim": 16}), {"a": Curve.of_counts(np.arange(1, 701))}, cluster())
    assert (700.0, 1.0) in made.tables[0].curve and made.tables[0].curve[-1] == (40_700.0, 1.0)


def test_every_rank_fits_and_its_parts_add_up(plan):
    assert sum(card.count for card in plan.ranks) == 8
    for card in plan.ranks:
        assert set(card.bytes) == set(MEMORY_PARTS) and card.total <= plan.budget
    by_table = sum(sum(table.bytes.values()) for table in plan.tables)
    assert by_table == pytest.approx(sum(card.total * card.count for card in plan.ranks), rel=1e-3)


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


def test_baselines_are_candidates_and_none_is_better(plan):
    names = {other.name: other for other in plan.candidates}
    assert {"row-wise", "table-wise", "full replication"} <= set(names)
    assert all(other.time is None or other.time >= plan.step.total * (1 - 1e-9) for other in plan.candidates)
    assert all((other.time is None) == (other.bytes > plan.budget) for other in plan.candidates)


def test_every_table_has_a_runner_up_that_is_no_better(plan):
    for table in plan.tables:
        assert table.runner_up is not None and table.binding
        if table.runner_up.time is not None:
            assert table.runner_up.time >= plan.step.total * (1 - 1e-6)


def test_a_small_table_is_replicated_for_serving():
    assert make_plan(tables(), HEAT, cluster(), budget="40MiB", goal="serve").table("country").placement == "replicated"


def test_more_memory_shortens_a_request_as_predicted():
    tight = make_plan(tables(), HEAT, cluster(), budget="24MiB", goal="serve")
    roomy = make_plan(tables(), HEAT, cluster(), budget="64MiB", goal="serve")
    assert roomy.step.total < tight.step.total
    (gib, node) = tight.sensitivities
    assert gib.saves > 0 and gib.time <= roomy.step.total * 1.01
    assert "node" in node.what and node.time is not None


def test_a_table_of_one_row_is_planned_without_suggestions():
    heat = profile_batches([{"one": np.zeros(13, np.int64)}], batch=4, cards_per_node=2)
    plan = make_plan(tables({"name": "one", "rows": 1, "dim": 3}), heat, cluster(1, 1))
    assert plan.table("one").rows == 1 and not [offer for offer in plan.suggestions if offer.option.startswith("--hash")]


def test_training_replicates_only_rows_wider_than_their_gradients():
    copied = {}
    for precision, batch in (("fp32", 65_536), ("int8", 65_536), ("fp32", 2048)):
        given = tables(ITEM | {"precision": precision, "cache": 0.0}, batch=batch, dense="0s")
        tiers = make_plan(given, HEAT, cluster(4, 4), gradients="bf16").table("item").tiers
        copied[precision, batch] = sum(tier.rows for tier in tiers if tier.tier < 3)
    assert copied["fp32", 65_536] > 0 and copied["int8", 65_536] == 0
    assert copied["fp32", 2048] == 0  # latency of the sync exceeds the savings


def test_replicas_can_be_forced_where_they_do_not_pay():
    given = tables(ITEM | {"precision": "int8", "cache": 0.0}, batch=64, dense="0s")
    chosen = make_plan(given, HEAT, cluster(4, 4), gradients="bf16")
    share_K = HEAT["item"].share_K
    hot = HEAT["item"].rows_K[request_probability(share_K, 64 * 20.0, Cluster.of(cluster(4, 4))).node >= 0.5].sum()
    for name, tier in (("hot rows once a node", 2), ("hot rows on every card", 1)):
        forced = make_baseline_plan(name, given, HEAT, cluster(4, 4), "bf16")
        rows = {each.tier: each.rows for each in forced.table("item").tiers}
        assert rows[tier] == pytest.approx(hot, rel=0.2) and rows[tier] + rows[3] == 100_000
        assert forced.step.total > chosen.step.total
        assert any(line.direction == "sync" and line.link == "cluster" and line.bytes for line in forced.traffic)
    with pytest.raises(BadInput, check=has(parameter="name", value="hot rows once a node")):
        make_baseline_plan("hot rows once a node", given, HEAT, cluster(1, 4), "bf16")


def test_a_heat_curve_is_level_after_the_seen_rows(plan):
    reach, taken = np.array(plan.table("item").curve).T
    assert reach[-1] == 100_000 and taken[reach == 80_000] == pytest.approx([1.0], abs=1e-5)


def test_serving_has_no_gradients_no_state_and_no_sync():
    plan = make_plan(tables(), HEAT, cluster(), budget="40MiB", goal="serve")
    assert plan.step.parts["sync"] == plan.step.parts["gradients"] == plan.step.hidden == 0
    assert all(card.bytes["optimizer state"] == 0 for card in plan.ranks)
    assert plan.step.throughput >= 512 * 8 / plan.step.total


def test_bf16_gradients_shorten_the_step():
    full, half = (make_plan(tables(), HEAT, cluster(), budget="40MiB", gradients=g) for g in ("fp32", "bf16"))
    assert half.step.exposed < full.step.exposed


@pytest.mark.parametrize("nodes, cards", [(1, 1), (1, 8), (3, 1)])
def test_plans_for_one_gpu_one_node_and_one_gpu_per_node(nodes, cards):
    plan = make_plan(tables(), HEAT, cluster(nodes, cards), budget="200MiB")
    assert all(tier.tier != 2 for table in plan.tables for tier in table.tiers)
    assert (plan.bytes_over("cluster") > 0) <= (nodes > 1)
    if nodes * cards == 1:
        assert plan.bytes_over("node") == 0 and plan.balance == 1


def test_a_plan_explains_itself_as_text_and_as_a_page(plan):
    for shown in (explain(plan), plan_page(plan)):
        assert all(name in shown for name in ("item", "user", "country", "row-wise"))


def test_a_serving_plan_mentions_no_gradients_and_no_sync():
    text = explain(make_plan(tables(), HEAT, cluster(), budget="40MiB", goal="serve"))
    assert "gradients" not in text and "sync" not in text and "as none" not in text


def test_compute_below_the_lookup_hides_gradients_and_sync():
    first, below = (make_plan(tables(below=part), HEAT, cluster(), budget="40MiB").step for part in ("0s", "10us"))
    assert below.total == pytest.approx(first.total - 10e-6, abs=1e-7) and "gradients" in below.overlaps
    with pytest.raises(ValidationError, check=contradicts("below")):
        tables(below="3ms")


@pytest.mark.parametrize("backend, overlaps", [("gloo", True), ("nccl", False)])
def test_plans_count_on_overlap_only_under_a_backend_that_has_it(backend, overlaps):
    plan = make_plan(tables(), HEAT, cluster(), budget="40MiB", backend=backend)
    assert plan.topology.backend == backend and f"Backend: {backend}," in explain(plan)
    assert bool(plan.step.overlaps) == (plan.step.hidden > 0) == overlaps
    assert overlaps or plan.step.total == pytest.approx(sum(plan.step.parts.values()))


def test_an_unknown_backend_is_refused():
    with pytest.raises(BadInput, check=has(parameter="backend", value="mpi")):
        make_plan(tables(), HEAT, cluster(), backend="mpi")


def test_a_table_on_one_gpu_uses_the_shared_link_of_its_node():
    given = tables({"name": "a", "rows": 40_700, "dim": 128, "precision": "fp32", "cache": 0.0, "lookups": 40})
    shared = cluster(nodes=2, cards=4)
    far = shared.links.cluster.model_copy(update={"alone": 200e9})
    shared = shared.model_copy(update={"links": shared.links.model_copy(update={"cluster": far})})
    heat = {"a": Curve.zipf(40_700, 0.6)}
    apart, joined = (make_baseline_plan("table-wise", given, heat, each).step.parts["rows"] for each in (cluster(), shared))
    assert apart - 20e-6 == pytest.approx(4 * (joined - 20e-6), rel=0.01)  # without the latency of an exchange
