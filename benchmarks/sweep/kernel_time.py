"""Kernel time of contenders on a GPU, by torch's profiler, and rounds of wall time within a time limit.

Kernel time is the time in which the GPU works for a contender: the union of the intervals of its kernels, copies and fills,
over its calls. Work on parallel streams counts once. One profiler session covers all contenders of a race: they run in turn,
and a spinning kernel marks where the next one begins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.runner.timing import Chunk, Times, enough, interleave, one_thread

MARKER = "spin_kernel"  # of torch.cuda._sleep
Run = Callable[[Any], Any]


class Interval(NamedTuple):
    """Work of the GPU, in microseconds."""

    start: float
    end: float
    name: str


def timed(chunks: Mapping[str, Chunk], seconds: float, chunk_ms: float, most_rounds: int = 10) -> dict[str, Times]:
    """Wall times of all contenders in turn: at least two rounds, then as many as fit into `seconds`."""
    begin = time.monotonic()
    iterations = {label: enough(chunk(2), chunk_ms, 4, 40) for label, chunk in chunks.items()}
    times = {label: Times([], []) for label in chunks}
    for _ in range(most_rounds // 2):
        for label, found in interleave(chunks, 2, iterations).items():
            times[label].all.extend(found.all)
            times[label].rounds.extend(found.rounds)
        if time.monotonic() - begin > seconds:
            break
    return times


def kernel_times(runs: Mapping[str, Run], draws: Mapping[str, Callable[[], Any]], calls: int, rounds: int) -> dict[str, float]:
    """Milliseconds of kernels of one call of each contender: the median over rounds."""
    order = [label for turn in range(rounds) for label in (list(runs) if turn % 2 == 0 else reversed(list(runs)))]
    inputs = [[draws[label]() for _ in range(calls)] for label in order]
    for label in runs:
        runs[label](draws[label]())
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler, one_thread():
        for label, batches in zip(order, inputs, strict=True):
            torch.cuda._sleep(1000)
            for batch in batches:
                runs[label](batch)
            torch.cuda.synchronize()
    found = segments(_intervals(profiler))
    if len(found) != len(order):
        raise RuntimeError(f"the profiler saw {len(found)} of {len(order)} stretches of work")
    by_label: dict[str, list[float]] = {label: [] for label in runs}
    for label, busy_us in zip(order, found, strict=True):
        by_label[label].append(busy_us / calls / 1e3)
    return {label: statistics.median(values) for label, values in by_label.items()}


def _intervals(profiler: Any) -> list[Interval]:
    return [
        Interval(event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]


def segments(work: Sequence[Interval]) -> list[float]:
    """Busy microseconds after each marker."""
    found: list[float] = []
    reached = 0.0
    for start, end, name in sorted(work):
        if MARKER in name:
            found.append(0.0)
            reached = end
        elif found:
            found[-1] += max(0.0, end - max(start, reached))
            reached = max(reached, end)
    return found
