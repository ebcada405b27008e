"""One contender of the train benchmark: a DLRM in training, with tables in host memory, ours or FBGEMM's.

The dense model, its optimizer and the samples are the same for all. Samples come from the synthetic click log and are made on
the GPU before the clock starts: a ring of batches. The mean loss of the timed steps is reported; it is about equal for all
arms.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.host.thermocline_tables import AHEAD, KeyedBatch
from benchmarks.host.thermocline_tables import HostTables as Ours
from benchmarks.kernels.cases import STEP_ROWWISE, Shape, Workload
from benchmarks.kernels.ids import Batch
from benchmarks.runner.isolated_process import Measurement, tried
from benchmarks.runner.lookahead import Through, summary, times
from benchmarks.runner.race import cache_work
from thermocline.data.synthetic import SyntheticLog
from thermocline.models import DLRM

DENSE_LR = 1e-3
LookUp = Callable[[Any, Any], Tensor]


class Sample(NamedTuple):
    """A batch of the log, with ids in the form that the tables take."""

    label_B: Tensor
    dense_BI: Tensor
    ids: Any


class TableRows(nn.Module):
    """Embeddings of a DLRM over external tables; the input is (this batch, the next)."""

    def __init__(self, look_up: LookUp) -> None:
        super().__init__()
        self._look_up = look_up

    def forward(self, both: tuple[Any, Any]) -> Tensor:
        return self._look_up(*both)


class Training:
    """A DLRM over some tables, and its steps."""

    def __init__(self, look_up: LookUp, shape: Shape, mlps: dict[str, Any], dense: int, device: str) -> None:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")  # TF32 for the MLPs of all arms
        self.model = DLRM(TableRows(look_up), shape.tables, shape.dim, dense, **mlps).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=DENSE_LR, fused=device != "cpu")
        self.loss = torch.zeros((), device=device)
        self.steps = 0

    def step(self, this: Sample, following: Sample | None) -> None:
        logit_B = self.model(this.dense_BI, (this.ids, following and following.ids))
        loss = binary_cross_entropy_with_logits(logit_B, this.label_B)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loss += loss.detach()
        self.steps += 1

    def timed(self, samples: list[Sample], device: str, job: dict[str, Any], through: Through = iter) -> Measurement:
        """Steps in the steady state of the tables."""
        ring = cycle(samples)

        def draw() -> Sample:
            return next(ring)

        times(self.step, draw, device, job["settle"], 0, through)
        self.loss.zero_()
        self.steps = 0
        found = summary(times(self.step, draw, device, 0, job["stretches"], through))
        rate = len(samples[0].label_B) / found["ms"] * 1e3
        return {**found, "samples_per_s": rate, "loss": float(self.loss) / self.steps}


def ring_of(shape: Shape, count: int, device: str, form: Callable[[Batch], Any]) -> list[Sample]:
    """Batches of the synthetic log over tables of this shape."""
    log = SyntheticLog((shape.rows,) * shape.tables, count * shape.batch, device=device)
    offsets = torch.arange(shape.tables * shape.batch + 1, device=device)
    made = []
    for clicks in log.batches(shape.batch):
        ids = form(Batch(clicks.ids_BF.t().reshape(-1), offsets))
        made.append(Sample(clicks.label_B, clicks.dense_BI.contiguous(), ids))
    return made


def measure(job: dict[str, Any]) -> Iterator[Measurement]:
    """Measure all arms of a contender."""
    shape, device = Shape(**job["shape"]), job["device"]
    yield from (_ours if job["side"] == "ours" else _fbgemm)(shape, device, job)


def _ours(shape: Shape, device: str, job: dict[str, Any]) -> Iterator[Measurement]:
    samples = ring_of(shape, job["ring"], device, lambda batch: KeyedBatch(batch, shape.tables))
    for precision, cache in job["stored"]:
        wanted = Workload(shape, precision, STEP_ROWWISE, cache=cache)
        kept: list[Ours] = []  # tables are built once; later variants train them further, with new MLPs

        def arm(way: str, wanted: Workload = wanted, kept: list[Ours] = kept) -> Measurement:
            if not kept:
                kept.append(Ours(wanted, device, "host"))
            contender = kept[0]
            contender.at_once = AHEAD.get(way, 0)
            contender.restage(0.0)
            training = Training(contender.look_up, shape, job["mlps"], SyntheticLog.dense, device)
            before = contender.collection.stats()
            found = training.timed(samples, device, job, partial(contender.through, ids=lambda sample: sample.ids))
            work = cache_work(before, contender.collection.stats())
            return {**found, **work, "card_bytes": contender.card_bytes()}

        for way in job["ways"] if cache else job["ways"][:1]:
            yield tried(f"{wanted.stored}/{way}", lambda way=way, arm=arm: arm(way))  # type: ignore[misc]
        kept.clear()
        _clean(device)


def _fbgemm(shape: Shape, device: str, job: dict[str, Any]) -> Iterator[Measurement]:
    from benchmarks.host import fbgemm_tables as peer

    yield tried("versions", peer.versions)
    samples = ring_of(shape, job["ring"], device, lambda batch: batch)
    memory = peer.HostMemory(4 * shape.dim * shape.rows * shape.tables + (1 << 20))
    wanted = Workload(shape, "fp32", STEP_ROWWISE)
    for name in peer.ARMS:

        def arm(name: str = name) -> Measurement:
            memory.begin()
            slots = peer.slots_for(shape, job["card_bytes"], name)
            contender = peer.FbgemmHostTables(wanted, device, name, slots, bound=shape.rows**-0.5)
            training = Training(contender.look_up, shape, job["mlps"], SyntheticLog.dense, device)
            return {**training.timed(samples, device, job), **contender.fill(), "slots": slots}

        yield tried(name, arm)
        _clean(device)


def _clean(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
