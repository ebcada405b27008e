"""This package as a contender."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.cases import Workload
from benchmarks.kernels.contender import EPS, LEARNING_RATE, CacheView, Contender, check_forward, check_step, random_gradient
from benchmarks.kernels.ids import Batch
from thermocline import formats as F
from thermocline.kernels.gather.reference import read_rows
from thermocline.rows.arena import Arena
from thermocline.rows.optimizers import SGD, RowOptimizer, RowwiseAdagrad
from thermocline.rows.table_spec import TableSpec
from thermocline.rows.training import Trainer, lookup

_OPTIMIZERS: dict[str, RowOptimizer] = {
    "sgd": SGD(lr=LEARNING_RATE),
    "rowwise_adagrad": RowwiseAdagrad(lr=LEARNING_RATE, eps=EPS),
}
# After 256 steps the cache updates itself at every fourth batch, and on the small CPU shapes counts have been halved once.
_SETTLE = {"cpu": 320, "cuda": 960}
STAGED = 1 << 30  # bit of the first meta word of a prefetched row; slot numbers are lower
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def build(job: Workload, device: str) -> Contender:
    """Random tables for a workload; a step rounds stochastically."""
    shape = job.shape
    tables = [TableSpec(shape.rows, shape.dim, job.precision, f"t{i}") for i in range(shape.tables)]
    arena = Arena(tables, device=device, slots=[int(job.cache * shape.rows)] * shape.tables)
    arena.randomize_(1.0, torch.Generator(device=device).manual_seed(5))
    mode = "sum" if shape.pooled else "none"
    dtype = _DTYPES[job.output]

    def prepare(batch: Batch) -> tuple[Tensor, Tensor]:
        offsets = batch.offsets if shape.pooled else batch.offsets[:: shape.batch].contiguous()
        return batch.ids, offsets

    def read(table: int, rows: Tensor) -> Tensor:
        if job.cache:
            return arena.read(table, rows)
        return read_rows(arena.codes, arena.meta, arena.layout.tables.features[table], rows)

    if job.optimizer is None:

        def forward(args: tuple[Tensor, Tensor]) -> Tensor:
            with torch.no_grad():
                return lookup(arena, args[0], args[1], mode=mode, dtype=dtype)

        return Contender("ours", prepare, forward, read)
    trainer = Trainer(arena, _OPTIMIZERS[job.optimizer])
    grad = random_gradient(shape, device)

    def step(args: tuple[Tensor, Tensor]) -> None:
        lookup(arena, args[0], args[1], mode=mode, dtype=dtype, trainer=trainer).backward(grad)

    return Contender("ours", prepare, step, read, grad, cache=cache_view(arena, device) if job.cache else None)


def first_words(arena: Arena, table: int) -> Tensor:
    """The first meta word of each row of a table: negative if the row is cached or prefetched."""
    field = arena.layout.tables.features[table]
    words = F.META_WORDS[field[F.FORMAT]]
    return arena.meta[field[F.META] :][: field[F.ROWS] * words].view(-1, words)[:, 0]


def cache_view(arena: Arena, device: str) -> CacheView:
    """Access to the cache of an arena."""

    def holds(table: int) -> Tensor:
        word_R = first_words(arena, table)
        return (word_R < 0) & (word_R & STAGED == 0)

    return CacheView(holds, arena.stats, _SETTLE[device.partition(":")[0]])


def contenders(job: Workload, device: str) -> list[Contender]:
    """The checked contender of this package."""
    if job.optimizer is not None:
        check_step(build, job, device)
    contender = build(job, device)
    if job.optimizer is None:
        check_forward(contender, job, device)
    return [contender]


def int8_contenders(job: Workload, device: str) -> list[Contender]:
    """The contender with int8 rows, a baseline for workloads in another precision."""
    job = replace(job, precision="int8")
    return [replace(contender, label=f"ours {job.stored}") for contender in contenders(job, device)]


def versions() -> dict[str, Any]:
    return {}
