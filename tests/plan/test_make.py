"""Plans from files and heat to plan.json: what they say, what they refuse, and that they can be shown and checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from thermocline.cli import app
from thermocline.errors import BadInput, FormatError
from thermocline.heat.curve import Curve
from thermocline.heat.profiler import profile_batches
from thermocline.plan.cost import Machine, askers
from thermocline.plan.explain import explain
from thermocline.plan.make import make_plain, make_plan
from thermocline.plan.model import MEMORY_PARTS, STEP_PARTS, Plan
from thermocline.plan.page import page
from thermocline.plan.read_heat import fold, read_heat
from thermocline.plan.reasons import FREE
from thermocline.plan.stores import LADDER, choose
from thermocline.plan.tables import TableFile, Tables
from thermocline.plan.topology import Host, Links, Topology

ITEM = {"name": "item", "rows": 100_000, "dim": 64, "pooling": "none", "lookups": 20}
USER = {"name": "user", "rows": 1_000_000, "dim": 32}
COUNTRY = {"name": "country", "rows": 200, "dim": 16}
HEAT = {
    "item": Curve.zipf(80_000, 1.1, 1e7),
    "user": Curve.zipf(1_000_000, 0.6, 1e6),
    "country": Curve.zipf(200, 1.2, 1e6),
}


def tables(*each, **changes):
    return Tables.model_validate({"batch": 512, "dense": "2ms", "tables": each or (ITEM, USER, COUNTRY)} | changes)


def cluster(nodes=2, cards=4, **card):
    links = {"node": {"bandwidth": "450GB/s", "latency": "10us"}, "cluster": {"bandwidth": "50GB/s", "latency": "20us"}}
    return Topology.model_validate(
        {"nodes": nodes, "cards_per_node": cards, "card": {"memory": "80GB", "bandwidth": "3TB/s"} | card, "links": links}
    )


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


def test_a_table_of_one_row_is_planned_for_though_no_lever_can_make_it_smaller():
    heat = profile_batches([{"one": np.zeros(13, np.int64)}], batch=4, cards_per_node=2)
    plan = make_plan(tables({"name": "one", "rows": 1, "dim": 3}), heat, cluster(1, 1))
    assert plan.table("one").rows == 1 and not [offer for offer in plan.offers if offer.option.startswith("--hash")]


def test_one_card_has_no_buffers_for_an_exchange_with_itself():
    plan = make_plan(tables(), HEAT, cluster(1, 1))
    assert plan.cards[0].bytes["buffers"] == 0 and plan.bytes_over("card") == 0


def test_lookups_a_sample_are_those_of_the_end_of_a_log_unless_it_is_shuffled():
    lengths = np.repeat([6, 3], [500, 300])  # 800 samples: the last three eighths are short
    bags = np.arange(lengths.sum()) % 97, np.concatenate([[0], np.cumsum(lengths)])
    heat = profile_batches([{"item": bags}], samples=800, batch=32, cards_per_node=2)
    seen = [read_heat(heat, TableFile(name="item", rows=97, dim=4), shuffled).per_sample for shuffled in (False, True)]
    assert seen == [3.0, pytest.approx(lengths.mean())]


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


def test_maps_are_not_taken_for_buffers_where_rows_do_not_fit():
    huge = {"name": "item", "rows": 10**11, "dim": 8, "precision": "int2"}
    with pytest.raises(BadInput, match=r"buffers of the exchange are \d+\.\d+ KiB") as told:
        make_plan(tables(huge), {"item": Curve.zipf(10**11, 1.0)}, cluster())
    assert "lower the batch" not in str(told.value)


def test_pruning_rows_that_were_never_seen_is_a_way_out_with_all_that_they_take():
    huge = {"name": "item", "rows": 10**12, "dim": 64, "precision": "int8"}
    with pytest.raises(BadInput, match=r"of the table that names one .*prune rows .* never saw \([\d.]+ TiB less a card\)"):
        make_plan(tables(huge), {"item": Curve.zipf(80_000, 1.0)}, cluster())


def test_a_heat_curve_turns_level_where_the_rows_that_were_seen_end(plan):
    reach, taken = np.array(plan.table("item").curve).T
    assert reach[-1] == 100_000 and taken[reach == 80_000] == pytest.approx([1.0], abs=1e-5)


def test_a_budget_beyond_the_card_is_refused():
    with pytest.raises(BadInput, match=r"90\.00 GiB a card, and a card has 74\.51 GiB"):
        make_plan(tables(), HEAT, cluster(), budget="90GiB")


def test_a_table_without_heat_is_refused_by_name():
    with pytest.raises(BadInput, match="'country'"):
        make_plan(tables(), {name: HEAT[name] for name in ("item", "user")}, cluster())


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


# -- heat --


def log(rng):
    """Batches of two features that look up the same table, and of one with a table of its own."""
    for _ in range(20):
        yield {"a": rng.integers(0, 50, 64), "b": rng.integers(25, 75, 64), "c": np.minimum(rng.zipf(1.5, 64), 9)}


def test_features_of_one_table_are_added_up_row_by_row():
    heat = profile_batches(log(np.random.default_rng(0)))
    seen = read_heat(heat, TableFile(name="ab", rows=100, dim=8, features=("a", "b")))
    assert seen.curve.rows == 100 and seen.curve.lookups == 2 * 20 * 64 and seen.per_sample == 2
    assert seen.curve.lookups_K[-1] == 0 and seen.curve.rows_K[-1] == 25


def test_a_plan_names_the_heat_it_was_made_from():
    heat = profile_batches(log(np.random.default_rng(1)))
    made = make_plan(tables({"name": "ab", "rows": 100, "dim": 8, "features": ["a", "b"]}, {"name": "c", "rows": 10, "dim": 8}),
                     heat, cluster())  # fmt: skip
    assert made.heat == heat.sha256 and made.table("ab").lookups == 2 * 512


def test_ids_beyond_the_rows_of_a_table_share_them():
    curve = Curve(np.array([1.0, 9.0, 90.0]), np.array([100.0, 90.0, 90.0]))
    folded = fold(curve, 20)
    assert folded.rows == 20 and folded.lookups == pytest.approx(curve.lookups)
    made = make_plan(tables(ITEM | {"rows": 1000}), HEAT, cluster())
    assert made.table("item").levers[0].kind == "hash" and "80,000 ids" in made.notes[0]


def test_pruned_rows_are_gone_and_their_bytes_are_told():
    heat = profile_batches(log(np.random.default_rng(2)))
    one = {"name": "a", "rows": 1000, "dim": 8, "precision": "fp32"}
    made = make_plan(tables(one), heat, cluster(), goal="serve", prune=20)
    lever = made.table("a").levers[0]
    left = made.table("a").rows
    assert lever.kind == "prune" and left < 51 and lever.saved == 8 * ((1000 - left) * 32 - lever.map)
    assert made.table("a").placement == "replicated" and lever.map == 68  # ids below 512 in one block of a bitmap


# -- the command line --


def run(*arguments):
    from typer.testing import CliRunner

    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def files(tmp_path):
    (tmp_path / "tables.yaml").write_text(
        "version: 1\nbatch: 512\ndense: 2ms\ntables:\n  - {name: item, rows: 100000, dim: 64, lookups: 5}\n", encoding="utf-8"
    )
    return tmp_path


def test_plan_make_show_and_check_on_the_command_line(files):
    made = run(
        "plan", "make", "--tables", files / "tables.yaml", "--zipf", "1.1", "--topology", "hgx-h200", "--nodes", 2,
        "-o", files / "plan.json", "--report", files / "plan.html", "--json", files / "out.json",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert "item" in made.output and "item" in (files / "plan.html").read_text()
    assert json.loads((files / "out.json").read_text())["sums"]["tables"] == 1
    shown = run("plan", "show", files / "plan.json", "--json", "-")
    assert json.loads(shown.output)["plan"]["tables"][0]["name"] == "item"
    plan = Plan.load(files / "plan.json")
    (files / "run.json").write_text(json.dumps(perfect_run(plan)))
    assert run("plan", "check", files / "plan.json", files / "run.json").exit_code == 0
    (files / "run.json").write_text(json.dumps(perfect_run(plan) | {"step": 2 * plan.step.total}))
    assert run("plan", "check", files / "plan.json", files / "run.json").exit_code == 1


def perfect_run(plan):
    """What a run would measure if everything came as predicted."""
    numbers = [(n, card) for card in plan.cards for n in range(card.first, card.first + card.count)]
    return {
        "version": 1, "batch": plan.batch, "steps": 10, "step": plan.step.total, "parts": plan.step.parts,
        "cards": [{"card": n, "bytes": card.bytes} for n, card in numbers],
        "traffic": [{"link": t.link, "direction": t.direction, "bytes": t.bytes} for t in plan.traffic],
    }  # fmt: skip


def test_plan_make_wants_heat_or_a_law(files):
    done = run("plan", "make", "--tables", files / "tables.yaml", "--topology", "hgx-h200", "-o", files / "plan.json")
    assert isinstance(done.exception, BadInput) and "--zipf" in str(done.exception)


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    for text, said in (("{", "line 1"), ("{}", "version None"), ('{"version": 1}', "field goal")):
        Path(tmp_path / "plan.json").write_text(text)
        with pytest.raises(FormatError, match=said):
            Plan.load(tmp_path / "plan.json")


# -- repeats --


def sessions(rng, samples, rows=5000, length=12):
    """Ids that come in bursts: everybody looks at a few things for a while."""
    hot = rng.integers(0, rows, samples // length + 1)
    ids = np.repeat(hot, length)[:samples]
    fresh = rng.random(samples) < 0.3
    ids[fresh] = np.minimum(rng.zipf(1.3, int(fresh.sum())), rows) - 1
    return ids


@pytest.mark.parametrize("cards", [1, 4])
def test_bursts_are_predicted_from_the_repeats_that_were_counted(cards):
    ids, batch = sessions(np.random.default_rng(3), 256 * 4 * 200), 256
    heat = profile_batches(({"item": part} for part in ids.reshape(-1, batch)), batch=batch, cards_per_node=4)
    counted = np.mean([len(set(part)) for part in ids.reshape(-1, batch * cards).tolist()])
    table = TableFile(name="item", rows=5000, dim=8)
    found = {}
    for shuffled in (False, True):
        seen = read_heat(heat, table, shuffled)
        asked = askers(seen.curve.share_K, float(batch), Machine(1, 4, 1, 1, 1), seen.fresh(batch, 4, 1))
        chance = asked.card if cards == 1 else asked.node
        found[shuffled] = float((chance * seen.curve.rows_K).sum())
    assert found[False] == pytest.approx(counted, rel=0.02)
    assert found[True] > 1.3 * counted


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


def test_a_plan_for_serving_speaks_of_no_gradients_and_no_sync():
    text = explain(make_plan(tables(), HEAT, cluster(), budget="40MiB", goal="serve"))
    assert "gradients" not in text and "sync" not in text and "as none" not in text


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


def test_what_a_model_computes_below_its_lookup_hides_gradients_and_sync():
    first, below = (make_plan(tables(below=part), HEAT, cluster(), budget="40MiB").step for part in ("0s", "10us"))
    assert below.total == pytest.approx(first.total - 10e-6, abs=1e-7) and "gradients" in below.overlaps
    with pytest.raises(ValueError, match="more than dense"):
        tables(below="3ms")
