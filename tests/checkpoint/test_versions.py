"""A folder of every version of the format that was ever written must open. They are beside this file, with what is in them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from cases import heat_of, plan_of, table_plan, with_slots
from sharded_ranks import Whole
from typer.testing import CliRunner

import thermocline as tc
from thermocline.checkpoint import Checkpoint
from thermocline.cli import app

HERE = Path(__file__).parent


def step(rows, number):
    draw = torch.Generator().manual_seed(number)
    columns = [torch.randint(count, (8,), generator=draw) for count in (40, 40, 21, 5)]
    rows(torch.stack(columns, dim=1)).values().square().sum().backward()


def test_version_1_opens_and_trains_on(tmp_path):
    shutil.copytree(HERE / "version1", tmp_path / "it")
    expected = json.loads((HERE / "version1.json").read_text())
    checkpoint = Checkpoint.open(tmp_path / "it")
    assert checkpoint.manifest.version == 1 and [save.kind for save in checkpoint.manifest.saves] == ["full", "incremental"]
    assert checkpoint.manifest.progress == {"batch": 6} and checkpoint.manifest.step == 6
    assert checkpoint.id_maps["user"] == tc.IdMap.pruned([3, 1 << 40, -5], fallback=4, salt=7)
    rows = tc.load(tmp_path / "it")
    for table, values in expected["saved"].items():
        assert torch.equal(rows.get_rows(table), torch.tensor(values))
    for number in range(6, 9):
        step(rows, number)
    for table, values in expected["three_steps_later"].items():
        assert torch.allclose(rows.get_rows(table), torch.tensor(values))  # kernels may round sums otherwise one day


OF_RANKS = {  # sha256 of all rows of each table, in fp32
    "user": (
        "84155b86e8f90275bf2bb4611563dbefc0b2cc8461bf6b1264c0e7f989258360",
        "870e84e08c424f34938958082ef83eb63d05d7f46df1e4844fc2b4a4c10f4881",
    ),
    "item": (
        "ad5d20e804d45c1f1cb70b0b7f77578c8a34537eebea74745e7339221dd0a806",
        "6609e9cc852591a3e00abfce6c0d678aac3440a3de3806bb5e9b3fbf32561059",
    ),
    "shop": (
        "acc0b4ec6f9461f9dcba83272dc8c2cbd976b1a4135f17253f6b7c5a9c9d7e9f",
        "9ff6e0cb985a888382c5b13a1cfc2b96b1780c8c1d2445047d2e8260de3315a4",
    ),
}


@pytest.mark.parametrize("version", [1, 2])
def test_old_checkpoint_of_two_ranks_opens_on_two_ranks_and_in_one_process(on_ranks, tmp_path, version):
    folder, heat = tmp_path / "it", heat_of()
    shutil.copytree(HERE / f"version{version}_ranks", folder)
    tables = [table_plan("user", 9, 0, "int8"), table_plan("item", 0, 0, "int8"), table_plan("shop", 0, 0, "int8", card=1)]
    plan = plan_of(1, 2, [with_slots(table, {1: (4, 0), 3: (8, 0)}) for table in tables], heat)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.manifest.version == version and len(checkpoint.manifest.saves[1].slots) == (0, 2)[version - 1]
    for then, later in on_ranks("open_and_train", 2, plan, heat, str(folder)):
        assert [(sha256(a), sha256(b)) for a, b in zip(then, later, strict=True)] == list(OF_RANKS.values())
    model = Whole(precision="int8", cache=0.9)
    tc.load_into(model, folder)
    assert [sha256(model.tables.get_rows(name).numpy()) for name in OF_RANKS] == [then for then, _ in OF_RANKS.values()]


def sha256(rows):
    return hashlib.sha256(rows.tobytes()).hexdigest()


def test_inspect_counts_what_ranks_have_written():
    done = CliRunner().invoke(app, ["checkpoint", "inspect", str(HERE / "version2_ranks"), "--json", "-"])
    found = json.loads(done.stdout)
    assert [(table["name"], table["rows"]) for table in found["tables"]] == [("user", 97), ("item", 61), ("shop", 23)]
    assert all(table["cached"] == 8 for table in found["tables"][1:]) and found["tables"][0]["cached"] == 4 + 8
    assert [(save["ranks"], save["files"]) for save in found["saves"]] == [(2, 5)] * 2
    shown = CliRunner().invoke(app, ["checkpoint", "inspect", str(HERE / "version2_ranks")]).stdout
    assert "all" in shown and "181" in shown and "by 2 ranks, 5 files" in shown
