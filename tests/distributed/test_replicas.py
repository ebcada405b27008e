"""Replicas of shard groups: gradients summed in every step equal one process; periodic syncs average rows as defined."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import TABLES, Model, batches, exact_loss, heat_of, joined, plan_of, sizes_of, table_plan, with_slots
from test_training import ALL_THIRD, MIXED, TWO, compare, tiers_plan

import thermocline as tc
from thermocline import formats as F
from thermocline.distributed.replicas import _SEED
from thermocline.kernels import dequantize_rows, quantize_rows

HEAT = heat_of()


@pytest.mark.parametrize(
    "nodes, cards, replicas, tiers, ahead",
    [(1, 2, 2, ALL_THIRD, ""), (1, 2, 2, MIXED, "three"), (2, 1, 3, TWO, "interrupted"), (2, 2, 2, TWO, "always")],
)
def test_gradients_summed_in_every_step_train_as_one_process(on_ranks, nodes, cards, replicas, tiers, ahead):
    plan, heat = tiers_plan(nodes, cards, tiers, "int8", "node" if nodes > 1 else "flat")
    settings, ranks = {"precision": "int8", "exact": True, "ahead": ahead}, nodes * cards * replicas
    found = on_ranks("train", ranks, plan, heat, settings | {"replicas": replicas}, 50)
    compare(found, ranks, settings)


@pytest.mark.parametrize("turned", [False, True])
def test_fp32_replicas_are_equal_bit_for_bit(on_ranks, turned):
    plan, heat = tiers_plan(1, 2, MIXED, "fp32")
    settings = {"precision": "fp32", "optimizer": tc.Adam(lr=0.01), "turned": turned}
    found = on_ranks("replica_ranks.train", 6, plan, heat, settings, 3, 1, 5)
    for rank, steps in enumerate(found):
        same_place = found[rank // 3 * 3 if turned else rank % 2]
        for mine, theirs in zip(steps, same_place, strict=True):
            assert all(np.array_equal(one, two) for one, two in zip(mine["held"], theirs["held"], strict=True))


@pytest.mark.parametrize("policy", ["lfu", "adaptive"])
def test_caches_of_replicas_that_sum_gradients_stay_equal(on_ranks, policy):
    tables = [with_slots(table_plan(name, 0, 0, "int8"), {3: (6, 0)}) for name in TABLES]
    plan = plan_of(1, 2, tables, HEAT)
    found = on_ranks("replica_ranks.train", 4, plan, HEAT, {"policy": policy, "ahead": "three"}, 2, 1, 12)
    for mine, theirs in zip(found[:2], found[2:], strict=True):
        assert all(np.array_equal(one, two) for one, two in zip(mine[-1]["held"], theirs[-1]["held"], strict=True))


def one_replica(replica, ranks, replicas, tables, step):
    """A step of one process on the batches of one replica."""
    sizes = sizes_of(step, ranks)
    each = ranks // replicas
    mine = range(replica * each, replica * each + each)
    parts = batches(step, sizes)
    exact_loss(tables(joined([parts[rank] for rank in mine])).values(), step, sum(sizes[: mine[0]])).backward()
    return [{int(row) for part in (parts[rank] for rank in mine) for f in t[2] for row in part[f][0]} for t in TABLES.values()]


def average(modules, updated, step):
    """The definition: means in fp64 in replica order, rounded to fp32, then to the precision by the bits of global rows."""
    first = 0
    clock = torch.tensor([modules[0].trainer.clock[F.SEED] ^ _SEED, step + 1])
    fields = modules[0].arena
    for index in range(len(TABLES)):
        rows = torch.tensor(sorted(updated[index]), dtype=torch.int64)
        _, _, first, format, dim = fields.views(index)
        total = sum(module.arena.read(index, rows).double() for module in modules)
        values = (total / len(modules)).float()
        codes, meta = quantize_rows(values, format, clock, rows + first)
        states = [m.arena.state_views(index, m.trainer.states, m.trainer.optimizer.states_per_row > 0) for m in modules]
        means = [(sum(s[n][rows].double() for s in states) / len(modules)).float() for n in range(len(states[0]))]
        for module, state in zip(modules, states, strict=True):
            module.arena.views(index)[0][rows], module.arena.views(index)[1][rows] = codes, meta
            for mine, mean in zip(state, means, strict=True):
                mine[rows] = mean
        assert torch.equal(dequantize_rows(codes, meta, format, dim), modules[0].arena.read(index, rows))


@pytest.mark.parametrize(
    "nodes, cards, replicas, tiers, precision, every",
    [(1, 2, 2, MIXED, "int8", 3), (2, 1, 3, ALL_THIRD, "int4", 2), (2, 2, 2, TWO, "fp32", 4)],
)
def test_rows_are_averaged_after_every_kth_update(on_ranks, nodes, cards, replicas, tiers, precision, every):
    plan, heat = tiers_plan(nodes, cards, tiers, precision)
    ranks, steps = nodes * cards * replicas, 2 * every + 1
    settings = {"precision": precision, "optimizer": tc.Adam(lr=2.0**-6) if precision == "int8" else tc.SGD(lr=2.0**-6)}
    found = on_ranks("replica_ranks.train", ranks, plan, heat, settings, replicas, every, steps)
    modules = [Model(**settings).tables for _ in range(replicas)]
    updated = [set() for _ in TABLES]
    apart = 0
    for step in range(steps):
        for replica, module in enumerate(modules):
            for mine, rows in zip(updated, one_replica(replica, ranks, replicas, module, step), strict=True):
                mine |= rows
        if (step + 1) % every == 0:
            average(modules, updated, step)
            updated = [set() for _ in TABLES]
        for rank, each in enumerate(found):
            wanted = [modules[rank * replicas // ranks].get_rows(name).numpy() for name in TABLES]
            assert all(np.array_equal(one, two) for one, two in zip(each[step]["rows"], wanted, strict=True)), (step, rank)
        apart += not np.array_equal(found[0][step]["rows"][0], found[-1][step]["rows"][0])
    assert apart >= steps - 2, "replicas differ between syncs, and only there"


def test_prefetched_batches_see_the_means(on_ranks):
    plan, heat = tiers_plan(1, 2, ALL_THIRD, "int8")
    found = [on_ranks("replica_ranks.train", 4, plan, heat, {"ahead": ahead}, 2, 3, 10) for ahead in ("", "three")]
    for plain, ahead in zip(*found, strict=True):
        assert all(np.array_equal(one, two) for one, two in zip(plain[-1]["held"], ahead[-1]["held"], strict=True))


@pytest.mark.parametrize("what", ["id", "gradient"])
def test_an_error_of_one_replica_is_an_error_of_all(on_ranks, what):
    told = on_ranks("replica_ranks.fail", 4, tiers_plan(1, 2, ALL_THIRD, "int8")[0], HEAT, what)
    assert all(each.startswith("1: ") and "2: " not in each for each in told), told
    if what == "id":
        assert "IdOutOfRange" in told[1] and all("another replica stopped" in each for each in told[2:]), told
    else:  # owners in all replicas refuse the sum
        assert all(any("BadGradient" in each for each in replica) for replica in (told[:2], told[2:])), told


@pytest.mark.parametrize(
    "what, parameter",
    [("shape", "mesh"), ("every", "sync_every"), ("differs", "sync_every"), ("no mesh", "sync_every"), ("cache", "sync_every")],
)
def test_meshes_that_do_not_fit_are_an_error_on_every_rank(on_ranks, what, parameter):
    tables = [with_slots(table_plan(name, 0, 0, "int8"), {3: (6, 0)}) for name in TABLES]
    assert on_ranks("replica_ranks.refuse", 6, plan_of(1, 3, tables, HEAT), HEAT, what) == [parameter] * 6


@pytest.mark.parametrize("every", [1, 3])
def test_a_save_averages_rows_first_and_all_replicas_load_it(on_ranks, tmp_path, every):
    plan, heat = tiers_plan(1, 2, ALL_THIRD, "int8")
    found = on_ranks("replica_ranks.save", 4, plan, heat, str(tmp_path / "saved"), every)
    for rows, loaded, changed in found:
        assert all(np.array_equal(one, two) for one, two in zip(rows, loaded, strict=True))
        assert all(np.array_equal(one, two) for one, two in zip(rows, found[0][0], strict=True))
        assert changed == (every > 1)


def test_a_rank_that_leaves_ends_all_replicas(on_ranks):
    told = on_ranks("replica_ranks.end", 4, tiers_plan(1, 2, ALL_THIRD, "int8")[0], HEAT)
    assert told[3] == "left" and set(told[:3]) <= {"ExchangeFailed", "BadInput"}, told
