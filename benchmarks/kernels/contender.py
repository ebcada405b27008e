"""A contender of a race, and the checks that it must pass before it is timed.

`check_forward` compares the first bags of a lookup with a plain sum over the rows as the contender stores them. `check_step`
compares a training step on a small table with the same step in float64; with a cache, the last of several steps, so that rows
are cached, admitted and evicted. Both raise `WrongResult`: a wrong kernel is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.cases import UNIFORM, ZIPF, Shape, Workload
from benchmarks.kernels.ids import Batch, IdStream, batches
from benchmarks.runner.timing import SETS, Chunk, chunk_on, fresh_chunk

LEARNING_RATE = 0.05
EPS = 1e-8
_BAGS = 32


class WrongResult(Exception):
    """A contender computed a wrong result; `check` names the failed check."""

    def __init__(self, message: str, check: str = "") -> None:
        super().__init__(message)
        self.check = check


def in_one(out: Any, table: int, shape: Shape) -> Tensor:
    """One table's part of an output that holds all tables: [bags, dim], or [ids, dim] unpooled."""
    full: Tensor = out
    if shape.pooled:
        return full.view(shape.batch, shape.tables, shape.dim)[:, table]
    return full.view(shape.tables, -1, shape.dim)[table]


class CacheView(NamedTuple):
    """Access to the cache of a contender."""

    holds: Callable[[int], Tensor]  # table -> mask of its cached rows
    stats: Callable[[], dict[str, int]]
    settle: int  # steps until the steady state


@dataclass(frozen=True)
class Contender:
    """Tables that were built for a workload. `prepare` makes the input of `run`, untimed."""

    label: str
    prepare: Callable[[Batch], Any]
    run: Callable[[Any], Any]
    read: Callable[[int, Tensor], Tensor]  # (table, rows) -> the rows as stored, fp32
    grad: Tensor | None = None  # gradient of the output, for a step
    part: Callable[[Any, int, Shape], Tensor] = in_one
    cache: CacheView | None = None


def id_dtype(job: Workload) -> torch.dtype:
    return {"int32": torch.int32, "int64": torch.int64}[job.id_dtype]


def chunk_of(contender: Contender, job: Workload, kind: str, device: str) -> Chunk:
    """A function that times a contender, with its cache in the steady state."""
    stream = IdStream(job.shape, kind, 1, device, id_dtype(job))
    if not job.cache:
        return chunk_on(device, contender.run, [contender.prepare(stream.draw()) for _ in range(SETS)])
    for _ in range(contender.cache.settle if contender.cache else 0):
        contender.run(contender.prepare(stream.draw()))
    return fresh_chunk(device, contender.run, lambda: contender.prepare(stream.draw()))


def random_gradient(shape: Shape, device: str) -> Tensor:
    generator = torch.Generator(device=device)
    generator.manual_seed(7)
    return torch.randn(shape.out_shape, generator=generator, device=device)


def check_forward(contender: Contender, job: Workload, device: str) -> None:
    """Compare the first bags of the first and the last table with a plain sum in float64."""
    shape = job.shape
    batch = batches(shape, ZIPF, 1, 1, device, id_dtype(job))[0]
    out = contender.run(contender.prepare(batch))
    ids_TBP = batch.ids.long().view(shape.tables, shape.batch, shape.pooling)
    bags, errors = min(_BAGS, shape.batch), []
    for table in {0, shape.tables - 1}:
        rows_ND = contender.read(table, ids_TBP[table, :bags].reshape(-1)).double()
        if shape.pooled:
            rows_ND = rows_ND.view(bags, shape.pooling, shape.dim).sum(1)
        got_ND = contender.part(out, table, shape)[: rows_ND.shape[0]].double()
        errors.append(float((got_ND - rows_ND).norm() / rows_ND.norm().clamp_min(1e-30)))
    # Peers may dequantize in fp16 before they sum in fp32.
    strict = job.output == "fp32" and (contender.label == "ours" or job.precision == "fp32")
    limit = 1e-5 if strict else 2e-3
    for error in errors:
        if not error <= limit:  # NaN too
            raise WrongResult(
                f"{contender.label}: the first bags are off by {error:.2g}, at most {limit:g} is right", check="forward"
            )


def small(job: Workload) -> Workload:
    """The same workload on small tables."""
    shape = replace(job.shape, tables=2, rows=700, batch=64, pooling=5)
    return replace(job, shape=shape)


def check_step(build: Callable[[Workload, str], Contender], job: Workload, device: str) -> None:
    """Compare a step on small tables with float64: updated rows are near the exact result, other rows are unchanged."""
    job = small(job)
    contender, shape = build(job, device), job.shape
    tables, rows_R = range(shape.tables), torch.arange(shape.rows, device=device)
    state_TR1 = torch.zeros(shape.tables, shape.rows, 1, dtype=torch.float64, device=device)
    *earlier, last = batches(shape, UNIFORM, 1 if contender.cache is None else 4, 3, device, id_dtype(job))
    for batch in earlier:
        contender.run(contender.prepare(batch))
        state_TR1 += torch.stack([_summed(contender, batch, table, shape) for table in tables]).square().mean(2, keepdim=True)
    before = [(contender.read(table, rows_R).double(), _cached(contender, table, shape, device)) for table in tables]
    contender.run(contender.prepare(last))
    ids_TN = last.ids.long().view(shape.tables, -1)
    lived = 0
    for table, (before_RD, were_R) in enumerate(before):
        sum_RD = _summed(contender, last, table, shape)
        exact_RD = before_RD - _exact_change(sum_RD, state_TR1[table], job)
        after_RD, are_R = contender.read(table, rows_R).double(), _cached(contender, table, shape, device)
        touched_R = torch.zeros(shape.rows, dtype=torch.bool, device=device)
        touched_R[ids_TN[table]] = True
        lived += int((touched_R & were_R & are_R).sum())
        # An evicted row is rounded; if the step looked it up, its update rounds it again.
        roundings_R = (~are_R).double() + (were_R & ~are_R & touched_R)
        if not bool((after_RD == before_RD)[~touched_R & (were_R == are_R)].all()):
            raise WrongResult(f"{contender.label}: a step changed rows that were not looked up", check="untouched rows")
        error_RD = (after_RD - exact_RD).abs()
        if not bool((error_RD <= _allowed(exact_RD, roundings_R, contender, job)).all()):
            raise WrongResult(
                f"{contender.label}: after one step a row is {float(error_RD.max()):.2g} away from the float64 result",
                check="step",
            )
        # A code of int4 is larger than a step: rounding may hide the step of a row, but not the mean over all rows.
        change_RD = exact_RD - before_RD
        share = float(((after_RD - before_RD) * change_RD).sum() / (change_RD**2).sum())
        if not 0.8 <= share <= 1.2:
            raise WrongResult(
                f"{contender.label}: one step took the rows {share:.2g} of the way to the float64 result", check="mean step"
            )
    if contender.cache and not lived:
        raise WrongResult(f"{contender.label}: no row that the step looked up lives in the cache", check="cached rows")


def _summed(contender: Contender, batch: Batch, table: int, shape: Shape) -> Tensor:
    """The gradient of each row of a table, in float64."""
    assert contender.grad is not None
    grad_ND = in_one(contender.grad, table, shape).double()
    if shape.pooled:
        grad_ND = grad_ND.repeat_interleave(shape.pooling, 0)
    sum_RD = torch.zeros(shape.rows, shape.dim, dtype=torch.float64, device=grad_ND.device)
    return sum_RD.index_add_(0, batch.ids.long().view(shape.tables, -1)[table], grad_ND)


def _cached(contender: Contender, table: int, shape: Shape, device: str) -> Tensor:
    return torch.zeros(shape.rows, dtype=torch.bool, device=device) if contender.cache is None else contender.cache.holds(table)


def _exact_change(sum_RD: Tensor, state_R1: Tensor, job: Workload) -> Tensor:
    """The change of each row by a step; `state_R1` is Adagrad's state before it."""
    if job.optimizer == "sgd":
        return LEARNING_RATE * sum_RD
    return LEARNING_RATE * sum_RD / ((state_R1 + sum_RD.square().mean(1, keepdim=True)).sqrt() + EPS)


def _allowed(exact_RD: Tensor, roundings_R: Tensor, contender: Contender, job: Workload) -> Tensor:
    """Largest distance of a row from the exact one: fp32 rounding, and one code for each rounding of codes."""
    float_error_R1 = 1e-5 * exact_RD.abs().amax(1, keepdim=True).clamp_min(1.0)
    if contender.label != "ours" or job.precision == "fp32":
        return float_error_R1
    levels = {"int8": 254, "int4": 15}[job.precision]
    low_R1, high_R1 = exact_RD.amin(1, keepdim=True), exact_RD.amax(1, keepdim=True)
    if job.precision == "int8":  # codes are symmetric around zero
        high_R1 = torch.maximum(high_R1, -low_R1)
        low_R1 = -high_R1
    return float_error_R1 + 1.25 * (high_R1 - low_R1) / levels * roundings_R[:, None]
