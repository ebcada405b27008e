"""`thermocline bench accuracy`: tables of low precision against fp32 ones, on a click log, paired by seed.

Every run is one process's work for seconds or minutes, and runs know nothing of each other. So they are done side by side, one
thread each: two processes of one thread finish more runs than one of two threads. A finished run is a line in a file beside the
results at once, and is never repeated; Ctrl-C loses what is under way and nothing else. Seeds are the outer loop: whenever one
stops, what is there is paired.

    accuracy_arms.py     what is compared, and one run
    accuracy_rule.py     what passes
    accuracy_rows.py     runs -> rows of the record, and the table
    pareto.py            memory against accuracy, as a picture
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..data import ClickFile
from ..errors import BadInput, FormatError
from ..train import Settings, recipes
from . import accuracy_rows, record
from .accuracy_arms import CRITEO, FP32, MOVIELENS, SYNTHETIC, Arm, Job, Result, arms_of, run_job

DIMS = (16, 64)
LARGE = 1 << 22  # training samples of a synthetic log
ReportProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Plan:
    """What is to be compared. `log` has the log (`data`, `test`, or `samples` and `rows`) and the device; without `seeds`, as
    many as the rule wants."""

    log: Settings = field(default_factory=Settings)
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
        """The log's name in cases. How hard a synthetic one is depends on its size."""
        if self.log.data is not None:
            return self.kind
        return f"{SYNTHETIC}-{_short(self.log.rows)}-rows-{_short(self.log.samples)}-samples"

    @property
    def log_key(self) -> str:
        """What tells runs on this log, with this recipe, from others in the same file."""
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

    def arms(self) -> list[Arm]:
        return [arm for arm in arms_of(self.kind, self.whole_grid, self.filter) if not (self.large and arm.plain)]

    def jobs(self) -> list[Job]:
        """All runs, those of the first seeds first."""
        key, settings, kind = self.log_key, self.recipe.apply(self.log), self.kind
        wanted = {arm: self.seeds or arm.seeds(kind) for arm in self.arms()}
        wanted[FP32] = max(wanted.values())
        return [
            Job(arm, replace(settings, dim=dim, seed=seed), key)
            for seed in range(max(wanted.values()))
            for dim in self.dims
            for arm, seeds in wanted.items()
            if seed < seeds and not arm.zeroed
        ]


def run(plan: Plan, runs: Path | None = None, jobs: int = 1, progress: ReportProgress | None = None) -> dict[str, Any]:
    """Do the runs that are not yet in the file `runs`, `jobs` at a time, and return the record."""
    recorder = record.Recorder("accuracy", lambda line: None)
    asked, done = plan.jobs(), _read(runs)
    left = [job for job in asked if job.key not in done]
    tell = progress or (lambda finished, total, what: None)
    tell(len(asked) - len(left), len(asked), "runs")
    with closing(_results(left, jobs)) as results:  # closed, it ends its processes, wherever Ctrl-C comes
        for result in results:
            result = replace(result, commit=recorder.record["commit"])
            done[result.key] = result
            if runs:
                _append(runs, result)
            finished = sum(job.key in done for job in asked)
            tell(finished, len(asked), f"{result.arm}, D={result.dim}, seed {result.seed}")
    accuracy_rows.write(recorder, plan.name, plan.kind, plan.arms(), [done[job.key] for job in asked])
    return recorder.record | {"log": plan.log_key, "recipe": asdict(plan.recipe)}


def runs_file(json: str | None) -> Path | None:
    """Where finished runs are kept, beside the results."""
    return Path(json).with_suffix(".runs.jsonl") if json not in (None, "-") else None


# -- finished runs --


def _append(path: Path, result: Result) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def _read(path: Path | None) -> dict[tuple[str, str, int, int], Result]:
    """Finished runs by key. A last line that was cut off, by a full disk or a power cut, is a run to repeat."""
    if path is None or not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        path.write_text(text := text[: text.rfind("\n") + 1], encoding="utf-8")
    try:
        results = [Result(**json.loads(line)) for line in text.splitlines()]
    except (ValueError, TypeError) as error:
        raise FormatError(f"'{path}' is not a file of runs: {error}; move it away, or use another --json") from None
    return {result.key: result for result in results}


# -- doing runs --


def _results(left: Sequence[Job], jobs: int) -> Generator[Result, None, None]:
    """The results of runs, as they come."""
    if jobs < 1:
        raise BadInput(f"jobs is {jobs}; at least 1 run is done at a time")
    if jobs == 1 or len(left) < 2:
        with _one_thread():
            for job in left:
                yield Result(**run_job(job))
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with _passive(), ProcessPoolExecutor(min(jobs, len(left)), context, _start_worker) as pool:
        try:
            for future in as_completed([pool.submit(run_job, job) for job in left]):
                yield Result(**future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    torch.set_num_threads(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _passive() -> Iterator[None]:
    """Processes started here do not spin while they wait: the variable is read when they load torch."""
    before = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_WAIT_POLICY"]
        else:
            os.environ["OMP_WAIT_POLICY"] = before


def _short(count: int) -> str:
    """20000000 -> 20M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return str(count)
