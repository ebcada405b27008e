"""Tables of one contender for a workload, and the checks that they must pass before they are timed.

`check_lookup` compares bags of up to 32 tables with `nn.EmbeddingBag` in float64 over the rows as the contender stores them.
`check_step` trains a small workload of the same kind for a few steps and compares the last one with float64. Both raise
`WrongResult`: wrong tables are not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.kernels.contender import EPS, LEARNING_RATE, WrongResult
from benchmarks.sweep.family import MEAN, NONE, SweepWorkload
from benchmarks.sweep.ids import BatchStream, SweepBatch
from benchmarks.sweep.limits import output_elements

OUTPUTS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Relative to the sum of absolute values; the output is rounded once, and peers may dequantize in fp16.
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1.6e-2}
PEER_QUANTIZED = 4e-3
_TABLES, _FIRST, _LAST = 32, 64, 8  # tables, first and last bags that are compared
_STEPS = 4
_ADD = 2.0**-24  # relative error of one fp32 addition: a row that repeats is rounded the same way each time


class SweepTables(Protocol):
    """Tables that were built for a workload. `prepare` makes the input of `lookup` and `step`, untimed."""

    label: str
    output: str
    converted: list[str]  # what was changed because the contender cannot do it as drawn
    grad: Tensor | None  # gradient of the output of a step, as `gradient` makes it

    def prepare(self, batch: SweepBatch) -> Any: ...
    def lookup(self, args: Any) -> Any: ...
    def step(self, args: Any) -> None: ...
    def read(self, table: int, rows_N: Tensor) -> Tensor: ...
    def part(self, out: Any, batch: SweepBatch, table: int) -> Tensor: ...


def gradient(workload: SweepWorkload, lookups: int, output: str, device: str) -> Tensor:
    """A gradient of the output: [batch, all columns], or [most lookups, widest table] unpooled."""
    columns = max(workload.dims) if workload.mode == NONE else sum(workload.dims)
    generator = torch.Generator(device=device).manual_seed(7)
    grad = torch.randn(output_elements(workload, lookups), generator=generator, device=device)
    return grad.view(-1, columns).to(OUTPUTS[output])


def check_lookup(tables: SweepTables, workload: SweepWorkload, device: str, tolerance: float | None = None) -> None:
    """Compare bags of a lookup with torch."""
    batch = BatchStream(workload, device, seed=3).draw()
    out = tables.lookup(tables.prepare(batch))
    offsets = batch.offsets.tolist()
    limit = max(TOLERANCE[tables.output], tolerance or 0.0)
    for table in _spread_out(workload):
        part = tables.part(out, batch, table)
        bags = range(table * workload.batch, (table + 1) * workload.batch)
        for some in {bags[:_FIRST], bags[-_LAST:]}:
            bounds = offsets[some.start : some.stop + 1]
            wanted_BD, scale_BD = _pooled(tables, workload, batch, table, bounds)
            if workload.mode != NONE:
                scale_BD = scale_BD * (1 + torch.tensor(bounds, device=device).diff()[:, None] * (_ADD / limit))
            base = offsets[bags.start] if workload.mode == NONE else bags.start
            first = (offsets[some.start] if workload.mode == NONE else some.start) - base
            got_BD = part[first : first + wanted_BD.shape[0]].double()
            off = (got_BD - wanted_BD).abs() - limit * scale_BD
            if got_BD.shape != wanted_BD.shape or not bool((off <= 2e-7).all()):  # NaN too
                error = float(off.max()) if got_BD.shape == wanted_BD.shape else float("nan")
                raise WrongResult(f"{tables.label}: table {table} is {error:.2g} further off than is right", check="lookup")


def _spread_out(workload: SweepWorkload) -> list[int]:
    """Tables to compare: evenly spread, with the narrowest and the widest."""
    dims, count = workload.dims, workload.tables
    spread = [index * count // _TABLES for index in range(_TABLES)] if count > _TABLES else list(range(count))
    return sorted({*spread, count - 1, dims.index(min(dims)), dims.index(max(dims))})


def _pooled(
    tables: SweepTables, workload: SweepWorkload, batch: SweepBatch, table: int, bounds: list[int]
) -> tuple[Tensor, Tensor]:
    """Bags between these offsets in float64, and the sums of their absolute values."""
    first, last = bounds[0], bounds[-1]
    rows_ND = tables.read(table, batch.ids[first:last].long()).double()
    if workload.mode == NONE:
        return rows_ND, rows_ND.abs()
    offsets = torch.tensor(bounds[:-1], device=rows_ND.device) - first
    weights = None if batch.weights is None else batch.weights[first:last].double()
    found = []
    for values_ND, by in ((rows_ND, weights), (rows_ND.abs(), None if weights is None else weights.abs())):
        if not values_ND.shape[0]:
            found.append(rows_ND.new_zeros(len(bounds) - 1, workload.dims[table]))
            continue
        bag = nn.EmbeddingBag.from_pretrained(values_ND, mode=MEAN if workload.mode == MEAN else "sum")
        found.append(bag(torch.arange(values_ND.shape[0], device=values_ND.device), offsets, by))
    return found[0], found[1]


# -- steps --


def small(workload: SweepWorkload) -> SweepWorkload:
    """A workload of the same kind on small tables, one of each width: kernels are compiled for a set of widths."""
    dims = workload.dims
    kept = sorted({workload.tables - 1, *(dims.index(width) for width in dims)})
    return replace(
        workload,
        rows=tuple(min(300, workload.rows[table]) for table in kept),
        dims=tuple(dims[table] for table in kept),
        batch=min(24, workload.batch),
        mean_length=min(6.0, workload.mean_length),
        most_lookups=1000,
    )


def check_step(
    build: Callable[[SweepWorkload], SweepTables], workload: SweepWorkload, device: str, rounding_levels: int | None = None
) -> None:
    """Compare the last of a few steps with float64. `rounding_levels`: codes between the ends of a stored row."""
    workload = small(workload)
    tables, stream = build(workload), BatchStream(workload, device, seed=4)
    every = [torch.arange(rows, device=device) for rows in workload.rows]
    states = [torch.zeros(rows, 1, dtype=torch.float64, device=device) for rows in workload.rows]
    for step in range(_STEPS):
        batch = stream.draw()
        before = [tables.read(table, rows_R).double() for table, rows_R in enumerate(every)]
        tables.step(tables.prepare(batch))
        for table, rows_R in enumerate(every):
            sum_RD = _row_gradients(tables, workload, batch, table)
            states[table] += sum_RD.square().mean(1, keepdim=True)
            change_RD = -LEARNING_RATE * sum_RD / (states[table].sqrt() + EPS)
            if step == _STEPS - 1:
                after_RD = tables.read(table, rows_R).double()
                _compare_step(tables.label, before[table], change_RD, after_RD, rounding_levels)


def _row_gradients(tables: SweepTables, workload: SweepWorkload, batch: SweepBatch, table: int) -> Tensor:
    """The gradient of each row of a table, in float64."""
    assert tables.grad is not None
    ids_N, weights_N, offsets = _of_table(workload, batch, table)
    dim, grad = workload.dims[table], tables.grad
    if workload.mode == NONE:
        grad_ND = grad[sum(batch.counts[:table]) :][: ids_N.numel(), :dim].double()
    else:
        column, lengths_B = sum(workload.dims[:table]), offsets.diff()
        grad_BD = grad[:, column : column + dim].double()
        if workload.mode == MEAN:
            grad_BD = grad_BD / lengths_B.clamp(min=1)[:, None]
        grad_ND = grad_BD.repeat_interleave(lengths_B, 0)
    if weights_N is not None:
        grad_ND = grad_ND * weights_N.double()[:, None]
    return grad_ND.new_zeros(workload.rows[table], dim).index_add_(0, ids_N, grad_ND)


def _of_table(workload: SweepWorkload, batch: SweepBatch, table: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Ids, weights and offsets of one table."""
    first = sum(batch.counts[:table])
    here = slice(first, first + batch.counts[table])
    offsets = batch.offsets[table * workload.batch : (table + 1) * workload.batch + 1].long()
    return batch.ids[here].long(), None if batch.weights is None else batch.weights[here], offsets


def _compare_step(label: str, before_RD: Tensor, change_RD: Tensor, after_RD: Tensor, levels: int | None) -> None:
    """Rows are near the exact result, and the mean step is right: rounding may hide the step of one row."""
    exact_RD = before_RD + change_RD
    allowed_R1 = 2e-5 * exact_RD.abs().amax(1, keepdim=True).clamp_min(1.0)
    if levels is not None:  # an evicted row is rounded, and once more if the step looked it up
        both_RD = torch.maximum(exact_RD.abs(), before_RD.abs())
        allowed_R1 = allowed_R1 + 2 * 1.25 * 2 * both_RD.amax(1, keepdim=True) / levels
    error_RD = (after_RD - exact_RD).abs()
    if not bool((error_RD <= allowed_R1).all()):
        raise WrongResult(f"{label}: after a step a row is {float(error_RD.max()):.2g} away from float64", check="step")
    length = float(change_RD.square().sum())
    share = float(((after_RD - before_RD) * change_RD).sum()) / length if length else 1.0
    if not 0.8 <= share <= 1.2:
        raise WrongResult(f"{label}: a step took the rows {share:.2g} of the way to the float64 result", check="mean step")
