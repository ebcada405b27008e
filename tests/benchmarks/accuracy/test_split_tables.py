"""Tables that are split by heat, as an arm of the accuracy benchmark."""

from __future__ import annotations

import pytest
import torch

from benchmarks.accuracy import arms as accuracy_arms
from benchmarks.accuracy.arms import AccuracyArm
from benchmarks.accuracy.split_tables import SplitTables
from benchmarks.runner.paired import TrainingJob
from thermocline.nn.config import RowConfig
from thermocline.rows.optimizers import SGD
from thermocline.train import DLRMSettings

HEAT = [torch.tensor([5, 0, 9, 1]), torch.tensor([2, 8, 3, 0, 0, 7])]  # in order: 2 of the first, 1 and 5 of the second, ...


def split(shares: dict[str, float]) -> SplitTables:
    tables = SplitTables(HEAT, 8, shares, RowConfig(optimizer=SGD(lr=1.0)), "cpu")
    for feature, heat_R in enumerate(HEAT):
        tables.set_rows(str(feature), torch.arange(len(heat_R)), values(feature))
    return tables


def values(feature: int) -> torch.Tensor:
    return torch.randn(len(HEAT[feature]), 8, generator=torch.Generator().manual_seed(feature))


def test_hot_rows_have_the_first_precision_and_all_are_found_and_trained() -> None:
    tables = split({"fp32": 0.4, "int8": 0.6})
    ids_BF = torch.tensor([[0, 0], [1, 1], [2, 2], [3, 3], [2, 4], [2, 5]])
    wanted = torch.cat([values(feature)[ids_BF[:, feature]] for feature in range(2)], 1)
    out = tables(ids_BF)
    assert torch.allclose(out, wanted, atol=0.02)
    same = [(out[:, 8 * f : 8 * f + 8] == wanted[:, 8 * f : 8 * f + 8]).all(1) for f in range(2)]
    exact = [set(ids_BF[same[f], f].tolist()) for f in range(2)]
    assert exact == [{0, 2}, {1, 5}]  # four of ten rows, the hottest of both
    out.sum().backward()
    moved = (tables(ids_BF) - wanted).view(-1, 2, 8)
    assert torch.allclose(moved[:, 1], torch.full((6, 8), -1.0), atol=0.05)
    assert torch.allclose(moved[ids_BF[:, 0] == 2, 0], torch.full((3, 8), -3.0), atol=0.05)


def test_every_row_is_counted_once_and_its_place_in_the_order_too() -> None:
    tables = SplitTables([torch.arange(600), torch.arange(400)], 64, {"int8": 0.6, "int4": 0.4}, RowConfig(), "cpu")
    memory = tables.memory()
    assert memory.parts["maps"] == 4 * 1000
    assert memory.ratio == pytest.approx(1000 * 64 * 4 / (600 * (64 + 4) + 400 * (32 + 4) + 4000), rel=0.01)


def test_an_arm_of_split_tables_is_trained_and_judged() -> None:
    settings = DLRMSettings(samples=1501, rows=5003, dim=8, batch=64, bottom=(8,), top=(16,))
    found = accuracy_arms.run_job(TrainingJob(AccuracyArm("int4", split=0.6), settings, "log"))
    assert 0.3 < found["measures"]["trained"]["auc"] < 0.9 and found["arm"] == "split-60%-int8-int4"
    assert 1.5 < found["memory_ratio"] < 3.5  # of eight columns
