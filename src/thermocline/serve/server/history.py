"""Metrics of the last two minutes, sampled every second, for the status page. Prometheus keeps longer histories."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from typing import NamedTuple

from .metrics import BOUNDS, ServerMetrics, quantile

SECONDS = 120


class MetricsSample(NamedTuple):
    """Counters at one moment."""

    at: float
    answered: int
    failed: int
    ids: int
    counts: tuple[int, ...]  # of the latency histogram, over all models


class MetricsWindow(NamedTuple):
    """Rates between two samples."""

    seconds: float
    requests: float  # a second
    failed: float
    ids: float
    p50: float
    p99: float
    counts: tuple[int, ...]


class MetricsHistory:
    """Samples of the last `SECONDS` seconds."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._samples: deque[MetricsSample] = deque(maxlen=SECONDS + 1)
        self.sample()

    def sample(self) -> None:
        """Take a sample; call this once a second."""
        models = list(self._metrics.models.values())
        counts = [0] * (len(BOUNDS) + 1)
        for one in models:
            counts = [a + b for a, b in zip(counts, one.stages["all"].counts, strict=True)]
        failed = sum(sum(one.failed.values()) for one in models)
        answered, ids = sum(one.answered for one in models), sum(one.ids for one in models)
        self._samples.append(MetricsSample(time.monotonic(), answered, failed, ids, tuple(counts)))

    def window(self, seconds: int = SECONDS) -> MetricsWindow:
        """Rates of the last `seconds`, or since the first sample."""
        return _between(self._samples[max(len(self._samples) - 1 - seconds, 0)], self._samples[-1])

    def rates(self) -> list[tuple[float, float]]:
        """(seconds ago, requests) of each second."""
        samples = list(self._samples)
        return [(before.at - samples[-1].at, _between(before, after).requests) for before, after in pairwise(samples)]


def _between(before: MetricsSample, after: MetricsSample) -> MetricsWindow:
    seconds = max(after.at - before.at, 1e-3)
    counts = tuple(b - a for a, b in zip(before.counts, after.counts, strict=True))
    return MetricsWindow(
        seconds,
        (after.answered - before.answered) / seconds,
        (after.failed - before.failed) / seconds,
        (after.ids - before.ids) / seconds,
        quantile(counts, 0.5),
        quantile(counts, 0.99),
        counts,
    )
