"""The last minutes of a server, second by second: what the status page draws. Prometheus keeps the longer story."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from typing import NamedTuple

from .metrics import BOUNDS, Metrics, quantile

SECONDS = 120


class Sample(NamedTuple):
    """All counts at one moment."""

    at: float
    answered: int
    refused: int
    ids: int
    counts: tuple[int, ...]  # of the histogram of whole requests, over all models


class Window(NamedTuple):
    """What happened between two moments."""

    seconds: float
    requests: float  # in a second
    refused: float
    ids: float
    p50: float
    p99: float
    counts: tuple[int, ...]


class History:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: deque[Sample] = deque(maxlen=SECONDS + 1)
        self.sample()

    def sample(self) -> None:
        """To be called once a second."""
        models = list(self._metrics.models.values())
        counts = [0] * (len(BOUNDS) + 1)
        for one in models:
            counts = [a + b for a, b in zip(counts, one.stages["all"].counts, strict=True)]
        refused = sum(sum(one.refused.values()) for one in models)
        answered, ids = sum(one.answered for one in models), sum(one.ids for one in models)
        self._samples.append(Sample(time.monotonic(), answered, refused, ids, tuple(counts)))

    def window(self, seconds: int = SECONDS) -> Window:
        """The last so many seconds, as far as there are samples."""
        return _between(self._samples[max(len(self._samples) - 1 - seconds, 0)], self._samples[-1])

    def rates(self) -> list[tuple[float, float]]:
        """Requests in each second: (seconds ago, requests)."""
        samples = list(self._samples)
        return [(before.at - samples[-1].at, _between(before, after).requests) for before, after in pairwise(samples)]


def _between(before: Sample, after: Sample) -> Window:
    seconds = max(after.at - before.at, 1e-3)
    counts = tuple(b - a for a, b in zip(before.counts, after.counts, strict=True))
    return Window(
        seconds,
        (after.answered - before.answered) / seconds,
        (after.refused - before.refused) / seconds,
        (after.ids - before.ids) / seconds,
        quantile(counts, 0.5),
        quantile(counts, 0.99),
        counts,
    )
