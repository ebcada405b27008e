"""`python -m benchmarks exchange`: bytes and time of row-wise sharding, over real sockets and shaped links.

    network.py    nodes as network namespaces
    logs.py       logs -> heat and batches
    arms.py       the compared plans
    rank.py       one rank with our tables (`torchrec_rank.py`: with TorchRec)
    step.py       measured steps of a rank
    rows.py       results -> rows of the record

Processes are started once for a cluster and a ratio of its links, and do all of its jobs. A finished job is a line in a file
beside the results, and is never repeated. A failed job is recorded, and new processes do the jobs after it.
"""

from __future__ import annotations

import itertools
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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from benchmarks.exchange import logs as exchange_logs
from benchmarks.exchange import rows as exchange_rows
from benchmarks.exchange.arms import BY_NAME, REPLICAS
from benchmarks.exchange.network import Net, cluster, why_not
from benchmarks.exchange.step import APART, OVERLAP, add_line
from benchmarks.kernels.benchmark import PEER_PYTHON
from benchmarks.runner import record
from thermocline.plan.topology import Topology

Progress = Callable[[int, int, str], None]
Job = dict[str, Any]


class Scale(NamedTuple):
    """Link rate and number of steps for a log. Both scale with the batch, which differs by a factor of twenty: P0 takes about a
    second and more, so that links, not processes, bound a step; the dense part takes about a tenth of it."""

    rate: float  # bytes a second and card between nodes, at 1/9
    steps: int  # more where steps are short and differ
    dense: float  # seconds that it waits


SCALES = {
    "globo": Scale(1e6, 8, 0.08),
    "retail": Scale(1e6, 43, 0.12),
    "gowalla": Scale(4e6, 14, 0.1),
    "zipf-1.05": Scale(4e6, 5, 0.4),
    "zipf-1.2": Scale(4e6, 5, 0.4),
}
INSIDE = 9  # times faster inside of a node
PEER = "torchrec"
ONLY_ON = dict.fromkeys(REPLICAS, ("globo", "zipf-1.2"))  # where it is asked what tiers are worth
LIMIT = 300.0  # seconds without a finished job after which ranks are given up


@dataclass(frozen=True)
class ClusterCase:
    """A cluster, a ratio of its links, and the jobs to measure."""

    nodes: int
    cards: int
    ratio: int
    logs: Sequence[str] = exchange_logs.LOGS
    arms: Sequence[str] = tuple(BY_NAME)

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.cards}/1in{self.ratio}"


CASES = (
    ClusterCase(2, 2, 9, arms=(*BY_NAME, PEER)),
    ClusterCase(4, 2, 9, arms=tuple(name for name in BY_NAME if name not in ("P3f", "P1o"))),
    ClusterCase(2, 2, 30, ("globo", "zipf-1.2"), ("P0", "P1", "P2", "P1q", "P3")),
)


@dataclass(frozen=True)
class ExchangePlan:
    """All jobs of the benchmark. `data`: the folder of real logs."""

    data: Path | None = None
    only: Sequence[str] = ()  # parts of the names of jobs, all of which a job must have
    cases: Sequence[ClusterCase] = CASES
    batch: int = exchange_logs.SEQUENCES
    zipf: tuple[int, int] = (exchange_logs.ZIPF_ROWS, exchange_logs.ZIPF_SEQUENCES)
    topology: Topology | None = None  # taken for measured, whatever the cluster

    def jobs(self) -> list[Job]:
        """All runs, ordered so that links change seldom."""
        found = []
        for case in self.cases:
            for log in case.logs:
                rate, steps, dense = SCALES[log]
                links = {"links": f"{INSIDE * rate:g}/{case.ratio}", "rates": (INSIDE * rate, INSIDE * rate / case.ratio)}
                for arm, mode in itertools.product(case.arms, (APART, OVERLAP)):
                    if (arm, mode) != (PEER, OVERLAP) and log in ONLY_ON.get(arm, case.logs):
                        named = {"case": case.name, "log": log, "arm": arm, "mode": mode}
                        found.append({"name": "/".join(named.values()), **named, **links, "steps": steps, "dense": dense})
        return [job for job in found if all(part in f"{job['name']}/" for part in self.only)]


def run(
    plan: ExchangePlan,
    runs: Path | None = None,
    peer_python: str | os.PathLike[str] | None = None,
    progress: Progress = lambda done, total, what: None,
) -> dict[str, Any]:
    """Do the jobs that are not yet in the file `runs`, and return the record."""
    recorder = record.Recorder("exchange", lambda line: None, judged=not plan.only and plan.cases is CASES and not why_not())
    if why_not():
        recorder.note(f"over loopback, links not shaped: {why_not()}; times say nothing of unequal links")
    jobs = without_peer(plan.jobs(), peer_python, recorder)
    with tempfile.TemporaryDirectory(prefix="thermocline-") as folder, ended_by_signal():
        here = Path(folder)
        kept = runs or here / "runs.jsonl"
        done = read_runs(kept)
        missing = _prepare(plan, here, {job["log"] for job in jobs if job["name"] not in done}, recorder)
        jobs = [job for job in jobs if job["log"] not in missing]
        for case, peer in itertools.product(plan.cases, (False, True)):
            mine = [job for job in jobs if job["case"] == case.name and (job["arm"] == PEER) == peer]
            ranks = ClusterRun(case, here, kept, plan, python_of(peer_python) if peer else sys.executable)
            report = partial(_report, progress, kept, len(jobs), f"{case.name}, TorchRec" if peer else case.name)
            while left := [job for job in mine if job["name"] not in read_runs(kept)]:
                ranks.do(left, report)
        done = read_runs(kept)
    exchange_rows.write(recorder, [done[job["name"]] for job in jobs])
    return recorder.record


def _report(progress: Progress, kept: Path, total: int, what: str) -> None:
    progress(len(read_runs(kept)), total, what)


def python_of(given: str | os.PathLike[str] | None) -> str:
    return str(given or os.environ.get(PEER_PYTHON) or sys.executable)


def without_peer(jobs: list[Job], peer_python: str | os.PathLike[str] | None, recorder: record.Recorder) -> list[Job]:
    """The jobs that can be done: those of TorchRec where it can be loaded."""
    if not any(job["arm"] == PEER for job in jobs):
        return jobs
    tried = subprocess.run([python_of(peer_python), "-c", "import torchrec"], capture_output=True, text=True, check=False)
    if not tried.returncode:
        return jobs
    why = (tried.stderr.strip().splitlines() or ["it cannot be started"])[-1]
    recorder.note(f"TorchRec was not measured: {why}; --peer-python names a Python that has it")
    return [job for job in jobs if job["arm"] != PEER]


def _prepare(plan: ExchangePlan, folder: Path, names: set[str], recorder: record.Recorder) -> set[str]:
    """Write logs for the ranks; returns the missing ones."""
    missing = set()
    for name in exchange_logs.LOGS:
        if name in names:
            log = exchange_logs.read(name, plan.data, *plan.zipf)
            if log is None:
                missing.add(name)
                recorder.note(f"{name} was not measured: {exchange_logs.FILES[name]}.parquet is not in {plan.data}")
            else:
                log.save(folder, name, plan.batch, plan.cases[0].cards)
    return missing


def read_runs(path: Path) -> dict[str, Job]:
    """Finished jobs by name. A last line that was cut off is a job to repeat."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return {job["name"]: job for job in map(json.loads, lines)}


# -- processes ------------------------------------------------------------------------------------------------------------


class ClusterRun(NamedTuple):
    """The processes of one cluster."""

    case: ClusterCase
    folder: Path
    out: Path
    plan: ExchangePlan
    python: str
    ranks: tuple[str, str] = ("benchmarks.exchange.rank", "benchmarks.exchange.torchrec_rank")  # our module, and the peer's

    def do(self, jobs: list[Job], report: Callable[[], None]) -> None:
        """Start them and wait until they have done what they can; what stopped them is the result of a job."""
        module = self.ranks[jobs[0]["arm"] == PEER]
        with cluster(self.case.nodes, self.case.cards) as net, tempfile.TemporaryDirectory(prefix="thermocline-") as meetings:
            given = {
                "net": tuple(net), "port": _free_port(net), "meetings": meetings, "jobs": jobs,
                "logs": str(self.folder), "out": str(self.out),
                "batch": self.plan.batch, "topology": self.plan.topology and self.plan.topology.model_dump(mode="json"),
            }  # fmt: skip
            task = self.folder / "task.json"
            task.write_text(json.dumps(given), encoding="utf-8")
            with _started([self.python, "-m", module, str(task)]) as process:
                error = _watch(process, self.out, report)
        left = [job for job in jobs if job["name"] not in read_runs(self.out)]
        if left:
            add_line(str(self.out), left[0] | {"error": error or "ranks ended without a result"})


def _free_port(net: Net) -> int:
    """The first free port of a few; in a fresh namespace all are free."""
    if net.owner:
        return 20_000
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The process that forks the ranks, in its own session; the session ends with this context."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _watch(process: subprocess.Popen[str], out: Path, report: Callable[[], None]) -> str:
    """Wait until the ranks end or stop reporting. Returns the failure, or ""."""
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
def ended_by_signal() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that all processes are cleaned up."""

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
