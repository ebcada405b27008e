"""Bags that the owners of their rows pool: sums travel, and training is that of one process."""

from __future__ import annotations

from collections import Counter

import numpy as np
import owner_pooling_ranks
import pytest
import torch
from cases import FEATURES, TABLES, Model, batches, heat_of, plan_of, sizes_of, table_plan, with_slots
from test_caches import Emulated
from test_placement import IDS
from test_simulate import cards_of
from test_traffic_meter import link
from test_training import ALL_THIRD, MIXED, TWO, compare

import thermocline as tc
from benchmarks.plan.baselines import make_baseline_plan
from support import has
from thermocline.distributed.placement.row_index import RowIndex
from thermocline.distributed.placement.table_map import make_maps
from thermocline.distributed.replanning.cost import step_seconds, table_heat
from thermocline.distributed.simulation.simulator import simulate
from thermocline.heat.profiler import profile_batches
from thermocline.plan.report.explain import explain
from thermocline.plan.run_file import check_run
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology

HEAT = heat_of()
STEPS = 20


def by_owners(nodes, cards, tiers=ALL_THIRD, precision="int8", card=None, only=tuple(TABLES), heat=HEAT, sums="fp32"):
    """A plan with owner pooling for some tables; the others are requested once per node."""
    tables = []
    for name in TABLES:
        on_card = card if name == "shop" else None
        first, second = (0, 0) if on_card is not None else tiers[name]
        table = table_plan(name, first, second, precision, "flat" if name in only else "node", on_card)
        owners = {"pooled_by": "owner", "wire_rows": sums} if name in only else {}
        tables.append(table.model_copy(update=owners))
    return plan_of(nodes, cards, tables, heat)


@pytest.mark.parametrize(
    "plan, ahead, close",
    [
        (by_owners(1, 2), "", 1e-4),
        (by_owners(1, 2, sums="bf16"), "", 0.02),
        (by_owners(1, 2, sums="int8"), "", 0.04),
        (by_owners(2, 2, MIXED), "three", 1e-4),
        (by_owners(2, 2, TWO, only=("user", "shop")), "", 1e-4),
        (by_owners(2, 2, TWO, "int4", only=("user", "item")), "sometimes", 1e-4),
        (by_owners(2, 2, card=3), "interrupted", 1e-4),
    ],
    ids=[
        "tier 3",
        "sums in bf16",
        "sums in int8",
        "tiers 1 and 3",
        "all tiers, one table by askers",
        "ahead now and then",
        "a table on a card, interrupted",
    ],
)
def test_rows_equal_one_process_bit_for_bit_where_gradients_sum_exactly(on_ranks, plan, ahead, close):
    settings = {"precision": plan.tables[0].precision, "exact": True, "ahead": ahead}
    found = on_ranks("train", plan.topology.world_size, plan, HEAT, settings, 50)
    compare(found, plan.topology.world_size, settings, outs_close=close)


@pytest.mark.parametrize(
    "nodes, cards, settings",
    [
        (2, 2, {"precision": "int8", "mode": "mean", "ahead": "always"}),
        (1, 2, {"precision": "fp32", "mode": "sum", "optimizer": tc.Adam(lr=0.01)}),
    ],
)
def test_gradients_of_one_feature_are_summed_in_the_order_of_one_process(on_ranks, nodes, cards, settings):
    found = on_ranks(
        "owner_pooling_ranks.train",
        nodes * cards,
        by_owners(nodes, cards, precision=settings["precision"]),
        HEAT,
        settings,
        STEPS,
    )
    alone = {name: value for name, value in settings.items() if name != "ahead"}
    whole, outs = owner_pooling_ranks.train(0, 1, None, None, alone, STEPS, ranks=nodes * cards)
    by_row, compared = whole.trainer.optimizer.states_per_row > 0, 0
    for step, out in enumerate(outs):
        assert np.allclose(np.concatenate([each[1][step] for each in found]), out, atol=1e-2), step
    for held, _ in found:
        for index, rows, parts in held:
            if len(whole.tables[index].features) == 1:
                theirs = [*whole.arena.views(index)[:2], *whole.arena.state_views(index, whole.trainer.states, by_row)]
                assert all(np.array_equal(mine, other.numpy()[rows]) for mine, other in zip(parts, theirs, strict=True))
                compared += len(rows)
    assert compared == sum(rows for rows, _, features in TABLES.values() if len(features) == 1)


def test_fp32_means_equal_one_process_up_to_the_order_of_sums(on_ranks):
    settings = {"precision": "fp32", "mode": "mean", "exact": False, "optimizer": tc.Adam(lr=0.01)}
    found = on_ranks("train", 4, by_owners(2, 2, MIXED, "fp32"), HEAT, settings, 50)
    compare(found, 4, settings, close=2e-5)


def test_requesters_pool_bags_with_weights_and_weights_get_gradients(on_ranks):
    found = on_ranks("owner_pooling_ranks.weighted", 2, by_owners(1, 2, precision="fp32"), HEAT)
    steps, rows = owner_pooling_ranks.weighted(0, 1, None, None, ranks=2)
    lengths = [[len(part[feature][0]) for feature in FEATURES] for part in batches(0, [3, 3])]
    for step, (out, grads) in enumerate(steps):
        assert np.allclose(np.concatenate([each[0][step][0] for each in found]), out, atol=1e-5)
        assert len(grads) == (0 if step % 2 else len(FEATURES))
        for feature, grad in enumerate(grads):
            theirs = np.concatenate([each[0][step][1][feature] for each in found])
            assert np.allclose(theirs, grad, atol=1e-5)
    assert sum(lengths[0]) > 0 and len(steps) == 6
    for each in found:
        assert all(np.allclose(each[1][name], rows[name], atol=1e-5) for name in TABLES)


# -- caches -----------------------------------------------------------------------------------------------------------------


class Exact(Emulated):
    """Owners receive every lookup, so counts are exact."""

    def told(self, tier, counts, by_node):
        return sum(counts) if tier == 3 else super().told(tier, counts, by_node)


@pytest.mark.parametrize("precision, policy, ahead", [("int4", "lfu", "always"), ("int8", "adaptive", "")])
def test_caches_of_owners_equal_one_process_that_emulates_all_ranks(on_ranks, precision, policy, ahead):
    tables = [
        with_slots(table, {1: (3, 0), 3: (9, 4 * (precision == "int4"))}) for table in by_owners(2, 2, MIXED, precision).tables
    ]
    plan, settings = plan_of(2, 2, tables, HEAT), {"precision": precision, "policy": policy}
    found = on_ranks("cache_ranks.train", 4, plan, HEAT, settings | {"ahead": ahead}, STEPS)
    assert sum(each["stats"]["evictions"] for each in found) > 3
    emulated = Exact(plan, settings, found)
    for step in range(STEPS):
        sizes = sizes_of(step, 4)
        if step % 5 == 0:
            for each, out in zip(found, emulated.looked_up(step, sizes), strict=True):
                assert np.allclose(each["outs"][step], out, atol=1e-4), step
        emulated.step(step, sizes)
    for each, (_, arena, trainer) in zip(found, emulated.shards, strict=True):
        for one, other in zip((arena.codes, arena.meta, *trainer.states, *arena.cache[:7]), each["end"], strict=True):
            assert np.array_equal(one.numpy(), other)


# -- what it sends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes, cards, seed", [(2, 2, 1), (1, 2, 2), (2, 4, 3)])
def test_simulated_bytes_and_messages_equal_the_meters(on_ranks, nodes, cards, seed):
    rng = np.random.default_rng(seed)
    tiers = {name: (int(rng.integers(rows)), 0) for name, (rows, _, _) in TABLES.items()}
    plan = by_owners(
        nodes,
        cards,
        tiers if seed > 1 else TWO,
        card=1 if seed == 2 else None,
        only=("user", "shop") if seed == 1 else tuple(TABLES),
    )
    plan = plan_of(
        nodes, cards, [t.model_copy(update={"wire_gradients": ["fp32", "bf16", "int8"][seed % 3]}) for t in plan.tables], HEAT
    )
    sizes = [[int(n) for n in rng.integers(0, 6, nodes * cards)] for _ in range(3)]
    sizes[1] = [0] * (nodes * cards)
    found = on_ranks("replan_ranks.metered", nodes * cards, plan, HEAT, sizes)
    simulated = simulate(plan, HEAT, [[cards_of(step, each)] for step, each in enumerate(sizes)])
    for card, (lines, messages) in enumerate(found):
        assert simulated.sent(card) == lines
        assert np.array_equal(simulated.messages_CDL[card], messages)


@pytest.mark.parametrize("sums, width", [("fp32", 4), ("bf16", 2), ("int8", 1)])
def test_a_bag_moves_an_id_per_lookup_and_a_sum_and_gradient_per_owner(on_ranks, sums, width):
    scale = 4 * (sums == "int8")
    plan, sizes = by_owners(2, 2, MIXED, sums=sums), [4, 0, 7, 2]
    maps = dict(zip(TABLES, make_maps(plan.tables, HEAT, IDS, 2, 2, torch.device("cpu")), strict=True))
    hand = [Counter() for _ in sizes]
    for rank, batch in enumerate(batches(0, sizes)):
        for name, (_, dim, features) in TABLES.items():
            for ids, offsets in (batch[feature] for feature in features):
                for bag in range(sizes[rank]):
                    tier, home, _ = maps[name].locate(ids[offsets[bag] : offsets[bag + 1]])
                    homes = home[tier == 3].tolist()
                    for owner in homes:
                        hand[rank][name, "ids", link(rank, owner, 2)] += 4
                    for owner in set(homes):
                        hand[owner][name, "rows", link(rank, owner, 2)] += width * dim + scale
                        hand[rank][name, "gradients", link(rank, owner, 2)] += 4 * dim
    for (lines, _, _), counted in zip(on_ranks("measure", 4, plan, HEAT, sizes), hand, strict=True):
        assert {(t, d, at): size for t, tier, d, at, size in lines if tier == 3} == counted


@pytest.mark.parametrize("wire, rows_of", [("fp32", "fp32"), ("int8", "int8")])
def test_the_planner_lets_owners_pool_where_that_moves_fewer_bytes(on_ranks, wire, rows_of):
    """Long bags of an even table; and short ones of a skewed table, whose rows travel."""
    rng, rows, dim = np.random.default_rng(7), 4001, 16
    log = [{"even": rng.integers(0, rows, (64, 24)), "skewed": rng.zipf(1.4, (64, 2)) % rows} for _ in range(12)]
    heat = profile_batches(log, batch=16, cards_per_node=2)
    tables = [TableConfig(name=name, rows=rows, dim=dim, precision=rows_of, cache=0.0) for name in log[0]]
    slow = {"node": {"bandwidth": 2e8, "latency": 0.0}, "cluster": {"bandwidth": 2e7, "latency": 0.0}}
    cluster = {"nodes": 2, "cards_per_node": 2, "card": {"memory": 1 << 30, "bandwidth": 1e12}, "links": slow}
    given = TablesConfig(batch=16, tables=tuple(tables))
    plan = tc.make_plan(given, heat, Topology.model_validate(cluster), "300KB", gradients=wire, sums=wire)
    even = plan.table("even")
    assert even.pooled_by == "owner" and even.exchange == "flat" and plan.table("skewed").pooled_by == "asker"
    assert even.wire_rows == even.wire_gradients == plan.sums == wire and "pooled by the owner" in explain(plan)
    ids = {name: tc.IdMap.identity(rows) for name in log[0]}
    row_index = RowIndex(plan.tables, make_maps(plan.tables, heat, ids, 2, 2, torch.device("cpu")), 2, 2, torch.device("cpu"))
    priced = step_seconds(plan, plan.tables, row_index, table_heat(plan, heat)).parts  # as `replan` does
    assert all(priced[part] == pytest.approx(plan.step.parts[part], rel=0.1) for part in ("ids", "rows", "gradients"))
    found = [
        line for lines, _ in on_ranks("owner_pooling_ranks.measured", 4, plan, heat, log, dim) for line in lines if line.table
    ]
    predicted = {(line.link, line.direction): line.bytes for line in plan.traffic}
    for way in ("ids", "rows", "gradients"):
        for over in ("node", "cluster"):
            sent = sum(line.bytes for line in found if (line.link, line.direction) == (over, way)) / 4 / len(log)
            assert sent == pytest.approx(predicted[over, way], rel=0.05), (over, way)


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_whole_tables_take_the_memory_of_owners_and_askers_that_a_plan_states(pooling, on_ranks):
    rng, rows, dim = np.random.default_rng(11), (6007, 1500, 4001), 16
    log = [{f"t{n}": rng.integers(0, count, (512, 6 * n + 2)) for n, count in enumerate(rows)} for _ in range(12)]
    heat = profile_batches(log, batch=128, cards_per_node=2)
    tables = [
        TableConfig(name=name, rows=count, dim=dim, precision="fp32", pooling=pooling)
        for name, count in zip(log[0], rows, strict=True)
    ]
    slow = {"node": {"bandwidth": 2e8, "latency": 0.0}, "cluster": {"bandwidth": 2e7, "latency": 0.0}}
    cluster = {"nodes": 2, "cards_per_node": 2, "card": {"memory": 1 << 30, "bandwidth": 1e12}, "links": slow}
    given = TablesConfig(batch=128, tables=tuple(tables))
    plan = make_baseline_plan("table-wise", given, heat, Topology.model_validate(cluster))
    assert len({table.rank for table in plan.tables}) == 3, "one rank only asks"
    run = on_ranks("owner_pooling_ranks.measured", 4, plan, heat, log, dim)[0][1]
    for line in check_run(plan, run).lines:
        assert line.kind != "memory" or line.ok, str(line)


# -- what is refused --------------------------------------------------------------------------------------------------------


def test_plans_that_owners_cannot_pool_are_refused():
    per_node = plan_of(
        1, 1, [table_plan(name, 0, 0, "int8", "node").model_copy(update={"pooled_by": "owner"}) for name in TABLES]
    )
    with pytest.raises(tc.BadInput, check=has(parameter="exchange", table="user")):
        tc.shard_(Model(), per_node)
    with pytest.raises(tc.BadInput, check=has(parameter="mode", value="max", table="user")):
        tc.shard_(Model(mode="max"), by_owners(1, 1), HEAT)


def test_one_process_with_two_precisions_pools_its_own_bags():
    found = []
    for pooled_by in ("asker", "owner"):
        how = {"pooled_by": pooled_by, "wire_rows": "fp32"}
        tables = [table_plan(name, 5, 0, "int8", first_precision="fp32") for name in TABLES]
        plan = plan_of(1, 1, [table.model_copy(update=how) for table in tables], HEAT)
        model, outs = Model(mode="mean"), []
        tc.shard_(model, plan, HEAT, reduce="sum")
        assert (model.tables.state.batch_layout.is_owner_pooled is not None) == (pooled_by == "owner")
        for step in range(4):
            out = model.tables(batches(step, [5])[0]).values()
            outs.append(out.detach().clone().numpy())
            owner_pooling_ranks.linear_loss(out, step, 0).backward()
        found.append((outs, [model.tables.get_rows(name).numpy() for name in TABLES]))
    (outs, rows), (other_outs, other_rows) = found
    assert all(np.allclose(one, other, atol=1e-5) for one, other in zip(outs, other_outs, strict=True))
    assert all(np.array_equal(one, other) for one, other in zip(rows, other_rows, strict=True))  # sums are in the same order
