"""`thermocline bench exchange`: what row-by-row sharding sends and how long that takes, over real sockets and shaped links.

    exchange_net.py      nodes as network namespaces
    exchange_logs.py     logs -> heat and batches
    exchange_arms.py     what is compared, as plans
    exchange_rank.py     what a rank does
    exchange_rows.py     results -> rows of the record

Processes are started once for a cluster and a ratio of its links, and do all jobs of it. A finished job is a line in a file
beside the results, and is never repeated; what failed is named, and the jobs after it are done by new processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from . import exchange_logs, exchange_rows, record
from .exchange_arms import ARMS
from .exchange_net import Net, cluster, why_not
from .exchange_rank import save_log

Progress = Callable[[int, int, str], None]
Job = dict[str, Any]

# Bytes a second and card between nodes at 1/9: so slow that P0 takes seconds, and links and not processes bound a step.
RATES = {"globo": 1e6, "retail": 1e6, "gowalla": 2e6, "zipf-1.05": 8e6, "zipf-1.2": 8e6}
INSIDE = 9  # times faster inside of a node
LIMIT = 300.0  # seconds without a finished job after which ranks are given up


@dataclass(frozen=True)
class Case:
    """A cluster and a ratio of its links, and what is measured there."""

    nodes: int
    cards: int
    ratio: int
    overlap: bool

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.cards}/1in{self.ratio}/{'overlap' if self.overlap else 'apart'}"


CASES = (Case(2, 2, 9, False), Case(4, 2, 9, False), Case(2, 2, 30, False))


@dataclass(frozen=True)
class Plan:
    """What is to be measured. `data`: the folder of real logs."""

    data: Path | None = None
    only: Sequence[str] = ()  # parts of the names of jobs, all of which a job must have
    batch: int = exchange_logs.SEQUENCES
    steps: int = 3
    dense: float = 0.1
    cases: Sequence[Case] = CASES
    zipf: tuple[int, int] = (exchange_logs.ZIPF_ROWS, exchange_logs.ZIPF_SEQUENCES)

    def jobs(self) -> list[Job]:
        found = []
        for case in self.cases:
            for log in exchange_logs.LOGS:
                for arm in ARMS:
                    name = f"{case.name}/{log}/{arm.name}"
                    inside = RATES[log] * INSIDE
                    job = {
                        "name": name, "case": case.name, "log": log, "arm": arm.name, "overlap": case.overlap,
                        "links": f"{inside:g}/{case.ratio}", "rates": (inside, inside / case.ratio),
                        "steps": self.steps, "dense": self.dense,
                    }  # fmt: skip
                    if all(part in f"{name}/" for part in self.only):
                        found.append(job)
        return found


def run(plan: Plan, runs: Path | None = None, progress: Progress = lambda done, total, what: None) -> dict[str, Any]:
    """Do the jobs that are not yet in the file `runs`, and return the record."""
    recorder = record.Recorder("exchange", lambda line: None, judged=not plan.only and plan.cases is CASES)
    if why_not():
        recorder.note(f"over loopback, links not shaped: {why_not()}; times say nothing of unequal links")
    jobs = plan.jobs()
    with tempfile.TemporaryDirectory(prefix="thermocline-") as folder, _ended_by_signal():
        here = Path(folder)
        kept = runs or here / "runs.jsonl"
        done = _read(kept)
        missing = _prepare(plan, here, {job["log"] for job in jobs if job["name"] not in done}, recorder)
        jobs = [job for job in jobs if job["log"] not in missing]
        for case in plan.cases:
            mine = [job for job in jobs if job["case"] == case.name]
            while left := [job for job in mine if job["name"] not in _read(kept)]:
                _launch(plan, case, left, here, kept, lambda: progress(len(_read(kept)), len(jobs), case.name))
        done = _read(kept)
    exchange_rows.write(recorder, [done[job["name"]] for job in jobs])
    return recorder.record


def _prepare(plan: Plan, folder: Path, names: set[str], recorder: record.Recorder) -> set[str]:
    """Put logs where ranks find them; returns those that are not there."""
    missing = set()
    for name in exchange_logs.LOGS:
        if name in names:
            log = exchange_logs.read(name, plan.data, *plan.zipf)
            if log is None:
                missing.add(name)
                recorder.note(f"{name} was not measured: {exchange_logs.FILES[name]}.parquet is not in {plan.data}")
            else:
                save_log(folder, name, log, plan.batch, plan.cases[0].cards)
    return missing


def _read(path: Path) -> dict[str, Job]:
    """Finished jobs by name. A last line that was cut off is a job to repeat."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return {job["name"]: job for job in map(json.loads, lines)}


# -- processes ------------------------------------------------------------------------------------------------------------


def _launch(plan: Plan, case: Case, jobs: list[Job], folder: Path, out: Path, report: Callable[[], None]) -> None:
    """Start the ranks of a cluster and wait until they have done what they can; what stopped them is a result too."""
    with cluster(case.nodes, case.cards) as net:
        given = {
            "net": tuple(net), "port": _free_port(net), "jobs": jobs, "logs": str(folder), "batch": plan.batch, "out": str(out)
        }  # fmt: skip
        task = folder / "task.json"
        task.write_text(json.dumps(given), encoding="utf-8")
        with _ranks([sys.executable, "-m", "thermocline.bench.exchange_rank", str(task)]) as process:
            error = _watch(process, out, report)
        left = [job for job in jobs if job["name"] not in _read(out)]
        if left:
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(left[0] | {"error": error or "ranks ended without a result"}) + "\n")


def _free_port(net: Net) -> int:
    """The first of a few ports that nobody uses: in namespaces nobody uses any."""
    if net.owner:
        return 20_000
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def _ranks(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The process that forks the ranks, in a session of its own; all of it has ended when this ends."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _watch(process: subprocess.Popen[str], out: Path, report: Callable[[], None]) -> str:
    """Wait until the ranks have ended, or nothing has come for long. What was wrong, "" if nothing."""
    said: list[str] = []
    assert process.stderr is not None
    threading.Thread(target=said.extend, args=(process.stderr,), daemon=True).start()
    size, since = -1, time.monotonic()
    while process.poll() is None:
        found = out.stat().st_size if out.exists() else 0
        if found != size:
            size, since = found, time.monotonic()
            report()
        if time.monotonic() - since > LIMIT:
            return f"nothing came of the ranks for {LIMIT:g} s"
        time.sleep(0.1)
    if not process.returncode:
        return ""
    named = [line for line in said if line.startswith("rank ")]
    return (named or said[-1:] or ["a rank ended"])[0].strip()


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that nothing stays behind."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
