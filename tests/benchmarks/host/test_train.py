"""`python -m benchmarks train`: rows from results, and a small run on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.host import train
from benchmarks.host import train_contender as train_side
from benchmarks.host.thermocline_tables import HostTables, KeyedBatch
from benchmarks.kernels.cases import STEP_ROWWISE, Workload
from benchmarks.runner import record, show

ASKED = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"
BASE = "cuda/dlrm/int8+5%/train"


def test_every_asked_case_is_one_that_the_bench_measures() -> None:
    assert set(show.load_asked(ASKED)["train"]) <= set(train.all_cases())


def test_a_small_run_has_every_row_and_writes_what_show_reads() -> None:
    found = train.run("cpu", train.QUICK_SHAPE, judged=False)
    rows = {row["case"]: row for row in found["rows"]}
    assert sorted(rows) == sorted(train.all_cases())
    assert rows[BASE]["ours"] > 0 and rows[BASE]["way"] in train.WAYS and 0 < rows[BASE]["hit_rate"] < 1
    assert rows["cuda/dlrm/fp32/train-zero-copy"]["loss"] == pytest.approx(rows[BASE]["loss"], abs=0.1)
    assert not show.parse(found, "test").short()


def test_tables_and_mlps_learn_the_log() -> None:
    shape = train.QUICK_SHAPE
    samples = train_side.ring_of(shape, 4, "cpu", lambda batch: KeyedBatch(batch, shape.tables))
    tables = HostTables(Workload(shape, "int8", STEP_ROWWISE, cache=0.05), "cpu", "host")
    training = train_side.Training(tables.look_up, shape, train.QUICK_MLPS, 13, "cpu")
    losses = []
    for number in range(40):
        training.loss.zero_()
        training.step(samples[number % 4], None)
        losses.append(float(training.loss))
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert torch.equal(samples[0].ids.values().view(26, -1)[3], samples[0].ids.values()[3 * 63 : 4 * 63])


def arm(rate: float, **further: Any) -> dict[str, Any]:
    return {"ms": 1.0, "spread": 0.01, "samples_per_s": rate, "card_bytes": 100, **further}


def rows_of(ours: dict[str, Any], peers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    recorder = record.Recorder("train", lambda line: None)
    train.add_rows(recorder, ours, peers)
    return {row["case"]: row for row in recorder.rows}


def test_the_best_arm_is_compared_with_the_best_fp32_arm() -> None:
    ours = {"int8+5%/zero-copy": arm(300.0), "int8+5%/prefetch": arm(500.0), "fp32/zero-copy": arm(250.0)}
    rows = rows_of(ours, {"lru": arm(100.0), "lfu": arm(200.0)})
    assert (rows[BASE]["way"], rows[BASE]["peer"], rows[BASE]["ratio"]) == ("prefetch", "ours fp32 zero-copy", 2.0)
    assert rows[BASE]["ok"] and not rows["cuda/dlrm/int4+5%/train"]["ok"]
    assert rows["cuda/dlrm/fp32/train-lru"]["ours"] == 100.0


def test_without_fbgemm_nothing_is_beaten() -> None:
    ours = {"int8+5%/zero-copy": arm(300.0), "fp32/zero-copy": arm(1.0)}
    rows = rows_of(ours, {"process": {"error": "no module"}})
    assert rows[BASE]["ratio"] is None and not rows[BASE]["ok"]
    assert rows["cuda/dlrm/fp32/train-lfu"]["skipped"] == "no module"
