"""Heat in plans: features of a table, ids beyond its rows, repeats, the end of a log."""

from __future__ import annotations

import numpy as np
import pytest
from example_tables import HEAT, ITEM, cluster, tables

from support import has
from thermocline.errors import BadInput
from thermocline.heat.curve import Curve
from thermocline.heat.profiler import profile_batches
from thermocline.plan.cost.heat_input import fold, row_stats_of
from thermocline.plan.cost.step_cost import Cluster, request_probability
from thermocline.plan.make import make_plan
from thermocline.plan.tables import TableConfig


def test_lookups_per_sample_come_from_the_end_of_a_log_unless_shuffled():
    lengths = np.repeat([6, 3], [500, 300])  # 800 samples: the last three eighths are short
    bags = np.arange(lengths.sum()) % 97, np.concatenate([[0], np.cumsum(lengths)])
    heat = profile_batches([{"item": bags}], samples=800, batch=32, cards_per_node=2)
    seen = [row_stats_of(heat, TableConfig(name="item", rows=97, dim=4), shuffled).per_sample for shuffled in (False, True)]
    assert seen == [3.0, pytest.approx(lengths.mean())]


def test_a_table_without_heat_is_refused_by_name():
    with pytest.raises(BadInput, check=has(table="country")):
        make_plan(tables(), {name: HEAT[name] for name in ("item", "user")}, cluster())


def log(rng):
    """Batches of two features that look up the same table, and of one with a table of its own."""
    for _ in range(20):
        yield {"a": rng.integers(0, 50, 64), "b": rng.integers(25, 75, 64), "c": np.minimum(rng.zipf(1.5, 64), 9)}


def test_features_of_one_table_are_summed_by_row():
    heat = profile_batches(log(np.random.default_rng(0)))
    seen = row_stats_of(heat, TableConfig(name="ab", rows=100, dim=8, features=("a", "b")))
    assert seen.curve.rows == 100 and seen.curve.lookups == 2 * 20 * 64 and seen.per_sample == 2
    assert seen.curve.lookups_K[-1] == 0 and seen.curve.rows_K[-1] == 25


def test_a_plan_has_the_sha256_of_its_heat():
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


def test_pruned_rows_and_saved_bytes_are_in_the_plan():
    heat = profile_batches(log(np.random.default_rng(2)))
    one = {"name": "a", "rows": 1000, "dim": 8, "precision": "fp32"}
    made = make_plan(tables(one), heat, cluster(), goal="serve", prune=20)
    lever = made.table("a").levers[0]
    left = made.table("a").rows
    assert lever.kind == "prune" and left < 51 and lever.saved == 8 * ((1000 - left) * 32 - lever.map)
    assert made.table("a").placement == "replicated" and lever.map == 68  # ids below 512 in one block of a bitmap


def sessions(rng, samples, rows=5000, length=12):
    """Ids in bursts: a few ids are popular for a while."""
    hot = rng.integers(0, rows, samples // length + 1)
    ids = np.repeat(hot, length)[:samples]
    fresh = rng.random(samples) < 0.3
    ids[fresh] = np.minimum(rng.zipf(1.3, int(fresh.sum())), rows) - 1
    return ids


@pytest.mark.parametrize("cards", [1, 4])
def test_bursts_are_predicted_from_counted_repeats(cards):
    ids, batch = sessions(np.random.default_rng(3), 256 * 4 * 200), 256
    heat = profile_batches(({"item": part} for part in ids.reshape(-1, batch)), batch=batch, cards_per_node=4)
    counted = np.mean([len(set(part)) for part in ids.reshape(-1, batch * cards).tolist()])
    table = TableConfig(name="item", rows=5000, dim=8)
    found = {}
    for shuffled in (False, True):
        seen = row_stats_of(heat, table, shuffled)
        requested = request_probability(
            seen.curve.share_K, float(batch), Cluster(1, 4, 1, 1, 1), seen.effective_share(batch, 4, 1)
        )
        chance = requested.rank if cards == 1 else requested.node
        found[shuffled] = float((chance * seen.curve.rows_K).sum())
    assert found[False] == pytest.approx(counted, rel=0.02)
    assert found[True] > 1.3 * counted
