"""Shards on a GPU train what shards on CPUs train: several ranks share the GPU under gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_ranks
import numpy as np
import pytest
import torch
from cases import TABLES, heat_of, plan_of, table_plan, with_slots
from rank_pool import Pool, caller, started

import thermocline as tc

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")

STEPS = 30
HEAT = heat_of()
ALL_FIRST = {name: (rows, 0) for name, (rows, _, _) in TABLES.items()}
ALL_THIRD = dict.fromkeys(TABLES, (0, 0))
TWO = {"user": (13, 30), "item": (0, 61), "shop": (5, 11)}
EXCHANGES = {"user": "flat", "item": "node", "shop": "node"}


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    yield from started(gpu_ranks.work, 4, ["thermocline.distributed.shard", "thermocline.checkpoint.save_job"])


@pytest.fixture
def on_card(processes: Pool, tmp_path: Path) -> Callable[..., list[Any]]:
    """Call `BACKEND FUNCTION` of `gpu_ranks.py` on some ranks."""
    return caller(processes, tmp_path, 300.0)


def planned(nodes, cards, tiers, precision, exchanges=EXCHANGES, slots=None, **more):
    tables = [table_plan(name, *tiers[name], precision, exchanges[name], **more) for name in TABLES]
    return plan_of(nodes, cards, [with_slots(table, slots) if slots else table for table in tables], HEAT)


def check_alike(cpu, card, close=0.0):
    assert cpu.keys() == card.keys()
    for name, array in cpu.items():
        near = name == "outs" or close
        assert np.allclose(array, card[name], atol=close or 1e-6) if near else np.array_equal(array, card[name]), name


def check(found, close=0.0):
    for (cpu, card), sent in found:
        check_alike(cpu, card, close)
        assert not sent or sent[0] == sent[1]


@pytest.mark.parametrize("tiers, precision", [(ALL_FIRST, "int8"), (ALL_THIRD, "fp32")], ids=["tier 1", "tier 3"])
def test_two_ranks_on_a_card_train_what_two_cpus_train(on_card, tiers, precision):
    check(on_card("gloo both", 2, planned(1, 2, tiers, precision), HEAT, {"precision": precision}, STEPS))


@pytest.mark.parametrize("how", [{"overlap": False}, {"large": True, "ahead": True}], ids=["apart", "ahead and in pieces"])
def test_four_ranks_in_two_all_to_alls_train_what_cpus_train(on_card, how):
    check(on_card("gloo both", 4, planned(2, 2, TWO, "int8"), HEAT, {"precision": "int8", **how}, 8))


def test_fp32_rows_and_gradients_that_depend_on_them_are_close(on_card):
    settings = {"precision": "fp32", "exact": False, "optimizer": tc.Adam(lr=0.01)}
    check(on_card("gloo both", 2, planned(2, 1, TWO, "fp32"), HEAT, settings, 10), close=2e-5)


@pytest.mark.parametrize("precision, policy, ahead", [("int8", "fixed", False), ("int4", "adaptive", True)])
def test_caches_on_a_gpu_equal_those_on_cpus(on_card, precision, policy, ahead):
    near = 2 if precision == "int4" else 0
    plan = planned(2, 1, TWO, precision, slots={1: (3, near), 2: (5, 0), 3: (6, near)})
    check(on_card("gloo both", 2, plan, HEAT, {"precision": precision, "policy": policy, "ahead": ahead}, 15))


@pytest.mark.parametrize("slots", [None, {1: (3, 0), 2: (5, 0), 3: (6, 0)}], ids=["uncached", "cached"])
def test_rows_in_host_memory_train_on_a_gpu_as_on_cpus(on_card, slots):
    plan = planned(2, 1, TWO, "int8", slots=slots)
    check(on_card("gloo both", 2, plan, HEAT, {"residency": "host", "policy": "adaptive", "ahead": True}, 12))


def test_rows_in_host_memory_migrate_and_are_saved_on_a_gpu(on_card, tmp_path):
    plans = [planned(2, 1, TWO, "int8"), planned(2, 1, ALL_THIRD, "int8")]
    for cpu, card in on_card("gloo moved", 2, plans, HEAT, {"residency": "host"}):
        check_alike(cpu, card)
    given = str(tmp_path / "saved"), plans, HEAT, {"precision": "int8", "residency": "host"}
    for before, loaded, _, _ in on_card("gloo saved", 2, ("cuda", "cuda"), *given):
        assert all(np.array_equal(before[f"rows of {name}"], loaded[f"rows of {name}"]) for name in TABLES)


def test_owners_pool_rows_on_the_card_in_slots_too(on_card):
    tiers, slots = {"user": (13, 30), "item": (0, 0), "shop": (5, 0)}, {1: (3, 0), 2: (5, 0), 3: (6, 0)}
    plan = planned(2, 1, tiers, "int8", dict.fromkeys(TABLES, "flat"), slots)
    plan = plan.model_copy(
        update={"tables": tuple(t.model_copy(update={"pooled_by": "owner", "wire_rows": "fp32"}) for t in plan.tables)}
    )
    check(on_card("gloo both", 2, plan, HEAT, {"policy": "adaptive", "ahead": True}, 8))


def test_rows_on_cpus_train_under_both_backends_too(on_card):
    plan = planned(1, 2, TWO, "int8")
    one, two = (on_card(f"{backend} train_on_cpus", 2, plan, HEAT) for backend in ("gloo", "cpu:gloo,cuda:nccl"))
    for mine, theirs in zip(one, two, strict=True):
        check_alike(mine, theirs)


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")], ids="{0[0]} to {0[1]}".format)
def test_a_checkpoint_of_one_device_continues_on_another(on_card, devices, tmp_path):
    plan = planned(1, 2, TWO, "int8", slots={1: (3, 0), 2: (5, 0), 3: (6, 0)})
    settings = {"precision": "int8", "policy": "adaptive"}
    for before, loaded, went_on, loaded_went_on in on_card(
        "gloo saved", 2, devices, str(tmp_path / "saved"), [plan, plan], HEAT, settings
    ):
        for each in (before, loaded, went_on, loaded_went_on):
            each.pop("codes")  # of rows in slots they are stale, and not saved
        check_alike(before, loaded)
        check_alike(went_on, loaded_went_on)


def test_rows_migrate_on_the_card_as_on_cpus(on_card):
    slots = {1: (3, 0), 2: (5, 0), 3: (6, 0)}
    plans = [planned(2, 1, TWO, "int8", slots=slots), planned(2, 1, ALL_THIRD, "int8", slots={3: (9, 0)})]
    for cpu, card in on_card("gloo moved", 2, plans, HEAT, {"policy": "adaptive"}):
        check_alike(cpu, card)


def test_an_error_found_on_a_gpu_is_an_error_on_all_ranks(on_card):
    for told in on_card("gloo refused", 2, planned(1, 2, ALL_THIRD, "int8"), HEAT):
        assert "gradient" in told, told


def test_an_error_of_one_collection_is_raised_by_it_once(on_card):
    for told in on_card("gloo refused_of_two", 2, planned(1, 2, ALL_THIRD, "int8")):
        (first, second), rest = (told[3], told[4]), [*told[:3], *told[5:]]
        assert "gradient" in first and "of table" in first and "ids 0 to 19" in second and "is 21." in second, told
        assert not any(rest), told


def test_meta_tables_move_to_the_gpu_of_the_dense_part(on_card):
    for (cpu, theirs), (card, mine) in on_card("gloo without_values", 2, planned(1, 2, ALL_THIRD, "int8")):
        assert (cpu, card) == ("cpu", "cuda")
        assert np.array_equal(mine, theirs)


def test_a_sequence_model_trains_alike_on_gpu_and_cpu_and_resumes(on_card, tmp_path):
    for cpu, card in on_card("gloo train_sequences", 2, str(tmp_path / "run")):
        assert card[2] == pytest.approx(cpu[2], rel=1e-3)
        np.testing.assert_allclose(card[3], cpu[3], rtol=1e-2, atol=1e-3)
