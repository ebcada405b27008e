"""What is counted, and how Prometheus reads it.

A request passes stages (`STAGES`), and each is timed. prometheus_client's own histograms take a lock and a generator for every
observation, 1.5 to 3 us; five stages of every request would cost as much as the lookup. All observations are made by the
thread of the event loop, so plain lists do, and a collector turns them into prometheus_client's families when somebody asks.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from .served_model import CardStatus

TOGETHER = 256  # answers that are counted at a time, at the latest
STAGES = ("read", "queue", "infer", "write", "all")
# Seconds; 2 or 2.5 times from one to the next, from a kernel's launch to a client's patience.
BOUNDS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def quantile(counts: Sequence[int], share: float) -> float:
    """The seconds that so many stayed under, evenly spread inside a bucket; the last bound stands for all beyond it."""
    wanted, seen, low = share * sum(counts), 0, 0.0
    for bound, number in zip(BOUNDS, counts, strict=False):
        if number and seen + number >= wanted:
            return low + (bound - low) * (wanted - seen) / number
        seen, low = seen + number, bound
    return BOUNDS[-1] if seen < sum(counts) else 0.0


class Histogram:
    """Counts between bounds, and the sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def note(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> Iterator[tuple[str, float]]:
        seen = 0
        for bound, number in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            seen += number
            yield bound, seen


class ModelMetrics:
    """The counts of one model, over all its versions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refused: Counter[str] = Counter()  # by status
        self.batches: Counter[int] = Counter()  # by requests in them
        self.handed = 0  # batches that were worked on in a thread of their lane
        self._answered = self._ids = 0
        self._last = 0.0
        self._stages = {stage: Histogram() for stage in STAGES}
        self._noted: list[tuple[float, float, float, float, int]] = []
        self._noted_at = 0.0

    def note_answer(self, read: float, queue: float, infer: float, write: float, ids: int) -> None:
        """The seconds that one request spent in each stage."""
        self._noted.append((read, queue, infer, write, ids))
        self._noted_at = perf_counter()
        if len(self._noted) >= TOGETHER:
            self._count()

    def _count(self) -> None:
        """Many at once: what one request needs is not in the processor's caches any more when the next one comes."""
        if not self._noted:
            return
        read, queue, infer, write, every = (self._stages[stage] for stage in STAGES)
        for seconds in self._noted:
            read.note(seconds[0])
            queue.note(seconds[1])
            infer.note(seconds[2])
            write.note(seconds[3])
            every.note(seconds[0] + seconds[1] + seconds[2] + seconds[3])
            self._ids += seconds[4]
        self._answered += len(self._noted)
        self._last = time.time() - (perf_counter() - self._noted_at)
        self._noted.clear()

    @property
    def stages(self) -> Mapping[str, Histogram]:
        self._count()
        return self._stages

    @property
    def answered(self) -> int:
        self._count()
        return self._answered

    @property
    def ids(self) -> int:
        self._count()
        return self._ids

    @property
    def last(self) -> float:
        """When the last request was answered, seconds since 1970."""
        self._count()
        return self._last


@dataclass(frozen=True)
class Seen:
    """What a model in use looks like from outside at this moment."""

    name: str
    version: str
    queued: int
    cards: tuple[CardStatus, ...]

    @property
    def imbalance(self) -> float:
        """Most over mean lookups of cards: 1 is even."""
        lookups = [card.lookups for card in self.cards]
        return max(lookups) * len(lookups) / sum(lookups) if sum(lookups) else 1.0


class Metrics:
    """All that is counted; `watch` says which models are in use."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMetrics] = {}
        self.watch: Iterable[Seen] = ()
        self.started = time.time()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def of(self, model: str) -> ModelMetrics:
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelMetrics(model)
        return found

    def text(self) -> bytes:
        """What /metrics answers."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._of_requests()
        yield from self._of_models()

    def _of_requests(self) -> Iterator[Metric]:
        seconds = HistogramMetricFamily("thermocline_request_seconds", "Time of a request by stage.", labels=("model", "stage"))
        answered = CounterMetricFamily("thermocline_requests", "Requests by outcome.", labels=("model", "status"))
        ids = CounterMetricFamily("thermocline_ids", "Ids of answered requests.", labels=("model",))
        batches = CounterMetricFamily("thermocline_batches", "Micro-batches.", labels=("model",))
        for one in self.models.values():
            for stage, histogram in one.stages.items():
                seconds.add_metric((one.name, stage), list(histogram.buckets()), histogram.total)
            answered.add_metric((one.name, "OK"), one.answered)
            for status, number in one.refused.items():
                answered.add_metric((one.name, status), number)
            ids.add_metric((one.name,), one.ids)
            batches.add_metric((one.name,), sum(one.batches.values()))
        yield from (seconds, answered, ids, batches)

    def _of_models(self) -> Iterator[Metric]:
        lookups = CounterMetricFamily("thermocline_card_lookups", "Lookups served by a card.", labels=("model", "card"))
        ready = GaugeMetricFamily("thermocline_card_ready", "1 if the card answers.", labels=("model", "card"))
        held = GaugeMetricFamily("thermocline_card_bytes", "Bytes of rows on a card.", labels=("model", "card"))
        imbalance = GaugeMetricFamily("thermocline_imbalance", "Most over mean lookups of cards.", labels=("model",))
        queued = GaugeMetricFamily("thermocline_queue_depth", "Requests that wait.", labels=("model",))
        version = GaugeMetricFamily("thermocline_model_version", "1 for the version in use.", labels=("model", "version"))
        for one in self.watch:
            for card in one.cards:
                labels = (one.name, str(card.number))
                lookups.add_metric(labels, card.lookups)
                ready.add_metric(labels, int(card.ready))
                held.add_metric(labels, card.bytes)
            imbalance.add_metric((one.name,), one.imbalance)
            queued.add_metric((one.name,), one.queued)
            version.add_metric((one.name, one.version), 1)
        yield from (lookups, ready, held, imbalance, queued, version)
