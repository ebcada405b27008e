"""The arms of the accuracy benchmark, and one run of one of them.

    fp32                         our tables in fp32: what all others are compared with
    plain                        plain nn.EmbeddingBag with the same optimizer in plain PyTorch: fp32 has to equal it
    int8-stochastic-5%           precision, rounding of the rows that are not cached, rows in the full-precision cache (LFU)
    tiers-1%-5%-int2             1% of the rows in fp32, 5% in int8, all others in int2, by heat; begins with the heat of the
                                 training part, so that hot rows have the initial values of fp32 and not rounded ones
    split-60%-int8-int4          the hottest 60% of the rows in int8, all others in int4, by the heat of the training part, each
                                 row stored once (`split_tables.py`)
    zeroed-89%                   a control: the fp32 arm, after training, with all but the hottest 11% of rows set to zero

Two controls have to be rejected on every log, or the log cannot tell good from bad: int4 rounded to nearest without a cache,
and `zeroed-89%`. Heat is how often a row is looked up in the training part, all tables ranked together, ties by row number.
Rows are zeroed in the finished fp32 model: its MLPs were trained with the rows they miss now, and the control costs an
evaluation, no training.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy.plain_tables import plain_dlrm
from benchmarks.accuracy.split_tables import SplitTables
from benchmarks.runner.memory_log import in_memory
from benchmarks.runner.noninferiority import MANY_SEEDS, SEEDS
from benchmarks.runner.paired import RunResult, TrainingJob
from thermocline.data.click_files import open_log
from thermocline.data.click_log import ClickLog, MemoryLog, heat_of
from thermocline.data.metrics import Measures
from thermocline.models import DLRM, initialize
from thermocline.nn.config import RowConfig
from thermocline.rows.optimizers import RowwiseAdagrad
from thermocline.train import DLRMRun, DLRMSettings, evaluate

KEPT = 0.11  # share of the rows that the zeroing control keeps
IN_MEMORY = 1 << 21  # samples; shorter files are kept in memory
ON_CARD = 1 << 26  # samples; shorter synthetic logs are made on the GPU once for all arms of a seed (about 330 bytes each)
_BLOCK = 1 << 20  # samples of a block on a GPU, where the number of operations dominates

CRITEO, MOVIELENS, SYNTHETIC = "criteo", "movielens", "synthetic"


@dataclass(frozen=True)
class AccuracyArm:
    """One way to store the rows."""

    precision: str = "fp32"
    stochastic: bool = True
    cache: float = 0.0
    plain: bool = False
    zeroed: bool = False  # evaluated in the runs of fp32
    tiers: tuple[float, float] | None = None  # shares of rows in fp32 and int8, above the precision
    split: float = 0.0  # share of rows in int8, all others in the precision

    @property
    def name(self) -> str:
        if self.plain:
            return "plain"
        if self.zeroed:
            return f"zeroed-{1 - KEPT:.0%}"
        if self.precision == "fp32":
            return "fp32"
        if self.tiers:
            return f"tiers-{self.tiers[0]:.0%}-{self.tiers[1]:.0%}-{self.precision}"
        if self.split:
            return f"split-{self.split:.0%}-int8-{self.precision}"
        return f"{self.precision}-{'stochastic' if self.stochastic else 'nearest'}-{self.cache:.0%}"

    @property
    def settings(self) -> dict[str, Any]:
        """DLRMSettings of a run of this arm."""
        precision: Any = self.precision
        if self.tiers:
            precision = {"fp32": self.tiers[0], "int8": self.tiers[1], self.precision: 1 - sum(self.tiers)}
        if self.split:
            precision = "fp32"  # of the tables that split tables replace
        return {"precision": precision, "cache": self.cache, "warm": self.tiers is not None, "stochastic": self.stochastic}

    @property
    def cached(self) -> bool:
        """Whether a flush changes rows."""
        return self.cache > 0 or self.tiers is not None

    def seeds(self, kind: str) -> int:
        """Number of seeds that the rule wants on this kind of log."""
        return MANY_SEEDS if kind == MOVIELENS or self.precision == "int2" else SEEDS


FP32, PLAIN, ZEROED = AccuracyArm(), AccuracyArm(plain=True), AccuracyArm(zeroed=True)
CONTROL = AccuracyArm("int4", stochastic=False)
INT8_5, INT4_1 = AccuracyArm("int8", cache=0.05), AccuracyArm("int4", cache=0.01)
TIERS = AccuracyArm("int2", tiers=(0.01, 0.05))
_CACHES = tuple(
    AccuracyArm(precision, stochastic, cache)
    for precision in ("int8", "int4", "int2")
    for stochastic in (False, True)
    for cache in (0.0, 0.01, 0.05, 0.1)
)
_SPLITS = tuple(AccuracyArm("int4", split=share) for share in (0.7, 0.6, 0.5, 0.4))
GRID = (*_CACHES, TIERS, AccuracyArm("int2", tiers=(0.0, 0.08)), *_SPLITS)  # two tiers of equal bytes
# What runs by default: all of ALWAYS, and what each kind of log has to show.
ALWAYS = (FP32, PLAIN, CONTROL, ZEROED)
GATED = {
    CRITEO: (INT8_5, INT4_1, TIERS),
    MOVIELENS: (AccuracyArm("int8"), AccuracyArm("int8", stochastic=False)),
    SYNTHETIC: (INT4_1,),
}


def arms_of(kind: str, whole_grid: bool = False, filter: str | None = None) -> list[AccuracyArm]:
    """The required arms or the whole grid; with `filter`, arms of the grid whose name contains it, and fp32."""
    wanted = dict.fromkeys([*ALWAYS, *GATED[kind], *(GRID if whole_grid or filter else ())])
    return [arm for arm in wanted if arm == FP32 or filter is None or filter in arm.name]


def run_job(job: TrainingJob[AccuracyArm]) -> dict[str, Any]:
    """Train and evaluate one arm with one seed; returns a `RunResult` as a dict, which can be pickled."""
    arm, started = job.arm, time.perf_counter()
    settings = replace(job.settings, **arm.settings)
    logs = _logs(settings)
    model = plain_dlrm(settings, logs[0]) if arm.plain else _split(arm, settings, logs[0]) if arm.split else None
    run = DLRMRun(settings, logs=logs, model=model)
    outcome = run.finish()
    seconds = time.perf_counter() - started
    tables: Any = run.model.embeddings
    measures = {"trained": {"auc": outcome.auc, "logloss": outcome.logloss}}
    ratios = {}
    if not arm.plain:
        memory = tables.memory()
        ratios = {"memory_ratio": memory.ratio, "memory_ratio_with_state": memory.ratio_with_state}
    if arm.cached:
        tables.flush()
        measures["flushed"] = judge(run)
    if arm == FP32:
        zero_cold(tables, run.train_log, KEPT)
        measures["zeroed"] = judge(run)
    done = RunResult(*job.key, measures, **ratios, stats=outcome.stats, rows=outcome.rows, seconds=seconds)
    return asdict(done)


def _split(arm: AccuracyArm, settings: DLRMSettings, log: ClickLog) -> DLRM:
    """The model of an arm whose rows are split by heat."""
    shares = {"int8": arm.split, arm.precision: 1 - arm.split}
    optimizer = RowwiseAdagrad(lr=settings.lr)
    tables = SplitTables(
        heat_of(log), settings.dim, shares, RowConfig(optimizer=optimizer, seed=settings.seed), settings.device
    )
    initialize(tables, {str(n): rows for n, rows in enumerate(log.rows)}, settings.dim, settings.seed, settings.device)
    return settings.model_of(tables, len(log.rows), log.dense)


def judge(run: DLRMRun) -> dict[str, float]:
    """AUC and LogLoss of the current model."""
    found: Measures = evaluate(run.model, run.test_log, run.settings.device)
    return {"auc": found.auc, "logloss": found.logloss}


def _logs(settings: DLRMSettings) -> tuple[ClickLog, ClickLog]:
    """The log of a run. Seeds share a file's samples; only the order of a shuffled log follows the seed."""
    if settings.data is None:
        on_card = settings.device.startswith("cuda") and settings.samples <= ON_CARD
        return _made(settings.rows, settings.samples, settings.seed, settings.device) if on_card else settings.logs()
    train, test = _read(settings.data, settings.test, settings.device)
    if isinstance(train, MemoryLog) and train.shuffle is not None:
        train = replace(train, shuffle=settings.seed)
    return train, test


@lru_cache(maxsize=1)
def _made(rows: int, samples: int, seed: int, device: str) -> tuple[ClickLog, ClickLog]:
    train, judged = DLRMSettings(rows=rows, samples=samples, seed=seed, device=device).logs()
    return in_memory(train, device, _BLOCK), in_memory(judged, device, _BLOCK)


@lru_cache(maxsize=1)
def _read(data: Path, test: Path | None, device: str) -> tuple[ClickLog, ClickLog]:
    train, judged = open_log(data, test)
    return _kept(train, device), _kept(judged, device)


def _kept(log: ClickLog, device: str) -> ClickLog:
    """The log, in memory if it is short enough."""
    return log if isinstance(log, MemoryLog) or log.samples > IN_MEMORY else in_memory(log, device)


def cold_rows(heat: Iterable[Tensor], kept: float) -> list[Tensor]:
    """Rows of each table outside the hottest share `kept` of all tables together."""
    heat = list(heat)
    hottest_first_R = torch.cat(heat).argsort(descending=True, stable=True)
    cold_R = torch.ones(len(hottest_first_R), dtype=torch.bool, device=hottest_first_R.device)
    cold_R[hottest_first_R[: round(kept * len(cold_R))]] = False
    return [part_R.nonzero()[:, 0] for part_R in cold_R.split([len(table_R) for table_R in heat])]


def zero_cold(tables: Any, train_log: ClickLog, kept: float) -> None:
    """Set all rows to zero except the hottest of the training part."""
    for table, rows_N in zip(tables.tables, cold_rows(heat_of(train_log), kept), strict=True):
        tables.set_rows(table.name, rows_N, torch.zeros(len(rows_N), table.dim, device=rows_N.device))
