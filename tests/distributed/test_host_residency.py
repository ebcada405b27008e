"""Shards in host memory train what shards on the device train, and plans count host and device bytes apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import TABLES, Model, heat_of, plan_of, table_plan, with_slots
from device_side_ranks import device_side
from test_caches import log
from test_training import ALL_THIRD, TWO, check, tiers_plan

import thermocline as tc
from support import has
from thermocline import formats as F
from thermocline.heat.profiler import profile_batches
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.exchange import gpu
from thermocline.plan import TableConfig, TablesConfig
from thermocline.plan.run_file import check_run
from thermocline.plan.topology import Topology

BIG = 5003


def on_host(plan, *names):
    """The plan with tables in host memory; all of them without names."""
    tables = [t.model_copy(update={"residency": "host"}) if not names or t.name in names else t for t in plan.tables]
    return plan.model_copy(update={"tables": tuple(tables)})


@pytest.mark.parametrize("ahead", ["", "three, interrupted"])
def test_rows_in_host_memory_train_as_in_one_process(on_ranks, ahead):
    plan, heat = tiers_plan(2, 2, TWO, "int8", "node")
    check(on_ranks, plan, heat, {"precision": "int8", "exact": True, "ahead": ahead, "residency": "host"})


def test_a_plan_puts_rows_into_host_memory_without_a_change_of_the_model(on_ranks):
    plan, heat = tiers_plan(1, 3, ALL_THIRD, "int4")
    check(on_ranks, on_host(plan), heat, {"precision": "int4", "exact": True, "ahead": "three"})


def test_slots_on_the_device_serve_rows_in_host_memory(on_ranks):
    tables = [with_slots(table_plan(name, 0, 0, "int8"), {3: (9, 0)}) for name in TABLES]
    plan, heat = plan_of(1, 2, tables, heat_of()), heat_of()
    settings = {"precision": "int8", "policy": "adaptive", "ahead": "three"}
    found = on_ranks("cache_ranks.train", 2, on_host(plan), heat, settings, 20)
    wanted = on_ranks("cache_ranks.train", 2, plan, heat, settings, 20)
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(mine["end"], theirs["end"], strict=True))
        assert all(np.array_equal(mine["read"][name], theirs["read"][name]) for name in TABLES)


@pytest.mark.parametrize("exchange", ["flat", "node"])
def test_a_run_measures_what_a_plan_in_host_memory_predicts(on_ranks, exchange):
    heat = profile_batches(log(1, 0), batch=16, cards_per_node=2)
    tables = (
        TableConfig(name="item", rows=BIG, dim=16, pooling="none", precision="int8", cache=0.05, residency="host"),
        TableConfig(name="hour", rows=24, dim=8, precision="fp32", residency="host"),
    )
    slow = {
        "node": {"bandwidth": 2e8},
        "cluster": {"bandwidth": 2e7},
        "host": {"bandwidth": 1e8 if exchange == "flat" else 1e12},
    }
    cluster = {"nodes": 2, "cards_per_node": 2, "card": {"memory": 1 << 30, "bandwidth": 1e10}, "links": slow}
    topology = Topology.model_validate(cluster | {"host": {"memory": 1 << 30}})
    plan = tc.make_plan(TablesConfig(batch=16, dense=2e-3, tables=tables), heat, topology, "160KB")
    assert not plan.notes and {table.residency for table in plan.tables} == {"host"}
    assert all(tier.tier == 3 for table in plan.tables for tier in table.tiers)
    run = on_ranks("cache_ranks.planned", 4, plan, heat, list(log(1, 0))[:12])[0][0]
    lines = {(line.kind, line.what): line for line in check_run(plan, run).lines}
    for rank in range(4):
        assert run.ranks[rank].host == pytest.approx(plan.ranks[0].host, rel=0.05, abs=300)
        assert run.ranks[rank].bytes["tables"] < plan.ranks[0].host / 2
    for what in ("host: rows", "host: gradients"):
        line = lines["traffic", what]
        assert line.measured == pytest.approx(line.predicted, rel=0.06), str(line)


def test_bytes_over_the_host_link_are_those_of_uncached_rows():
    model = torch.nn.ModuleDict({"rows": tc.EmbeddingCollection([tc.Table("item", 61, 8)], rows=tc.RowConfig(cache=0.0))})
    table = table_plan("item", 7, 0, "int8", first_precision="int4", shape=(61, 8, ("item",)))
    plan = on_host(plan_of(1, 1, [table], heat_of()))
    sharding = tc.shard_(model, plan, heat_of())
    tables = sharding.collections["rows"]
    assert not tables.row_index.unsharded and tables.rows.residency == "host"
    ids = torch.arange(61).repeat(2)
    tables({"item": (ids, torch.arange(62) * 2)}).values().sum().backward()
    found = {(r.tier, r.direction): r.bytes for r in sharding.sent() if r.link == "host"}
    widths = {1: 7 * F.row_bytes(F.INT4, 8), 3: 54 * F.row_bytes(F.INT8, 8)}
    assert found == {(t, way): n * size for t, size in widths.items() for way, n in (("rows", 1), ("gradients", 2))}
    again = {(r.tier, r.direction): r.bytes for r in sharding.sent() if r.link == "host"}
    assert again == found, "counted once"


def test_a_module_with_tables_in_both_memories_is_refused():
    plan, heat = tiers_plan(1, 1, ALL_THIRD, "int8")
    with pytest.raises(tc.BadInput, check=has(parameter="residency", table="item", collection="tables")):
        tc.shard_(Model(), on_host(plan, "item"), heat)
    sharding = tc.shard_(Model(residency="host"), on_host(plan, "item"), heat)
    assert sharding.collections["tables"].rows.residency == "host"


def test_a_table_for_host_memory_needs_a_link_to_it():
    tables = TablesConfig(batch=16, tables=(TableConfig(name="item", rows=BIG, dim=16, residency="host"),))
    heat = profile_batches(log(1, 0), batch=16, cards_per_node=1)
    laptop = Topology.load("laptop")
    links = laptop.links.model_copy(update={"host": None})
    with pytest.raises(tc.BadInput, check=has(parameter="residency", table="item")):
        tc.make_plan(tables, heat, laptop.model_copy(update={"links": links}))


def test_rows_move_between_memories_with_a_plan(on_ranks):
    plan, heat = tiers_plan(1, 2, ALL_THIRD, "int8")
    for plans in ([on_host(plan), plan], [plan, on_host(plan)]):
        for places, rows, wanted in on_ranks("host_ranks.move", 2, plans, heat):
            assert places == [each.tables[0].residency.replace("card", "device") for each in plans]
            assert all(np.array_equal(one, other) for one, other in zip(rows, wanted, strict=True))


@pytest.mark.parametrize("there", ["host", "device"])
def test_a_checkpoint_of_rows_in_host_memory_continues_anywhere(on_ranks, tmp_path, there):
    plan, heat = tiers_plan(1, 2, ALL_THIRD, "int8")
    plans = [on_host(plan), on_host(plan) if there == "host" else plan]
    for saved, loaded, continued, further in on_ranks("host_ranks.save", 2, plans, heat, str(tmp_path / there)):
        for one, other in ((saved, loaded), (continued, further)):
            assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_kernels_launch_on_the_device_though_codes_are_on_the_host(monkeypatch):
    """A launch takes its device from its first tensor, which must not be the codes."""
    plan, heat = tiers_plan(1, 1, ALL_THIRD, "int8")
    first = []
    with device_side():
        sharding = tc.shard_(Model(residency="host"), plan, heat)
        shard = sharding.collections["tables"].shard
        monkeypatch.setattr(gpu, "launch", lambda kernel, programs, tensors, *rest, **more: first.append(tensors[0]))
        assert implementation_for("exchange", shard.arena.meta) is gpu
        where = shard.row_index.locate(torch.arange(10))
        shard.pack(where, None, torch.arange(10) * 16, torch.empty(200, dtype=torch.uint8))
    assert first and all(tensor.data_ptr() != shard.arena.codes.data_ptr() for tensor in first)
