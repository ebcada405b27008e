"""One run of the quality benchmark: two processes train one model by the plan of an arm, and evaluate it together.

Processes are started once and do all runs, each run in a new process group: starting processes takes longer than a run.
"""

from __future__ import annotations

import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.accuracy.arms import cold_rows
from benchmarks.quality.arms import CARDS_PER_NODE, FP32, KEPT, NODES, QualityArm, Size, plan_of
from benchmarks.runner.paired import RunResult, TrainingJob
from thermocline.data.click_log import heat_of
from thermocline.errors import ThermoclineError
from thermocline.heat.profile import HeatProfile
from thermocline.heat.profiler import profile_batches
from thermocline.plan.model import Plan
from thermocline.train import DLRMRun, DLRMSettings, SequenceRun, SequenceSettings, TrainingRanks, evaluate

RANKS = NODES * CARDS_PER_NODE
TIMEOUT = timedelta(seconds=120)

Measures = dict[str, dict[str, float]]


# -- a rank's part --


def do(job: TrainingJob[QualityArm], rank: int, ranks: int) -> dict[str, Any]:
    """Train and evaluate in the current process group, or alone; returns a `RunResult` as a dict."""
    started = time.perf_counter()
    train = _sequence if isinstance(job.settings, SequenceSettings) else _clicks
    measures, memory, rows = train(job, rank, ranks)
    result = RunResult(*job.key, measures, stats={"bytes": memory}, rows=rows, seconds=time.perf_counter() - started)
    return asdict(result)


def _sequence(job: TrainingJob[QualityArm], rank: int, ranks: int) -> tuple[Measures, int, int]:
    settings = job.settings
    assert isinstance(settings, SequenceSettings)
    log = _histories(settings)
    heat = profile_batches([{log.column: log.training_items()}])
    size = Size(settings.items, settings.dim, (log.column,), settings.batch * (settings.negatives + settings.length))
    run = SequenceRun(settings, log=log, ranks=_cards(job.arm, {"item": size}, heat, rank, ranks))
    outcome = run.finish()
    measures = {"trained": {"hit_rate": outcome.hit_rate, "ndcg": outcome.ndcg}}
    if job.arm == FP32:
        counts_R = torch.bincount(torch.from_numpy(log.training_items()), minlength=settings.items)
        _zero(run.model.embeddings, ["item"], [counts_R])
        measures["zeroed"] = run.evaluate()
    return measures, sum(outcome.memory.values()), outcome.rows


def _clicks(job: TrainingJob[QualityArm], rank: int, ranks: int) -> tuple[Measures, int, int]:
    settings = job.settings
    assert isinstance(settings, DLRMSettings)
    train, test = _click_logs(settings)
    names = [f"C{feature + 1}" for feature in range(len(train.rows))]
    heat = profile_batches(dict(zip(names, batch.ids_BF.t().numpy(), strict=True)) for batch in train.batches(1 << 16))
    sizes = {name: Size(rows, settings.dim, (name,), settings.batch) for name, rows in zip(names, train.rows, strict=True)}
    run = DLRMRun(settings, logs=(train, test), ranks=_cards(job.arm, sizes, heat, rank, ranks))
    outcome = run.finish()
    measures = {"trained": {"auc": outcome.auc, "logloss": outcome.logloss}}
    if job.arm == FP32:
        _zero(run.model.embeddings, names, heat_of(train))
        found = evaluate(run.model, test, settings.device, run.ranks)
        measures["zeroed"] = {"auc": found.auc, "logloss": found.logloss}
    return measures, sum(outcome.memory.values()), outcome.rows


@lru_cache(maxsize=1)
def _histories(settings: SequenceSettings) -> Any:
    """One log for all arms of a seed."""
    return settings.log()


@lru_cache(maxsize=1)
def _click_logs(settings: DLRMSettings) -> Any:
    return settings.logs()


def _cards(arm: QualityArm, sizes: dict[str, Size], heat: HeatProfile, rank: int, ranks: int) -> TrainingRanks:
    """Plan and heat of the first rank: a heat profile contains its time of creation."""
    made: list[Any] = [plan_of(arm, sizes, heat, ranks), heat]
    if ranks > 1:
        dist.broadcast_object_list(made)
    plan: Plan = made[0]
    return TrainingRanks(rank, ranks, plan, made[1])


def _zero(tables: Any, names: list[str], heat: list[Tensor]) -> None:
    for name, cold_N in zip(names, cold_rows(heat, KEPT), strict=True):
        dim = next(table.dim for table in tables.tables if table.name == name)
        tables.set_rows(name, cold_N, torch.zeros(len(cold_N), dim))


# -- processes --


class RankProcesses:
    """Processes that do jobs together."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._results = context.Queue()
        self._tasks = [context.Queue() for _ in range(size)]
        self._done = 0
        self._processes = [
            context.Process(target=_work, args=(rank, size, tasks, self._results), daemon=True)
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()

    def do(self, job: TrainingJob[QualityArm]) -> dict[str, Any]:
        """Wait for all ranks; returns the result of the first."""
        self._done += 1
        for tasks in self._tasks:
            tasks.put((job, str(Path(self._folder.name) / f"store{self._done}")))
        first: dict[str, Any] = {}
        for _ in self._tasks:
            rank, result, failed = self._results.get(timeout=10 * TIMEOUT.total_seconds())
            if failed:
                raise ThermoclineError(f"rank {rank} of {job.key} failed: {failed}")
            first = result if rank == 0 else first
        return first

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()
        self._folder.cleanup()


@contextmanager
def started(size: int = RANKS) -> Iterator[RankProcesses]:
    """Ranks for the duration of this context."""
    before = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch is imported
    try:
        ranks = RankProcesses(size)
    finally:
        if before is None:
            del os.environ["OMP_WAIT_POLICY"]
    try:
        yield ranks
    finally:
        ranks.close()


def _work(rank: int, size: int, tasks: Any, results: Any) -> None:
    """A rank: do jobs until this process or its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    torch.set_num_threads(1)
    parent = mp.parent_process()
    while parent is not None and parent.is_alive():
        try:
            job, store = tasks.get(timeout=5)
        except queue.Empty:
            continue
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT)
            results.put((rank, do(job, rank, size), None))
        except Exception:
            results.put((rank, {}, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
