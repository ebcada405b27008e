"""Paired training runs: each run is done once, kept in a file, and done beside others.

Runs are independent and take seconds or minutes, so several processes of one thread each do them. A finished run is appended
to a file beside the results and is never repeated; Ctrl-C loses only unfinished runs. Seeds are the outer loop of the jobs, so
that finished runs are paired whenever the benchmark stops.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from benchmarks.runner.record import Recorder
from thermocline.errors import BadInput, FormatError

Key = tuple[str, str, int, int]  # log, arm, dimension, seed
ReportProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class RunResult:
    """Metrics of one run."""

    log: str
    arm: str
    dim: int
    seed: int
    measures: dict[str, dict[str, float]]  # "trained" and other states -> {"auc", "logloss"}
    memory_ratio: float = 1.0
    memory_ratio_with_state: float = 1.0
    stats: Mapping[str, float] = field(default_factory=dict)
    rows: int = 0
    seconds: float = 0.0
    commit: str | None = None

    @property
    def key(self) -> Key:
        return self.log, self.arm, self.dim, self.seed


class Named(Protocol):
    """An arm of the experiment."""

    @property
    def name(self) -> str: ...


A = TypeVar("A", bound=Named)


@dataclass(frozen=True)
class TrainingJob(Generic[A]):
    """One run: `settings` hold the log, the recipe and the seed; `arm` changes them."""

    arm: A
    settings: Any  # of `thermocline.train`, with `dim` and `seed`
    log: str

    @property
    def key(self) -> Key:
        return self.log, self.arm.name, int(self.settings.dim), int(self.settings.seed)


RunJob = Callable[[Any], dict[str, Any]]  # a job -> a `RunResult` as a dict, which can be pickled


def finish(
    asked: Sequence[TrainingJob[Any]],
    run_job: RunJob,
    runs: Path | None,
    jobs: int,
    progress: ReportProgress | None,
    commit: str | None,
) -> list[RunResult]:
    """Results of all jobs: from the file `runs`, and from runs done now, `jobs` at a time."""
    done = _read(runs)
    left = [job for job in asked if job.key not in done]
    tell = progress or (lambda finished, total, what: None)
    tell(len(asked) - len(left), len(asked), "runs")
    with closing(_results(left, run_job, jobs)) as results:  # closing it ends its processes, also after Ctrl-C
        for result in results:
            result = replace(result, commit=commit)
            done[result.key] = result
            if runs:
                _append(runs, result)
            finished = sum(job.key in done for job in asked)
            tell(finished, len(asked), f"{result.arm}, D={result.dim}, seed {result.seed}")
    return [done[job.key] for job in asked]


def note_commits(recorder: Recorder, results: Iterable[RunResult]) -> None:
    """Note the commits of the runs, unless all have the commit of the record."""
    commits = sorted({str(result.commit) for result in results})
    if commits != [str(recorder.record["commit"])]:
        what = f"commit {commits[0]}" if len(commits) == 1 else f"{len(commits)} commits: {', '.join(commits)}"
        recorder.note(f"these runs are of {what}")


def runs_file(json: str | None) -> Path | None:
    """File of finished runs, beside the results."""
    return Path(json).with_suffix(".runs.jsonl") if json not in (None, "-") else None


# -- finished runs --


def _append(path: Path, result: RunResult) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def _read(path: Path | None) -> dict[Key, RunResult]:
    """Finished runs by key. An incomplete last line is dropped, and its run repeated."""
    if path is None or not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        path.write_text(text := text[: text.rfind("\n") + 1], encoding="utf-8")
    try:
        results = [RunResult(**json.loads(line)) for line in text.splitlines()]
    except (ValueError, TypeError) as error:
        message = f"'{path}' is not a file of runs: {error}; move it away, or use another --json"
        raise FormatError(message, path=path) from None
    return {result.key: result for result in results}


# -- doing runs --


def _results(left: Sequence[TrainingJob[Any]], run_job: RunJob, jobs: int) -> Generator[RunResult, None, None]:
    """Results in the order of completion."""
    if jobs < 1:
        raise BadInput(f"jobs is {jobs}; at least 1 run is done at a time")
    if jobs == 1 or len(left) < 2:
        with _one_thread():
            for job in left:
                yield RunResult(**run_job(job))
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with _passive(), ProcessPoolExecutor(min(jobs, len(left)), context, _start_worker) as pool:
        try:
            for future in as_completed([pool.submit(run_job, job) for job in left]):
                yield RunResult(**future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
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
    """Makes OpenMP threads of child processes sleep while they wait; torch reads the variable at import."""
    before = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_WAIT_POLICY"]
        else:
            os.environ["OMP_WAIT_POLICY"] = before
