"""Tables whose ids come and go on several ranks equal those of one process on the batches of all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from elastic_ranks import ElasticModel, begun, elastic_plan, load, move, save, train

import thermocline as tc
from support import has
from thermocline import BadInput
from thermocline.serve import ShardGroup

STEPS = 30


def same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert np.array_equal(mine[name], value) if isinstance(value, np.ndarray) else mine[name] == value, name


def check(found, one):
    outs, gone, whole = one
    for rank, (mine, _, everything) in enumerate(found):
        assert all(np.array_equal(out, expected[rank]) for out, expected in zip(mine, outs, strict=True))
        same(everything, whole)
    assert sorted(each for _, part, _ in found for each in part) == gone
    assert len(gone) > 20, "no id was evicted"


def compare(on_ranks, plan, ranks, settings):
    one = train(0, ranks, None, None, settings, 0, STEPS)
    check(on_ranks("elastic_ranks.train", ranks, plan, None, settings, 0, STEPS), one)


@pytest.mark.parametrize(
    "ranks, mode, update", [(2, "sum", "backward"), (4, "none", "step"), (4, "sum", "step"), (3, "none", "backward")]
)
def test_ids_rows_and_evictions_equal_those_of_one_process(on_ranks, ranks, mode, update):
    compare(on_ranks, elastic_plan(1, ranks)[0], ranks, {"mode": mode, "update": update})


@pytest.mark.parametrize("mode, update", [("sum", "step"), ("none", "backward")])
def test_times_chances_and_ids_that_read_zeros_change_no_bit(on_ranks, mode, update):
    compare(on_ranks, elastic_plan(1, 3)[0], 3, {"mode": mode, "update": update, "timed": True})


@pytest.mark.parametrize("mode, update", [("sum", "backward"), ("none", "step")])
def test_a_table_grows_at_the_owners_of_its_ids_as_in_one_process(on_ranks, mode, update):
    settings = {"mode": mode, "update": update, "grows": True}
    one = train(0, 4, None, None, settings, 0, STEPS)
    state = one[2]["0 state of seen"]
    assert state["rows"] > 60 and state["evicted"] > 10  # it began with 20
    check(on_ranks("elastic_ranks.train", 4, elastic_plan(2, 2)[0], None, settings, 0, STEPS), one)


@pytest.mark.parametrize("settings", [{}, {"timed": True}, {"grows": True}], ids=str)
def test_ids_saved_by_three_ranks_are_loaded_by_one_and_by_two(on_ranks, tmp_path, settings):
    folder = str(tmp_path / "saved")
    saved = on_ranks("elastic_ranks.save", 3, elastic_plan(1, 3)[0], folder, settings)
    whole = save(0, 3, None, folder, settings)
    for each in saved:
        same(each, whole)
    then, later = load(0, 2, None, None, folder, settings)
    same(then, whole)
    for mine in on_ranks("elastic_ranks.load", 2, *elastic_plan(1, 2, 4), folder, settings):
        same(mine[0], whole)
        same(mine[1], later)


@pytest.mark.filterwarnings("ignore:elastic table")
@pytest.mark.parametrize("rows", [100, 700])
def test_ranks_load_ids_into_another_capacity_as_one_process_does(on_ranks, tmp_path, rows):
    folder = str(tmp_path / "saved")
    on_ranks("elastic_ranks.save", 2, elastic_plan(1, 2)[0], folder, {})
    one = load(0, 3, None, None, folder, {"item_rows": rows})
    state = one[0]["0 state of seen"]
    assert (state["dropped"] > 10) == (rows == 100) and state["used"] > 80
    for mine in on_ranks("elastic_ranks.load", 3, *elastic_plan(1, 3, item_rows=rows), folder, {"item_rows": rows}):
        same(mine[0], one[0])
        same(mine[1], one[1])


@pytest.mark.parametrize("update", ["backward", "step"])
def test_plain_modules_with_padding_and_two_lookups_a_step(on_ranks, update):
    compare(on_ranks, elastic_plan(1, 2, plain=True)[0], 2, {"update": update, "plain": True})


@pytest.mark.parametrize("nodes, cards, seed", [(2, 2, 1), (1, 3, 2), (2, 1, 3)])
def test_any_tiers_and_owners_of_rows_change_no_bit(on_ranks, nodes, cards, seed):
    plan, heat = elastic_plan(nodes, cards, seed)
    one = train(0, nodes * cards, None, None, {}, 0, STEPS)
    check(on_ranks("elastic_ranks.train", nodes * cards, plan, heat, {}, 0, STEPS), one)


def test_trained_ids_are_sharded_pinned_and_migrated(on_ranks):
    plans, state = [elastic_plan(2, 2)[0], elastic_plan(2, 2, 4)[0]], begun(4)
    check(on_ranks("elastic_ranks.move", 4, plans, state), move(0, 4, None, state))


@pytest.mark.parametrize("back", [False, True])
def test_one_process_keeps_the_kind_of_its_key_tables(back):
    whole, (plan, heat) = elastic_plan(1, 1)[0], elastic_plan(1, 1, 4)
    fp32 = [(each.tiers[0].model_copy(update={"precision": "fp32"}), *each.tiers[1:]) for each in plan.tables]
    tables = tuple(each.model_copy(update={"tiers": tiers}) for each, tiers in zip(plan.tables, fp32, strict=True))
    plans = [(whole, None), (plan.model_copy(update={"tables": tables}), heat)]
    model = ElasticModel()
    sharding = tc.shard_(model, *plans[back])
    with pytest.raises(BadInput, check=has(parameter="ids")):
        sharding.migrate(*plans[not back])
    sharding.migrate(*plans[back])


def test_ranks_publish_ids_with_their_rows(on_ranks, tmp_path):
    folder = str(tmp_path / "saved")
    numbers = on_ranks("elastic_ranks.publish", 3, *elastic_plan(1, 3, 4), folder)
    assert numbers == [3] * 3
    model = ElasticModel()
    tc.load_into(model, folder + " expected")
    with ShardGroup(folder, shards=2) as group:
        assert group.version == "1+4"  # the last when the publisher closes
        for table, feature in (("item", "seen"), ("item", "bought"), ("shop", "shop")):
            ids = model.tables.elastic(feature)
            own, others = ids.ids(), torch.arange(-40, 0) << 40
            found = group.lookup({feature: torch.cat([own, others])}, outputs=[feature, f"{feature}.known"])
            assert torch.equal(found[feature][: len(own)], model.tables.get_rows(table, ids.rows_of(own)))
            assert found[f"{feature}.known"][: len(own)].all() and not found[f"{feature}.known"][len(own) :].any()
