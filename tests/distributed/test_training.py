"""Training on several ranks equals training in one process on the batches of all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import TABLES, Model, batches, exact_loss, heat_of, joined, plan_of, sizes_of, smooth_loss, table_plan
from ranks import interrupt, train_pairs, train_two, train_with_ddp

import thermocline as tc
from support import has

STEPS = 50
ALL_FIRST = {name: (rows, 0) for name, (rows, _, _) in TABLES.items()}
ALL_THIRD = dict.fromkeys(TABLES, (0, 0))
MIXED = {"user": (13, 0), "item": (61, 0), "shop": (5, 0)}
TWO = {"user": (13, 30), "item": (0, 61), "shop": (5, 11)}


def tiers_plan(nodes, cards, tiers, precision, exchange="flat"):
    heat = heat_of()
    return plan_of(nodes, cards, [table_plan(name, *tiers[name], precision, exchange) for name in TABLES], heat), heat


def one_process(ranks, settings):
    """The same training in one process."""
    given = {name: value for name, value in settings.items() if name not in ("dedup", "ahead")}
    loss = exact_loss if given.pop("exact") else smooth_loss
    model, outs = Model(**given), []
    for step in range(STEPS):
        batch = joined(batches(step, sizes_of(step, ranks)))
        out = model.tables(batch).values()
        outs.append(out.detach().clone().numpy())
        loss(out, step, 0).backward()
        if "interrupted" in settings.get("ahead", "") and step % 3 == 0:
            interrupt(model, step)
    return model.tables, outs


def check(on_ranks, plan, heat, settings, close=None):
    """Train in both ways; bit for bit the same rows and state, or rows that are close."""
    compare(on_ranks("train", plan.topology.world_size, plan, heat, settings, STEPS), plan.topology.world_size, settings, close)


def compare(found, ranks, settings, close=None, outs_close=None):
    """Compare ranks with training in one process. `outs_close`: bags are summed in another order."""
    whole, outs = one_process(ranks, settings)
    outs_close = outs_close or close
    for step, out in enumerate(outs):
        theirs = np.concatenate([each["outs"][step] for each in found])
        assert np.allclose(theirs, out, atol=outs_close) if outs_close else np.array_equal(theirs, out), step
    by_row = whole.trainer.optimizer.states_per_row > 0
    seen = [set() for _ in whole.tables]
    for each in found:
        for index, rows, parts in each["held"]:
            seen[index] |= set(rows.tolist())
            theirs = [*whole.arena.views(index)[:2], *whole.arena.state_views(index, whole.trainer.states, by_row)]
            for mine, other in zip(parts, theirs, strict=True):
                assert close or np.array_equal(mine, other.numpy()[rows])
        for table in whole.tables:
            difference = np.abs(each["read"][table.name] - whole.get_rows(table.name).numpy()).max()
            assert difference <= (close or 0.0)
    assert [len(rows) for rows in seen] == [table.rows for table in whole.tables]


@pytest.mark.parametrize(
    "cards, tiers", [(2, ALL_FIRST), (3, ALL_THIRD), (2, MIXED), (3, MIXED)], ids=["tier 1", "tier 3", "mixed", "mixed on 3"]
)
def test_int8_rows_equal_those_of_one_process_bit_for_bit(on_ranks, cards, tiers):
    check(on_ranks, *tiers_plan(1, cards, tiers, "int8"), {"precision": "int8", "exact": True})


def test_a_baseline_in_which_every_lookup_travels_trains_the_same_rows(on_ranks):
    check(on_ranks, *tiers_plan(1, 3, ALL_THIRD, "int8"), {"precision": "int8", "exact": True, "dedup": False})


@pytest.mark.parametrize("ahead", ["always", "three", "sometimes", "interrupted", "three, interrupted"])
@pytest.mark.parametrize("nodes, cards", [(2, 2), (1, 3)])
def test_prefetched_rows_change_no_bit(on_ranks, nodes, cards, ahead):
    exchanges, heat = {"user": "flat", "item": "node", "shop": "node"}, heat_of()
    tables = [table_plan(name, *TWO[name], "int8", exchanges[name]) for name in TABLES]
    check(on_ranks, plan_of(nodes, cards, tables, heat), heat, {"precision": "int8", "exact": True, "ahead": ahead})


@pytest.mark.parametrize("nodes, cards", [(2, 2), (3, 1), (1, 2)])
def test_replicas_per_node_and_requests_per_node_change_no_bit(on_ranks, nodes, cards):
    exchanges, heat = {"user": "flat", "item": "node", "shop": "node"}, heat_of()
    tables = [table_plan(name, *TWO[name], "int8", exchanges[name]) for name in TABLES]
    check(on_ranks, plan_of(nodes, cards, tables, heat), heat, {"precision": "int8", "exact": True})


@pytest.mark.parametrize("ahead", ["", "always"])
def test_gradients_that_go_between_nodes_in_pieces_change_no_bit(on_ranks, ahead):
    exchanges, heat = {"user": "flat", "item": "node", "shop": "node"}, heat_of()
    tables = [table_plan(name, *TWO[name], "int8", exchanges[name]) for name in TABLES]
    settings = {"precision": "int8", "exact": True, "ahead": ahead}
    found = on_ranks("train_with_large_messages", 4, plan_of(2, 2, tables, heat), heat, settings, STEPS)
    assert [pieces for _, pieces in found] == [STEPS] * 4
    compare([each for each, _ in found], 4, settings)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_tiers_and_whole_tables_on_a_card_change_no_bit(on_ranks, seed):
    rng = np.random.default_rng(seed)
    nodes, cards = [(2, 2), (1, 4), (4, 1), (1, 2), (2, 1)][rng.integers(5)]
    heat, tables = heat_of(), []
    whole = list(TABLES)[rng.integers(len(TABLES))]
    for name, (rows, _, _) in TABLES.items():
        first, second = sorted(rng.integers(0, rows + 1, 2))
        card = int(rng.integers(nodes * cards)) if name == whole else None
        tiers = (0, 0) if card is not None else (int(first), int(second - first))
        tables.append(table_plan(name, *tiers, "int4", ["flat", "node"][rng.integers(2)], card))
    settings = {"precision": "int4", "exact": True, "optimizer": tc.Adagrad(lr=0.25)}
    check(on_ranks, plan_of(nodes, cards, tables, heat), heat, settings)


@pytest.mark.parametrize("cards, tiers", [(3, ALL_FIRST), (2, ALL_THIRD)], ids=["tier 1", "tier 3"])
def test_fp32_rows_equal_one_process_up_to_the_order_of_sums(on_ranks, cards, tiers):
    settings = {"precision": "fp32", "exact": False, "optimizer": tc.Adam(lr=0.01)}
    check(on_ranks, *tiers_plan(1, cards, tiers, "fp32"), settings, close=2e-5)


def test_fp32_rows_in_all_tiers_on_two_nodes_equal_those_of_one_process(on_ranks):
    check(on_ranks, *tiers_plan(2, 1, TWO, "fp32", "node"), {"precision": "fp32", "exact": False}, close=2e-5)


@pytest.mark.parametrize("gradients", ["bf16", "int8"])
def test_the_hottest_rows_may_be_fp32_among_int8_rows_and_gradients_shorter(on_ranks, gradients):
    heat = heat_of()
    tables = [table_plan(name, *TWO[name], "int8", "node", first_precision="fp32") for name in TABLES]
    tables = [table.model_copy(update={"wire_gradients": gradients}) for table in tables]
    found = on_ranks("train", 4, plan_of(2, 2, tables, heat), heat, {"precision": "int8", "exact": True}, 5)
    for each in found[1:]:  # replicas were compared on the ranks; all read the same
        assert all(np.array_equal(each["read"][name], found[0]["read"][name]) for name in TABLES)


def test_dense_parts_in_ddp_and_means_as_losses_train_as_in_one_process(on_ranks):
    ranks = on_ranks("train_with_ddp", 2, *tiers_plan(1, 2, MIXED, "fp32"))
    one = train_with_ddp(0, 1, *tiers_plan(1, 1, MIXED, "fp32"))
    for found in ranks:
        for mine, theirs in zip([*found[0], *found[1]], [*one[0], *one[1]], strict=True):
            assert np.allclose(mine, theirs, atol=1e-6)


def test_two_collections_of_a_model_and_rows_that_are_not_pooled(on_ranks):
    one = train_two(0, 1, None, None)
    for found in on_ranks("train_two", 3, *tiers_plan(1, 3, MIXED, "int8")):
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found, one, strict=True))


def test_two_lookups_of_one_pass_are_one_step_on_ranks_too(on_ranks):
    rows, steps = train_pairs(0, 1, None, None)
    for found, ticks in on_ranks("train_pairs", 3, *tiers_plan(1, 3, MIXED, "int8")):
        assert ticks == steps == 10
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found, rows, strict=True))


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "none"])
def test_one_process_gives_what_the_collection_gave(mode):
    plan, heat = tiers_plan(1, 1, {name: (5, 0) for name in TABLES}, "int8")
    model, whole = Model(mode=mode), Model(mode=mode)
    tc.shard_(model, plan, heat)
    for step in range(3):
        batch = joined(batches(step, [5, 3]))
        mine, theirs = model.tables(batch), whole.tables(batch)
        assert mine.keys() == theirs.keys() and type(mine) is type(theirs)
        assert torch.equal(mine.values(), theirs.values())
        exact_loss(mine.values(), step, 0).backward()
        exact_loss(theirs.values(), step, 0).backward()
    for name in TABLES:
        assert torch.allclose(model.tables.get_rows(name), whole.tables.get_rows(name), atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_get_the_same_gradient(frozen):
    plan, heat = tiers_plan(1, 1, ALL_THIRD, "int8")
    model, whole = Model(), Model()
    model.requires_grad_(not frozen)
    tc.shard_(model, plan, heat)
    before = model.tables.get_rows("item")
    batch = batches(1, [7])[0]
    grads = []
    for tables in (model.tables, whole.tables):
        weights = {name: torch.linspace(-1, 2, len(ids)).requires_grad_() for name, (ids, _) in batch.items()}
        tables({name: (*bags, weights[name]) for name, bags in batch.items()}).values().square().sum().backward()
        grads.append(torch.cat([each.grad for each in weights.values()]))
    assert torch.allclose(*grads, atol=1e-5)
    assert torch.equal(model.tables.get_rows("item"), before) == frozen


def test_rows_outside_a_table_are_refused():
    model = Model()
    tc.shard_(model, *tiers_plan(1, 1, ALL_THIRD, "int8"))
    with pytest.raises(tc.BadInput, check=has(table="shop", low=3, high=23)):
        model.tables.get_rows("shop", torch.tensor([3, 23]))
    model.tables.set_rows("shop", torch.tensor([3]), torch.ones(1, 5))
    assert torch.equal(model.tables.get_rows("shop", torch.tensor([3, 3])), torch.ones(2, 5))


def test_rows_of_a_collection_without_values_do_not_depend_on_the_plan():
    found = []
    for tiers in (ALL_FIRST, ALL_THIRD, MIXED):
        with torch.device("meta"):
            model = Model()
        tc.shard_(model, *tiers_plan(1, 1, tiers, "fp32"))
        found.append(torch.cat([model.tables.get_rows(name).reshape(-1) for name in TABLES]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    first = found[0][: 97 * 8]
    assert abs(float(first.abs().max()) - 97**-0.5) < 1e-2 and abs(float(first.mean())) < 1e-2
