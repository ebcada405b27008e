"""`python -m benchmarks sweep`: workloads drawn from a written family, ours and FBGEMM side by side.

`family.py` describes the family, `race.py` the measures of a workload, `limits.py` the limits, `summary.py` the rows over all
workloads. FBGEMM is measured where `import fbgemm_gpu` works, in this process. No workload starts after `limit_s` seconds;
those left out are noted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels import fbgemm_contender
from benchmarks.kernels.gpu import recovered
from benchmarks.runner.record import Recorder, brief
from benchmarks.runner.timing import BACKWARD
from benchmarks.sweep import family as families
from benchmarks.sweep import limits, summary
from benchmarks.sweep.race import SweepSettings, WorkloadRace

PEER_HELP = (
    "FBGEMM was not measured, ours is timed alone: `import fbgemm_gpu` must work in this environment; install the fbgemm-gpu "
    "wheel (on a CPU fbgemm-gpu-cpu) that matches this torch with --no-deps, or put it on PYTHONPATH"
)


def run(
    device: str,
    seed: int,
    workloads: int,
    threads: int | None = None,
    seconds: float = 8.0,
    limit_s: float = 440.0,
    quick: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measure the first `workloads` workloads of a seed, and return the record."""
    begin = time.monotonic()
    recorder = Recorder("sweep", lambda line: None, judged=not quick)
    family = families.QUICK if quick else families.CPU if device == "cpu" else families.GPU
    if device == "cpu":
        threads = threads or torch.get_num_threads()
        torch.set_num_threads(threads)
    else:
        threads = None
        recorder.note(BACKWARD)
    rate = limits.copy_rate(device, quick)
    recorder.note(f"limits are bytes over {rate:.0f} GB/s, a copy on this device; seed {seed}")
    settings = SweepSettings(device, seconds, rate, _fbgemm(recorder), threads)
    if quick:
        settings.settle, settings.chunk_ms = 8, 1.0
    recorder.record |= {"seed": seed, "workloads": {}}
    for number in range(workloads):
        if time.monotonic() - begin > limit_s:
            recorder.note(f"left out after {limit_s:.0f} s: workloads {number} to {workloads - 1} of seed {seed}")
            break
        workload = families.draw(family, seed, number)
        progress(number, workloads, workload.name)
        recorder.record["workloads"][workload.name] = workload.to_json()
        WorkloadRace(recorder, workload, settings).run()
        if not recovered(recorder, device):
            break
    summary.add_rows(recorder, device, threads)
    progress(workloads, workloads, "done")
    return recorder.record


def _fbgemm(recorder: Recorder) -> bool:
    try:
        recorder.record["versions"].update(fbgemm_contender.versions())
    except (ImportError, OSError) as error:
        recorder.note(f"{PEER_HELP} ({brief(error)})")
        return False
    return True
