"""Sharded models in torch.distributed.checkpoint: any plan and any number of ranks load what others saved."""

from __future__ import annotations

import numpy as np
import pytest
from cases import TABLES, heat_of, plan_of, table_plan, with_slots
from dcp_ranks import go_on, stop_and_go

TIERS = {"user": (13, 30), "item": (61, 0), "shop": (0, 0)}
THIRD = dict.fromkeys(TABLES, (0, 0))
SLOTS = dict.fromkeys((1, 2, 3), (3, 0))


def made_plan(nodes, gpus, tiers=TIERS, precision="int8", first="", slots=None):
    heat = heat_of()
    tables = [table_plan(name, *tiers[name], precision, first_precision=first) for name in TABLES]
    return plan_of(nodes, gpus, tables if slots is None else [with_slots(table, slots) for table in tables], heat), heat


def equal(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def one_process(plan, settings, folder, given="", first=0, last=12):
    return go_on(0, 1, *plan, settings, given, str(folder), first, last)


@pytest.mark.parametrize("precision, first", [("int8", ""), ("int4", ""), ("int4", "fp32")])
def test_4_2_1_and_4_ranks_train_on_with_the_bits_of_one_process(on_ranks, tmp_path, precision, first):
    settings = {"precision": precision}
    plans = [(2, 2), (1, 2), (1, 1), (1, 4)]
    moved = [TIERS, {**TIERS, "user": (40, 7)}, TIERS, THIRD]
    given, then = "", None
    for number, (shape, tiers) in enumerate(zip(plans, moved, strict=True)):
        size, saved = shape[0] * shape[1], str(tmp_path / f"save{number}")
        same_tiers = TIERS if first else tiers  # rows that change their precision are rounded
        arguments = (*made_plan(*shape, same_tiers, precision, first), settings, given, saved, 3 * number, 3 * number + 3)
        found = on_ranks("dcp_ranks.go_on", size, *arguments) if size > 1 else [go_on(0, 1, *arguments)]
        for loaded, trained in found:
            assert then is None or equal(loaded, then)
            assert equal(trained, found[0][1])
        given, then = saved, found[0][1]
    if not first:  # one process rounds the same rows
        assert equal(one_process(made_plan(1, 1, THIRD, precision), settings, tmp_path / "whole")[1], then)


@pytest.mark.parametrize("how", ["dcp", "async", "copy", "torch.save"])
def test_the_same_ranks_train_on_with_the_same_caches(on_ranks, tmp_path, how):
    plan = made_plan(2, 2, precision="int4", slots=dict.fromkeys((1, 2, 3), (2, 2)))
    for saved, loaded in on_ranks("dcp_ranks.stop_and_go", 4, *plan, {}, str(tmp_path / "saved"), how):
        assert equal(saved, loaded)


def test_one_process_trains_on_with_the_same_cache(tmp_path):
    saved, loaded = stop_and_go(0, 1, *made_plan(1, 1, slots=SLOTS), {}, "", "copy")
    assert equal(saved, loaded)


def test_cached_rows_keep_their_values_where_other_ranks_have_slots(on_ranks, tmp_path):
    given = str(tmp_path / "four")
    found = on_ranks("dcp_ranks.go_on", 4, *made_plan(2, 2, slots=SLOTS), {}, "", given, 0, 6)
    all_slots = {3: (100, 0)}  # for every row
    loaded, _ = one_process(made_plan(1, 1, THIRD, slots=all_slots), {}, tmp_path / "one", given, 6, 6)
    assert equal(loaded, found[0][1])
    rounded, _ = one_process(made_plan(1, 1), {}, tmp_path / "none", given, 6, 6)
    assert not equal(rounded, loaded) and all(np.allclose(*each, atol=0.05) for each in zip(rounded, loaded, strict=True))


def test_a_state_that_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(on_ranks):
    for (optimizer, piece), unchanged in on_ranks("dcp_ranks.refuse", 2, *made_plan(1, 2)):
        assert "rank 0: rows were trained by sgd" in optimizer and "rank 0: no rows_000" in piece and unchanged
