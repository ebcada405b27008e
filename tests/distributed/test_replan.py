"""Heat is counted while training, and a new plan is proposed when it pays for moving the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import FEATURES, TABLES, Model, batches, heat_of, joined, plan_of, table_plan
from replan_ranks import BIG, big_model

import thermocline as tc
from support import has
from thermocline.distributed.replanning.replan import heat_by_row
from thermocline.heat.profiler import profile_batches
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology


def tiers_plan(nodes, cards, heat):
    return plan_of(nodes, cards, [table_plan(name, 5, 7, "int8", "node") for name in TABLES], heat)


@pytest.mark.parametrize("ranks", [3, 1])
def test_heat_of_all_ranks_is_that_of_their_batches_together(on_ranks, ranks):
    sizes = [[4, 0, 7][:ranks], [2, 3, 1][:ranks], [5, 5, 5][:ranks]]
    heat = heat_of()
    found = on_ranks("replan_ranks.counted", ranks, tiers_plan(1, ranks, heat), heat, sizes)
    whole = profile_batches({f: each[f] for f in FEATURES} for each in (joined(batches(n, s)) for n, s in enumerate(sizes)))
    for heat, sha256, left in found:
        assert sha256 == found[0][1] and left == [0] * len(FEATURES)
        for name, table in whole.tables.items():
            assert np.array_equal(heat[name].ids_H, table.ids_H) and np.array_equal(heat[name].counts_H, table.counts_H)
            assert (heat[name].samples, heat[name].lookups, heat[name].exact) == (table.samples, table.lookups, True)


def test_one_batch_in_so_many_is_counted_and_none_if_none_is_wanted():
    heat = heat_of()
    for every, counted in ((2, [0, 2, 4]), (0, [])):
        model = Model()
        sharding = tc.shard_(model, tiers_plan(1, 1, heat), heat, count_every=every)
        steps = [batches(step, [5])[0] for step in range(5)]
        for batch in steps:
            model.tables(batch).values().sum().backward()
        assert sharding.heat()["user"].lookups == sum(len(steps[step]["user"][0]) for step in counted)
    with pytest.raises(tc.BadInput, check=has(parameter="heat", feature="user")):
        tc.replan(sharding)


def log(seed, shift):
    """Batches whose hottest items begin at `shift`."""
    rng = np.random.default_rng(seed)
    for _ in range(40):
        items = (rng.zipf(1.2, (64, 20)) + shift) % BIG
        yield {"item": items, "hour": rng.integers(0, 24, 64)}


@pytest.fixture(scope="module")
def jobs():
    """Heat of three logs: the second like the first, hot rows of the third are others; and a plan by the first."""
    heats = [profile_batches(log(seed, shift), batch=64, cards_per_node=2) for seed, shift in ((1, 0), (2, 0), (3, 2500))]
    tables = (
        TableConfig(name="item", rows=BIG, dim=16, pooling="none", precision="int8", cache=0.0),
        TableConfig(name="hour", rows=24, dim=8, precision="int8", cache=0.0),
    )
    slow = {"node": {"bandwidth": 2e8, "latency": 0.0}, "cluster": {"bandwidth": 1e7, "latency": 0.0}}
    cluster = Topology.model_validate(
        {"nodes": 2, "cards_per_node": 2, "card": {"memory": 1 << 30, "bandwidth": 1e10}, "links": slow, "backend": "gloo"}
    )
    return heats, tc.make_plan(TablesConfig(batch=64, dense=2e-3, tables=tables), heats[0], cluster, "160KB")


def test_a_plan_slowed_by_drift_is_replaced_when_that_pays(on_ranks, jobs):
    heats, plan = jobs
    found = on_ranks("replan_ranks.drifted", 4, plan, heats[0], heats[2], [100_000, 1])
    sent = {link: sum(each[1][link] for each in found) for link in ("node", "cluster")}
    for numbers, _, proposed in found:
        (now, then, saves, seconds, pays, after, moves, rows, text), short, again = numbers
        assert pays and saves == now - then > 0.02 * (now - 2e-3) and after == pytest.approx(seconds / saves)
        assert moves == sent  # as proposed, so it was sent
        assert sum(rows["item"].values()) > 10 and "rows from tier" in text and text.endswith("steps of 100,000: migrate.")
        assert not short[4] and short[:4] == (now, then, saves, seconds) and short[-1].endswith("steps of 1: stay.")
        assert then - 2e-3 == pytest.approx(proposed.step.exposed, rel=0.1)
        assert again[0] == pytest.approx(then) and not again[4] and set(again[6].values()) == {0}
        assert numbers[0][:6] == found[0][0][0][:6]  # the same on all ranks


def test_a_plan_without_drift_stays(jobs):
    heats, plan = jobs
    alone = plan.topology.model_copy(update={"nodes": 1, "gpus_per_node": 1})
    tables = tuple(t.model_copy(update={"placement": "tiers", "exchange": "none"}) for t in plan.tables)
    plan = plan.model_copy(update={"topology": alone, "tables": tables, "budget": 400_000})
    sharding = tc.shard_(big_model(), plan, heats[0])
    proposal = tc.replan(sharding, heats[1])
    assert not proposal.pays and proposal.bytes == {"node": 0, "cluster": 0}


def test_rows_are_what_heat_is_planned_by_where_ids_are_hashed():
    map = tc.IdMap.hashed(23, salt=3)
    model = torch.nn.ModuleDict(
        {"rows": tc.EmbeddingCollection([tc.Table("shop", 23, 5, ids=map)], rows=tc.RowConfig(cache=0.0))}
    )
    plan = plan_of(1, 1, [table_plan("shop", 3, 0, "fp32")])
    heat = profile_batches([{"shop": np.array([10**12, 7, 7, -5, 10**12, 7])}])
    sharding = tc.shard_(model, plan.model_copy(update={"heat": heat.sha256}), heat)
    rows = heat_by_row(sharding, heat)["shop"]
    expected = np.bincount(map(torch.tensor([10**12, 7, 7, -5, 10**12, 7])).numpy(), minlength=23)
    assert dict(zip(rows.ids_H.tolist(), rows.counts_H.tolist(), strict=True)) == {
        row: int(n) for row, n in enumerate(expected) if n
    }
