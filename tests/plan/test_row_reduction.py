"""Levers on request, and the suggestions of a plan without them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from typer.testing import CliRunner

from support import has
from thermocline.cli import app
from thermocline.errors import BadInput
from thermocline.heat.curve import Curve
from thermocline.heat.profiler import profile_batches
from thermocline.plan.cost.heat_input import id_stats_of
from thermocline.plan.make import make_plan
from thermocline.plan.model import Plan
from thermocline.plan.report.explain import LEVERS_HEAD, as_json, explain
from thermocline.plan.report.page import plan_page
from thermocline.plan.solve.row_reduction import ReductionOptions, RowReducer
from thermocline.plan.tables import TablesConfig
from thermocline.plan.topology import Topology

TABLES = TablesConfig.model_validate(
    {
        "batch": 256,
        "dense": "1ms",
        "tables": [
            {"name": "item", "rows": 3001, "dim": 16, "features": ["item", "history"]},
            {"name": "user", "rows": 9001, "dim": 32},
            {"name": "hour", "rows": 24, "dim": 16},
            {"name": "day", "rows": 7, "dim": 16},
            {"name": "shop", "rows": 97, "dim": 16, "pooling": "mean"},
        ],
    }
)


def log(seed=0):
    random = np.random.default_rng(seed)
    for _ in range(10):
        yield {
            "item": (random.zipf(1.3, 512) * 7) % 2903,
            "history": (random.zipf(1.3, 512) * 7) % 2903,
            "user": random.integers(0, 9001, 512),
            "hour": random.integers(0, 24, 512),
            "day": random.integers(0, 7, 512),
            "shop": random.zipf(1.2, 512) % 97,
        }


HEAT = profile_batches(log())


def cluster(nodes=2, cards=4):
    links = {"node": {"bandwidth": "450GB/s", "latency": "10us"}, "cluster": {"bandwidth": "50GB/s", "latency": "20us"}}
    card = {"memory": "80GB", "bandwidth": "3TB/s"}
    return Topology.model_validate({"nodes": nodes, "cards_per_node": cards, "card": card, "links": links})


def reducer(heat=HEAT, cards=8, tables=TABLES, room=1e9):
    return RowReducer(tables, heat, tuple(id_stats_of(heat, table) for table in tables.tables), cards, room, trains=True)


@pytest.fixture(scope="module")
def plain():
    return make_plan(TABLES, HEAT, cluster(), budget="1MiB")


# -- only on request --


def test_a_plan_without_levers_suggests_them(plain):
    assert all(table.levers == () for table in plain.tables)
    assert [table.rows for table in plain.tables] == [table.rows for table in TABLES.tables]
    assert [offer.option for offer in plain.suggestions] == [
        "--prune 0",
        "--prune 1",
        "--hash 0.5",
        "--hash 0.125",
        "--unify 16384",
    ]
    never, once, half, eighth, small = plain.suggestions
    assert never.bytes < once.bytes and 0 < half.bytes < eighth.bytes and small.bytes == 0
    assert small.detail.startswith("2 fewer tables") and "collisions" in half.detail
    assert all(
        offer.time is not None and offer.saves == pytest.approx(plain.step.total - offer.time) for offer in plain.suggestions
    )


def test_suggestions_are_in_text_json_and_page(plain):
    for shown in (explain(plain), plan_page(plain)):
        assert LEVERS_HEAD in shown and "--hash 0.125" in shown
    assert as_json(plain)["plan"]["offers"][0]["option"] == "--prune 0"


@pytest.mark.parametrize("option, value", [("prune", 1), ("hash", 0.125)])
def test_a_requested_lever_saves_what_was_suggested(option, value):
    plain, asked = (make_plan(TABLES, HEAT, cluster(), goal="serve", **levers) for levers in ({}, {option: value}))
    offer = next(o for o in plain.suggestions if o.option == f"--{option} {value:g}")
    for plan in (plain, asked):
        assert {(table.precision, table.placement) for table in plan.tables} == {("int8", "replicated")}
    assert sum(lever.saved for table in asked.tables for lever in table.levers) == pytest.approx(offer.bytes, abs=5)
    assert not any(o.option.startswith(f"--{option}") for o in asked.suggestions)


# -- each lever --


def test_pruning_counts_all_features_of_a_table():
    counts = sum(np.bincount(np.concatenate([batch[f] for batch in log()]), minlength=3001) for f in ("item", "history"))
    (lever,) = reducer().reduce(ReductionOptions(prune=3)).levers[0]
    assert (lever.kind, lever.kept, lever.shared, lever.features) == ("prune", int((counts > 3).sum()), 1, ("item", "history"))


def test_hash_sizes_stay_within_their_bytes():
    for share in (0.5, 0.125, 0.02):
        found = reducer(cards=1).reduce(ReductionOptions(hash=share))
        rows = reducer().row_bytes()
        whole = sum(table.rows * rows[table.name] for table in TABLES.tables)
        held = sum(
            table.rows * rows[table.name] + seen.id_map_bytes for table, seen in zip(found.tables, found.stats, strict=True)
        )
        assert 0.5 * share * whole < held <= share * whole * (1 + 1e-9)


def test_hash_bytes_and_hash_share_are_equivalent():
    rows = reducer().row_bytes()
    whole = sum(table.rows * rows[table.name] for table in TABLES.tables)
    assert (
        reducer().reduce(ReductionOptions(hash=f"{whole / 4:.0f}B")).cuts == reducer().reduce(ReductionOptions(hash=0.25)).cuts
    )
    assert reducer().reduce(ReductionOptions(hash="0.25")).cuts == reducer().reduce(ReductionOptions(hash=0.25)).cuts


RANKS_AND_ROOM = ((1, 1e9), (512, 1e4), (512, 1e9))


def test_many_ranks_keep_fewer_ids_because_every_rank_has_the_map():
    wide = TablesConfig.model_validate({"batch": 64, "tables": [{"name": "t", "rows": 5000, "dim": 8}]})
    random = np.random.default_rng(1)
    heat = profile_batches({"t": random.permutation(5000)[random.zipf(1.1, 512) % 5000] << 40} for _ in range(20))
    few, many, roomy = (
        reducer(heat, cards, wide, room).reduce(ReductionOptions(hash=0.1)).cuts[0] for cards, room in RANKS_AND_ROOM
    )
    assert few.kept > many.kept and roomy == few  # with all rows on every GPU, as on one GPU


def test_unified_tables_have_the_lookups_of_all():
    found = reducer().reduce(ReductionOptions(unify=97))
    assert [table.name for table in found.tables] == ["item", "user", "small_16_sum", "shop"]
    small, seen, levers = found.tables[2], found.stats[2], found.levers[2]
    assert small.rows == 31 and small.features == ("hour", "day") and seen.per_sample == 2 and seen.curve.rows == 31
    assert [(lever.offset, lever.rows) for lever in levers] == [(0, 24), (24, 7)]
    assert len(reducer().reduce(ReductionOptions(unify=10**6)).stats[0].curve.rows_K) < 400  # not the steps of all
    assert seen.curve.lookups == pytest.approx(2 * 5120) and seen.curve.share_K[0] == pytest.approx(1 / 14, rel=0.2)


def test_levers_apply_in_order():
    plan = make_plan(TABLES, HEAT, cluster(), prune=1, hash=0.05, unify=5000)
    joined = next(table for table in plan.tables if "hour" in table.features)
    assert [lever.kind for lever in joined.levers if "item" in lever.features] == ["prune", "hash", "unify"]
    prune, hash_, _ = (lever for lever in joined.levers if "item" in lever.features)
    assert hash_.rows == prune.kept + prune.shared and hash_.kept <= prune.kept
    assert joined.rows == sum(lever.rows for lever in joined.levers if lever.kind == "unify")
    assert re.search(r"[23] tables joined", explain(plan))


def test_sketched_heat_keeps_only_ids_that_it_lists():
    tables = TablesConfig.model_validate({"batch": 64, "tables": [{"name": "t", "rows": 400, "dim": 8}]})
    exact = profile_batches([{"t": np.arange(400).repeat(2)}])["t"]
    from dataclasses import replace

    from thermocline.heat.cardinality import registers_of
    from thermocline.heat.profile import HeatProfile

    sketched = replace(exact, exact=False, ids_H=exact.ids_H[:50], counts_H=exact.counts_H[:50], slack=1,
                       registers=registers_of(exact.ids_H))  # fmt: skip
    cut = reducer(HeatProfile({"t": sketched}), 1, tables).reduce(ReductionOptions(hash=0.8)).cuts[0]
    assert cut is not None and cut.kept <= 50 < cut.rows < 400


# -- the whole plan --


@settings(max_examples=12, deadline=None)
@given(
    prune=some.none() | some.integers(0, 4),
    hash=some.none() | some.floats(0.01, 1.0),
    unify=some.none() | some.integers(1, 20_000),
    cards=some.sampled_from([(1, 1), (1, 3), (2, 4)]),
)
def test_plans_with_any_levers_add_up_and_beat_baselines(prune, hash, unify, cards):
    plan = make_plan(TABLES, HEAT, cluster(*cards), prune=prune, hash=hash, unify=unify)
    assert all(other.time is None or other.time >= plan.step.total * (1 - 1e-9) for other in plan.candidates)
    by_table = sum(sum(table.bytes.values()) for table in plan.tables)
    assert by_table == pytest.approx(sum(card.total * card.count for card in plan.ranks), rel=1e-3)
    assert sorted(f for table in plan.tables for f in table.features) == sorted(
        f for table in TABLES.tables for f in table.feature_names
    )
    for table in plan.tables:
        assert sum(tier.rows for tier in table.tiers) == table.rows
        assert [t.threshold for t in table.tiers] == sorted((t.threshold for t in table.tiers), reverse=True)
        last = {lever.features: lever for lever in table.levers if lever.kind != "unify"}
        maps = plan.topology.world_size * sum(lever.map for lever in last.values())
        assert table.bytes["maps"] >= maps
    assert sum(table.rows for table in plan.tables) <= sum(table.rows for table in TABLES.tables)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_error_without_a_fit_names_a_hash_that_fits():
    heat = {table.name: Curve.zipf(table.rows, 1.1, 1e6) for table in TABLES.tables}
    tables = TABLES.model_copy(update={"tables": tuple(t.model_copy(update={"precision": "fp32"}) for t in TABLES.tables)})
    with pytest.raises(BadInput) as caught:
        make_plan(tables, heat, cluster(), budget="300KiB")
    share = re.search(r"--hash (0\.\d+)", caught.value.remedies[-1])[1]
    assert make_plan(tables, heat, cluster(), budget="300KiB", hash=share).fullest_rank.total <= 300 << 10


@pytest.mark.parametrize("option, value", [("prune", -1), ("unify", 0), ("hash", 0.0), ("hash", "8 rows")])
def test_impossible_levers_are_refused(option, value):
    with pytest.raises(BadInput, check=has(value=value)):
        make_plan(TABLES, HEAT, cluster(), **{option: value})


def test_pruning_without_counts_is_refused():
    with pytest.raises(BadInput, check=has(parameter="heat")):
        make_plan(TABLES, {table.name: Curve.zipf(table.rows, 1.1) for table in TABLES.tables}, cluster(), prune=0)


def test_levers_on_the_command_line(tmp_path):
    HEAT.save(tmp_path / "heat.tc")
    (tmp_path / "tables.json").write_text(TABLES.model_dump_json(exclude_none=True))
    words = ["--tables", tmp_path / "tables.json", "--heat", tmp_path / "heat.tc", "--topology", "hgx-h200"]
    levers = ["--prune", "1", "--hash", "0.05", "--unify", "100"]
    done = CliRunner().invoke(app, [str(word) for word in ["plan", "make", *words, *levers, "-o", tmp_path / "plan.json"]])
    assert done.exit_code == 0, done.output
    plan = Plan.load(tmp_path / "plan.json")
    assert {lever.kind for table in plan.tables for lever in table.levers} == {"prune", "hash", "unify"}
    assert plan.suggestions == () and LEVERS_HEAD not in done.output
