"""Kernels on a CPU against FBGEMM and torch, with one thread and with two.

Contenders live in worker processes (`worker.py`): ours and torch's in one, FBGEMM in another with its own environment, because
FBGEMM's binaries match one version of torch only. Rounds alternate between the workers within one run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from benchmarks.kernels.cases import CPU_THREADS, KERNELS, Baseline, CaseGroup, KernelPlan
from benchmarks.kernels.worker import Worker, WorkerError, start_ours, start_peer
from benchmarks.runner.race import OURS, ReadyContenders, TimingBudget, active, add_rows, libraries_of, time_all
from benchmarks.runner.record import Recorder, brief
from benchmarks.runner.timing import Chunk

BUDGET = TimingBudget(rounds=8, chunk_ms=150.0, least=4, most=100)
QUICK = TimingBudget(rounds=2, chunk_ms=5.0, least=2, most=10)

PEER_HELP = (
    "FBGEMM was not measured: its rows are missing. It needs its own environment: "
    "python -m venv peer && peer/bin/pip install torch==2.13.0 numpy && "
    "peer/bin/pip install --no-deps fbgemm-gpu-cpu==1.8.0; "
    "then give --peer-python peer/bin/python, or set THERMOCLINE_PEER_PYTHON."
)


class Workers:
    """Workers of a run, started on first use and again after an error."""

    def __init__(self, peer_python: str | None) -> None:
        self.peer_python = peer_python
        self.workers: dict[str, Worker] = {}

    def of(self, library: str) -> Worker:
        """The worker of a library."""
        name = "fbgemm" if library == "fbgemm" else "ours"
        if name not in self.workers:
            threads = max(CPU_THREADS)
            if name == "ours":
                self.workers[name] = start_ours(threads)
            else:
                assert self.peer_python is not None
                self.workers[name] = start_peer(self.peer_python, threads)
        return self.workers[name]

    def threads(self, count: int) -> None:
        for worker in self.workers.values():
            worker.ask("threads", count=count)

    def drop(self) -> None:
        """Free all contenders, or end the workers."""
        try:
            for worker in self.workers.values():
                worker.ask("drop")
        except WorkerError:
            self.close()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def run(
    recorder: Recorder,
    wanted: Callable[[str], bool],
    quick: bool,
    peers: bool,
    peer_python: str | None,
    progress: Callable[[int, int, str], None],
    plan: KernelPlan = KERNELS,
) -> None:
    """Measure every wanted CPU row."""
    groups = plan.cpu()
    with Workers(peer_python if peers else None) as workers:
        available = {"torch", *_fbgemm(workers, recorder, peers)}
        for done, group in enumerate(groups):
            baselines = active(group, available, peers)
            # Names are those of the full shape: a quick run differs in size only.
            cases = {t: {r: group.case("cpu", group.kinds[0], r.suffix, t) for r in baselines} for t in CPU_THREADS}
            cases = {t: {r: case for r, case in of.items() if wanted(case)} for t, of in cases.items()}
            if any(cases.values()):
                progress(done, len(groups), f"cpu {group.job.shape.name} {group.job.stored} {group.job.label}")
                _race(workers, group.quick() if quick else group, cases, recorder, QUICK if quick else BUDGET)
        progress(len(groups), len(groups), "cpu")


def _fbgemm(workers: Workers, recorder: Recorder, peers: bool) -> set[str]:
    """Record the version of FBGEMM, or note how to install it."""
    if not peers:
        return set()
    if workers.peer_python is None:
        recorder.note(PEER_HELP)
        return set()
    try:
        found = workers.of("fbgemm").ask("hello")["versions"]
    except (WorkerError, OSError) as error:
        workers.close()
        recorder.note(f"{workers.peer_python} cannot run FBGEMM ({brief(str(error))}). {PEER_HELP}")
        return set()
    recorder.record["versions"].update(found)
    return {"fbgemm"}


def _race(
    workers: Workers, group: CaseGroup, cases: dict[int, dict[Baseline, str]], recorder: Recorder, budget: TimingBudget
) -> None:
    """Build the contenders of a group once, then race them with each number of threads."""

    def build(library: str) -> list[str]:
        answer = workers.of(library).ask("build", library=library, job=group.job.to_json(), kind=group.kinds[0])
        labels: list[str] = answer["labels"]
        return labels

    ready = ReadyContenders()
    workers.threads(max(CPU_THREADS))
    ready.gather(libraries_of(baseline for of in cases.values() for baseline in of), build)
    chunks = {label: _chunk(workers.of(library), label) for label, library in ready.library_of.items()}
    for threads, of in cases.items():
        if not of:
            continue
        try:
            workers.threads(threads)
        except WorkerError as error:
            ready.errors.setdefault(OURS, str(error))
        add_rows(recorder, of, ready, lambda: time_all(chunks, budget, lambda: _stats(workers, group)))
    workers.drop()


def _stats(workers: Workers, group: CaseGroup) -> dict[str, int]:
    """Counters of our cache."""
    stats: dict[str, int] = workers.of(OURS).ask("stats", label=OURS)["stats"] if group.job.cache else {}
    return stats


def _chunk(worker: Worker, label: str) -> Chunk:
    def chunk(iterations: int) -> list[float]:
        taken: list[float] = worker.ask("run", label=label, iterations=iterations)["ms"]
        return taken

    return chunk
