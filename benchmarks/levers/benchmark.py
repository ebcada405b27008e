"""`python -m benchmarks levers`: fewer rows, chosen by heat, against all rows and against a uniform cut, paired by seed.

    arms.py    the arms, and one training run
    rows.py    runs -> rows of the record, and the table

Training and the rule are those of the accuracy benchmark. Launches are counted without training: the operators of one step over
all features, and the bytes, for separate modules, a collection and one table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.accuracy import benchmark as accuracy
from benchmarks.levers import rows as levers_rows
from benchmarks.levers.arms import ARMS, FULL, ZEROED, LeverArm, raw_log, run_job
from benchmarks.runner import record
from benchmarks.runner.noninferiority import SEEDS
from benchmarks.runner.paired import ReportProgress, TrainingJob, finish
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.nn.embedding import EmbeddingBag
from thermocline.train import DLRMSettings

DIMS = (16,)
APART, COLLECTION, UNIFIED = "a module each", "a collection", "one table"


@dataclass(frozen=True)
class LeversPlan:
    """The arms and runs of the experiment. `log`: the log (`data`, `test`, or `samples` and `rows`)."""

    log: DLRMSettings = field(default_factory=DLRMSettings)
    dims: Sequence[int] = DIMS
    seeds: int = SEEDS
    filter: str | None = None

    @property
    def same_log(self) -> accuracy.AccuracyPlan:
        """The plan of the accuracy benchmark on this log, for its name and recipe."""
        return accuracy.AccuracyPlan(self.log)

    def arms(self) -> list[LeverArm]:
        """Arms whose name contains the filter, and the arms they are compared with."""
        wanted = [arm for arm in ARMS if self.filter is None or self.filter in arm.name]
        peers = [FULL, *(arm.uniform for arm in wanted if arm.uniform)]
        return [arm for arm in ARMS if arm in wanted or arm in peers]

    def jobs(self) -> list[TrainingJob[LeverArm]]:
        """All runs, ordered by seed."""
        key, settings = self.same_log.log_key, self.same_log.recipe.apply(self.log)
        trained = [arm for arm in self.arms() if arm != ZEROED]  # evaluated in the runs of `full`
        return [
            TrainingJob(arm, replace(settings, dim=dim, seed=seed), key)
            for seed in range(self.seeds)
            for dim in self.dims
            for arm in trained
        ]


def run(plan: LeversPlan, runs: Path | None = None, jobs: int = 1, progress: ReportProgress | None = None) -> dict[str, Any]:
    """Do the runs that are missing in the file `runs`, `jobs` at a time, and return the record."""
    recorder = record.Recorder("levers", lambda line: None)
    results = finish(plan.jobs(), run_job, runs, jobs, progress, recorder.record["commit"])
    levers_rows.write(recorder, plan.same_log.name, plan.arms(), results)
    ways = ways_to_keep([table.distinct for table in raw_log(plan.log).heat], plan.dims[0])
    for name in (COLLECTION, UNIFIED):
        recorder.add(
            f"{plan.same_log.name}/launches/{name.replace(' ', '-')}",
            ways[name].launches,
            "launches",
            peer=APART,
            peer_value=ways[APART].launches,
            ratio=ways[APART].launches / ways[name].launches,
            bytes=ways[name].bytes,
            peer_bytes=ways[APART].bytes,
        )
    return recorder.record | {"log": plan.same_log.log_key, "recipe": asdict(plan.same_log.recipe)}


# -- launches and bytes --


class _Calls(TorchDispatchMode):
    """Counts calls of this package's operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "thermocline"
        return func(*args, **(kwargs or {}))


class Way(NamedTuple):
    """Operators in a training step, and bytes with optimizer state."""

    launches: int
    bytes: int


def ways_to_keep(rows: Sequence[int], dim: int) -> dict[str, Way]:
    """Cost of tables as separate modules, as a collection and as one table."""
    names = [f"C{feature}" for feature in range(1, len(rows) + 1)]
    ids_BF, first_F = torch.zeros(3, len(rows), dtype=torch.int64), torch.tensor([0, *rows[:-1]]).cumsum(0)
    bags = [EmbeddingBag(count, dim, mode="sum", rows=RowConfig("fp32")) for count in rows]
    tables = [Table(name, count, dim) for name, count in zip(names, rows, strict=True)]
    collection = EmbeddingCollection(tables, rows=RowConfig("fp32"))
    unified = EmbeddingCollection([Table("all", sum(rows), dim, names)], rows=RowConfig("fp32"))

    def apart() -> Tensor:
        return torch.cat([bag(ids_B[:, None]) for bag, ids_B in zip(bags, ids_BF.t(), strict=True)], dim=1)

    return {
        APART: Way(_count(apart), sum(bag.memory().total for bag in bags)),
        COLLECTION: Way(_count(lambda: collection(ids_BF).values()), collection.memory().total),
        UNIFIED: Way(_count(lambda: unified(ids_BF + first_F).values()), unified.memory().total),
    }


def _count(look_up: Callable[[], Tensor]) -> int:
    calls = _Calls()
    with calls:
        look_up().sum().backward()
    return calls.count
