"""A job whose rows were moved goes on as if they had always been where they are."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from cases import TABLES, Model, batches, exact_loss, heat_of, joined, plan_of, sizes_of, table_plan

import thermocline as tc
from support import has

STEPS = 6


def random_plan(rng, nodes, cards, heat, precision):
    """Random tiers and exchanges; in every other plan one table whole on a rank."""
    tables, whole = [], list(TABLES)[rng.integers(6) % len(TABLES)] if rng.integers(2) else ""
    for name, (rows, _, _) in TABLES.items():
        first, second = sorted(int(n) for n in rng.integers(0, rows + 1, 2))
        card = int(rng.integers(nodes * cards)) if name == whole else None
        tiers = (0, 0) if card is not None else (first, second - first)
        tables.append(table_plan(name, *tiers, precision, ["flat", "node"][rng.integers(2)], card))
    return plan_of(nodes, cards, tables, heat)


def one_process(ranks, settings, steps, halve_every=0):
    """The same steps in one process."""
    model = Model(**settings)
    optimizer = tc.fused_optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, halve_every or steps + 1, gamma=0.5)
    for step in range(steps):
        exact_loss(model.tables(joined(batches(step, sizes_of(step, ranks)))).values(), step, 0).backward()
        optimizer.step()
        schedule.step()
    return model.tables


def check_equal(found, whole):
    """Every stored row has the bits and state of one process, and every row is stored."""
    by_row = whole.trainer.optimizer.states_per_row > 0
    seen = [set() for _ in whole.tables]
    for held in found:
        for index, rows, parts in held:
            seen[index] |= set(rows.tolist())
            theirs = [*whole.arena.views(index)[:2], *whole.arena.state_views(index, whole.trainer.states, by_row)]
            for mine, other in zip(parts, theirs, strict=True):
                assert np.array_equal(mine, other.numpy()[rows])
    assert [len(rows) for rows in seen] == [table.rows for table in whole.tables]


@pytest.mark.parametrize(
    "seed, nodes, cards, settings",
    [
        (1, 2, 2, {"precision": "int4", "optimizer": tc.RowwiseAdagrad(lr=0.25)}),
        (2, 1, 3, {"precision": "int8", "optimizer": tc.Adagrad(lr=0.25)}),
        (3, 4, 1, {"precision": "fp32", "optimizer": tc.SGD(lr=0.125)}),
        (4, 2, 1, {"precision": "int8", "optimizer": tc.Adam(lr=0.25)}),
        (5, 1, 1, {"precision": "int8", "optimizer": tc.RowwiseAdagrad(lr=0.25)}),
        (6, 2, 4, {"precision": "int2", "optimizer": tc.RowwiseAdagrad(lr=0.25)}),
    ],
)
def test_rows_state_and_clock_keep_their_bits_through_two_migrations(on_ranks, seed, nodes, cards, settings):
    rng = np.random.default_rng(seed)
    heats = [heat_of(seed), heat_of(seed + 20), heat_of(seed + 40)]
    plans = [random_plan(rng, nodes, cards, heat, settings["precision"]) for heat in heats]
    found = on_ranks("replan_ranks.moved", nodes * cards, plans, heats, settings, STEPS)
    whole = one_process(nodes * cards, settings, 3 * STEPS, halve_every=STEPS)
    check_equal([held for held, _ in found], whole)
    for _, ((clock, hyper),) in found:
        assert clock == whole.trainer.clock.tolist() and hyper == whole.trainer.hyper.tolist()


def pooled_by(owners, plan, heat):
    """The plan with owner pooling for some tables, which then use the flat exchange."""
    own = {"pooled_by": "owner", "exchange": "flat", "wire_rows": "fp32"}
    tables = [table.model_copy(update=own if table.name in owners else {}) for table in plan.tables]
    return plan_of(plan.topology.nodes, plan.topology.gpus_per_node, tables, heat)


@pytest.mark.parametrize(
    "nodes, cards, owners, settings",
    [
        (2, 2, [(), ("user", "shop"), ("item", "shop")], {"precision": "int8", "optimizer": tc.RowwiseAdagrad(lr=0.25)}),
        (1, 3, [tuple(TABLES), (), tuple(TABLES)], {"precision": "int4", "optimizer": tc.Adam(lr=0.25)}),
    ],
    ids=["table by table, ahead", "all there and back"],
)
def test_rows_keep_their_bits_between_plans_with_and_without_owner_pooling(on_ranks, nodes, cards, owners, settings):
    """The second time rows stay where they are, and only their bags are pooled elsewhere."""
    rng, heats = np.random.default_rng(8), [heat_of(1), heat_of(21), heat_of(21)]
    one, two = (random_plan(rng, nodes, cards, heat, settings["precision"]) for heat in heats[:2])
    plans = [pooled_by(who, plan, heat) for who, plan, heat in zip(owners, (one, two, two), heats, strict=True)]
    found = on_ranks("replan_ranks.moved", nodes * cards, plans, heats, settings, STEPS)
    check_equal([held for held, _ in found], one_process(nodes * cards, settings, 3 * STEPS, halve_every=STEPS))


def test_rows_that_change_their_precision_are_rounded_to_nearest(on_ranks):
    heat, tiers = heat_of(), {"user": (13, 30), "item": (0, 61), "shop": (5, 11)}
    plans = [plan_of(2, 1, [table_plan(n, *tiers[n], p) for n in TABLES], heat) for p in ("fp32", "int8")]
    for before, after in on_ranks("replan_ranks.rounded", 2, plans, heat):
        for name, old, new in zip(TABLES, before, after, strict=True):
            rows, dim, _ = TABLES[name]
            arena = tc.Arena([tc.TableSpec(rows, dim, "int8")])
            arena.write(0, torch.arange(rows), torch.from_numpy(old))
            assert np.array_equal(arena.read(0).numpy(), new) and not np.array_equal(old, new)


def two_plans(nodes, cards, heat):
    rng = np.random.default_rng(9)
    return [random_plan(rng, nodes, cards, heat, "int8") for _ in range(3)]


@pytest.mark.parametrize("what, kind", [("memory", MemoryError), ("Ctrl-C", KeyboardInterrupt), ("plans", tc.BadInput)])
def test_an_error_on_one_rank_is_one_on_all_and_changes_nothing(on_ranks, what, kind):
    heat = heat_of()
    found = on_ranks("replan_ranks.broken", 3, what, two_plans(1, 3, heat), heat, STEPS)
    assert isinstance(found[1][0], kind)
    for error in (found[0][0], found[2][0]):
        assert error.parameter == "the plan" if what == "plans" else error.rank == 1
    settings = {"precision": "int8", "optimizer": None}
    check_equal([held for _, held in found], one_process(3, settings, STEPS))


def test_migration_to_a_plan_that_does_not_fit_is_refused():
    heat = heat_of()
    model = Model()
    plan, other, _ = two_plans(1, 1, heat)
    sharding = tc.shard_(model, plan, heat)
    with pytest.raises(tc.BadInput, check=has(parameter="plan", needed=2, available=1)):
        sharding.migrate(two_plans(1, 2, heat)[0], heat)
    with pytest.raises(tc.BadInput, check=has(parameter="heat", needed=heat.sha256)):
        sharding.migrate(other, heat_of(4))
    with pytest.raises(tc.BadInput, check=has(parameter="exchange", table="user")):
        own = {"pooled_by": "owner", "exchange": "node"}
        sharding.migrate(plan_of(1, 1, [table.model_copy(update=own) for table in other.tables], heat), heat)
    sharding.migrate(other, heat)
    assert sharding.plan == other


def test_a_loop_over_sharded_tables_looks_several_batches_ahead():
    heat, batches = heat_of(), [(n, n * n) for n in range(4)]
    model, inputs = Model(), []
    tc.shard_(model, plan_of(1, 1, [table_plan(name, 9, 0, "int8") for name in TABLES], heat), heat)
    with mock.patch.object(model.tables, "prefetch", inputs.append):
        assert [batch for batch, _ in model.tables.prefetched(batches, ids=lambda batch: batch[1])] == batches
    assert inputs == [1, 4, 9]
    with pytest.raises(tc.BadInput, check=has(parameter="at_once", value=0)):
        list(model.tables.prefetched([], at_once=0))


def test_one_process_moves_rows_only_between_tiers_of_two_precisions():
    heat, other = heat_of(), heat_of(4)

    def plan(heat, first_precision=""):
        return plan_of(1, 1, [table_plan(name, 9, 0, "int8", first_precision=first_precision) for name in TABLES], heat)

    def maps(model):
        return [each.digest() for each in model.tables.row_index.maps]

    model, fresh = Model(), Model()
    sharding = tc.shard_(model, plan(heat, "fp32"), heat)
    tc.shard_(fresh, plan(other, "fp32"), other)
    assert maps(model) != maps(fresh)
    sharding.migrate(plan(other, "fp32"), other)
    assert maps(model) == maps(fresh)

    alike = Model()
    sharding, row_index = tc.shard_(alike, plan(heat), heat), alike.tables.row_index
    sharding.migrate(plan(other), other)
    assert alike.tables.row_index is row_index and sharding.plan == plan(other), "all rows are in one place, whatever the tiers"


def test_a_backward_through_a_forward_before_the_migration_is_refused(on_ranks):
    heat = heat_of()
    for error in on_ranks("replan_ranks.late", 2, two_plans(1, 2, heat), heat):
        assert isinstance(error, tc.BadInput) and error.collection == "tables"
