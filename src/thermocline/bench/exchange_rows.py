"""Results of `bench exchange` as rows of the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .record import Recorder

Job = dict[str, Any]


def write(recorder: Recorder, jobs: Sequence[Job]) -> None:
    for job in jobs:
        if "error" in job:
            recorder.fail(job["name"], job["error"])
        else:
            recorder.add(job["name"], job["exposed"], "s", **{k: v for k, v in job.items() if k not in ("name", "case")})
