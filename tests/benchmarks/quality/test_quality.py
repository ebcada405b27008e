"""The quality benchmark: arms are what their names say, the rule judges as it says, and runs are done on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import benchmark as quality
from benchmarks.quality.arms import ALONE, ARMS, FP32, GATED, ZEROED, Size, arms_of, plan_of
from benchmarks.quality.ranks import do
from benchmarks.runner import record, show
from benchmarks.runner.noninferiority import PASSES, REJECTED, Interval
from benchmarks.runner.paired import RunResult, TrainingJob
from support import mentions
from thermocline.heat.profiler import profile_batches

ASKED = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"


def test_the_gated_arm_has_int8_rows_bf16_gradients_and_all_three_tiers() -> None:
    heat = profile_batches([{"item": np.arange(100) ** 2 % 97}])
    (table,) = plan_of(GATED, {"item": Size(101, 8, ("item",), 10)}, heat).tables
    assert [(tier.tier, tier.rows, tier.precision) for tier in table.tiers] == [
        (1, 5, "int8"),
        (2, 15, "int8"),
        (3, 81, "int8"),
    ]
    assert table.wire_gradients == "bf16"
    (plain,) = plan_of(FP32, {"item": Size(101, 8, ("item",), 10)}, heat).tables
    assert [(tier.tier, tier.rows, tier.precision) for tier in plain.tiers] == [(3, 101, "fp32")]
    assert plain.wire_gradients == "fp32"


def test_arms_are_chosen_by_name_next_to_fp32() -> None:
    assert [arm.name for arm in (*ARMS, *ALONE)] == ["fp32", "int8-bf16-tiers", "zeroed-89%", "int8", "bf16", "tiers"]
    assert arms_of(None) == [FP32, GATED, ZEROED]
    assert [arm.name for arm in arms_of("tiers")] == ["fp32", "int8-bf16-tiers", "tiers"]


@pytest.mark.parametrize(
    "low, high, said",
    [(-0.004, 0.001, PASSES), (-0.006, 0.001, REJECTED), (-0.002, -0.001, REJECTED), (0.001, 0.002, PASSES)],
)
def test_a_certain_loss_and_too_wide_an_interval_are_both_rejected(low: float, high: float, said: str) -> None:
    assert quality.verdict(Interval((low + high) / 2, low, high), 5e-3) == said


def results(loss: float) -> list[RunResult]:
    """Ten seeds of made-up runs, in which the gated arm loses so much."""
    found = []
    for job in quality.QualityPlan().jobs():
        wobble = 1e-4 * (job.settings.seed % 3 - 1)
        lost = (loss + wobble) * (job.arm == GATED)
        names = ("auc", "logloss") if job.log.startswith("dlrm") else ("hit_rate", "ndcg")
        trained = {name: 0.5 + 0.01 * job.settings.seed - lost for name in names}
        measures = {"trained": trained} | ({"zeroed": {name: 0.3 for name in names}} if job.arm == FP32 else {})
        found.append(RunResult(*job.key, measures, stats={"bytes": 1000}, rows=10, seconds=1.0))
    return found


@pytest.mark.parametrize("loss, ok", [(0.0, True), (0.001, False), (-0.001, True)])
def test_rows_hold_what_is_asked_unless_something_is_lost(loss: float, ok: bool) -> None:
    recorder = record.Recorder("quality", lambda line: None)
    recorder.asked = show.load_asked(ASKED)["quality"]
    quality.write(recorder, quality.QualityPlan().arms(), results(loss))
    rows = {row["case"]: row for row in recorder.rows}
    assert set(recorder.asked) <= set(rows) and len(rows) == 9
    assert all(rows[case]["ok"] == (ok or "zeroed" in case) for case in recorder.asked)
    assert rows["sequence/ndcg/zeroed-89%"]["verdict"] == REJECTED
    show.parse(json.loads(json.dumps(recorder.record)), "made up")
    assert quality.table(recorder.record).row_count == 9


def test_every_kind_of_run_can_be_done_and_is_done_once(tmp_path: Path) -> None:
    plan, done = quality.QualityPlan(seeds=1, quick=True), []

    def alone(job: TrainingJob) -> dict[str, Any]:
        done.append(job.key)
        return do(job, 0, 1)

    first = quality.run(plan, tmp_path / "q.runs.jsonl", do=alone)
    again = quality.run(plan, tmp_path / "q.runs.jsonl", do=alone)
    assert len(done) == 4 and first["rows"] == again["rows"]
    values = {row["case"]: row["ours"] for row in first["rows"]}
    assert values["sequence/hit_rate/zeroed-89%"] < values["sequence/hit_rate/int8-bf16-tiers"] - 0.1
    assert 0 < abs(values["dlrm/auc/int8-bf16-tiers"] - values["dlrm/auc/fp32"]) < 0.02


def test_ranks_do_runs_together_and_tell_what_failed() -> None:
    from dataclasses import replace

    from benchmarks.quality.ranks import started
    from thermocline import ThermoclineError

    settings = replace(quality.QUICK[quality.SEQUENCE], users=60)  # type: ignore[call-arg]
    with started() as ranks:
        found = RunResult(**ranks.do(TrainingJob(GATED, settings, "sequence")))
        assert 0 < found.measures["trained"]["hit_rate"] < 1
        with pytest.raises(ThermoclineError, check=mentions("heads")):
            ranks.do(TrainingJob(GATED, replace(settings, heads=3), "sequence"))  # type: ignore[call-arg]
