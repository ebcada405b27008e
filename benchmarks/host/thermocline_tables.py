"""Our tables in host memory, as contenders of the host benchmark: rows in pinned memory, the cache on the GPU.

    int8+5%/zero-copy    kernels read and write rows that are not cached over the link
    int8+5%/prefetch     `prefetch` of the next batch before the forward of this one
    int8+5%/prefetch4    rows of four batches together, during the four steps before (`prefetched`)
    int8+5%+staged10%/prefetch4   the same, with GPU memory for a tenth of the rows as stored
    int8+5%/device       the same tables on the GPU: the time of a step without the link
    int4+1%/...

*Useful* bytes are those that a step cannot avoid: the stored codes of each distinct row that is not cached, once in and once
out. Metadata stays on the GPU and does not count. Where rows stay on the GPU, useful bytes are those that a step transfers.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.cases import ZIPF, Workload
from benchmarks.kernels.contender import EPS, LEARNING_RATE, Contender, check_step, random_gradient
from benchmarks.kernels.ids import Batch, IdStream
from benchmarks.kernels.thermocline_contender import cache_view, first_words
from benchmarks.runner.isolated_process import Measurement, tried
from benchmarks.runner.lookahead import STRETCH, stretch, summary, times, wait
from benchmarks.runner.race import cache_work
from benchmarks.runner.timing import PERIOD
from thermocline import formats as F
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.nn.prefetch import AT_ONCE
from thermocline.rows.optimizers import RowwiseAdagrad
from thermocline.rows.precision import format_of

LINK_BYTES = 256 << 20
AHEAD = {"prefetch": 1, f"prefetch{AT_ONCE}": AT_ONCE}  # batches prefetched together
_COUNTED = 4  # batches in which distinct rows are counted


class KeyedBatch:
    """A batch as a collection takes it without joining tensors: a key for each table, ids and offsets of all."""

    def __init__(self, batch: Batch, tables: int) -> None:
        self._batch, self._keys = batch, [f"t{i}" for i in range(tables)]

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._batch.ids

    def offsets(self) -> Tensor:
        return self._batch.offsets


class HostTables:
    """Tables of a workload, in host memory or on the GPU. `at_once`: number of batches prefetched together."""

    at_once = 0

    def __init__(self, job: Workload, device: str, residency: str) -> None:
        shape = job.shape
        self.job, self.device, self.grad = job, device, random_gradient(shape, device)
        self.stream = IdStream(shape, ZIPF, 1, device, torch.int64)
        self.collection = EmbeddingCollection(
            [Table(f"t{i}", shape.rows, shape.dim) for i in range(shape.tables)],
            mode="sum" if shape.pooled else "none",
            rows=RowConfig(
                job.precision,
                cache=job.cache,
                optimizer=RowwiseAdagrad(lr=LEARNING_RATE, eps=EPS),
                residency=residency,
                staged=job.staged if job.staged and residency == "host" else None,
            ),
            device=device,
        )

    def restage(self, share: float) -> None:
        """Set the staged share of later prefetches; 0: what the first batches need."""
        self.collection.arena.unstage()
        self.collection.arena.staged = share or None

    def prefetch(self, following: Any) -> None:
        """Fetch the rows of a later batch."""
        self.collection.prefetch(following)

    def draw(self) -> KeyedBatch:
        """A new batch."""
        return KeyedBatch(self.stream.draw(), self.job.shape.tables)

    def through(self, batches: list[Any], ids: Callable[[Any], Any] | None = None) -> Iterable[Any]:
        """The batches, with later ones prefetched; `ids`: the input of the tables in a batch."""
        return (batch for batch, _ in self.collection.prefetched(batches, ids, self.at_once)) if self.at_once else batches

    def look_up(self, this: Any, _: Any = None) -> Tensor:
        """Rows of a batch."""
        values: Tensor = self.collection(this).values()
        return values

    def step(self, this: KeyedBatch, _: Any = None) -> None:
        self.look_up(this).backward(self.grad)

    def contender(self, ahead: bool = False) -> Contender:
        """A contender for `check_step`; with `ahead`, every batch is prefetched before its step."""

        def run(batch: KeyedBatch) -> None:
            if ahead:
                self.prefetch(batch)
            self.step(batch)

        tables, view = self.job.shape.tables, cache_view(self.collection.arena, self.device)
        return Contender(
            "ours", lambda batch: KeyedBatch(batch, tables), run, self.collection.read_table, self.grad, cache=view
        )

    def card_bytes(self) -> int:
        """Bytes on the GPU, with optimizer state."""
        memory = self.collection.memory()
        return memory.total - memory.host

    def useful(self) -> dict[str, float]:
        """Distinct rows of a step, those not cached, and useful bytes in each direction."""
        view = cache_view(self.collection.arena, self.device)
        cached_R = torch.cat([view.holds(table) for table in range(self.job.shape.tables)])
        rows = [self.distinct(self.draw()) for _ in range(_COUNTED)]
        missing = sum(int((~cached_R[row_U]).sum()) for row_U in rows)
        counted = {"distinct_rows": sum(map(len, rows)), "rows_not_cached": missing}
        return {
            **{name: count / _COUNTED for name, count in counted.items()},
            "useful_bytes_each_way": missing * self.width / _COUNTED,
        }

    def distinct(self, batch: KeyedBatch) -> Tensor:
        """Distinct rows of a batch, numbered over all tables."""
        shape = self.job.shape
        first_T1 = torch.arange(shape.tables, device=self.device)[:, None] * shape.rows
        row_U: Tensor = (batch.values().view(shape.tables, -1) + first_T1).unique()
        return row_U

    @property
    def width(self) -> int:
        """Bytes of a row in host memory."""
        return F.row_bytes(format_of(self.job.precision), self.job.shape.dim)

    def timed(self, settle: int, stretches: int) -> Measurement:
        """Steps in the steady state."""
        times(self.step, self.draw, self.device, settle, 0, self.through)
        before = self.collection.stats()
        taken = times(self.step, self.draw, self.device, 0, stretches, self.through)
        after, steps = self.collection.stats(), stretches * (PERIOD + STRETCH + PERIOD)
        did = {"a_step": {name: (count - before.get(name, 0)) / steps for name, count in after.items()}}
        sizes = {"card_bytes": self.card_bytes(), "host_bytes": self.collection.memory().host}
        return {**summary(taken), **cache_work(before, after), **self.useful(), **sizes, **did}

    def prefetch_alone(self, count: int) -> Measurement:
        """Mean milliseconds of a prefetch alone, bytes of the rows that were not on the GPU, and bytes in both directions."""
        taken, rows, moved = 0.0, 0, self._moved()
        for _ in range(count):
            batch = self.draw()
            word_R = torch.cat([first_words(self.collection.arena, table) for table in range(self.job.shape.tables)])
            rows += int((word_R[self.distinct(batch)] >= 0).sum())
            wait(self.device)
            start = time.perf_counter()
            self.prefetch(batch)
            wait(self.device)
            taken += time.perf_counter() - start
            self.step(batch)
        sums = {"ms": taken * 1e3, "bytes": rows * self.width, "bytes_both_ways": self._moved() - moved}
        return {f"prefetch_{name}": total / count for name, total in sums.items()}

    def _moved(self) -> int:
        stats = self.collection.stats()
        return sum(stats.get(f"prefetch_bytes_{way}", 0) for way in ("in", "out"))


def measure(job: dict[str, Any]) -> Iterator[Measurement]:
    """Measure one shape: the link, then every variant."""
    device, settle, stretches = job["device"], job["settle"], job["stretches"]
    if job["link"]:
        yield tried("link", lambda: link(device))
    jobs = [Workload.from_json(one) for one in job["jobs"]]
    for wanted in (one for one in jobs if not one.staged):
        staged = [one for one in jobs if one.staged and (one.precision, one.cache) == (wanted.precision, wanted.cache)]
        yield from _of_one(wanted, staged, device, settle, stretches)


def _of_one(job: Workload, staged: Sequence[Workload], device: str, settle: int, stretches: int) -> Iterator[Measurement]:
    """Measure the variants of a workload, and of workloads that differ in the staged share only, on the same tables."""
    name = job.stored

    def zero_copy() -> Measurement:
        check_step(lambda small, place: HostTables(small, place, "host").contender(), job, device)
        return kept[0].timed(settle, stretches)

    def ahead(job: Workload, at_once: int) -> Measurement:
        contender = kept[0]
        check_step(lambda small, place: HostTables(small, place, "host").contender(ahead=True), job, device)
        contender.restage(job.staged)
        contender.at_once = at_once
        found = contender.timed(settle, stretches)
        contender.at_once = 0
        if at_once == 1:
            return found | contender.prefetch_alone(8 * stretches)
        return found | {"useful_bytes_each_way": found["a_step"].get("prefetch_bytes_in", 0.0)}

    def on_card() -> Measurement:
        return HostTables(job, device, "device").timed(settle, stretches)

    try:
        kept = [HostTables(job, device, "host")]
    except Exception as error:
        yield {"name": f"{name}/zero-copy", "error": repr(error)}
        return
    yield tried(f"{name}/zero-copy", zero_copy)
    for way, at_once in AHEAD.items():
        for one in (job, *staged) if at_once == AT_ONCE else (job,):
            yield tried(f"{one.stored}/{way}", partial(ahead, one, at_once))
    kept.clear()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    yield tried(f"{name}/device", on_card)


def link(device: str, size: int = LINK_BYTES) -> Measurement:
    """GB/s of copies between pinned host memory and the GPU, in each direction."""
    if device == "cpu":
        return {"skipped": "there is no link on a CPU"}
    there = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(size, dtype=torch.uint8, device=device)
    ways = {"h2d": (here, there), "d2h": (there, here)}
    found = {}
    for way, (target, source) in ways.items():
        taken = stretch(lambda _, __, t=target, s=source: t.copy_(s, non_blocking=True), lambda: None, device, 16)  # type: ignore[misc]
        found[way] = size / summary(taken)["ms"] / 1e6
    return found
