"""`python -m benchmarks kernels` and `step`: every case of a plan against its peers, on every device found."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.kernels.cases import KERNELS, KernelPlan
from benchmarks.runner import record

PEER_PYTHON = "THERMOCLINE_PEER_PYTHON"


def run(
    device: str | None = None,
    filter: str | None = None,
    quick: bool = False,
    peers: bool = True,
    peer_python: str | os.PathLike[str] | None = None,
    report: Callable[[str], None] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    save: record.Save | None = None,
    plan: KernelPlan = KERNELS,
) -> dict[str, Any]:
    """Measure, and return the record.

    Args:
        filter: keeps the cases whose name contains it.
        report: receives lines of text.
        progress: receives finished steps, all steps, and the current case.
        save: receives the record after every row.
    """
    tell = report or (lambda line: None)
    recorder = record.Recorder(plan.bench, tell, save, judged=peers and not quick)
    step = progress or (lambda done, total, what: None)

    def wanted(case: str) -> bool:
        return filter is None or filter in case

    for name in devices(device):
        if name == "cpu":
            from benchmarks.kernels import cpu as kernels_cpu

            python = peer_python or os.environ.get(PEER_PYTHON) or None
            kernels_cpu.run(recorder, wanted, quick, peers, os.fspath(python) if python else None, step, plan)
        else:
            from benchmarks.kernels import gpu as kernels_gpu

            kernels_gpu.run(recorder, wanted, quick, peers, step, plan)
    tell(record.summary(recorder.record))
    return recorder.record


def devices(device: str | None) -> list[str]:
    """The given device, or all devices of this machine."""
    if device is not None:
        return [device]
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
