"""This package's int8 rows as a contender, for jobs in another precision to be measured by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.kernels import thermocline_contender as ours
from benchmarks.kernels.cases import Workload
from benchmarks.kernels.contender import Contender


def sides(job: Workload, device: str) -> list[Contender]:
    """The same job with int8 rows, checked."""
    job = replace(job, precision="int8")
    return [replace(side, label=f"ours {job.stored}") for side in ours.sides(job, device)]


def versions() -> dict[str, Any]:
    return {}
