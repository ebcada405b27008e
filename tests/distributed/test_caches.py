"""Caches on shards: a fixed set of rows trains as in one process, others as one process says that emulates every shard."""

from __future__ import annotations

from dataclasses import replace

import cache_ranks
import numpy as np
import pytest
import torch
from cases import FEATURES, TABLES, Model, batches, exact_loss, heat_of, joined, plan_of, sizes_of, table_plan, with_slots
from replan_ranks import BIG
from test_placement import IDS
from test_replan import log

import thermocline as tc
from thermocline import formats as F
from thermocline.distributed.placement.row_index import RowIndex
from thermocline.distributed.placement.table_map import make_maps
from thermocline.heat.profiler import profile_batches
from thermocline.kernels import RowArrays
from thermocline.kernels.layout import Cache
from thermocline.kernels.update import reference
from thermocline.plan.run_file import check_run
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology
from thermocline.rows.arena import Arena
from thermocline.rows.training import Trainer

HEAT = heat_of()
STEPS = 24


def plan_with_slots(seed, nodes, cards, precision="int8"):
    """Random tiers, each with slots; sometimes a table on one rank."""
    rng = np.random.default_rng(seed)
    tables = []
    for name, (rows, _, _) in TABLES.items():
        first, second = sorted(int(n) for n in rng.integers(0, rows + 1, 2))
        card = int(rng.integers(nodes * cards)) if name == "shop" and seed % 2 else None
        tiers = (0, 0) if card is not None else (first, second - first)
        table = table_plan(name, *tiers, precision, ["flat", "node"][rng.integers(2)], card)
        near = precision != "int8"
        slots = {tier.tier: (int(rng.integers(1, 9)), int(rng.integers(5)) * near) for tier in table.tiers}
        tables.append(with_slots(table, slots))
    return plan_of(nodes, cards, tables, HEAT)


# -- a fixed set of rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed, nodes, cards, precision, ahead",
    [
        (1, 1, 3, "int8", ""),
        (2, 2, 2, "int8", ""),
        (3, 2, 2, "int4", "three"),
        (4, 2, 2, "int8", "sometimes"),
        (5, 2, 1, "int4", ""),
    ],
)
def test_rows_in_fixed_slots_train_as_in_one_process(on_ranks, seed, nodes, cards, precision, ahead):
    plan, ranks = plan_with_slots(seed, nodes, cards, "int8"), nodes * cards
    if precision == "int4":  # fp32 slots alone: of int8 slots a process has those of all its tables together
        tables = [with_slots(table_in(table, "int4"), {t.tier: (t.cached, 0) for t in table.tiers}) for table in plan.tables]
        plan = plan_of(nodes, cards, tables, HEAT)
    settings = {"precision": precision, "policy": "fixed"}
    found = on_ranks("cache_ranks.train", ranks, plan, HEAT, settings | {"ahead": ahead}, STEPS)
    hot = {name: sorted({row for each in found for row in each["cached"][name]}) for name in TABLES}
    assert all(each["cached"] == each["then"] for each in found) and sum(map(len, hot.values())) > 8
    whole, outs = one_process(ranks, settings, hot)
    for step, out in enumerate(outs):
        assert np.array_equal(np.concatenate([each["outs"][step] for each in found]), out), step
    by_row = whole.trainer.optimizer.states_per_row > 0
    for each in found:
        for name in TABLES:
            assert np.array_equal(each["read"][name], whole.get_rows(name).numpy())
        for index, rows, states in each["state"]:
            theirs = whole.arena.state_views(index, whole.trainer.states, by_row)
            assert all(np.array_equal(mine, other.numpy()[rows]) for mine, other in zip(states, theirs, strict=True))


def table_in(table, precision):
    tiers = tuple(tier.model_copy(update={"precision": precision}) for tier in table.tiers)
    return table.model_copy(update={"precision": precision, "tiers": tiers})


def one_process(ranks, settings, hot):
    """The same training in one process, with the same rows in slots."""
    tables, outs = Model(**settings, cache=1.0).tables, []
    heat = {}
    for name, (rows, _, _) in TABLES.items():
        heat[name] = torch.zeros(rows)
        heat[name][hot[name]] = 1.0
    tables.warm(heat)
    for name, (rows, _, _) in TABLES.items():
        tables.set_rows(name, torch.arange(rows), cache_ranks.values(name))
    for step in range(STEPS):
        out = tables(joined(batches(step, sizes_of(step, ranks)))).values()
        outs.append(out.detach().clone().numpy())
        exact_loss(out, step, 0).backward()
    return tables, outs


# -- caches that adapt --------------------------------------------------------------------------------------------------------


def arena_tier(row_index, arena, pool):
    """Of the part that slots belong to."""
    return next(part.tier for k, part in enumerate(row_index.parts) if arena.views(k)[2] == pool.row)


class Emulated:
    """One process with the arenas of all ranks, updated by the reference of caches and updates."""

    def __init__(self, plan, settings, found):
        self.nodes, self.cards = plan.topology.nodes, plan.topology.gpus_per_node
        maps = make_maps(plan.tables, HEAT, IDS, self.nodes, self.cards, torch.device("cpu"))
        self.shards = []
        for rank, each in enumerate(found):
            row_index = RowIndex(plan.tables, maps, self.nodes, self.cards, torch.device("cpu"), rank)
            full, near = ([getattr(p, kind) * p.is_local for p in row_index.parts] for kind in ("fp32_slots", "int8_slots"))
            arena = Arena(row_index.specs(), slots=full, int8_slots=near, policy=settings["policy"])
            trainer = Trainer(arena, tc.RowwiseAdagrad(lr=0.125), seed=5)
            for mine, given in zip((arena.codes, arena.meta, *trainer.states, *arena.cache[:7]), each["begin"], strict=True):
                mine.copy_(torch.from_numpy(given))
            self.shards.append((row_index, arena, trainer))

    def step(self, step, sizes):
        grads, lookups = self.summed(step, sizes)
        for rank, (row_index, arena, trainer) in enumerate(self.shards):
            clock, hyper = trainer.clock.clone(), trainer.hyper.clone()
            rows = torch.tensor(sorted(grads), dtype=torch.int64)  # may be empty
            where = row_index.locate(rows)
            homes = where.home_N.tolist()
            for tier in (1, 2, 3):
                mine = [
                    n for n, part in enumerate(where.part_N.tolist())
                    if row_index.parts[part].tier == tier and self.holds(rank, tier, homes[n])
                ]  # fmt: skip
                at = torch.tensor([arena.views(int(where.part_N[n]))[2] + int(where.index_N[n]) for n in mine])
                order = at.argsort()
                counts = [
                    self.told(tier, lookups[int(rows[n])], row_index.parts[int(where.part_N[n])].exchange == "node")
                    for n in mine
                ]
                trainer.clock.copy_(clock), trainer.hyper.copy_(hyper)
                pools = [n for n, pool in enumerate(arena.pools) if arena_tier(row_index, arena, pool) == tier]
                cache = Cache(*arena.cache)
                tables = replace(arena.layout.tables, pools=tuple(arena.pools[n] for n in pools))
                if pools:
                    cache = cache._replace(ledger=cache.ledger[pools[0] : pools[-1] + 1])
                cache.clock[F.STEP], cache.steps[0] = clock[F.STEP], clock[F.STEP]
                arrays = RowArrays(arena.codes, arena.meta, arena.layout._replace(tables=tables), cache)
                grads_UW = torch.stack([grads[int(rows[n])] for n in mine])[order] if mine else torch.zeros(0, 8)
                seen = torch.tensor(counts)[order].long()
                reference.update_rows(arrays, trainer.arrays, at[order].long(), grads_UW, seen, rows[mine][order])

    def looked_up(self, step, sizes):
        """The outputs of all ranks from the present rows."""
        tables = [self.rows(index) for index in range(len(TABLES))]
        outs = []
        for batch, size in zip(batches(step, sizes), sizes, strict=True):
            columns = []
            for values, (_, dim, features) in zip(tables, TABLES.values(), strict=True):
                for feature in features:
                    ids, offsets = batch[feature]
                    bag_N = torch.arange(size).repeat_interleave(offsets.diff())
                    columns.append(torch.zeros(size, dim).index_add_(0, bag_N, values[ids]))  # in the order of the ids
            outs.append(torch.cat(columns, dim=1).numpy())
        return outs

    def rows(self, table):
        """All rows of a table, each from its home."""
        row_index = self.shards[0][0]
        rows = torch.arange(row_index.maps[table].rows)
        where = row_index.locate(rows + row_index.first[table])
        found = torch.empty(len(rows), list(TABLES.values())[table][1])
        for home, part in {*zip(where.home_N.tolist(), where.part_N.tolist(), strict=True)}:
            mine_N = (where.home_N == home) & (where.part_N == part)
            found[mine_N] = self.shards[home][1].read(part, where.index_N[mine_N])
        return found

    def holds(self, rank, tier, home):
        return tier == 1 or (home == rank if tier == 3 else home % self.cards == rank % self.cards)

    def told(self, tier, counts, by_node):
        """The count that owners receive for the lookups of each rank, by the route of a tier."""
        floor = lambda n: 1 << min(n, 128).bit_length() - 1 if n else 0  # noqa: E731
        each = [floor(n) for n in counts]
        if self.nodes > 1 and (tier < 3 or by_node):
            each = [floor(sum(each[n * self.cards : (n + 1) * self.cards])) for n in range(self.nodes)]
        copies = (tier == 1 and self.nodes * self.cards > 1) or (tier == 2 and self.nodes > 1)
        return floor(sum(each)) if copies else sum(each)

    def summed(self, step, sizes):
        """Gradients and lookups of each rank, by global row."""
        row_index, grads, lookups, first = self.shards[0][0], {}, {}, 0
        for rank, (batch, size) in enumerate(zip(batches(step, sizes), sizes, strict=True)):
            width = sum(TABLES[t][1] for t in TABLES for _ in TABLES[t][2])
            out = torch.zeros(size, width, requires_grad=True)
            exact_loss(out, step, first).backward()
            first += size
            column = 0
            for index, (_, dim, features) in enumerate(TABLES.values()):
                for feature in features:
                    ids, offsets = batch[feature]
                    for bag in range(size):
                        for row in (ids[offsets[bag] : offsets[bag + 1]] + row_index.first[index]).tolist():
                            padded = torch.nn.functional.pad(out.grad[bag, column : column + dim], (0, 8 - dim))
                            grads[row] = grads.get(row, 0) + padded
                            lookups.setdefault(row, [0] * len(sizes))[rank] += 1
                    column += dim
        return grads, lookups


@pytest.mark.parametrize(
    "seed, nodes, cards, precision, policy, ahead",
    [
        (1, 1, 3, "int8", "lfu", ""),
        (2, 2, 2, "int4", "lfu", "three"),
        (3, 2, 2, "int8", "lru", "sometimes"),
        (6, 2, 2, "int8", "adaptive", "three"),
        (4, 3, 1, "int4", "adaptive", ""),
    ],
)
def test_caches_equal_one_process_that_emulates_all_ranks(on_ranks, seed, nodes, cards, precision, policy, ahead):
    plan, settings = plan_with_slots(seed, nodes, cards, precision), {"precision": precision, "policy": policy}
    found = on_ranks("cache_ranks.train", nodes * cards, plan, HEAT, settings | {"ahead": ahead}, STEPS)
    assert sum(each["stats"]["evictions"] for each in found) > 3
    emulated = Emulated(plan, settings, found)
    for step in range(STEPS):
        sizes = sizes_of(step, nodes * cards)
        if step % 3 == 0:
            for each, out in zip(found, emulated.looked_up(step, sizes), strict=True):
                assert np.array_equal(each["outs"][step], out), step
        emulated.step(step, sizes)
    for each, (_, arena, trainer) in zip(found, emulated.shards, strict=True):
        mine = (arena.codes, arena.meta, *trainer.states, *arena.cache[:7])
        names = ("codes", "meta", "state", *Cache._fields)
        for name, one, other in zip(names, mine, each["end"], strict=False):
            assert np.array_equal(one.numpy(), other), name
    for each in found[1:]:
        assert all(np.array_equal(each["read"][name], found[0]["read"][name]) for name in TABLES)


def test_a_plan_with_slots_is_carried_out_as_it_predicts(on_ranks):
    heat = profile_batches(log(1, 0), batch=16, cards_per_node=2)
    tables = (
        TableConfig(name="item", rows=BIG, dim=16, pooling="none", precision="int8", cache=0.05),
        TableConfig(name="hour", rows=24, dim=8, precision="fp32"),
    )
    slow = {"node": {"bandwidth": 2e8, "latency": 0.0}, "cluster": {"bandwidth": 2e7, "latency": 0.0}}
    cluster = {"nodes": 2, "cards_per_node": 2, "card": {"memory": 1 << 30, "bandwidth": 1e10}, "links": slow}
    given = TablesConfig(batch=16, dense=2e-3, tables=tables)
    plan = tc.make_plan(given, heat, Topology.model_validate(cluster), "160KB")
    assert sum(tier.cached for tier in plan.table("item").tiers) == pytest.approx(0.05 * BIG, abs=1)
    assert plan.table("item").placement == "tiers" and plan.table("item").pooled_by == "asker"
    found = on_ranks("cache_ranks.planned", 4, plan, heat, list(log(1, 0))[:12])
    lines = {line.what: line for line in check_run(plan, found[0][0]).lines if line.kind == "memory"}
    for what, line in lines.items():
        if "buffers" not in what:
            assert line.measured == pytest.approx(line.predicted, rel=0.05, abs=700), str(line)
    rows = sum(each.bytes for each in found[0][0].traffic if each.direction == "rows" and each.link != "card")
    asked = sum(each.bytes for each in plan.traffic if each.direction == "rows" and each.link != "card")
    assert rows == pytest.approx(asked, rel=0.05)
    assert len({row for _, cached in found for row in cached["item"]}) == pytest.approx(0.05 * BIG, abs=8)


# -- migration ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seeds, nodes, cards, policy, heats",
    [((1, 2), 2, 2, "lfu", (3, 4)), ((6, 5), 1, 3, "fixed", (3, 4)), ((4, 7), 1, 2, "adaptive", (3, None))],
)
def test_a_row_is_rounded_only_if_it_leaves_its_slot(on_ranks, seeds, nodes, cards, policy, heats):
    profiles = [None if seed is None else heat_of(seed) for seed in heats]
    plans = [
        plan_of(nodes, cards, plan_with_slots(seed, nodes, cards).tables, heat)
        for seed, heat in zip(seeds, profiles, strict=True)
    ]
    if heats[1] is None:  # rows in one tier: which they are needs no heat
        tables = [with_slots(table_plan(name, 0, 0, "int8"), {3: (9, 0)}) for name in TABLES]
        plans[1] = plan_of(nodes, cards, tables)
    found = on_ranks("cache_ranks.moved", nodes * cards, plans, profiles, {"policy": policy}, 9)
    for name, (rows, dim, _) in TABLES.items():
        had, has = ({row for each in found for row in each[when][1][name]} for when in (0, 1))
        assert had and has
        arena = Arena([tc.TableSpec(rows, dim, "int8")])
        for before, after, _, clock in found:
            old, new = before[0][name], after[0][name]
            arena.write(0, torch.arange(rows), torch.from_numpy(old))
            left = sorted(had - has)
            assert np.array_equal(new[left], arena.read(0).numpy()[left])
            stay = [row for row in range(rows) if row not in had - has]
            assert np.array_equal(new[stay], old[stay])
            assert clock == [5, 18]


@pytest.mark.parametrize("what", ["values", "rows", "scores"])
def test_replicas_with_different_slots_are_found(on_ranks, what):
    tables = [with_slots(table_plan(name, 9, 0, "int8"), {1: (4, 0)}) for name in TABLES]
    for error in on_ranks("cache_ranks.differ", 2, plan_of(1, 2, tables, HEAT), HEAT, what):
        assert (error.what, error.first, error.ranks) == ("tier 1 of table 'user'", 0, [1])


def test_slots_are_those_of_the_plan_and_go_to_the_hottest_rows(on_ranks):
    tables = [with_slots(table_plan(name, 6, 8, "int4"), {1: (3, 2), 2: (3, 1), 3: (4, 3)}) for name in TABLES]
    plan = plan_of(2, 2, tables, HEAT)
    slots = {1: (3, 2), 2: (2, 1), 3: (1, 1)}  # of one card: a node's, or those of all, divided and rounded up
    for each in on_ranks("cache_ranks.train", 4, plan, HEAT, {"precision": "int4"}, 0):
        full = sum(slots[tier][0] * 4 * dim for tier in slots for _, dim, _ in TABLES.values())
        near = sum(slots[tier][1] * 4 * F.int8_slot_words(dim) for tier in slots for _, dim, _ in TABLES.values())
        assert full + near <= each["memory"]["cache"] < full + near + 200  # values of slots begin at multiples of the dimension
        hottest = HEAT.tables["user"].ids_H[:5].tolist()
        assert set(hottest) <= set(each["cached"]["user"])
    assert set(FEATURES) == set(HEAT.tables)
