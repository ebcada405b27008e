"""Where ranks differ, all of them are told so."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases import TABLES, Model, heat_of, plan_of, table_plan
from test_training import MIXED, tiers_plan
from torch import nn

import thermocline as tc


def fails(on_ranks, what, plans, ranks=3):
    return on_ranks("fail", ranks, what, plans, heat_of())


def test_plans_that_differ_are_told_on_every_rank(on_ranks):
    plans = [tiers_plan(1, 3, {**MIXED, "user": (first, 0)}, "int8")[0] for first in (13, 14)]
    for said in fails(on_ranks, "plans", [plans[0], plans[1], plans[0]]):
        assert "ranks differ in the plan (ranks 0, 2: sha256" in said and "rank 1: sha256" in said


def test_a_plan_for_another_number_of_cards_is_told_on_every_rank(on_ranks):
    for said in fails(on_ranks, "ranks", [tiers_plan(2, 2, MIXED, "int8")[0]]):
        assert "the plan is for 4 cards (2 x 2), and there are 3 ranks" in said


@pytest.mark.parametrize(
    "what, named",
    [
        ("no file", "No such file"),
        ("a feature less", "the input lacks 'shop'"),
        ("a bad id", "Feature 'shop' has ids 0 to 22, but the id at position 2 is 23"),
        ("weights", "with weights"),
        ("eval", "looking"),
        ("nan", "of table "),
        ("other rows", "tier 1 of table 'user'"),
        ("a flipped bit", "not the same on rank 0 and on ranks [1]"),
    ],
)
def test_what_one_rank_does_otherwise_is_told_on_every_rank(on_ranks, what, named):
    said = fails(on_ranks, what, [tiers_plan(1, 3, MIXED, "int8")[0]])
    assert all(named in each for each in said), said


def test_a_rank_that_ends_is_told_on_the_others(on_ranks):
    said = on_ranks("leave", 3, [tiers_plan(1, 3, MIXED, "int8")[0]], heat_of())
    assert said[1] == "left"
    assert all(f"rank {rank} could not exchange with ranks 0, 1, 2: rank 1 did not come" in said[rank] for rank in (0, 2))


def test_a_rank_that_is_killed_in_the_middle_of_training_is_named_on_the_others(tmp_path):
    script = [sys.executable, str(Path(__file__).parent / "dying_rank.py"), str(tmp_path / "store")]
    ranks = [subprocess.Popen([*script, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(3)]
    said = [process.communicate(timeout=600)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [7, -signal.SIGKILL, 7]
    for rank in (0, 2):
        assert re.search(f"rank {rank} could not exchange with ranks 0, 1, 2: ranks? [0-9, ]*1", said[rank]), said[rank]


def test_a_plan_with_tiers_needs_the_heat_it_was_made_with():
    heat = heat_of()
    plan = plan_of(1, 1, [table_plan(name, *MIXED[name], "int8") for name in TABLES], heat)
    with pytest.raises(tc.BadInput, match=r"shard_\(model, plan, heat="):
        _sharded(plan, None)
    with pytest.raises(tc.BadInput, match=f"made with heat {heat.sha256[:12]}"):
        _sharded(plan, heat_of(seed=4))


def test_what_cannot_be_carried_out_is_refused():
    heat = heat_of()
    plans = [table_plan(name, *MIXED[name], "int8") for name in TABLES]
    with pytest.raises(tc.BadInput, match="'user' is not in the plan, which has item, shop"):
        _sharded(plan_of(1, 1, plans[1:], heat), heat)
    with pytest.raises(tc.BadInput, match="'user' is planned with rows in host memory"):
        _sharded(plan_of(1, 1, [plans[0].model_copy(update={"residency": "host"}), *plans[1:]], heat), heat)
    with pytest.raises(tc.BadInput, match="97 x 8 in the model and 98 x 8 in the plan"):
        _sharded(plan_of(1, 1, [plans[0].model_copy(update={"rows": 98}), *plans[1:]], heat), heat)


def _sharded(plan, heat):
    from cases import Model

    return tc.shard_(Model(), plan, heat)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: nn.Sequential(tc.EmbeddingBag(97, 8)), "'0' is an EmbeddingBag, which cannot be sharded"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "the model has no EmbeddingCollection"),
        (lambda: Model().tables, "is a collection itself"),
    ],
)
def test_a_model_without_a_collection_inside_is_told_what_it_has(make, said):
    with pytest.raises(tc.BadInput, match=said):
        tc.shard_(make(), tiers_plan(1, 1, MIXED, "int8")[0])


def test_a_model_that_is_sharded_already_is_told_so_and_its_sharding_prints_in_a_few_lines():
    plan, heat = tiers_plan(1, 1, MIXED, "int8")
    model = Model()
    sharding = tc.shard_(model, plan, heat)
    assert len(str(sharding).splitlines()) < 20 and "created" not in str(sharding)
    with pytest.raises(tc.BadInput, match="'tables' is sharded already; `migrate`"):
        tc.shard_(model, plan, heat)
