"""Training runs of benchmarks that compare arms by paired seeds: each done once, kept, and side by side with others.

Every run is one process's work for seconds or minutes, and runs know nothing of each other. So they are done side by side, one
thread each: two processes of one thread finish more runs than one of two threads. A finished run is a line in a file beside the
results at once, and is never repeated; Ctrl-C loses what is under way and nothing else. Seeds are the outer loop of the jobs
given: whenever one stops, what is there is paired.
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
from thermocline.train import DLRMSettings

Key = tuple[str, str, int, int]  # log, arm, dimension, seed
ReportProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class RunResult:
    """What one run told."""

    log: str
    arm: str
    dim: int
    seed: int
    measures: dict[str, dict[str, float]]  # "trained", and whatever else was judged: {"auc", "logloss"} each
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
    """An arm: whatever is compared, by name."""

    @property
    def name(self) -> str: ...


A = TypeVar("A", bound=Named)


@dataclass(frozen=True)
class TrainingJob(Generic[A]):
    """One run to do: `settings` have the log, the recipe and the seed, `arm` what is tried on them."""

    arm: A
    settings: DLRMSettings
    log: str

    @property
    def key(self) -> Key:
        return self.log, self.arm.name, self.settings.dim, self.settings.seed


class HasKey(Protocol):
    """A job, whatever it is, that a result can be told by."""

    @property
    def key(self) -> Key: ...


RunJob = Callable[[Any], dict[str, Any]]  # a job -> a `RunResult` as a dict, which travels between processes


def finish(
    asked: Sequence[HasKey],
    run_job: RunJob,
    runs: Path | None,
    jobs: int,
    progress: ReportProgress | None,
    commit: str | None,
) -> list[RunResult]:
    """The results of all jobs: those in the file `runs`, and those that are done now, `jobs` at a time."""
    done = _read(runs)
    left = [job for job in asked if job.key not in done]
    tell = progress or (lambda finished, total, what: None)
    tell(len(asked) - len(left), len(asked), "runs")
    with closing(_results(left, run_job, jobs)) as results:  # closed, it ends its processes, wherever Ctrl-C comes
        for result in results:
            result = replace(result, commit=commit)
            done[result.key] = result
            if runs:
                _append(runs, result)
            finished = sum(job.key in done for job in asked)
            tell(finished, len(asked), f"{result.arm}, D={result.dim}, seed {result.seed}")
    return [done[job.key] for job in asked]


def note_commits(recorder: Recorder, results: Iterable[RunResult]) -> None:
    """Say which commits the runs are of, unless all are of the record's."""
    commits = sorted({str(result.commit) for result in results})
    if commits != [str(recorder.record["commit"])]:
        what = f"commit {commits[0]}" if len(commits) == 1 else f"{len(commits)} commits: {', '.join(commits)}"
        recorder.note(f"these runs are of {what}")


def runs_file(json: str | None) -> Path | None:
    """Where finished runs are kept, beside the results."""
    return Path(json).with_suffix(".runs.jsonl") if json not in (None, "-") else None


# -- finished runs --


def _append(path: Path, result: RunResult) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def _read(path: Path | None) -> dict[Key, RunResult]:
    """Finished runs by key. A last line that was cut off, by a full disk or a power cut, is a run to repeat."""
    if path is None or not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        path.write_text(text := text[: text.rfind("\n") + 1], encoding="utf-8")
    try:
        results = [RunResult(**json.loads(line)) for line in text.splitlines()]
    except (ValueError, TypeError) as error:
        raise FormatError(f"'{path}' is not a file of runs: {error}; move it away, or use another --json") from None
    return {result.key: result for result in results}


# -- doing runs --


def _results(left: Sequence[HasKey], run_job: RunJob, jobs: int) -> Generator[RunResult, None, None]:
    """The results of runs, as they come."""
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
