"""Tables whose ids come and go on several ranks equal those of one process on the batches of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from elastic_ranks import begun, elastic_plan, move, train

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
