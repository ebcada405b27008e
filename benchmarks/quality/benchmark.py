"""`python -m benchmarks quality`: the loss of quality by int8 rows, bf16 gradients and tiers, paired by seed.

    arms.py     the arms, and the plan of each
    ranks.py    one training run, on two ranks

Two models: a sequence model by HitRate@10 and NDCG@10 of the last item of every history, ranked among all items; and a DLRM by
AUC on samples after those of the training part.

The rule, fixed before the first measurement: an arm **passes** a metric if the 95% interval of its paired differences to fp32
does not lie below zero (no significant loss) and does not reach below the margin: 5e-4 for AUC, as in the accuracy benchmark,
and 5e-3 for HitRate and NDCG, whose resolution is one user. Otherwise it is **rejected**; too few seeds are no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from benchmarks.quality.arms import FP32, QualityArm, arms_of
from benchmarks.quality.ranks import started
from benchmarks.runner import record
from benchmarks.runner.noninferiority import PASSES, REJECTED, SEEDS, Interval, interval
from benchmarks.runner.paired import ReportProgress, RunResult, TrainingJob, finish, note_commits
from benchmarks.runner.paired_rows import asked_cell, draw, finite, seeds_cell, span
from benchmarks.runner.record import Recorder, Row
from thermocline.train import DLRMSettings, SequenceSettings

SEQUENCE, DLRM = "sequence", "dlrm"
MARGINS = {"hit_rate": 5e-3, "ndcg": 5e-3, "auc": 5e-4}
MEASURES = {SEQUENCE: ("hit_rate", "ndcg"), DLRM: ("auc",)}
UNITS = {"hit_rate": "HitRate@10", "ndcg": "NDCG@10", "auc": "AUC"}

# Batches of one rank of two.
_HISTORIES = SequenceSettings(users=3000, items=3200, dim=16, length=20, negatives=48, batch=64, epochs=3, dense_lr=2e-3)
_CLICKS = DLRMSettings(samples=256_000, rows=20_000, dim=16, batch=512, bottom=(32,), top=(64,), lr=0.04, dense_lr=4e-3)
MODELS: dict[str, SequenceSettings | DLRMSettings] = {SEQUENCE: _HISTORIES, DLRM: _CLICKS}
QUICK: dict[str, SequenceSettings | DLRMSettings] = {
    SEQUENCE: replace(_HISTORIES, users=300, items=320, epochs=1),
    DLRM: replace(_CLICKS, samples=3000, rows=2000),
}


@dataclass(frozen=True)
class QualityPlan:
    """The arms and runs of the experiment."""

    seeds: int = SEEDS
    filter: str | None = None
    quick: bool = False

    def arms(self) -> list[QualityArm]:
        return arms_of(self.filter)

    def jobs(self) -> list[TrainingJob[QualityArm]]:
        """All runs, ordered by seed."""
        models = QUICK if self.quick else MODELS
        trained = [arm for arm in self.arms() if not arm.zeroed]  # evaluated in the runs of fp32
        return [
            TrainingJob(arm, replace(settings, seed=seed), f"{name}: {settings}")
            for seed in range(self.seeds)
            for name, settings in models.items()
            for arm in trained
        ]


def run(
    plan: QualityPlan, runs: Path | None = None, progress: ReportProgress | None = None,
    do: Callable[[TrainingJob[QualityArm]], dict[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Do the runs that are missing in the file `runs`, and return the record. `do`: runs a job, by default on two ranks."""
    recorder = record.Recorder("quality", lambda line: None, judged=not plan.quick)
    jobs = plan.jobs()
    if do is not None:
        results = finish(jobs, do, runs, 1, progress, recorder.record["commit"])
    else:
        with started() as ranks:
            results = finish(jobs, ranks.do, runs, 1, progress, recorder.record["commit"])
    write(recorder, plan.arms(), results)
    models = QUICK if plan.quick else MODELS
    return recorder.record | {"models": {name: str(settings) for name, settings in models.items()}}


# -- rows --


def write(recorder: Recorder, arms: Sequence[QualityArm], results: Sequence[RunResult]) -> None:
    """Add a row for every model, metric and arm."""
    for model, measures in MEASURES.items():
        of_model = [result for result in results if result.log.startswith(f"{model}:")]
        fp32 = {result.seed: result for result in of_model if result.arm == FP32.name}
        for name in measures:
            for arm in arms:
                mine = fp32 if arm.zeroed else {result.seed: result for result in of_model if result.arm == arm.name}
                _add(recorder, f"{model}/{name}/{arm.name}", name, arm, mine, fp32)
    note_commits(recorder, results)


def _add(
    recorder: Recorder, case: str, name: str, arm: QualityArm, mine: dict[int, RunResult], fp32: dict[int, RunResult]
) -> None:
    when = "zeroed" if arm.zeroed else "trained"
    values = {seed: result.measures[when][name] for seed, result in mine.items()}
    peers = {seed: fp32[seed].measures["trained"][name] for seed in values}
    fields: Row = {
        "seeds": len(values), "seeds_wanted": SEEDS, "margin": MARGINS[name], "values": list(values.values()),
        "card_bytes": fmean(result.stats["bytes"] for result in mine.values()),
        "table_rows": next(iter(mine.values())).rows, "seconds": median(result.seconds for result in mine.values()),
    }  # fmt: skip
    if arm != FP32:
        found = interval([value - peers[seed] for seed, value in values.items()])
        asked = recorder.asked.get(case) if len(values) >= SEEDS else None
        said = verdict(found, MARGINS[name])
        fields |= {"difference": finite(found), "verdict": said, "worse": found.high < 0, "asked": asked}
        fields |= {"ok": asked is None or said == asked}
    peer = None if arm == FP32 else FP32.name
    recorder.add(case, fmean(values.values()), UNITS[name], peer=peer, peer_value=fmean(peers.values()), **fields)


def verdict(difference: Interval, margin: float) -> str:
    """The result of the rule for paired differences to fp32."""
    return PASSES if difference.high >= 0 and difference.low > -margin else REJECTED


# -- the table --


def table(measured: dict[str, Any], only_short: bool = False) -> Table:
    """The record as a table for a terminal; differences in units of 1e-4, with * where a loss is significant."""
    names = ("arm", "seeds", "value", "fp32", "difference", "margin", "seconds", "verdict", "asked")
    return draw(measured, "differences to fp32", names, _cells, only_short)


def _cells(row: Row) -> list[str]:
    return [
        row["case"],
        seeds_cell(row),
        f"{row['ours']:.4f} {row['unit']}",
        f"{row['peer_value']:.4f}",
        span(row.get("difference")) + ("*" if row.get("worse") else ""),
        f"{row['margin'] * 1e4:g}",
        f"{row['seconds']:.1f}",
        row.get("verdict", ""),
        asked_cell(row),
    ]
