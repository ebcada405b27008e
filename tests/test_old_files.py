"""Files written by version 0.1.0, before names changed, open in this tree: a checkpoint, a heat file and a plan.

`fixtures/v0.1.0` holds the files and the values that they had when they were written.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import thermocline as tc
from thermocline.checkpoint import Checkpoint
from thermocline.heat.profile import HeatProfile
from thermocline.plan.model import Plan

FILES = Path(__file__).parent / "fixtures" / "v0.1.0"
EXPECTED = json.loads((FILES / "expected.json").read_text())
RAW_IDS = torch.tensor([3, 1 << 40, -5, 17, 19, 1000, -7])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        ids = tc.IdMap.pruned([3, 1 << 40, -5, 17, 19], fallback=4, salt=7)
        self.tables = tc.EmbeddingCollection(
            [tc.Table("user", 61, 8), tc.Table("item", ids.rows, 8, ids=ids)],
            rows=tc.RowConfig("int8", cache=0.2, optimizer=tc.RowwiseAdagrad(lr=0.05), seed=3),
        )
        self.bag = tc.EmbeddingBag(37, 16, mode="sum", rows=tc.RowConfig("int4", optimizer=tc.Adagrad(lr=0.03), seed=5))
        self.dense = torch.nn.Linear(32, 1)

    def forward(self, ids, bags):
        return self.dense(torch.cat([self.tables(ids).values(), self.bag(bags)], dim=1))


@pytest.fixture
def values():
    return load_file(FILES / "checkpoint_values.safetensors")


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FILES / "checkpoint", tmp_path / "checkpoint"))


def opened(folder):
    model = Model()
    adam = torch.optim.Adam(model.dense.parameters(), lr=1e-2)
    progress = tc.resume(folder, model, optimizers=adam)
    return model, adam, progress


def step(model, adam, draw):
    users = (61 * torch.rand(24, generator=draw) ** 3).long()
    ids = torch.stack([users, RAW_IDS[torch.randint(7, (24,), generator=draw)]], dim=1)
    bags = torch.randint(37, (24, 3), generator=draw)
    adam.zero_grad()
    model(ids, bags).square().sum().backward()
    adam.step()


def test_old_checkpoint_gives_the_same_rows_and_optimizer_state(folder, values):
    model, adam, progress = opened(folder)
    assert progress == {"batch": 12}
    for table in ("user", "item"):
        assert torch.equal(model.tables.get_rows(table), values[f"tables.{table}"])
    assert torch.equal(model.bag.weight, values["bag"])
    for name, parameter in model.dense.named_parameters():
        assert torch.equal(parameter, values[f"dense.{name}"])
    for number, state in adam.state_dict()["state"].items():
        for key, tensor in state.items():
            assert torch.equal(tensor, values[f"adam.{number}.{key}"])


def test_training_continues_from_an_old_checkpoint(folder, values):
    model, adam, _ = opened(folder)
    draw = torch.Generator().manual_seed(1)
    fresh = Model()
    other = torch.optim.Adam(fresh.dense.parameters(), lr=1e-2)
    for _ in range(12):
        step(fresh, other, draw)  # consumes the random numbers of the steps before the last save
    for _ in range(3):
        step(model, adam, draw)
    for table in ("user", "item"):
        assert torch.allclose(model.tables.get_rows(table), values[f"later.tables.{table}"], atol=1e-5)
    assert torch.allclose(model.bag.weight, values["later.bag"], atol=1e-5)
    assert torch.allclose(model.dense.weight, values["later.dense.weight"], atol=1e-5)


def test_reader_without_a_model_sees_the_old_checkpoint():
    checkpoint = Checkpoint.open(FILES / "checkpoint")
    checkpoint.verify()
    assert [save.kind for save in checkpoint.manifest.saves] == ["full", "incremental", "incremental"]
    assert checkpoint.id_maps["item"] == tc.IdMap.pruned([3, 1 << 40, -5, 17, 19], fallback=4, salt=7)
    assert [(table.name, table.precision) for table in checkpoint.manifest.tables] == [
        ("user", "int8"),
        ("item", "int8"),
        ("bag", "int4"),
    ]


def test_old_heat_file_opens():
    heat = HeatProfile.load(FILES / "heat.tc")
    assert list(heat.tables) == list(EXPECTED["heat"])
    for name, counted in EXPECTED["heat"].items():
        table = heat[name]
        assert (table.lookups, table.distinct, table.hottest(0.1)) == (
            counted["lookups"],
            counted["distinct"],
            counted["hottest"],
        )
        assert [sha256(table.ids_H), sha256(table.counts_H)] == counted["sha256"]


def test_old_plan_is_of_the_old_heat_file():
    heat, plan = HeatProfile.load(FILES / "heat.tc"), Plan.load(FILES / "plan.json")
    assert heat.is_named_by(plan.heat) and not replace(heat, source="another log").is_named_by(plan.heat)


def test_old_plan_opens_with_every_field():
    plan = Plan.load(FILES / "plan.json")
    assert with_fields_of(json.loads((FILES / "plan.json").read_text()), plan.model_dump(mode="json")) == plan.model_dump(
        mode="json"
    )
    assert {table.name: summary(table) for table in plan.tables} == EXPECTED["plan"]
    assert plan.step.total == EXPECTED["step"]


def test_old_tables_and_topology_files_give_the_same_plan():
    plan = tc.make_plan(FILES / "tables.yaml", FILES / "heat.tc", FILES / "topology.yaml", budget="140kB", prune=1)
    assert {table.name: summary(table) for table in plan.tables} == EXPECTED["plan"]


def with_fields_of(old, new):
    """`old`, with the fields that it lacks at their values in `new`, which are defaults."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {
            **{name: new[name] for name in new.keys() - old.keys()},
            **{k: with_fields_of(v, new.get(k)) for k, v in old.items()},
        }
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [with_fields_of(*pair) for pair in zip(old, new, strict=True)]
    return old


def summary(table):
    tiers = [[tier.tier, tier.rows] for tier in table.tiers]
    return {"rows": table.rows, "dim": table.dim, "precision": table.precision, "cache": table.cache, "tiers": tiers}


def sha256(array):
    return hashlib.sha256(array.tobytes()).hexdigest()
