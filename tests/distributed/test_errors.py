"""Errors that all ranks raise: different inputs or operations, a failed rank, and plans that do not fit."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from cases import TABLES, Model, heat_of, plan_of, table_plan
from test_training import MIXED, tiers_plan
from torch import nn

import thermocline as tc
from forked import script
from support import has
from thermocline.distributed.placement.local_shard import ReplicaMismatch


def errors_of(on_ranks, what, plans, ranks=3):
    return on_ranks("fail", ranks, what, plans, heat_of())


def test_different_plans_are_an_error_on_every_rank(on_ranks):
    plans = [tiers_plan(1, 3, {**MIXED, "user": (first, 0)}, "int8")[0] for first in (13, 14)]
    for error in errors_of(on_ranks, "plans", [plans[0], plans[1], plans[0]]):
        assert error.parameter == "the plan" and error.values[0] == error.values[2] != error.values[1]


@pytest.mark.parametrize("given", ["the same", "none"])
def test_all_ranks_use_plan_and_heat_of_rank_0(on_ranks, given):
    plan, heat = tiers_plan(1, 3, MIXED, "int8")
    first, *others = on_ranks("shard_by_rank_0", 3, plan, heat, given)
    assert first == ("2001-01-01", plan.tables) and all(other == first for other in others)


def test_heat_that_only_another_rank_has_is_an_error_on_every_rank(on_ranks):
    plan, heat = tiers_plan(1, 3, MIXED, "int8")
    for error in on_ranks("shard_by_rank_0", 3, plan, heat, "only rank 1"):
        assert error.parameter == "the heat" and error.values[0] == error.values[2] == "none" != error.values[1]
    for error in on_ranks("shard_by_rank_0", 3, plan, heat, "not rank 0"):
        assert error.parameter == "plan"


def test_a_plan_for_another_number_of_ranks_is_an_error_on_every_rank(on_ranks):
    for error in errors_of(on_ranks, "ranks", [tiers_plan(2, 2, MIXED, "int8")[0]]):
        assert (error.parameter, error.needed, error.available) == ("plan", 4, 3)


@pytest.mark.parametrize(
    "what, named",
    [
        ("checks", "check_every"),
        ("version", "the version of thermocline"),
        ("update", "collections"),
        ("residency", "collections"),
    ],
)
def test_different_settings_are_an_error_on_every_rank(on_ranks, what, named):
    for error in errors_of(on_ranks, what, one_plan()):
        assert error.parameter == named and error.values[0] == error.values[2] != error.values[1]


def test_a_rank_whose_rows_cannot_be_sharded_stops_all(on_ranks):
    first, own, third = errors_of(on_ranks, "device", one_plan())
    assert own.parameter == "device" and first.rank == third.rank == 1


def one_plan():
    return [tiers_plan(1, 3, MIXED, "int8")[0]]


@pytest.mark.parametrize(
    "what, kind, fields",
    [
        ("no file", FileNotFoundError, {}),
        ("a feature less", tc.BadInput, {}),
        ("a bad id", tc.IdOutOfRange, {"name": "shop", "id": 23, "position": 25, "first": 23, "rows": 23}),
    ],
)
def test_an_error_of_one_rank_is_an_error_on_every_rank(on_ranks, what, kind, fields):
    first, own, third = errors_of(on_ranks, what, one_plan())
    assert isinstance(own, kind) and all(getattr(own, name) == value for name, value in fields.items())
    assert first.rank == third.rank == 1 and str(own) in str(first) == str(third)


@pytest.mark.parametrize("what, named", [("weights", "with weights"), ("frozen", "looking")])
def test_a_different_operation_of_one_rank_is_an_error_on_every_rank(on_ranks, what, named):
    for error in errors_of(on_ranks, what, one_plan()):
        assert error.parameter == "operation" and [named in value for value in error.values].count(True) == 1


def test_a_bad_gradient_is_an_error_on_every_rank_with_its_table(on_ranks):
    found = errors_of(on_ranks, "nan", one_plan())
    own = {rank for rank, error in enumerate(found) if isinstance(error, tc.BadGradient)}
    assert own and all(found[rank].table in TABLES for rank in own)
    assert all(error.rank in own for rank, error in enumerate(found) if rank not in own)


@pytest.mark.parametrize("what, where, ranks", [("other rows", "tier 1 of table 'user'", [1, 2]), ("a flipped bit", None, [1])])
def test_different_replicas_are_an_error_on_every_rank(on_ranks, what, where, ranks):
    for error in errors_of(on_ranks, what, one_plan()):
        assert isinstance(error, ReplicaMismatch) and (error.first, error.ranks) == (0, ranks)
        assert where is None or error.what == where


def test_a_rank_that_ends_is_named_on_the_others(on_ranks):
    first, left, third = on_ranks("leave", 3, one_plan(), heat_of())
    assert left == "left"
    assert [(error.rank, error.unresponsive) for error in (first, third)] == [(0, [1]), (2, [1])]


def test_a_rank_killed_during_training_is_named_on_the_others(tmp_path):
    file = Path(__file__).with_name("dying_rank.py")
    ranks = [process.finish() for process in [script(file, tmp_path / "store", rank) for rank in range(3)]]
    assert [rank.returncode for rank in ranks] == [7, -signal.SIGKILL, 7]
    said = [rank.stdout for rank in ranks]
    for rank in (0, 2):
        assert re.search(f"rank {rank} could not exchange with ranks 0, 1, 2: ranks? [0-9, ]*1", said[rank]), said[rank]


def test_a_plan_with_tiers_needs_the_heat_it_was_made_with():
    heat = heat_of()
    plan = plan_of(1, 1, [table_plan(name, *MIXED[name], "int8") for name in TABLES], heat)
    with pytest.raises(tc.BadInput, check=has(parameter="heat", table="user")):
        _sharded(plan, None)
    with pytest.raises(tc.BadInput, check=has(parameter="heat", needed=heat.sha256)):
        _sharded(plan, heat_of(seed=4))


def test_plans_that_do_not_fit_the_tables_are_refused():
    heat = heat_of()
    plans = [table_plan(name, *MIXED[name], "int8") for name in TABLES]
    with pytest.raises(tc.BadInput, check=has(table="user")):
        _sharded(plan_of(1, 1, plans[1:], heat), heat)
    with pytest.raises(tc.BadInput, check=has(parameter="residency", table="user")):
        _sharded(plan_of(1, 1, [plans[0].model_copy(update={"residency": "host"}), *plans[1:]], heat), heat)
    with pytest.raises(tc.BadInput, check=has(table="user", needed=(98, 8), available=(97, 8))):
        *others, last = plans[0].tiers
        larger = {"rows": 98, "tiers": (*others, last.model_copy(update={"rows": last.rows + 1}))}
        _sharded(plan_of(1, 1, [plans[0].model_copy(update=larger), *plans[1:]], heat), heat)


def _sharded(plan, heat):
    from cases import Model

    return tc.shard_(Model(), plan, heat)


@pytest.mark.parametrize(
    "make, fields",
    [
        (lambda: nn.Sequential(tc.EmbeddingBag(97, 8)), {"table": "0"}),
        (lambda: nn.ModuleDict({"item": tc.Embedding(61, 8)}), {"parameter": "features", "table": "item"}),
        (lambda: nn.Sequential(nn.Linear(2, 2)), {"parameter": "model"}),
        (lambda: nn.Sequential(tc.Embedding(97, 8, rows=tc.RowConfig(independent=True))), {"parameter": "model"}),
    ],
)
def test_models_that_cannot_be_sharded_by_a_plan_are_refused(make, fields):
    with pytest.raises(tc.BadInput, check=has(**fields)):
        tc.shard_(make(), tiers_plan(1, 1, MIXED, "int8")[0])


def test_a_module_that_cannot_be_sharded_stays_as_it_was(monkeypatch):
    def fail(*given):
        raise MemoryError

    monkeypatch.setattr("thermocline.distributed.sharded_collection.init_rows", fail)
    model = Model()
    with pytest.raises(MemoryError):
        tc.shard_(model, *tiers_plan(1, 1, MIXED, "int8"))
    assert type(model.tables) is tc.EmbeddingCollection and model.tables.get_rows("user").shape == (97, 8)


def test_a_sharded_model_is_refused_and_its_sharding_prints_in_a_few_lines():
    plan, heat = tiers_plan(1, 1, MIXED, "int8")
    model = Model()
    sharding = tc.shard_(model, plan, heat)
    assert len(str(sharding).splitlines()) < 20 and "created" not in str(sharding)
    with pytest.raises(tc.BadInput, check=has(parameter="model", module="tables")):
        tc.shard_(model, plan, heat)
