"""The rules of the zoo, on a model of this file; and the page with its results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import thermocline as tc
from benchmarks.runner.paired import RunResult
from benchmarks.runner.record import Recorder
from benchmarks.runner.show import load_asked
from benchmarks.zoo import benchmark
from benchmarks.zoo.case import Trained, ZooCase

ROOT = Path(__file__).resolve().parents[3]


def train(seed, convert, frozen=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(203, 8), nn.Linear(8, 1))
    convert(model)
    if frozen and isinstance(model[0], tc.Embedding):
        model[0].requires_grad_(False)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    ids, losses = torch.randint(203, (40, 64)), []
    for batch in ids:
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch).squeeze(1), (batch % 2).float())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Trained(-losses[-1], losses)


def run_of(apart):
    measures = {"trained": {"metric": 0.5}, "losses": {"0": 1 + apart}}
    return RunResult("tiny", "arm", 0, 0, measures, stats={"bytes_before": 1, "bytes_after": 1}, seconds=1.0)


def verdict(runs):
    """Of fp32 rows, for runs of one seed by arm."""
    recorder = Recorder("zoo", lambda line: None)
    case = ZooCase("tiny", "of/ours", "-loss", tc.Adagrad(lr=0.1), train)
    benchmark.judge(recorder, case, {"plain": [run_of(0.0)], "int8": [run_of(0.0)], **runs})
    return recorder.record["rows"][0]["verdict"]


def rows_of(monkeypatch, **changes):
    case = ZooCase("tiny", "of/ours", "-loss", tc.Adagrad(lr=0.1), lambda *given: train(*given, **changes))
    monkeypatch.setattr(benchmark, "cases", lambda *_: [case])
    record = benchmark.run(seeds=3)
    assert benchmark.table(record).row_count == 1
    return record["rows"]


def test_a_model_that_learns_the_same_is_equal_and_within_seeds(monkeypatch):
    fp32, int8 = rows_of(monkeypatch)
    assert (fp32["verdict"], int8["verdict"]) == (benchmark.EQUAL, benchmark.WITHIN)
    assert fp32["bytes_before"] == fp32["bytes_after"] == 203 * 8 * 4 > int8["bytes_after"]


def test_a_model_whose_rows_stay_as_they_are_is_found(monkeypatch):
    fp32, int8 = rows_of(monkeypatch, frozen=True)
    assert fp32["verdict"] != benchmark.EQUAL and int8["verdict"] != benchmark.WITHIN


def test_one_control_that_rounding_spares_or_strays_decides_nothing(monkeypatch):
    controls = {name: [run_of(apart)] for name, apart in zip(benchmark.CONTROLS, (0.0, 1e-4, 1e-4), strict=True)}
    assert verdict(controls | {"fp32": [run_of(1.1e-4)]}) == benchmark.EQUAL
    controls = {name: [run_of(apart)] for name, apart in zip(benchmark.CONTROLS, (0.0, 0.0, 1e-4), strict=True)}
    assert verdict(controls | {"fp32": [run_of(1.1e-4)]}) != benchmark.EQUAL


def test_missing_libraries_are_noted(monkeypatch):
    monkeypatch.setattr(benchmark, "FILES", ("case_of_no_library",))
    record = benchmark.run()
    assert len(record["notes"]) == 1 and not record["rows"]


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").glob("zoo_*.json")), ids=lambda file: file.stem)
def test_the_page_has_the_table_of_the_recorded_run(file):
    record = json.loads(file.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in benchmark.markdown(record) if line not in page] == []
    assert {row["case"] for row in record["rows"]} == set(load_asked(ROOT / "benchmarks" / "asked.json")["zoo"])
