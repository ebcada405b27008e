"""Timing of training steps with prefetch, on ids that are new in every step.

    step(this, following)      a training step; `following` is the next batch, or None at the end of a stretch
    through(batches)           the batches of a stretch as they are handed out; prefetching happens here

A stretch of batches is drawn before the clock starts. Its first and last `PERIOD` steps do not count: nothing was prefetched
for the first, and nothing runs beside the last. A time is the mean of `PERIOD` consecutive steps, by CUDA events without a
wait between steps: work on another stream is charged to the step that waits for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from benchmarks.runner.timing import PERIOD, one_thread, quantile

Step = Callable[[Any, Any], Any]
Through = Callable[[list[Any]], Iterable[Any]]
STRETCH = 32  # steps drawn at a time


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def stretch(
    step: Step, draw: Callable[[], Any], device: str, steps: int = STRETCH, through: Through = iter
) -> list[float]:  # fmt: skip
    """Milliseconds of a step, one value for each `PERIOD` steps, between untimed steps."""
    batches = [draw() for _ in range(PERIOD + steps + PERIOD)]
    wait(device)
    marks = []
    with one_thread():
        for number, (this, following) in enumerate(zip(through(batches), [*batches[1:], None], strict=True)):
            if number >= PERIOD and number % PERIOD == 0:
                marks.append(_mark(device))
            step(this, following)
    wait(device)
    return [_between(first, last) / PERIOD for first, last in pairwise(marks)]


def times(
    step: Step, draw: Callable[[], Any], device: str, settle: int, stretches: int, through: Through = iter
) -> list[float]:  # fmt: skip
    """Times after at least `settle` untimed steps."""
    for _ in range(-(-settle // STRETCH)):
        stretch(step, draw, device, min(STRETCH, settle), through)
    return [ms for _ in range(stretches) for ms in stretch(step, draw, device, through=through)]


def summary(taken: Sequence[float]) -> dict[str, float]:
    """Median and (p90 - p10) / median."""
    median = statistics.median(taken)
    return {"ms": median, "spread": (quantile(taken, 0.9) - quantile(taken, 0.1)) / median}


def _mark(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
    event.record()  # type: ignore[no-untyped-call, unused-ignore]
    return event


def _between(first: Any, last: Any) -> float:
    return float((last - first) * 1e3) if isinstance(first, float) else float(first.elapsed_time(last))
