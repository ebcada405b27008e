"""`thermocline bench levers`: fewer rows by heat against all of them, and against a uniform cut, paired by seed.

    levers_arms.py       what is compared, and one run
    levers_rows.py       runs -> rows of the record, and the table
    accuracy_rule.py     what passes, as for `bench accuracy`
    paired.py            runs are done once, kept, and side by side

What is trained, how, and how differences are judged is all `bench accuracy`'s; only the arms are others. Launches, which follow
from the modules alone, are counted on tables of a few rows: operators of ours in one training step of all features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..nn.collection import EmbeddingCollection, Table
from ..nn.embedding import EmbeddingBag
from ..train import Settings
from . import accuracy, levers_rows, record
from .accuracy_rule import SEEDS
from .levers_arms import ARMS, FULL, ZEROED, Arm, Job, raw_log, run_job
from .paired import ReportProgress, finish

DIMS = (16,)
APART, COLLECTION, UNIFIED = "a module each", "a collection", "one table"


@dataclass(frozen=True)
class Plan:
    """What is to be compared. `log` has the log (`data`, `test`, or `samples` and `rows`)."""

    log: Settings = field(default_factory=Settings)
    dims: Sequence[int] = DIMS
    seeds: int = SEEDS
    filter: str | None = None

    @property
    def same_log(self) -> accuracy.Plan:
        """The plan of `bench accuracy` on this log: its name, and how it is trained on."""
        return accuracy.Plan(self.log)

    def arms(self) -> list[Arm]:
        """Those whose name has the filter, with the arms they are compared with."""
        wanted = [arm for arm in ARMS if self.filter is None or self.filter in arm.name]
        peers = [FULL, *(arm.uniform for arm in wanted if arm.uniform)]
        return [arm for arm in ARMS if arm in wanted or arm in peers]

    def jobs(self) -> list[Job]:
        """All runs, those of the first seeds first."""
        key, settings = self.same_log.log_key, self.same_log.recipe.apply(self.log)
        trained = [arm for arm in self.arms() if arm != ZEROED]  # judged from the runs of `full`
        return [
            Job(arm, replace(settings, dim=dim, seed=seed), key)
            for seed in range(self.seeds)
            for dim in self.dims
            for arm in trained
        ]


def run(plan: Plan, runs: Path | None = None, jobs: int = 1, progress: ReportProgress | None = None) -> dict[str, Any]:
    """Do the runs that are not yet in the file `runs`, `jobs` at a time, and return the record."""
    recorder = record.Recorder("levers", lambda line: None)
    results = finish(plan.jobs(), run_job, runs, jobs, progress, recorder.record["commit"])
    levers_rows.write(recorder, plan.same_log.name, plan.arms(), results)
    features = raw_log(plan.log).train.ids_BF.shape[1]
    counts = launches(features)
    for way in (COLLECTION, UNIFIED):
        recorder.add(
            f"{plan.same_log.name}/launches/{way.replace(' ', '-')}",
            counts[way],
            "launches",
            peer=APART,
            peer_value=counts[APART],
            ratio=counts[APART] / counts[way],
        )
    return recorder.record | {"log": plan.same_log.log_key, "recipe": asdict(plan.same_log.recipe)}


# -- launches --


class _Calls(TorchDispatchMode):
    """Counts the operators of this package that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "thermocline"
        return func(*args, **(kwargs or {}))


def launches(features: int, rows: int = 5, dim: int = 4) -> dict[str, int]:
    """How many operators one training step takes, for each way to keep the tables of so many features."""
    names = [f"C{feature}" for feature in range(1, features + 1)]
    ids_BF = torch.arange(3 * features).view(3, features) % rows
    apart = nn.ModuleList(EmbeddingBag(rows, dim, mode="sum", precision="fp32") for _ in names)
    collection = EmbeddingCollection([Table(name, rows, dim) for name in names], precision="fp32")
    unified = EmbeddingCollection([Table("all", features * rows, dim, names)], precision="fp32")
    first_F = torch.arange(features) * rows
    return {
        APART: _count(lambda: torch.cat([bag(ids_B[:, None]) for bag, ids_B in zip(apart, ids_BF.t(), strict=True)], dim=1)),
        COLLECTION: _count(lambda: collection(ids_BF).values()),
        UNIFIED: _count(lambda: unified(ids_BF + first_F).values()),
    }


def _count(look_up: Callable[[], Tensor]) -> int:
    calls = _Calls()
    with calls:
        look_up().sum().backward()
    return calls.count
