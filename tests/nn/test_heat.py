"""Heat profiles into modules, and out of modules that have trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thermocline as tc
from support import has, mentions
from thermocline import formats as F
from thermocline.heat import HeatProfile, merge
from thermocline.heat.profile import TableHeat
from thermocline.heat.profiler import profile_batches

IDS = np.repeat([17, 3, 250, 9], [40, 30, 20, 10])


def cached(module, table=0):
    """Rows of a table that are in slots."""
    rows = module.arena.cache[2]
    first = module.arena.layout.tables.features[table][F.ROW]
    return sorted((rows[rows != F.EMPTY] & ~F.DIRTY).sub(first).tolist())


@pytest.mark.parametrize("form", ["table", "profile", "path", "text"])
def test_one_table_is_warmed_by_any_form_of_a_profile(tmp_path, form):
    profile = profile_batches([{"item": IDS}])
    profile.save(tmp_path / "heat.tc")
    forms = {"table": profile["item"], "profile": profile, "path": tmp_path / "heat.tc", "text": str(tmp_path / "heat.tc")}
    module, other = (tc.EmbeddingBag(301, 4, rows=tc.RowConfig("int8", cache=3 / 301)) for _ in range(2))
    module.warm(forms[form])
    other.warm(torch.bincount(torch.from_numpy(IDS), minlength=301))
    assert cached(module) == [3, 17, 250]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(module.arena.cache[2:4], other.arena.cache[2:4], strict=True))


def test_a_collection_is_warmed_by_feature_or_by_table_through_its_id_maps():
    hashed, kept = tc.IdMap.hashed(50, salt=3), tc.IdMap.pruned([10**12, 5], fallback=2)
    tables = [
        tc.Table("user", 50, 4, ids=hashed),
        tc.Table("item", 300, 4, features=["clicked", "seen"]),
        tc.Table("shop", 4, 4, features=["at"], ids=kept),
    ]
    module = tc.EmbeddingCollection(tables, rows=tc.RowConfig("int8", cache=8 / 354))
    users, items = np.array([10**15, -4, 10**15, 8]), np.array([17, 3, 17, 17])
    shops = np.array([10**12, 10**12, 6, 7])
    module.warm(profile_batches([{"user": users, "clicked": items, "seen": items[::-1] + 1, "shop": shops}]))
    assert cached(module, 0) != []
    held = module.arena.meta < 0
    first = [field[F.ROW] for field in module.arena.layout.tables.features]
    assert set(hashed(torch.tensor([10**15])).tolist()) <= set((held[first[0] : first[0] + 50]).nonzero()[:, 0].tolist())
    assert {17, 18} <= set((held[first[1] : first[1] + 300]).nonzero()[:, 0].tolist())
    assert held[first[3] + kept(torch.tensor([10**12]))].all()


def test_a_sketched_table_warms_with_heavy_hitters_and_predicts_at_most_their_share():
    whole = profile_batches([{"item": IDS}])["item"]
    parts = {name: getattr(whole, name) for name in ("samples", "lookups", "lengths_L", "bags_L")}
    heat = TableHeat("item", distinct=4, exact=False, ids_H=whole.ids_H[:2], counts_H=whole.counts_H[:2], slack=20,
                     registers=np.zeros(1 << 14, np.uint8), **parts)  # fmt: skip
    module = tc.EmbeddingBag(301, 4, rows=tc.RowConfig("int8", cache=2 / 301))
    module.warm(heat)
    assert cached(module) == [3, 17]
    assert module.arena.predicted[0] == pytest.approx(0.7, abs=0.01)


def test_heat_that_does_not_fit_is_refused_with_the_way_out(tmp_path):
    module = tc.EmbeddingBag(100, 4, rows=tc.RowConfig("int8", cache=0.1))
    with pytest.raises(tc.BadInput, check=has(table="item", value=250, available=100)):
        module.warm(profile_batches([{"item": IDS}]))
    with pytest.raises(tc.BadInput, check=has(parameter="heat", available=("a", "b"))):
        module.warm(profile_batches([{"a": IDS, "b": IDS}]))
    with pytest.raises(tc.BadInput, check=mentions("none.tc")):
        module.warm(tmp_path / "none.tc")
    with pytest.raises(tc.BadInput, check=has(parameter="heat", value="list")):
        module.warm([1] * 100)
    tables = [tc.Table("a", 300, 4, ["x", "y"], ids={"x": tc.IdMap.hashed(9)})]
    collection = tc.EmbeddingCollection(tables, rows=tc.RowConfig("int8", cache=0.1))
    for name in ("b", "a"):  # by the table's name one could not tell which map its ids go through
        with pytest.raises(tc.BadInput, check=has(table="a", needed=("x", "y"), available=(name,))):
            collection.warm(profile_batches([{name: IDS}]))


def train(module, steps, seed=0, rows=301):
    random = np.random.default_rng(seed)
    ids = torch.from_numpy(random.zipf(1.5, (steps, 64, 2)) % rows)
    for ids_BN in ids:
        module(ids_BN).square().sum().backward()
    return ids


@pytest.mark.parametrize("policy", ["lfu", "adaptive"])
@pytest.mark.parametrize("optimizer", [tc.RowwiseAdagrad(lr=0.01), tc.Adagrad(lr=0.01), tc.SGD(lr=0.01)])
def test_a_module_that_has_trained_tells_what_its_cache_knows(policy, optimizer):
    module = tc.EmbeddingBag(301, 4, mode="sum", rows=tc.RowConfig("int8", cache=0.1, policy=policy, optimizer=optimizer))
    ids = train(module, 20)
    profile = module.heat()
    (heat,) = profile.tables.values()
    true = torch.bincount(ids.flatten(), minlength=301).double()
    hottest = true.argsort(descending=True)[:5].tolist()
    assert not heat.exact and set(hottest) <= set(heat.ids_H[:10].tolist())
    share = true[heat.ids_H].sum() / true.sum()
    assert heat.counts_H.sum() / heat.lookups == pytest.approx(float(share), abs=0.15)
    assert heat.distinct == (301 if isinstance(optimizer, tc.SGD) else int((true > 0).sum()))
    assert heat.curve().rows == heat.distinct and heat.samples == 0 and heat.per_sample == 1.0


def test_live_heat_of_several_tables_is_merged_saved_and_warms_another_module(tmp_path):
    tables = [tc.Table("a", 200, 4), tc.Table("b", 101, 4), tc.Table("c", 64, 8, row_config=tc.RowConfig("fp32"))]
    module = tc.EmbeddingCollection(tables, rows=tc.RowConfig("int8", cache=0.1))
    random = np.random.default_rng(1)
    for _ in range(15):
        ids_BF = torch.from_numpy(random.zipf(1.5, (64, 3)) % 64)
        module(ids_BF).values().square().sum().backward()
    heat = module.heat()
    assert list(heat.tables) == ["a", "b", "c"] and len(heat["c"].ids_H) == 0 and 1 in heat["a"].ids_H[:3]
    merge([heat, heat]).save(tmp_path / "heat.tc")
    back = HeatProfile.load(tmp_path / "heat.tc")
    assert back["a"].lookups == 2 * heat["a"].lookups
    module.warm(back)
    assert len(cached(module)) > 0


def test_modules_that_count_nothing_say_so():
    with pytest.raises(tc.BadInput, check=has(parameter="cache")):
        tc.EmbeddingBag(30, 4, rows=tc.RowConfig(cache=0.0)).heat()
    with pytest.raises(tc.BadInput, check=has(parameter="policy", value="lru")):
        tc.EmbeddingBag(300, 4, rows=tc.RowConfig(cache=0.1, policy="lru")).heat()
