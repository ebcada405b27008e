"""Metrics of the server: their Prometheus form, and the last two minutes for the status page.

The histograms of prometheus_client take a lock for every observation, 8 us for the five stages of a request. Only the event
loop's thread records here, so plain lists suffice, and a collector converts them when Prometheus scrapes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from thermocline.serve.served_model import ElasticCounts, ShardStatus

if TYPE_CHECKING:
    from thermocline.serve.publishing.staleness import Staleness

SECONDS = 120  # of the history
STAGES = ("read", "queue", "infer", "write", "all")
# Why the server closes connections: a body that does not arrive, a response that is not read, an idle stream, too many.
DROP_REASONS = ("body", "read", "idle", "limit")
# Seconds.
BOUNDS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def quantile(counts: Sequence[int], share: float) -> float:
    """A quantile of latency in seconds, linear inside a bucket. The last bound stands for all values beyond it."""
    wanted, seen, low = share * sum(counts), 0, 0.0
    for bound, number in zip(BOUNDS, counts, strict=False):
        if number and seen + number >= wanted:
            return low + (bound - low) * (wanted - seen) / number
        seen, low = seen + number, bound
    return BOUNDS[-1] if seen < sum(counts) else 0.0


class LatencyHistogram:
    """Counts for each bucket, and the sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> Iterator[tuple[str, float]]:
        return zip((*map(str, BOUNDS), "+Inf"), accumulate(self.counts), strict=True)


class ModelMetrics:
    """The counts of one model, over all its versions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failed: Counter[str] = Counter()  # by gRPC code
        self.batches: Counter[int] = Counter()  # by number of requests
        self.worker_batches = 0  # batches executed in a worker thread
        self.answered = self.ids = 0
        self.queued_in_fronts = 0
        self.last = 0.0  # Unix time of the last request
        self.stages = {stage: LatencyHistogram() for stage in STAGES}
        self._histograms = tuple(self.stages.values())

    def record(self, read: float, queue: float, infer: float, write: float, ids: int) -> None:
        """Count a request: its seconds in each stage, and its ids."""
        seconds = (read, queue, infer, write, read + queue + infer + write)
        for histogram, each in zip(self._histograms, seconds, strict=True):
            histogram.counts[bisect_left(BOUNDS, each)] += 1
            histogram.total += each
        self.answered += 1
        self.ids += ids
        self.last = time.time()

    def counts(self) -> Counts:
        """Everything that was counted, as numbers by name."""
        stages = {name: {"total": each.total} | _by_name(enumerate(each.counts)) for name, each in self.stages.items()}
        batches, failed = _by_name(self.batches.items()), dict(self.failed)
        counted = {"answered": self.answered, "ids": self.ids, "worker_batches": self.worker_batches}
        return counted | {"batches": batches, "failed": failed, "stages": stages}

    def add(self, counts: Counts) -> None:
        """Add what another process counted."""
        self.answered, self.ids = self.answered + counts["answered"], self.ids + counts["ids"]
        self.worker_batches += counts["worker_batches"]
        self.failed.update(counts["failed"])
        self.batches.update({int(size): number for size, number in counts["batches"].items()})
        for name, histogram in self.stages.items():
            own = dict(counts["stages"][name])
            histogram.total += own.pop("total")
            for bucket, number in own.items():
                histogram.counts[int(bucket)] += number
        if counts["answered"]:
            self.last = time.time()


Counts = dict[str, Any]  # numbers, or such by name


def _by_name(numbers: Iterable[tuple[int, int]]) -> Counts:
    return {str(name): number for name, number in numbers}


def subtract_counts(now: Counts, before: Counts) -> Counts:
    """What was counted since `before`."""
    return {name: _subtract(value, before.get(name)) for name, value in now.items()}


def _subtract(now: Any, before: Any) -> Any:
    if isinstance(now, dict):
        return subtract_counts(now, before or {})
    if isinstance(now, list):
        return [each - then for each, then in zip(now, before or [0] * len(now), strict=True)]
    return now - (before or 0)


@dataclass(frozen=True)
class ModelSnapshot:
    """State of a served model at one moment."""

    name: str
    version: str
    queued: int
    shards: tuple[ShardStatus, ...]
    staleness: Staleness | None = None  # of a model that was published to
    elastic: Mapping[str, ElasticCounts] = field(default_factory=dict)  # by feature

    @property
    def imbalance(self) -> float:
        """Maximum over mean lookups of the shards."""
        lookups = [shard.lookups for shard in self.shards]
        return max(lookups) * len(lookups) / sum(lookups) if sum(lookups) else 1.0


class ServerMetrics:
    """Metrics of all models. `watch` lists the models in use."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMetrics] = {}
        self.watch: Callable[[], Iterable[ModelSnapshot]] = tuple
        self.dropped: Counter[str] = Counter()  # connections by reason
        self.in_flight: Callable[[], int] = int  # bytes
        self.started = time.time()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def of(self, model: str) -> ModelMetrics:
        if model not in self.models:
            self.models[model] = ModelMetrics(model)
        return self.models[model]

    def counts(self) -> Counts:
        """Everything that was counted, for another process to add."""
        return {"models": {name: each.counts() for name, each in self.models.items()}, "dropped": dict(self.dropped)}

    def add(self, counts: Counts) -> None:
        """Add what another process counted."""
        self.dropped.update(counts["dropped"])
        for name, each in counts["models"].items():
            self.of(name).add(each)

    def text(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The families of /metrics."""
        seconds = HistogramMetricFamily("thermocline_request_seconds", "Request latency by stage.", labels=("model", "stage"))
        answered = CounterMetricFamily("thermocline_requests", "Requests by gRPC status.", labels=("model", "status"))
        ids = CounterMetricFamily("thermocline_ids", "Ids of successful requests.", labels=("model",))
        batches = CounterMetricFamily("thermocline_batches", "Executed batches.", labels=("model",))
        for one in self.models.values():
            for stage, histogram in one.stages.items():
                seconds.add_metric((one.name, stage), list(histogram.buckets()), histogram.total)
            answered.add_metric((one.name, "OK"), one.answered)
            for status, number in one.failed.items():
                answered.add_metric((one.name, status), number)
            ids.add_metric((one.name,), one.ids)
            batches.add_metric((one.name,), sum(one.batches.values()))
        lookups = CounterMetricFamily("thermocline_shard_lookups", "Lookups in a shard.", labels=("model", "shard"))
        ready = GaugeMetricFamily("thermocline_shard_ready", "1 if the shard is up.", labels=("model", "shard"))
        held = GaugeMetricFamily("thermocline_shard_bytes", "Bytes of rows in a shard.", labels=("model", "shard"))
        imbalance = GaugeMetricFamily("thermocline_imbalance", "Maximum over mean lookups of the shards.", labels=("model",))
        queued = GaugeMetricFamily("thermocline_queue_depth", "Queued requests.", labels=("model",))
        version = GaugeMetricFamily("thermocline_model_version", "1 for the version in use.", labels=("model", "version"))
        for model in self.watch():
            for shard in model.shards:
                labels = (model.name, str(shard.number))
                lookups.add_metric(labels, shard.lookups)
                ready.add_metric(labels, int(shard.ready))
                held.add_metric(labels, shard.bytes)
            imbalance.add_metric((model.name,), model.imbalance)
            queued.add_metric((model.name,), model.queued)
            version.add_metric((model.name, model.version.partition("+")[0]), 1)  # publishes would be a series each
        yield from self._publishes()
        yield from self._elastic_ids()
        yield from (seconds, answered, ids, batches, lookups, ready, held, imbalance, queued, version)
        yield GaugeMetricFamily("thermocline_in_flight_bytes", "Requests and responses in memory.", self.in_flight())
        dropped = CounterMetricFamily("thermocline_dropped_connections", "Connections closed by reason.", labels=("reason",))
        for reason in DROP_REASONS:
            dropped.add_metric((reason,), self.dropped[reason])
        yield dropped

    def _elastic_ids(self) -> Iterator[Metric]:
        """Lookups of features whose ids came and went in training."""
        names = ("model", "feature")
        lookups = CounterMetricFamily("thermocline_elastic_lookups", "Lookups of elastic ids.", labels=names)
        unknown = CounterMetricFamily("thermocline_unknown_ids", "Those of ids without a row of their own.", labels=names)
        ids = GaugeMetricFamily("thermocline_elastic_ids", "Elastic ids with a row of their own.", labels=names)
        for model in self.watch():
            for feature, counts in model.elastic.items():
                lookups.add_metric((model.name, feature), counts.lookups)
                unknown.add_metric((model.name, feature), counts.unknown)
                ids.add_metric((model.name, feature), counts.ids)
        yield from (lookups, unknown, ids)

    def _publishes(self) -> Iterator[Metric]:
        """What servers know of the trainers that publish to them."""
        number = GaugeMetricFamily("thermocline_publish", "Number of the publish that is served.", labels=("model",))
        age = GaugeMetricFamily(
            "thermocline_staleness_seconds", "Age of served rows by lookups.", labels=("model", "quantile")
        )  # fmt: skip
        latency = GaugeMetricFamily(
            "thermocline_publish_seconds", "From the step to lookups, of the last publish.", labels=("model",)
        )  # fmt: skip
        rows = CounterMetricFamily("thermocline_published_rows", "Rows that publishes changed.", labels=("model",))
        for model in self.watch():
            if (known := model.staleness) is not None:
                number.add_metric((model.name,), known.publish)
                age.add_metric((model.name, "0.5"), known.p50)
                age.add_metric((model.name, "0.99"), known.p99)
                latency.add_metric((model.name,), known.seconds)
                rows.add_metric((model.name,), known.rows)
        yield from (number, age, latency, rows)


class MetricsSample(NamedTuple):
    """Counters of all models at one moment, or between two."""

    at: float  # seconds
    answered: int
    failed: int
    ids: int
    counts: tuple[int, ...]  # of the latency histogram

    def since(self, before: MetricsSample) -> MetricsSample:
        """What happened after another sample."""
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        answered, failed, ids = self.answered - before.answered, self.failed - before.failed, self.ids - before.ids
        return MetricsSample(max(self.at - before.at, 1e-3), answered, failed, ids, counts)


class MetricsHistory:
    """Samples of the last `SECONDS` seconds. Prometheus keeps longer histories."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._samples: deque[MetricsSample] = deque(maxlen=SECONDS + 1)
        self.sample()

    def sample(self) -> None:
        """Take a sample; call this once a second."""
        models = self._metrics.models.values()
        counts = [
            sum(each) for each in zip([0] * (len(BOUNDS) + 1), *(one.stages["all"].counts for one in models), strict=True)
        ]
        failed = sum(sum(one.failed.values()) for one in models)
        answered, ids = sum(one.answered for one in models), sum(one.ids for one in models)
        self._samples.append(MetricsSample(time.monotonic(), answered, failed, ids, tuple(counts)))

    def window(self, seconds: int = SECONDS) -> MetricsSample:
        """The last `seconds`, or since the first sample."""
        return self._samples[-1].since(self._samples[max(len(self._samples) - 1 - seconds, 0)])

    def rates(self) -> list[tuple[float, float]]:
        """(seconds ago, requests) of each second."""
        gaps = [(before.at - self._samples[-1].at, after.since(before)) for before, after in pairwise(self._samples)]
        return [(ago, gap.answered / gap.at) for ago, gap in gaps]
