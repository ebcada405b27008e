"""Fronts part of the serve benchmark: throughput of several front processes over one copy of the rows.

    fronts/N        requests a second of N fronts, over those of one; N load processes of 4 clients each
    fronts/N/cpu    requests per second of processor time, over those of one front: 1 if fronts cost nothing

Clients share the machine. With as many fronts as half of its cores, both have half of it; beyond, `fronts/N/cpu` says what N
cores would answer. All servers run at the same time and are measured in turn.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.runner.record import Recorder

from .lean import make_features
from .network import FULL, QUICK, Result, RunningServer, ServerContender, check_ready, ours, started

COUNTS = (1, 2, 4, 8, 16)
CLIENTS = 4  # of each load process


def run(recorder: Recorder, wanted: Callable[[str], bool], quick: bool, progress: Callable[[int, int, str], None]) -> None:
    """Measure as many fronts as this machine has cores."""
    cores = len(os.sched_getaffinity(0))
    counts = [count for count in COUNTS if count == 1 or (count <= cores and wanted(f"fronts/{count}"))]
    if len(counts) == 1:
        return
    rows, effort = (10_007, QUICK) if quick else (1_000_003, FULL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        features = make_features(folder / "checkpoint", 1, rows)
        with started([_with_fronts(folder / "checkpoint", count) for count in counts], folder) as servers:
            for server in servers:
                server.wait(check_ready)
            time.sleep(effort.settle)
            found: list[list[Result]] = [[] for _ in counts]
            for number in range(effort.rounds):
                progress(number, effort.rounds, "fronts")
                for results, count, server in zip(found, counts, servers, strict=True):
                    results.append(_measure(server, count, (CLIENTS, 16, rows, effort.seconds, features)))
    one = found[0]
    for count, results in zip(counts[1:], found[1:], strict=True):
        for case, field, unit in (
            (f"fronts/{count}", "requests_per_s", "requests/s"),
            (f"fronts/{count}/cpu", "requests_per_cpu_s", "requests/cpu-s"),
        ):
            ratios = sorted(each[field] / base[field] for each, base in zip(results, one, strict=True))
            value, peer = (statistics.median(each[field] for each in side) for side in (results, one))
            recorder.add(case, value, unit, "one front", peer, statistics.median(ratios), ratios[-1] - ratios[0])


def _with_fronts(checkpoint: Path, count: int) -> ServerContender:
    contender = ours(checkpoint, 2)
    return ServerContender(f"fronts-{count}", [*contender.command, "--fronts", str(count)])


def _measure(server: RunningServer, processes: int, job: tuple[int, int, int, float, list[str]]) -> Result:
    """Throughput of all load processes. Each sees the processor time of all, so that is the mean of theirs."""
    with ThreadPoolExecutor(processes) as several:
        found = list(several.map(lambda _: server.measure(*job), range(processes)))
    total = sum(each["requests_per_s"] for each in found)
    cpu = statistics.mean(each["requests_per_s"] / each["requests_per_cpu_s"] for each in found)  # processor seconds a second
    p99 = statistics.median(each["p99_ms"] for each in found)
    return {"requests_per_s": total, "requests_per_cpu_s": total / cpu, "p99_ms": p99}
