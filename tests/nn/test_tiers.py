"""Precision by heat inside one table, as modules see it."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thermocline as tc
from support import has, mentions, module_arguments
from thermocline import formats as F
from thermocline.nn.precision_tiers import LADDER, Tiers, fit, read_tiers
from thermocline.rows.cache import SLOT_BYTES

OPTIMIZERS = [tc.SGD(lr=0.1), tc.RowwiseAdagrad(lr=0.1), tc.Adam(lr=0.1)]
THREE = {"fp32": 0.02, "int8": 0.1, "int2": 0.88}


def ids_of(rows: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Small ids often."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) ** 3 * rows).long()


def bag(rows: int = 301, dim: int = 6, precision: Any = THREE, **keywords: Any) -> tc.EmbeddingBag:
    torch.manual_seed(0)
    return tc.EmbeddingBag(rows, dim, mode="sum", **module_arguments(precision=precision, **keywords))


def train(module: tc.EmbeddingBag, steps: int = 8, seed: int = 0) -> None:
    for step in range(steps):
        (module(ids_of(module.num_embeddings, (20, 3), seed + step)) ** 2).sum().backward()


def equal(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def near_rows(module: Any) -> Tensor:
    return ((module.arena.meta < 0) & (module.arena.meta & F.INT8_SLOT != 0)).nonzero()[:, 0]


# -- what a dict means --


@pytest.mark.parametrize(
    "given, tiers",
    [
        ({"fp32": 0.01, "int8": 0.05, "int2": 0.94}, Tiers("int2", 0.01, 0.05)),
        ({"int4": 0.9, "int8": 0.1}, Tiers("int4", 0.0, 0.1)),
        ({"fp32": 0.05, "int8": 0.95}, Tiers("int8", 0.05)),
        ({"fp32": 0.0, "int4": 1}, Tiers("int4")),
    ],
)
def test_a_dict_is_a_base_and_shares_above_it(given: dict[str, float], tiers: Tiers) -> None:
    assert read_tiers(given) == tiers


@pytest.mark.parametrize(
    "keywords, parameter",
    [
        ({"precision": {"fp32": 0.5, "int4": 0.4}}, "precision"),
        ({"precision": {"fp32": -0.5, "int4": 1.5}}, "precision"),
        ({"precision": {"fp32": 0.5, "int7": 0.5}}, "precision"),
        ({"precision": {"fp32": 1.0}}, "precision"),
        ({"precision": {"int4": 0.5, "int2": 0.5}}, "precision"),
        ({"precision": {"fp16": 0.1, "int8": 0.9}}, "precision"),
        ({"precision": {}}, "precision"),
        ({"precision": THREE, "cache": 0.05}, "cache"),
        ({"precision": "auto", "cache": 0.05, "budget": "1000B"}, "cache"),
        ({"precision": "auto"}, "budget"),
        ({"precision": "int8", "budget": "2GiB"}, "budget"),
        ({"precision": "auto", "budget": "much"}, "budget"),
        ({"precision": "auto", "budget": "1999B"}, "budget"),
    ],
)
def test_what_cannot_be_is_refused_by_name(keywords: dict[str, Any], parameter: str) -> None:
    with pytest.raises(tc.BadInput, check=has(parameter=parameter)):
        bag(**keywords)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_two_precisions_of_which_one_is_fp32_are_a_cache(update: str) -> None:
    tiered, cached = bag(precision={"fp32": 0.1, "int4": 0.9}, update=update), bag(precision="int4", cache=0.1, update=update)
    for module in (tiered, cached):
        train(module)
        module.fused_optimizer.step()
    assert equal(tiered, cached) and "cache_near" not in cached.state_dict()


# -- training --


def test_hot_rows_train_better_than_the_base_alone() -> None:
    """Rows are pulled to a target; what is left of the way is an error of rounding."""
    generator = torch.Generator().manual_seed(3)
    target, errors = torch.randn(301, 16, generator=generator), {}
    for name, precision in (("int2", {"int2": 1.0}), ("three", THREE), ("fp32", "fp32")):
        module = bag(dim=16, precision=precision, optimizer=tc.SGD(lr=0.05))
        for step in range(300):
            ids = ids_of(301, (40, 1), step)
            ((module(ids) - target[ids[:, 0]]) ** 2).sum().backward()
        errors[name] = (module.weight - target).square().mean(1).sqrt()
        if name == "three":
            assert module.stats()["promotions"] > 0
            near, full = near_rows(module), (module.arena.meta < F.CACHED + F.INT8_SLOT).nonzero()[:, 0]
    assert errors["three"][full].mean() < 0.01 * errors["int2"][full].mean() and len(full) == 6
    assert errors["three"][near].mean() < 0.25 * errors["int2"][near].mean() and len(near) == 30


def test_updates_at_the_step_give_the_same_bits() -> None:
    at_once, later = (bag(optimizer=tc.SGD(lr=0.1), update=update) for update in ("backward", "step"))
    for step in range(9):
        for module in (at_once, later):
            train(module, 1, seed=step)
            module.fused_optimizer.step()
            module.fused_optimizer.zero_grad()
    assert equal(at_once, later) and at_once.stats()["promotions"] > 0


def test_reading_sees_rows_wherever_they_live() -> None:
    module = bag()
    train(module)
    assert len(near_rows(module)) > 0
    everything, ids = module.weight, torch.arange(301)
    assert torch.equal(module.get_rows(ids), everything)
    assert torch.equal(module.eval()(ids[:, None]), everything)


def test_rows_that_are_set_are_rounded_where_they_live() -> None:
    module = bag()
    train(module)
    near = near_rows(module)
    full = ((module.arena.meta < 0) & (module.arena.meta & F.INT8_SLOT == 0)).nonzero()[:, 0]
    values = torch.randn(301, 6, generator=torch.Generator().manual_seed(1))
    module.set_rows(torch.arange(301), values)
    assert torch.equal(near_rows(module), near)
    error, largest = (module.weight - values).abs().amax(1), values.abs().amax(1)
    assert torch.equal(module.weight[full], values[full]) and len(full) > 0
    assert (error[near] <= 0.51 * largest[near] / 127).all() and (error[near] > 0).any()
    module.flush()
    assert module.arena.meta.min() >= 0
    extent = values.amax(1) - values.amin(1)
    assert ((module.weight - values).abs().amax(1) <= 0.5 * extent / 3 + largest / 64).all()


def test_a_flush_leaves_rows_of_the_base_and_an_empty_cache() -> None:
    module = bag()
    train(module)
    before, near = module.weight, near_rows(module)
    module.flush()
    assert module.arena.meta.min() >= 0 and (module.arena.cache[2] == F.EMPTY).all()
    after = module.weight
    assert (after[near] != before[near]).any()
    extent, largest = before.amax(1) - before.amin(1), before.abs().amax(1)
    assert ((after - before).abs().amax(1) <= 0.5 * extent / 3 + largest / 64).all()
    train(module)  # and on


# -- nn.Module --


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_copies_and_loaded_states_train_on_to_the_same_bits(optimizer: Any) -> None:
    module = bag(optimizer=optimizer)
    train(module)
    loaded, buffer = bag(optimizer=optimizer), io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    loaded.load_state_dict(torch.load(buffer))
    others = [copy.deepcopy(module), loaded]
    train(module, seed=50)
    for other in others:
        assert not equal(module, other)
        train(other, seed=50)
        assert equal(module, other)


def test_a_state_of_other_tiers_is_refused_and_a_plain_weight_is_not() -> None:
    module, other = bag(), bag(precision={"fp32": 0.12, "int2": 0.88})
    with pytest.raises(RuntimeError, check=mentions("36 slots for 6 int2, 30 of them near")):
        other.load_state_dict(module.state_dict())
    weight = torch.randn(301, 6)
    module.load_state_dict({"weight": weight})
    assert (module.weight - weight).abs().max() < 2


def test_a_state_with_the_same_slots_elsewhere_or_of_another_policy_is_refused() -> None:
    def pair(first: float, second: float, policy: str = "lfu") -> tc.EmbeddingCollection:
        tables = [tc.Table("a", 200, 8, row_config=tc.RowConfig({"fp32": first, "int8": 1 - first}))]
        tables += [tc.Table("b", 200, 8, row_config=tc.RowConfig({"fp32": second, "int4": 1 - second}))]
        return tc.EmbeddingCollection(tables, rows=tc.RowConfig(policy=policy))

    saved = pair(0.1, 0.2).state_dict()
    pair(0.1, 0.2).load_state_dict(saved)
    with pytest.raises(RuntimeError, check=mentions("20 slots for 8 int8")):
        pair(0.2, 0.1).load_state_dict(saved)
    with pytest.raises(RuntimeError, check=mentions("lfu", "lru")):
        pair(0.1, 0.2, "lru").load_state_dict(saved)


def test_a_refused_state_changes_nothing() -> None:
    module, other = bag(), bag()
    train(other)
    state, before = other.state_dict(), module.weight
    state["cache_ledger"] = state["cache_ledger"][:, :-1]
    with pytest.raises(RuntimeError, check=mentions("cache_ledger")):
        module.load_state_dict(state)
    assert torch.equal(module.weight, before)


def test_casts_never_change_stored_rows() -> None:
    module = bag()
    train(module)
    ids_R = torch.arange(module.num_embeddings)
    before = module.get_rows(ids_R)
    assert torch.equal(module.bfloat16().get_rows(ids_R), before) and torch.equal(module.double().get_rows(ids_R), before)
    assert module(torch.zeros(1, 1, dtype=torch.int64)).dtype == torch.float64


def test_memory_is_what_the_shares_say() -> None:
    rows, dim = 100_000, 64
    module = bag(rows, dim, {"fp32": 0.01, "int8": 0.05, "int2": 0.94}, optimizer=tc.RowwiseAdagrad(lr=0.02))
    parts, memory = module.memory().parts, module.memory()
    assert parts["codes"] == rows * 16 and parts["metadata"] == rows * 4
    assert parts["cache"] == 1000 * 4 * dim + 5000 * (dim + 4)
    assert parts["maps"] == pytest.approx(6000 * SLOT_BYTES, abs=200)
    assert memory.ratio >= 9.1 and memory.ratio_with_state >= 8.1


def test_the_module_says_what_it_is() -> None:
    assert "precision={'fp32': 0.02, 'int8': 0.1, 'int2': 0.88}, optimizer" in repr(bag())
    assert "precision='int8', cache=0.05" in repr(bag(precision="int8"))
    assert "precision='auto' (int" in repr(bag(precision="auto", budget="4000B"))


# -- auto --


def test_every_rung_is_smaller_than_the_one_before() -> None:
    for dim in (16, 64, 256):
        sizes = [bag(5000, dim, "fp32").memory().fp32]
        for rung in LADDER[1:]:
            memory = bag(5000, dim, {"fp32": rung.full, "int8": rung.near} | {rung.base: 1 - rung.full - rung.near}).memory()
            sizes.append(memory.total - memory.parts["optimizer state"])
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("budget", [1_300_000, 900_000, 420_000, "300KiB", 230_000, 200_000, 150_000, 115_000])
def test_auto_fills_its_budget_and_never_passes_it(budget: int | str) -> None:
    module = bag(5000, 64, "auto", budget=budget if isinstance(budget, str) else f"{budget}B")
    memory = module.memory()
    used, asked = memory.total - memory.parts["optimizer state"], 300 << 10 if isinstance(budget, str) else budget
    assert used <= asked
    assert used > asked - 2000 or module.tiers[0] == Tiers("fp32")
    train(module, 2)


def test_auto_takes_the_best_that_fits() -> None:
    assert fit([(5000, 64)], 2_000_000) == Tiers("fp32")
    assert [fit([(5000, 64)], 5000 * size).base for size in (100, 60, 42, 30, 23)] == ["int8", "int4", "int4", "int2", "int2"]
    tiers = fit([(5000, 64)], 5000 * 60)
    assert tiers.near == pytest.approx(5 * tiers.full) and tiers.full > 0.01


def test_a_budget_is_for_all_tables_and_counts_those_that_are_not_auto() -> None:
    tables = [
        tc.Table("a", 4000, 64),
        tc.Table("b", 900, 16),
        tc.Table("c", 500, 64, row_config=tc.RowConfig("int8")),
        tc.Table("d", 90, 8),
    ]
    module = tc.EmbeddingCollection(tables, rows=tc.RowConfig("auto", budget="260000B"))
    memory = module.memory()
    assert 250_000 < memory.total - memory.parts["optimizer state"] <= 260_000
    assert module.tiers[2] == Tiers("int8", 0.05) and len({module.tiers[n] for n in (0, 1, 3)}) == 1


def test_a_budget_is_for_all_that_convert_replaces() -> None:
    skipped, tiny = nn.Embedding(50, 8, max_norm=1), nn.Embedding(3, 2)
    model = nn.ModuleDict({"a": nn.Embedding(4000, 64), "b": nn.EmbeddingBag(900, 16), "c": skipped, "d": tiny})
    report = tc.convert_(model, tc.RowConfig("auto", budget="250KiB"))
    assert [bool(t.skipped) for t in report.tables] == [False, False, True, False]
    assert 250_000 < sum(t.bytes_after for t in report.tables if not t.skipped) <= 256_000
    assert model["a"].tiers == model["b"].tiers == model["d"].tiers
    with pytest.raises(tc.BadInput, check=has(parameter="budget")):
        tc.convert_(nn.ModuleDict({"a": nn.Embedding(40, 6)}), tc.RowConfig("auto"))


def test_convert_takes_a_dict() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(400, 6)})
    before = model["a"].weight.detach().clone()
    tc.convert_(model, tc.RowConfig(THREE))
    assert model["a"].tiers == (Tiers("int2", 0.02, 0.1),) and (model["a"].weight - before).abs().max() < 1.5


def test_tables_of_a_collection_have_tiers_of_their_own() -> None:
    tables = [
        tc.Table("a", 400, 6, row_config=tc.RowConfig(THREE)),
        tc.Table("b", 200, 6),
        tc.Table("c", 300, 6, row_config=tc.RowConfig({"int8": 0.1, "int4": 0.9})),
    ]
    module = tc.EmbeddingCollection(tables, rows=tc.RowConfig("int8", cache=0.05))
    pools = {F.NAMES[p.format]: (p.fp32_slots, p.int8_slots) for p in module.arena.pools}
    assert pools == {"int8": (10, 0), "int4": (0, 30), "int2": (8, 40)}
    for line in ("a: 400 x 6 int2 + 0.02 fp32 + 0.1 int8\n", "b: 200 x 6 int8 + 0.05 fp32\n", "c: 300 x 6 int4 + 0.1 int8\n"):
        assert line in repr(module)
    for step in range(5):
        ids = torch.cat([ids_of(rows, (40, 1), step) for rows in (400, 200, 300)], dim=1)
        out = module(ids)
        for n, name in enumerate("abc"):
            assert torch.equal(out[name], module.get_rows(name, ids[:, n]))
        out.values().square().sum().backward()


# -- heat --


def test_a_warm_cache_begins_with_the_hottest_rows() -> None:
    module, heat = bag(), torch.zeros(301)
    heat[100:140] = torch.arange(40.0, 0, -1)
    before = module.weight
    module.warm(heat)
    meta = module.arena.meta
    assert (meta[100:106] < F.CACHED + F.INT8_SLOT).all() and torch.equal(near_rows(module), torch.arange(106, 136))
    assert (module.weight - before).abs().max() <= 0.51 * before.abs().max() / 127
    (module(torch.tensor([[100], [135], [3]])) ** 2).sum().backward()
    assert module.stats()["hits"] == 2 and module.arena.meta[3] >= 0  # one lookup drives nobody out
    assert module.stats()["admissions"] == 36
    module.flush()
    assert module.stats()["evictions"] == 36
    assert torch.equal(module.weight[101:135], before[101:135])  # those that were not updated leave as they came


def test_rows_set_after_warming_are_set_in_the_precision_of_their_slots() -> None:
    module, heat, weight = bag(), torch.zeros(301), torch.randn(301, 6, generator=torch.Generator().manual_seed(2))
    heat[200:236] = torch.arange(36.0, 0, -1)
    module.warm(heat)
    module.load_state_dict({"weight": weight})
    error = (module.weight - weight).abs().amax(1)
    assert (error[200:206] == 0).all()
    assert (error[206:236] <= 0.51 * weight[206:236].abs().amax(1) / 127).all() and error[:200].mean() > 0.2
    torch.manual_seed(5)
    module.reset_parameters()
    torch.manual_seed(5)
    assert torch.equal(module.weight[200:206], nn.EmbeddingBag(301, 6).weight[200:206])


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_warm_works_for_plain_caches_and_collections(policy: str) -> None:
    tables = [tc.Table("a", 100, 4), tc.Table("b", 60, 4)]
    module = tc.EmbeddingCollection(tables, rows=tc.RowConfig("int8", cache=0.05, policy=policy))
    with pytest.raises(tc.BadInput, check=has(missing=["a"])):
        module.warm({"b": torch.ones(60)})
    module.warm({"a": torch.zeros(100), "b": 1e9 * torch.arange(60)})
    assert (module.arena.cache[2] != F.EMPTY).all() and module.arena.cache[3].min() >= 0
    rows = module.arena.cache[2].sort()[0]
    assert torch.equal(rows, module.arena.layout.tables.features[1][F.ROW] + torch.arange(52, 60))
    with pytest.raises(tc.BadInput, check=has(parameter="heat", table="b", needed=60)):
        module.warm({"a": torch.zeros(100), "b": torch.ones(59)})
    with pytest.raises(tc.BadInput, check=has(table="d")):
        module.warm({"d": torch.ones(59)})


def test_warm_rows_that_cool_down_give_way() -> None:
    module = bag(precision={"int8": 0.02, "int4": 0.98})
    module.warm(1e6 * (torch.arange(301) >= 290))
    for _ in range(60):
        module(torch.arange(6).repeat(4, 1)).sum().backward()
    assert set(range(6)) <= set(near_rows(module).tolist())


def test_hits_far_below_what_heat_predicts_are_told() -> None:
    module, heat = bag(), torch.zeros(301)
    heat[:36] = 1.0
    module.warm(heat)
    for _ in range(20):  # as predicted: the rows that were hot are looked up
        module(torch.arange(36).repeat(4, 1)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = module.stats()
    assert found["predicted_hits"] == found["hits"] == found["lookups"]
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        module(torch.randint(301, (4, 36), generator=generator)).sum().backward()
    with pytest.warns(UserWarning, match=r"%.*warm\(\).*%"):
        module.stats()
