"""How time is measured.

Contenders are timed in rounds, a few iterations of each in turn, so that noise and clock drift hit all of them. Each chunk
begins with untimed iterations. Rows report medians. Inputs rotate over `SETS` batches of ids.

Where a contender has a cache, ids are new in every step and a time is the mean of `PERIOD` consecutive steps: the cache updates
itself at every fourth batch, and a median of single steps would leave that work out. All contenders of such a race are timed
this way, after as many steps as each needs to reach its steady state.

CPU: wall time of one call. GPU: CUDA events around one call, recorded without a wait between calls, so that Python overhead
counts exactly where it exceeds GPU work. Backward passes run in the calling thread for every contender (`one_thread`):
autograd's device thread starts cold in every step, which on some machines costs as much as the rest of a step. The L2 cache is
not flushed between calls: ids rotate, and outputs of the large shapes are many times its size, but the hottest Zipf rows stay
in it for every contender. Small shapes (batch 512, 200 small tables) run from L2 and measure launch overhead.
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
    """Quantile with linear interpolation."""
    ordered = sorted(values)
    place = at * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def interleave(chunks: Mapping[str, Chunk], rounds: int, iterations: Mapping[str, int]) -> dict[str, Times]:
    """Time every contender in turn, round after round; the order alternates."""
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


BACKWARD = "on the GPU, backward passes ran in the calling thread for every contender"


def one_thread() -> AbstractContextManager[Any]:
    """Runs backward passes in the calling thread."""
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
    """The mean of each `PERIOD` calls, on inputs drawn for this chunk, untimed."""

    def chunk(iterations: int) -> list[float]:
        inputs = [draw() for _ in range(PERIOD + ceil_div(iterations, PERIOD) * PERIOD)]
        if not device.startswith("cuda"):
            return cpu_chunk(run, inputs, PERIOD, PERIOD)(iterations)
        torch.cuda.synchronize()  # pending GPU work would hide Python overhead
        return gpu_chunk(run, inputs, PERIOD, PERIOD)(iterations)

    return chunk


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ceil_div(count: int, by: int) -> int:
    return -(-count // by)


def enough(first: Sequence[float], target_ms: float, least: int, most: int) -> int:
    """Number of iterations that fill `target_ms`, estimated from a first few."""
    return max(least, min(most, round(target_ms / max(1e-3, statistics.median(first)))))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
