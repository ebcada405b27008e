"""Plans and heat files made into id maps: the hottest ids have rows of their own, features their part of a unified table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thermocline
from support import has
from thermocline.distributed import id_maps
from thermocline.heat.profiler import profile_batches
from thermocline.plan.cost.heat_input import hottest_ids
from thermocline.plan.make import make_plan
from thermocline.plan.tables import TablesConfig

FAR = 1 << 41  # ids of items are raw and sparse


def log(seed=0):
    random = np.random.default_rng(seed)
    for _ in range(10):
        yield {
            "item": random.zipf(1.3, 511) % 997 * FAR - 5,
            "history": random.zipf(1.3, 511) % 997 * FAR - 5,
            "user": random.zipf(1.1, 511) % 7001,
            "hour": random.integers(0, 24, 511),
        }


HEAT = profile_batches(log())
TABLES = TablesConfig.model_validate(
    {
        "batch": 64,
        "tables": [
            {"name": "item", "rows": 1000, "dim": 16, "features": ["item", "history"]},
            {"name": "user", "rows": 7001, "dim": 16},
            {"name": "hour", "rows": 24, "dim": 16},
        ],
    }
)


def plan_of(**levers):
    return make_plan(TABLES, HEAT, "laptop", **levers)


def test_the_hottest_ids_have_rows_of_their_own_and_others_share_one():
    table = plan_of(prune=2).table("item")
    (lever,) = table.levers
    map = id_maps(table, HEAT)["history"]
    ids_H, counts_H = hottest_ids(HEAT, ("item", "history"))
    assert counts_H[lever.kept - 1] > 2 >= counts_H[lever.kept] and map.rows == table.rows == lever.kept + 1
    rows_H = map(torch.from_numpy(ids_H))
    assert sorted(rows_H[: lever.kept].tolist()) == list(range(lever.kept))
    assert rows_H[lever.kept :].unique().tolist() == [lever.kept] and map(torch.tensor([17])).tolist() == [lever.kept]
    assert map.bytes == lever.map


@pytest.mark.parametrize("share", [0.5, 0.125])
def test_hash_sizes_are_the_rows_and_the_bytes_of_the_maps(share):
    plan = plan_of(hash=share)
    for table in plan.tables:
        maps = id_maps(table, HEAT)
        assert set(maps) == set(table.features)
        for map in maps.values():
            assert map.rows == table.rows and map.bytes == (table.levers[-1].map if table.levers else 0)


def test_a_unified_table_is_the_one_that_collections_make_of_the_same_maps():
    levers = {"prune": 1, "hash": 0.2}
    apart, joined = plan_of(**levers), plan_of(**levers, unify=7001)
    (one,) = joined.tables
    parts = [
        thermocline.Table(table.name, table.rows, table.dim, table.features, ids=id_maps(table, HEAT)) for table in apart.tables
    ]
    expected = thermocline.unify("all", parts)
    assert one.rows == expected.rows and id_maps(one, HEAT) == expected.ids


def test_tables_without_levers_take_ids_for_rows():
    assert id_maps(plan_of().table("user")) == {"user": thermocline.IdMap.identity(7001)}


def test_ids_that_are_more_than_rows_are_hashed_with_a_salt_of_the_table():
    tables = TABLES.model_copy(update={"tables": (TABLES.tables[0].model_copy(update={"rows": 100}),)})
    table = make_plan(tables, HEAT, "laptop").tables[0]
    assert id_maps(table)["item"] == thermocline.IdMap.hashed(100, table.levers[0].salt) and table.levers[0].salt


def test_kept_ids_need_the_heat_file_of_the_plan():
    table = plan_of(prune=0).table("user")
    with pytest.raises(thermocline.BadInput, check=has(parameter="heat")):
        id_maps(table)
    with pytest.raises(thermocline.BadInput, check=has(parameter="heat", available=9)):
        id_maps(table, profile_batches([{"user": np.arange(9)}]))
