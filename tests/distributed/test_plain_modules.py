"""Plain `EmbeddingBag` and `Embedding` modules, sharded, train as one process does."""

from __future__ import annotations

import numpy as np
import pytest
from cases import plan_of, table_plan, with_slots
from plain_ranks import (
    ROWS,
    PlainModel,
    joined_parts,
    parts_of,
    state_of,
    train_plain,
    train_root,
    train_steps,
    train_tied,
    train_wrapped,
)  # fmt: skip

import thermocline as tc
from thermocline.checkpoint import Checkpoint

TIERS = {"bags": (13, 30), "words": (61, 0), "shared": (0, 0)}
THIRD = dict.fromkeys(ROWS, (0, 0))


def plain_plan(nodes, gpus, tiers, precision="int8"):
    """A plan of the plain modules, whose heat names one feature for each."""
    made = []
    for name, (rows, dim) in ROWS.items():
        table = table_plan("user", 0, 0, precision)
        first, second = tiers[name]
        counts = {1: first, 2: second, 3: rows - first - second}
        parts = tuple(table.tiers[0].model_copy(update={"tier": n, "rows": k}) for n, k in counts.items() if k)
        own = {"name": name, "rows": rows, "dim": dim, "features": (f"{name} id",), "tiers": parts}
        made.append(table.model_copy(update=own))
    heat = plain_heat()
    return plan_of(nodes, gpus, made, heat), heat


def plain_heat():
    from thermocline.heat.profile import HeatProfile, TableHeat

    draw, tables, none = np.random.default_rng(3), {}, np.zeros(0, np.int64)
    for name, (rows, _) in ROWS.items():
        ids, counts = np.unique(draw.zipf(1.3, 300) % rows, return_counts=True)
        order = np.lexsort((ids, -counts))
        seen = ids[order].astype(np.int64), counts[order].astype(np.int64)
        tables[f"{name} id"] = TableHeat(f"{name} id", 100, int(counts.sum()), len(ids), True, *seen, none, none)
    return HeatProfile(tables, created="then")


def same(found, whole):
    """Outputs and rows of ranks equal those of one process in every bit."""
    outs, rows = whole
    for step, out in enumerate(outs):
        assert np.array_equal(np.concatenate([each[0][step] for each in found]), out), step
    for _, theirs in found:
        assert theirs["clocks"] == rows["clocks"]
        for name in ROWS:
            assert np.array_equal(theirs[name], rows[name]), name


@pytest.mark.parametrize("nodes, gpus, tiers", [(1, 2, TIERS), (1, 3, THIRD), (2, 2, TIERS)])
def test_plain_modules_train_as_in_one_process_bit_for_bit(on_ranks, nodes, gpus, tiers):
    plan, heat = plain_plan(nodes, gpus, tiers)
    same(
        on_ranks("plain_ranks.train_plain", nodes * gpus, plan, heat, nodes * gpus), train_plain(0, 1, None, None, nodes * gpus)
    )


def test_sharded_rows_train_in_the_passes_that_ask_for_them(on_ranks):
    plan, heat = plain_plan(1, 2, TIERS)
    same(on_ranks("plain_ranks.train_plain", 2, plan, heat, 2, 6, False, True), train_plain(0, 1, None, None, 2, 6))


def test_prefetched_plain_modules_change_no_bit(on_ranks):
    plan, heat = plain_plan(1, 2, TIERS)
    same(on_ranks("plain_ranks.train_plain", 2, plan, heat, 2, 12, True), train_plain(0, 1, None, None, 2, 12))


def test_one_process_trains_sharded_plain_modules_as_plain_ones():
    plan, heat = plain_plan(1, 1, THIRD)
    same([train_plain(0, 1, plan, heat, 3)], train_plain(0, 1, None, None, 3))


@pytest.mark.parametrize("kind", ["collection", "bag"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_model_itself_may_be_what_is_sharded(on_ranks, kind, ranks):
    plan, heat = plain_plan(1, ranks, THIRD)
    table = plan.tables[0].model_copy(update={"name": "table", "features": ("table id",)})
    plan = plan.model_copy(update={"tables": (table,)})
    _, rows = train_root(0, 1, None, None, kind)
    name = {"collection": "ShardedCollection", "bag": "ShardedEmbeddingBag"}[kind]
    for found in on_ranks("plain_ranks.train_root", ranks, plan, heat, kind):
        assert found[0] == name and np.array_equal(found[1], rows)


@pytest.mark.parametrize("optimizer", [tc.Adagrad(lr=0.125), tc.Adam(lr=0.125)], ids=["Adagrad", "Adam"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_weight_of_a_sharded_embedding_is_trained_as_in_one_process(on_ranks, ranks, optimizer):
    plan, heat = plain_plan(1, ranks, TIERS if ranks > 1 else THIRD, "fp32")
    rows = train_tied(0, 1, None, None, optimizer)
    for found in on_ranks("plain_ranks.train_tied", ranks, plan, heat, optimizer):
        assert np.array_equal(found, rows)


def test_torchs_distributed_checkpoint_saves_and_loads_a_sharded_model(on_ranks, tmp_path):
    plan, heat = plain_plan(1, 2, TIERS)
    for (saved, loaded), refused in on_ranks("plain_ranks.checkpoint_by_torch", 2, plan, heat, str(tmp_path / "saved")):
        assert saved["clocks"] == loaded["clocks"] and all(np.array_equal(saved[name], loaded[name]) for name in ROWS)
        assert refused == ["ignored_params"]


def test_checkpoints_move_plain_modules_between_ranks_and_one_process(on_ranks, tmp_path):
    plan, heat = plain_plan(1, 2, TIERS)
    model = PlainModel()
    model(parts_of(0, [5])[0]).sum().backward()
    tc.save(model, tmp_path / "one")
    found = on_ranks("plain_ranks.reload_plain", 2, plan, heat, str(tmp_path / "one"), str(tmp_path / "two"))
    model(joined_parts(parts_of(9, [3, 3]))).sum().backward()
    kinds = [[module.kind for module in Checkpoint.open(tmp_path / name).manifest.modules] for name in ("one", "two")]
    assert kinds == [["EmbeddingBag", "Embedding", "EmbeddingBag"]] * 2
    trained = state_of(model)
    tc.load_into(model, tmp_path / "two")
    for rows in [trained, *found]:
        assert all(np.array_equal(state_of(model)[name], rows[name]) for name in ROWS)


ONCE_A_NODE = {name: (0, rows) for name, (rows, _) in ROWS.items()}  # every node has all rows, split over its ranks
WRAPPED = [
    ("DDP", "backward", 1, TIERS), ("DDP", "step", 1, TIERS), ("FSDP2", "step", 1, TIERS), ("FSDP2", "backward", 2, TIERS),
    ("FSDP2", "backward", 2, ONCE_A_NODE),
]  # fmt: skip


@pytest.mark.parametrize("wrap, update, nodes, tiers", WRAPPED)
def test_sharded_rows_beside_a_wrapped_dense_part_train_as_one_process(on_ranks, wrap, update, nodes, tiers):
    plan, heat = plain_plan(nodes, 2, tiers, "fp32")
    rows, weight = train_wrapped(0, 1, None, None, 2 * nodes, wrap, update)
    for theirs, own in on_ranks("plain_ranks.train_wrapped", 2 * nodes, plan, heat, 2 * nodes, wrap, update):
        assert np.allclose(own, weight, atol=1e-6)
        assert all(np.allclose(theirs[name], rows[name], atol=1e-6) for name in ROWS)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_update_by_step_caches_and_prefetches_as_one_in_backward(on_ranks, ahead):
    plan, heat = plain_plan(2, 2, TIERS)
    tables = [with_slots(table, dict.fromkeys((1, 2, 3), (2, 0))) for table in plan.tables]
    plan = plan.model_copy(update={"tables": tuple(tables)})
    found = [on_ranks("plain_ranks.train_cached", 4, plan, heat, *how) for how in (("backward", False), ("step", ahead))]
    for one, other in zip(*found, strict=True):
        assert one["clocks"] == other["clocks"] and all(np.array_equal(one[name], other[name]) for name in ROWS)


@pytest.mark.parametrize("how", ["train", "flag"])
def test_a_dense_part_in_ddp_resumes_with_the_same_bits(on_ranks, how):
    assert on_ranks("plain_ranks.resume_with_ddp", 4, how) == [True] * 4


@pytest.mark.parametrize("how", ["each", "accumulated", "clipped", "scaled"])
@pytest.mark.parametrize("nodes, gpus", [(1, 3), (2, 2)])
def test_rows_updated_by_step_equal_those_of_one_process(on_ranks, nodes, gpus, how):
    ranks = nodes * gpus
    plan, heat = plain_plan(nodes, gpus, TIERS)
    said, rows = train_steps(0, 1, None, None, ranks, how)
    for theirs, held in on_ranks("plain_ranks.train_steps", ranks, plan, heat, ranks, how):
        assert theirs == said and (how != "scaled" or said != sorted(said))
        assert held["clocks"] == rows["clocks"]
        for name in ROWS:
            assert np.array_equal(held[name], rows[name]), name
