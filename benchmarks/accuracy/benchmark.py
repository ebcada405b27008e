"""`python -m benchmarks accuracy`: tables of low precision against fp32 tables, on a click log, paired by seed.

arms.py            the arms, and one training run
rows.py            runs -> rows of the record, and the table
split_tables.py    hot rows in int8, cold rows in int4, each stored once
pareto.py          picture: memory against accuracy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.accuracy import recipes
from benchmarks.accuracy import rows as accuracy_rows
from benchmarks.accuracy.arms import CRITEO, FP32, MOVIELENS, SYNTHETIC, AccuracyArm, arms_of, run_job
from benchmarks.runner import record
from benchmarks.runner.paired import ReportProgress, TrainingJob, finish
from thermocline.data.click_files import ClickFile
from thermocline.train import DLRMSettings

DIMS = (16, 64)
LARGE = 1 << 22  # training samples of a synthetic log


@dataclass(frozen=True)
class AccuracyPlan:
    """The arms and runs of the experiment. `log`: the log (`data`, `test`, or `samples` and `rows`) and the device; `seeds`
    defaults to the number that the rule wants."""

    log: DLRMSettings = field(default_factory=DLRMSettings)
    dims: Sequence[int] = DIMS
    seeds: int | None = None
    whole_grid: bool = False
    filter: str | None = None

    @property
    def kind(self) -> str:
        if self.log.data is None:
            return SYNTHETIC
        return MOVIELENS if ClickFile(self.log.data).pairs else CRITEO

    @property
    def name(self) -> str:
        """Name of the log in cases. The size of a synthetic log determines its difficulty."""
        if self.log.data is not None:
            return self.kind
        return f"{SYNTHETIC}-{_short(self.log.rows)}-rows-{_short(self.log.samples)}-samples"

    @property
    def log_key(self) -> str:
        """Identifies the log and the recipe in a file of runs."""
        files = [f"{path.name} {path.stat().st_size}" for path in (self.log.data, self.log.test) if path is not None]
        return "; ".join([self.name, *files, str(vars(self.recipe))])

    @property
    def large(self) -> bool:
        """Whether this is a synthetic log for a card: with batches of its own, and without the arm in plain PyTorch, whose 26
        sparse gradients a step would take longer than all other arms together. Shorter logs show that it equals fp32."""
        return self.log.data is None and self.log.samples >= LARGE

    @property
    def recipe(self) -> recipes.Recipe:
        if self.large:
            return recipes.LARGE
        return recipes.MOVIELENS if self.kind == MOVIELENS else recipes.CRITEO

    def arms(self) -> list[AccuracyArm]:
        return [arm for arm in arms_of(self.kind, self.whole_grid, self.filter) if not (self.large and arm.plain)]

    def jobs(self) -> list[TrainingJob[AccuracyArm]]:
        """All runs, ordered by seed."""
        key, settings, kind = self.log_key, self.recipe.apply(self.log), self.kind
        wanted = {arm: self.seeds or arm.seeds(kind) for arm in self.arms()}
        wanted[FP32] = max(wanted.values())
        return [
            TrainingJob(arm, replace(settings, dim=dim, seed=seed), key)
            for seed in range(max(wanted.values()))
            for dim in self.dims
            for arm, seeds in wanted.items()
            if seed < seeds and not arm.zeroed
        ]


def run(plan: AccuracyPlan, runs: Path | None = None, jobs: int = 1, progress: ReportProgress | None = None) -> dict[str, Any]:
    """Do the runs that are missing in the file `runs`, `jobs` at a time, and return the record."""
    recorder = record.Recorder("accuracy", lambda line: None)
    results = finish(plan.jobs(), run_job, runs, jobs, progress, recorder.record["commit"])
    accuracy_rows.write(recorder, plan.name, plan.kind, plan.arms(), results)
    return recorder.record | {"log": plan.log_key, "recipe": asdict(plan.recipe)}


def _short(count: int) -> str:
    """20000000 -> 20M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return str(count)
