"""How time is taken.

Contenders are never timed one after the other but in rounds, a few iterations of each in turn, so that a noisy
neighbour or a clock that drifts hits all of them; each chunk begins with iterations that do not count. Rows report
medians. Inputs rotate over `SETS` batches of ids.

CPU: wall time of one call. GPU: CUDA events around one call, recorded without a wait between calls, so what Python
costs shows exactly where a user would see it: where it is longer than the work on the card. Nothing flushes the card's
L2 cache between calls: ids rotate and the outputs of the large shapes are many times its size, but the hottest Zipf
rows stay in it, for every contender alike. Small shapes (batch 512, 200 small tables) run from L2; read those rows as
launch costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

SETS = 4

Chunk = Callable[[int], list[float]]  # iterations -> milliseconds of each


class Times(NamedTuple):
    """Milliseconds of one contender: all of them, and the median of each round."""

    all: list[float]
    rounds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.all)

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        return (quantile(self.all, 0.9) - quantile(self.all, 0.1)) / self.median


def quantile(values: Sequence[float], at: float) -> float:
    """Between the two neighbours where `at` falls between them."""
    ordered = sorted(values)
    place = at * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def interleave(chunks: Mapping[str, Chunk], rounds: int, iterations: Mapping[str, int]) -> dict[str, Times]:
    """Time every contender in turn, round after round; the order turns around from round to round."""
    times: dict[str, Times] = {name: Times([], []) for name in chunks}
    for turn in range(rounds):
        for name in list(chunks) if turn % 2 == 0 else reversed(list(chunks)):
            taken = chunks[name](iterations[name])
            times[name].all.extend(taken)
            times[name].rounds.append(statistics.median(taken))
    return times


def cpu_chunk(run: Callable[[Any], Any], inputs: Sequence[Any], warm: int = 1) -> Chunk:
    """Wall time of each call."""

    def chunk(iterations: int) -> list[float]:
        taken = []
        for i in range(warm + iterations):
            start = time.perf_counter()
            run(inputs[i % len(inputs)])
            taken.append((time.perf_counter() - start) * 1e3)
        return taken[warm:]

    return chunk


def gpu_chunk(run: Callable[[Any], Any], inputs: Sequence[Any], warm: int = 4) -> Chunk:
    """CUDA events around each call."""

    def chunk(iterations: int) -> list[float]:
        for i in range(warm):
            run(inputs[i % len(inputs)])
        marks = [(_event(), _event()) for _ in range(iterations)]
        for i, (start, end) in enumerate(marks):
            start.record()
            run(inputs[i % len(inputs)])
            end.record()
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) for start, end in marks]

    return chunk


def chunk_on(device: str, run: Callable[[Any], Any], inputs: Sequence[Any]) -> Chunk:
    return gpu_chunk(run, inputs) if device.startswith("cuda") else cpu_chunk(run, inputs)


def enough(first: Sequence[float], target_ms: float, least: int, most: int) -> int:
    """How many iterations fill `target_ms`, judged from a first few."""
    return max(least, min(most, round(target_ms / max(1e-3, statistics.median(first)))))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
