"""Where rows lie: the maps against plain numpy, and against the placement that the planner balances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import TABLES, heat_of, table_plan

from thermocline.distributed.placement import row_index as row_index_module
from thermocline.distributed.placement.row_index import RowIndex
from thermocline.distributed.placement.table_map import make_maps, scatter
from thermocline.ids.idmap import IdMap
from thermocline.kernels.exchange import cpu, gpu
from thermocline.kernels.gpu.launch import INTERPRETED
from thermocline.kernels.ids.bitmap import RankBitmap
from thermocline.plan import balance

CPU = torch.device("cpu")
IDS = {feature: IdMap.identity(rows) for rows, _, features in TABLES.values() for feature in features}


@pytest.mark.parametrize("rows", [1, 63, 64, 511, 512, 513, 5000])
def test_a_bitmap_tells_members_and_how_many_are_below(rows):
    rng = np.random.default_rng(rows)
    members = np.flatnonzero(rng.random(rows) < 0.4)
    inside, below = RankBitmap(rows, members, CPU).rank(torch.arange(rows))
    flags = np.isin(np.arange(rows), members)
    assert np.array_equal(inside.numpy(), flags)
    assert np.array_equal(below.numpy(), np.cumsum(flags) - flags)


def test_a_bitmap_takes_little_more_than_a_bit_a_row():
    assert RankBitmap(1 << 20, np.arange(5), CPU).bytes * 8 / (1 << 20) == 1.0625


@pytest.mark.parametrize("count", [1, 2, 7, 64, 1000, 4097])
def test_the_bijection_is_the_planners(count):
    assert np.array_equal(scatter(torch.arange(count), count).numpy(), balance.scatter(np.arange(count), count))


@pytest.mark.parametrize("nodes, cards", [(1, 1), (2, 2), (3, 1), (1, 5)])
@pytest.mark.parametrize("first, second", [(0, 0), (61, 0), (0, 61), (7, 0), (0, 7), (7, 9), (20, 41)])
def test_every_row_has_one_home_and_replicas_have_equal_indices(nodes, cards, first, second):
    heat, rows = heat_of(), torch.arange(61)
    plan = table_plan("item", first, second, "int8")
    found = make_maps([plan], heat, IDS, nodes, cards, CPU)[0]
    tier, home, place = found.locate(rows)
    assert [int((tier == n).sum()) for n in (1, 2, 3)] == [first, second, 61 - first - second]
    assert bool(((home >= 0) & (home < nodes * cards)).all())
    for n in (1, 2, 3):
        mine = tier == n
        if mine.any():
            where = {1: place, 2: (home % cards) * 1000 + place, 3: home * 1000 + place}[n][mine]
            assert len(set(where.tolist())) == int(mine.sum())  # no two rows in one place
            assert int(place[mine].max()) < found.local_rows(n)


def test_hot_rows_are_those_of_the_heat_file_with_ties_by_number():
    heat = heat_of()
    counts = np.zeros(61, np.int64)
    for feature in ("item", "history"):
        np.add.at(counts, heat[feature].ids_H, heat[feature].counts_H)
    order = np.lexsort((np.arange(61), -counts))
    tier = make_maps([table_plan("item", 9, 50, "int8")], heat, IDS, 2, 2, CPU)[0].locate(torch.arange(61))[0].numpy()
    assert set(np.flatnonzero(tier == 1)) == set(order[:9]) and set(np.flatnonzero(tier == 3)) == set(order[59:])


def test_owners_of_cold_rows_are_those_that_the_planner_balances():
    heat = heat_of()
    plan = table_plan("user", 10, 5, "int8")
    seen = heat["user"]
    work = balance.PlacementInput(97, seen.ids_H, balance.request_probability(seen.counts_H, plan.lookups), 15)
    placement = balance.place([work], 6)[0][0]
    tier, home, place = make_maps([plan], heat, IDS, 2, 3, CPU)[0].locate(torch.arange(97))
    cold = np.flatnonzero(tier.numpy() == 3)
    owner, at = placement.owner_and_place(cold)
    assert np.array_equal(home.numpy()[cold], owner) and np.array_equal(place.numpy()[cold], at)


def test_heat_of_raw_ids_becomes_heat_of_rows_by_the_features_map():
    heat, hashed = heat_of(), IdMap.hashed(97, salt=3)
    hottest = int(hashed(torch.from_numpy(heat["user"].ids_H))[0])
    counts = np.bincount(hashed(torch.from_numpy(heat["user"].ids_H)).numpy(), heat["user"].counts_H, minlength=97)
    tier = make_maps([table_plan("user", 1, 0, "int8")], heat, {**IDS, "user": hashed}, 1, 2, CPU)[0].locate(torch.arange(97))[
        0
    ]
    assert (tier == 1).nonzero().tolist() == [[int(counts.argmax())]]
    assert counts[hottest] > 0


@pytest.mark.parametrize("nodes, cards", [(1, 1), (2, 2), (3, 1), (1, 5), (7, 43)])
@pytest.mark.parametrize("module", [cpu, gpu], ids=["cpu", "gpu"])
def test_the_kernel_locates_rows_as_the_maps_do(nodes, cards, module, monkeypatch):
    device = torch.device("cuda" if module is gpu and torch.cuda.is_available() and not INTERPRETED else "cpu")
    monkeypatch.setattr(row_index_module, "implementation_for", lambda *_: module)
    shares = {"user": [(0, 0), (97, 0), (0, 97), (13, 30)], "item": [(7, 9), (20, 41), (5, 0)], "shop": [(0, 0), (0, 3)]}
    for n in range(4):
        tiers = {name: each[n % len(each)] for name, each in shares.items()}
        plans = [table_plan(name, *tiers[name], "int8", card=0 if name == "shop" and n == 2 else None) for name in TABLES]
        row_index = RowIndex(plans, make_maps(plans, heat_of(), IDS, nodes, cards, device), nodes, cards, device)
        rows_N = torch.randint(row_index.rows, (500,), generator=torch.Generator().manual_seed(n)).to(device)
        for mine, theirs in zip(row_index.locate(rows_N), row_index.locate_by_table(rows_N), strict=True):
            assert torch.equal(mine, theirs)
