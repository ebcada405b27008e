"""Save and load in one process: nothing changes, and training goes on as if it had never stopped."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import thermocline as tc
from support import has, module_arguments
from thermocline.checkpoint import Checkpoint
from thermocline.checkpoint.format import sections
from thermocline.kernels import dequantize_rows, quantize_rows
from thermocline.rows.precision import format_of

CONFIGURATIONS = {
    "int8": {"precision": "int8", "cache": 0.1},
    "int4, lru": {"precision": "int4", "cache": 0.07, "policy": "lru", "optimizer": tc.SGD(lr=0.1)},
    "tiers": {"precision": {"fp32": 0.05, "int8": 0.1, "int2": 0.85}, "policy": "adaptive", "optimizer": tc.Adagrad(lr=0.05)},
    "fp32": {"precision": "fp32", "optimizer": tc.Adam(lr=0.01, weight_decay=0.1)},
    "bf16, later": {"precision": "bf16", "update": "step"},
    "int8_affine": {"precision": "int8_affine", "cache": 0.0},
}


def collection(**settings):
    kept = tc.IdMap.pruned(range(0, 3000, 3), fallback=7, salt=5)
    tables = [
        tc.Table("user", 1007, 12, features=("user", "friend"), ids={"user": kept, "friend": tc.IdMap.hashed(1007, salt=3)}),
        tc.Table("item", 333, 12),
        tc.Table("shop", 19, 5, row_config=tc.RowConfig("fp32")),
    ]
    return tc.EmbeddingCollection(tables, **module_arguments(seed=9, **settings))


def steps(module, first, last):
    """Train on batches by their numbers; the losses."""
    losses = []
    for step in range(first, last):
        draw = torch.Generator().manual_seed(step)
        batch = {
            name: ((torch.rand(60, generator=draw) ** 3 * rows).long(), torch.arange(0, 61, 3))
            for name, rows in (("user", 5000), ("friend", 5000), ("item", 333), ("shop", 19))
        }
        loss = (module(batch).values() - 0.5).square().mean()
        loss.backward()
        module.fused_optimizer.step()
        module.fused_optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_state(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.fixture(autouse=True)
def small_sections(monkeypatch):
    """So that tables have several."""
    monkeypatch.setattr(sections, "SECTION_BYTES", 1 << 13)
    monkeypatch.setattr(sections, "_MULTIPLE", 64)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(tmp_path, name):
    torch.manual_seed(1)
    module = collection(**CONFIGURATIONS[name])
    steps(module, 0, 20)
    before = copy.deepcopy(module.state_dict())
    tc.save(module, tmp_path / "saved")
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items()), "saving changed the module"
    loaded = tc.load(tmp_path / "saved")
    assert isinstance(loaded, tc.EmbeddingCollection)
    assert_same_state(module, loaded)
    assert loaded.fused_optimizer.param_groups[0]["lr"] == module.fused_optimizer.param_groups[0]["lr"]
    assert steps(module, 20, 40) == steps(loaded, 20, 40)
    assert_same_state(module, loaded)


def test_blocks_are_the_rows_as_stored_and_cached_rows_are_in_full_precision(tmp_path):
    torch.manual_seed(2)
    module = collection(precision="int8", cache=0.1)
    steps(module, 0, 15)
    tc.save(module, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.verify()
    module_rows = {table.name: module.get_rows(table.name) for table in module.tables}
    flushed = copy.deepcopy(module)
    flushed.flush()
    some = 0
    for index, table in enumerate(module.tables):
        entry = checkpoint.manifest.table(table.name)
        assert (entry.rows, entry.dim, entry.features) == (table.rows, table.dim, tuple(table.features))
        codes, meta = (
            torch.cat(each) for each in zip(*((b.codes_RB, b.meta_RW) for b in checkpoint.blocks(table.name)), strict=True)
        )
        rows, values = checkpoint.cached(table.name)
        some += len(rows)
        assert torch.equal(values, module_rows[table.name][rows])
        format = format_of(entry.precision)
        codes[rows], meta[rows] = quantize_rows(values, format)
        expected = flushed.arena.views(index)
        assert torch.equal(codes, expected[0]) and torch.equal(meta, expected[1])
        assert torch.equal(dequantize_rows(codes, meta, format, entry.dim), flushed.get_rows(table.name))
    assert some > 20
    assert checkpoint.id_maps == module.id_maps
    assert checkpoint.manifest.step == 15


@pytest.mark.parametrize("make", [tc.EmbeddingBag, tc.Embedding])
def test_a_module_of_one_table_comes_back_as_it_was(tmp_path, make):
    torch.manual_seed(3)
    extra = {"mode": "max"} if make is tc.EmbeddingBag else {}
    module = make(101, 7, padding_idx=4, rows=tc.RowConfig("int4", independent=True), dtype=torch.bfloat16, **extra)
    for _ in range(5):
        module(torch.randint(101, (8, 3))).float().square().sum().backward()
    tc.save(module, tmp_path)
    loaded = tc.load(tmp_path)
    assert repr(loaded) == repr(module) and type(loaded) is make and loaded.rows == module.rows
    assert_same_state(module, loaded)
    ids = torch.randint(101, (9, 2))
    assert torch.equal(module(ids), loaded(ids))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = tc.EmbeddingCollection([tc.Table("a", 200, 8), tc.Table("b", 50, 8)], rows=tc.RowConfig(cache=0.1))
        self.bag = tc.EmbeddingBag(77, 4, mode="sum", rows=tc.RowConfig("int4"))
        self.top = nn.Sequential(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def forward(self, ids):
        rows = self.rows(ids[:, :2]).values()
        return self.top(torch.cat([rows, self.bag(ids[:, 2:])], dim=1))


def train(model, dense, first, last):
    for step in range(first, last):
        ids = torch.randint(50, (16, 4), generator=torch.Generator().manual_seed(step))
        model(ids).square().mean().backward()
        dense.step()
        dense.zero_grad()


def test_a_model_resumes_with_its_dense_part_and_optimizer(tmp_path):
    torch.manual_seed(4)
    model = Model()
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, dense, 0, 10)
    tc.save(model, tmp_path, optimizers=dense, progress={"batch": 10})
    torch.manual_seed(5)
    other = Model()
    its = torch.optim.Adam(other.parameters(), lr=0.5)
    tc.load_into(other, tmp_path, optimizers=its)
    assert Checkpoint.open(tmp_path).manifest.progress == {"batch": 10}
    train(model, dense, 10, 20)
    train(other, its, 10, 20)
    assert_same_state(model, other)


def test_a_second_save_replaces_the_first(tmp_path):
    torch.manual_seed(6)
    bag = tc.EmbeddingBag(50, 4)
    tc.save(bag, tmp_path)
    bag.set_rows(torch.arange(50), torch.randn(50, 4))
    tc.save(bag, tmp_path)
    assert torch.equal(tc.load(tmp_path).weight, bag.weight)
    assert len(list(tmp_path.iterdir())) == 2, "one manifest and one save"


@pytest.mark.parametrize("precision", ["int4", "fp32", {"fp32": 0.1, "int2": 0.9}])
def test_another_precision_rounds_once_to_nearest(tmp_path, precision):
    torch.manual_seed(7)
    module = tc.EmbeddingCollection([tc.Table("a", 301, 6)], rows=tc.RowConfig("int8", cache=0.2))
    for step in range(10):
        module(torch.randint(301, (20, 1), generator=torch.Generator().manual_seed(step))).values().square().sum().backward()
    tc.save(module, tmp_path)
    loaded = tc.load(tmp_path, precision=precision)
    base = loaded.arena.tables[0].precision
    assert base == ("int2" if isinstance(precision, dict) else precision)
    loaded.flush()
    expected = dequantize_rows(*quantize_rows(module.get_rows("a"), format_of(base)), format_of(base), 6)
    assert torch.equal(loaded.get_rows("a"), expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(module.trainer.states, loaded.trainer.states, strict=True))


def test_every_file_opens_with_the_safetensors_package(tmp_path):
    import safetensors.torch

    module = collection(precision="int4", cache=0.1)
    steps(module, 0, 3)
    tc.save(module, tmp_path)
    files = sorted(tmp_path.rglob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
    assert torch.equal(tensors["module//clock"], module.trainer.clock)
    assert json.loads((tmp_path / "manifest.json").read_text())["version"] == 2


def test_no_pickle_is_written_or_read(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle")

    model = Model()
    dense = torch.optim.Adam(model.parameters())
    train(model, dense, 0, 2)
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    tc.save(model, tmp_path, optimizers=dense)
    tc.load_into(Model(), tmp_path)


def test_gradients_that_wait_are_not_silently_lost(tmp_path):
    bag = tc.EmbeddingBag(50, 4, rows=tc.RowConfig(update="step"))
    bag(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(tc.BadInput, check=has(waits_for="step")):
        tc.save(bag, tmp_path)


def test_a_module_saved_alone_is_opened_by_load_and_not_by_from_pretrained(tmp_path):
    torch.manual_seed(8)
    rows = tc.EmbeddingCollection([tc.Table("a", 40, 4)])
    tc.save(rows, tmp_path / "rows")
    again = tc.load(tmp_path / "rows", precision="fp32")
    assert torch.equal(again.get_rows("a"), rows.get_rows("a")) and again.arena.tables[0].precision == "fp32"
    bag = tc.EmbeddingBag(40, 4, mode="max")
    tc.save(bag, str(tmp_path / "bag"))
    opened = tc.load(str(tmp_path / "bag"))
    assert_same_state(opened, bag)
    assert isinstance(opened, tc.EmbeddingBag) and opened.mode == "max" and opened.placeholder.requires_grad
    with pytest.raises(tc.BadInput, check=has(parameter="embeddings")):
        tc.EmbeddingBag.from_pretrained(tmp_path / "bag")


def test_a_frozen_module_comes_back_frozen(tmp_path):
    bag = tc.EmbeddingBag(40, 4)
    bag.requires_grad_(False)
    tc.save(bag, tmp_path)
    assert not tc.load(tmp_path).placeholder.requires_grad


def test_torchs_distributed_checkpoint_saves_a_model_with_rows(tmp_path):
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(9)
    model = Model()
    train(model, torch.optim.SGD(model.top.parameters(), lr=0.1), 0, 5)
    dcp.save({"model": model}, checkpoint_id=tmp_path)
    other = Model()
    dcp.load({"model": other}, checkpoint_id=tmp_path)
    assert_same_state(model, other)


def peak_from_now():
    """Reset the peak of this process' memory; a function that tells it, in MiB above what is used now."""
    Path("/proc/self/clear_refs").write_text("5")

    def peak():
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    now = peak()
    return lambda: peak() - now


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs a Linux that resets peaks")
def test_saving_and_loading_take_little_memory_beside_the_rows(tmp_path, monkeypatch):
    monkeypatch.undo()  # sections as they are
    module = collection_of_zeros(900_000, 64)
    peak = peak_from_now()
    tc.save(module, tmp_path)
    assert peak() < 28, "MiB; the rows have 62"
    module.arena.codes.zero_(), module.arena.meta.zero_()  # memory that was never written takes no room
    peak = peak_from_now()
    tc.load_into(module, tmp_path)
    assert peak() < 28


def collection_of_zeros(rows, dim):
    """Quickly made: values are not what is measured."""
    return tc.EmbeddingCollection.without_values([tc.Table("a", rows, dim)], rows=tc.RowConfig(cache=0.0))
