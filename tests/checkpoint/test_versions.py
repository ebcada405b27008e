"""A folder of every version of the format that was ever written must open. They are beside this file, with what is in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

import thermocline as tc
from thermocline.checkpoint.reader import Checkpoint

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
