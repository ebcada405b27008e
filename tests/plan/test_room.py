"""Memory: what fits, the error where nothing fits, and plans bound by memory."""

from __future__ import annotations

import re

import numpy as np
import pytest
from example_tables import COUNTRY, HEAT, ITEM, USER, cluster, tables

from benchmarks.plan.baselines import make_baseline_plan
from support import has
from thermocline.errors import BadInput
from thermocline.heat.curve import Curve
from thermocline.heat.profiler import profile_batches
from thermocline.plan.make import make_plan
from thermocline.plan.report.reasons import FREE, MEMORY
from thermocline.plan.solve.precisions import choose_precisions
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import HostSpec, Links

CLUSTERS = [(1, 1), (1, 3), (2, 2), (3, 2)]


def given(rows, batch, nodes, cards):
    heat = profile_batches([{"item": np.random.default_rng(rows).zipf(1.3, 4099) % rows}], batch=batch, cards_per_node=cards)
    item = TableConfig(name="item", rows=rows, dim=5, pooling="none", precision="fp32", cache=0.0)
    return TablesConfig(batch=batch, dense=1e-4, tables=(item,)), heat, cluster(nodes, cards)


@pytest.mark.parametrize("nodes, cards", CLUSTERS)
@pytest.mark.parametrize("rows", [1, 63, 1000, 4099])
def test_a_plan_fits_into_the_bytes_of_its_baseline(rows, nodes, cards):
    for batch in (7, 64, 331):
        asked = given(rows, batch, nodes, cards)
        room = make_baseline_plan("row-wise", *asked).fullest_rank.total
        made = make_plan(*asked, budget=room)
        assert made.fullest_rank.total <= room
        assert make_plan(*asked, budget=made.fullest_rank.total).fullest_rank.total <= made.fullest_rank.total


@pytest.mark.parametrize("rows, batch, nodes, cards", [(63, 7, 2, 2), (1000, 7, 2, 2), (61, 5, 1, 3)])
def test_one_byte_less_than_the_smallest_plan_does_not_fit(rows, batch, nodes, cards):
    asked = given(rows, batch, nodes, cards)
    least = min(made.bytes for made in make_plan(*asked).candidates)
    with pytest.raises(BadInput, check=has(needed=least, available=least - 1)):
        make_plan(*asked, budget=least - 1)


def test_precision_is_lowered_only_as_far_as_memory_requires():
    assert {t.precision for t in make_plan(tables(), HEAT, cluster()).tables} == {"int8"}
    small = make_plan(tables(), HEAT, cluster(), budget="8MiB")
    assert small.table("user").precision in ("int4", "int2") and small.table("country").precision == "int8"
    named = make_plan(tables(ITEM, USER | {"precision": "fp32"}, COUNTRY), HEAT, cluster())
    assert named.table("user").precision == "fp32" and named.table("user").cache == 0


def test_most_bytes_per_lookup_are_freed_first():
    assert choose_precisions([[10.0, 5.0], [100.0, 50.0], [100.0, 50.0]], [1.0, 1.0, 100.0], 170.0) == [0, 1, 0]
    assert choose_precisions([[10.0, 5.0], [10.0, 5.0]], [1.0, 1.0], 1.0) == [1, 1]


def test_error_without_a_fit_has_numbers_and_remedies():
    with pytest.raises(BadInput) as caught:
        make_plan(tables(ITEM, USER | {"rows": 50_000_000, "precision": "fp32"}, COUNTRY), HEAT, cluster(), budget="100MiB")
    error = caught.value
    assert error.rank == 0 and error.available == 100 << 20 < error.needed and error.table == "user"
    for words in ("precision", "--prune 0", "GPUs instead of 8", "budget"):
        assert any(words in remedy for remedy in error.remedies)


@pytest.mark.parametrize("nodes, cards", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("goal", ["train", "serve"])
def test_error_without_a_fit_needs_more_than_is_available(nodes, cards, goal):
    given, where = tables(COUNTRY | {"pooling": "none", "precision": "int2", "cache": 0.0}), cluster(nodes, cards)
    least = make_plan(given, HEAT, where, goal=goal)
    refused = 0
    for share in (0.97, 0.8, 0.5, 0.2):
        try:
            make_plan(given, HEAT, where, budget=int(share * min(c.bytes or 1 for c in least.candidates)), goal=goal)
        except BadInput as error:
            refused += 1
            assert error.needed > error.available
    assert refused == 4


def test_a_single_gpu_has_no_exchange_buffers():
    plan = make_plan(tables(), HEAT, cluster(1, 1))
    assert plan.ranks[0].bytes["buffers"] == 0 and plan.bytes_over("card") == 0


def test_maps_are_not_counted_as_buffers():
    huge = {"name": "item", "rows": 10**11, "dim": 8, "precision": "int2"}
    with pytest.raises(BadInput) as caught:
        make_plan(tables(huge), {"item": Curve.zipf(10**11, 1.0)}, cluster())
    assert not any("batch" in remedy for remedy in caught.value.remedies)


def test_pruning_unseen_rows_is_a_remedy_with_its_bytes():
    huge = {"name": "item", "rows": 10**12, "dim": 64, "precision": "int8"}
    with pytest.raises(BadInput) as caught:
        make_plan(tables(huge), {"item": Curve.zipf(80_000, 1.0)}, cluster())
    precision, prune = caught.value.remedies[:2]
    assert "precision" in precision and re.search(r"--prune 0 \([\d.]+ TiB less per GPU\)", prune)


def test_a_budget_above_gpu_memory_is_refused():
    with pytest.raises(BadInput, check=has(parameter="budget", value=90 << 30, available=80 * 10**9)):
        make_plan(tables(), HEAT, cluster(), budget="90GiB")


def test_codes_go_to_host_memory_only_if_gpus_are_too_small():
    links = {"node": {"bandwidth": "450GB/s"}, "cluster": {"bandwidth": "50GB/s"}, "host": {"bandwidth": "55GB/s"}}
    small = cluster().model_copy(update={"host": HostSpec(memory=10**9), "links": Links.model_validate(links)})
    given = tables(ITEM, USER | {"rows": 40_000_000, "precision": "int8", "cache": 0.0}, COUNTRY)
    plan = make_plan(given, HEAT, small, budget="100MiB")
    assert {t.name for t in plan.tables if t.residency == "host"} == {"user"} and "host memory" in plan.notes[0]
    assert plan.ranks[0].host == 40_000_000 * 32 // 8 and plan.fullest_rank.total <= plan.budget
    assert plan.bytes_over("host", "rows") > 0
    assert plan.step.total == pytest.approx(plan.candidates[0].time, rel=1e-9)
    assert plan.step.total > 0.998 * make_plan(given, HEAT, small, budget="1GiB").step.total
    with pytest.raises(BadInput, check=has(available=100 << 20)):
        make_plan(given, HEAT, small.model_copy(update={"host": HostSpec(memory=10**8)}), budget="100MiB")


def test_a_plan_that_fills_its_gpus_is_bound_by_memory():
    made = make_plan(tables(), HEAT, cluster(), budget="12MiB", goal="serve")
    assert made.fullest_rank.total > 0.97 * made.budget and made.binding.startswith(MEMORY)


@pytest.mark.parametrize("budget", ["250MiB", "180MiB", "160MiB"])
def test_a_plan_is_not_memory_bound_if_more_memory_changes_nothing(budget):
    # Row-wise is best with any memory because of sync latency; prices of rows alone would choose replicas.
    many = [ITEM | {"name": f"item {n}", "precision": "fp32", "cache": 0.0, "rows": 2_000_000} for n in range(3)]
    heat = {table["name"]: Curve.zipf(2_000_000, 1.1, 1e8) for table in many}
    made = make_plan(tables(*many, batch=3000, dense="0s"), heat, cluster(4, 4), gradients="bf16", budget=budget)
    assert made.sensitivities[0].saves == 0 and made.binding.startswith("the links")
    assert {table.binding for table in made.tables} == {FREE}


@pytest.mark.parametrize("cards", [1, 4])
def test_tables_in_host_memory_are_not_bound_by_gpu_memory(cards):
    links = {"node": {"bandwidth": "450GB/s"}, "host": {"bandwidth": "50GB/s"}}
    one = cluster(1, cards, memory="1GB").model_copy(
        update={"host": HostSpec(memory=9 * 10**11), "links": Links.model_validate(links)}
    )
    item = {"name": "item", "rows": 60_000_000, "dim": 64, "precision": "int8", "cache": 0.01, "lookups": 20}
    made = make_plan(tables(item), {"item": Curve.zipf(60_000_000, 1.1, 1e8)}, one)
    assert made.tables[0].residency == "host" and made.fullest_rank.total < 0.7 * made.budget
    assert not made.binding.startswith(MEMORY + " (")
