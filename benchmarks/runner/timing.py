"""How time is taken.

Contenders are never timed one after the other but in rounds, a few iterations of each in turn, so that a noisy
neighbour or a clock that drifts hits all of them; each chunk begins with iterations that do not count. Rows report
medians. Inputs rotate over `SETS` batches of ids.

Where a contender keeps a cache, ids are new in every step and a time is the mean of `PERIOD` steps in a row: the cache
looks at every fourth batch, and a median of single steps would leave its upkeep out. All contenders of such a race are
timed so, after as many steps as each needs to reach its steady state.

CPU: wall time of one call. GPU: CUDA events around one call, recorded without a wait between calls, so what Python
costs shows exactly where a user would see it: where it is longer than the work on the card. Backward passes run in the
thread that asks for them, for every contender (`one_thread`): autograd's own thread for a card starts cold in every step,
which on some machines costs as much as all the rest of a step. Nothing flushes the card's
L2 cache between calls: ids rotate and the outputs of the large shapes are many times its size, but the hottest Zipf
rows stay in it, for every contender alike. Small shapes (batch 512, 200 small tables) run from L2; read those rows as
launch costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from typing import Any, NamedTuple

import torch

SETS = 4
PERIOD = 4

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


def cpu_chunk(run: Callable[[Any], Any], inputs: Sequence[Any], warm: int = 1, period: int = 1) -> Chunk:
    """Wall time of each call, or the mean of each `period` calls."""

    def chunk(iterations: int) -> list[float]:
        upcoming = cycle(inputs)
        for _ in range(warm):
            run(next(upcoming))
        taken = []
        for _ in range(ceil_div(iterations, period)):
            start = time.perf_counter()
            for _ in range(period):
                run(next(upcoming))
            taken.append((time.perf_counter() - start) * 1e3 / period)
        return taken

    return chunk


BACKWARD = "on the card, backward passes ran in the thread that asks for them, for every contender"


def one_thread() -> AbstractContextManager[Any]:
    """Backward passes in the thread that asks for them: what `torch.autograd.set_multithreading_enabled(False)` does."""
    return torch.autograd.set_multithreading_enabled(False)  # type: ignore[no-any-return, unused-ignore]


def gpu_chunk(run: Callable[[Any], Any], inputs: Sequence[Any], warm: int = 4, period: int = 1) -> Chunk:
    """CUDA events around each call, or around each `period` calls."""

    def chunk(iterations: int) -> list[float]:
        upcoming = cycle(inputs)
        marks = [(_event(), _event()) for _ in range(ceil_div(iterations, period))]
        with one_thread():
            for _ in range(warm):
                run(next(upcoming))
            for start, end in marks:
                start.record()
                for _ in range(period):
                    run(next(upcoming))
                end.record()
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) / period for start, end in marks]

    return chunk


def chunk_on(device: str, run: Callable[[Any], Any], inputs: Sequence[Any]) -> Chunk:
    return gpu_chunk(run, inputs) if device.startswith("cuda") else cpu_chunk(run, inputs)


def fresh_chunk(device: str, run: Callable[[Any], Any], draw: Callable[[], Any]) -> Chunk:
    """The mean of each `PERIOD` calls, on inputs that are drawn for this chunk alone, outside the clock."""

    def chunk(iterations: int) -> list[float]:
        inputs = [draw() for _ in range(PERIOD + ceil_div(iterations, PERIOD) * PERIOD)]
        if not device.startswith("cuda"):
            return cpu_chunk(run, inputs, PERIOD, PERIOD)(iterations)
        torch.cuda.synchronize()  # work that still waits on the card would hide what Python costs
        return gpu_chunk(run, inputs, PERIOD, PERIOD)(iterations)

    return chunk


def ceil_div(count: int, by: int) -> int:
    return -(-count // by)


def enough(first: Sequence[float], target_ms: float, least: int, most: int) -> int:
    """How many iterations fill `target_ms`, judged from a first few."""
    return max(least, min(most, round(target_ms / max(1e-3, statistics.median(first)))))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
