"""torch's embedding bags as contenders.

CPU, quantized lookups: `torch.ops.quantized.embedding_bag_{byte,4bit}_rowwise_offsets`, one call for each table, raced with
separate outputs and with outputs joined by `torch.cat`. CPU, a step: `nn.EmbeddingBag(sparse=True)` for each table and
`torch.optim.SGD` over all. GPU: one `nn.EmbeddingBag` (or `nn.Embedding`) over all tables, with ids that are shifted untimed:
its best case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kernels.cases import Shape, Workload
from benchmarks.kernels.contender import LEARNING_RATE, Contender, check_forward, check_step, in_one, random_gradient
from benchmarks.kernels.ids import Batch


def _split(batch: Batch, shape: Shape) -> tuple[list[Tensor], Tensor]:
    """Ids of each table, and the offsets they all share."""
    return list(batch.ids.view(shape.tables, -1)), batch.offsets[: shape.batch + 1].contiguous()


def _of_table(out: Any, table: int, shape: Shape) -> Tensor:
    part: Tensor = out[table]
    return part


def _quantized(job: Workload) -> Contender:
    shape, bits = job.shape, {"int8": 8, "int4": 4}[job.precision]
    width = shape.dim * bits // 8
    kind = torch.float32 if bits == 8 else torch.float16
    op = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
    if bits == 4:
        op = torch.ops.quantized.embedding_bag_4bit_rowwise_offsets
    tables = []
    for _ in range(shape.tables):
        scale_bias_R2 = torch.empty(shape.rows, 2).uniform_(1e-3, 5e-3).to(kind)
        table_RB = torch.empty(shape.rows, width + 2 * kind.itemsize, dtype=torch.uint8).random_()
        table_RB[:, width:] = scale_bias_R2.view(torch.uint8)
        tables.append(table_RB)

    def run(args: tuple[list[Tensor], Tensor]) -> list[Tensor]:
        ids, offsets = args
        with torch.no_grad():
            return [op(w, i, offsets, include_last_offset=True) for w, i in zip(tables, ids, strict=True)]

    def read(table: int, rows: Tensor) -> Tensor:
        picked_NB = tables[table][rows]
        codes_ND, scale_bias_N2 = picked_NB[:, :width], picked_NB[:, width:].contiguous().view(kind).float()
        if bits == 4:
            codes_ND = torch.stack([codes_ND & 15, codes_ND >> 4], 2).flatten(1)
        return codes_ND.float() * scale_bias_N2[:, :1] + scale_bias_N2[:, 1:]

    return Contender("torch quantized", lambda batch: _split(batch, shape), run, read, part=_of_table)


def _with_cat(contender: Contender) -> Contender:
    """The same tables, with the outputs of all of them in one tensor."""
    return replace(
        contender, label=f"{contender.label}, joined", run=lambda args: torch.cat(contender.run(args), 1), part=in_one
    )


def _sparse_bags(job: Workload, device: str) -> Contender:
    shape = job.shape
    modules = [
        nn.EmbeddingBag(shape.rows, shape.dim, mode="sum", sparse=True, include_last_offset=True, device=device)
        for _ in range(shape.tables)
    ]
    optimizer = torch.optim.SGD([module.weight for module in modules], lr=LEARNING_RATE)
    grad = random_gradient(shape, device)
    grads = [grad[:, t * shape.dim : (t + 1) * shape.dim].contiguous() for t in range(shape.tables)]

    def run(args: tuple[list[Tensor], Tensor]) -> None:
        ids, offsets = args
        optimizer.zero_grad(set_to_none=True)
        outs = [module(i, offsets) for module, i in zip(modules, ids, strict=True)]
        torch.autograd.backward(outs, grads)
        optimizer.step()

    def read(table: int, rows: Tensor) -> Tensor:
        return modules[table].weight.detach()[rows]

    return Contender("nn.EmbeddingBag(sparse) + SGD", lambda batch: _split(batch, shape), run, read, grad)


def _joined(job: Workload, device: str) -> Contender:
    shape = job.shape
    weight_RD = torch.empty(shape.tables * shape.rows, shape.dim, device=device).uniform_(-1, 1)
    if shape.pooled:
        module: nn.Module = nn.EmbeddingBag.from_pretrained(weight_RD, mode="sum", include_last_offset=True)
    else:
        module = nn.Embedding.from_pretrained(weight_RD)

    def prepare(batch: Batch) -> tuple[Tensor, ...]:
        first_T1 = torch.arange(shape.tables, device=device).view(-1, 1) * shape.rows
        ids = (batch.ids.view(shape.tables, -1) + first_T1).view(-1)
        return (ids, batch.offsets) if shape.pooled else (ids,)

    def run(args: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            out: Tensor = module(*args)
        return out

    def read(table: int, rows: Tensor) -> Tensor:
        return weight_RD[rows + table * shape.rows]

    def part(out: Any, table: int, shape: Shape) -> Tensor:
        of_table: Tensor = out.view(shape.tables, -1, shape.dim)[table]
        return of_table

    return Contender("nn.EmbeddingBag" if shape.pooled else "nn.Embedding", prepare, run, read, part=part)


def build(job: Workload, device: str) -> Contender:
    if job.optimizer == "sgd":
        return _sparse_bags(job, device)
    assert job.optimizer is None, job.optimizer
    return _joined(job, device) if job.precision == "fp32" else _quantized(job)


def contenders(job: Workload, device: str) -> list[Contender]:
    """torch's contenders, checked."""
    if job.optimizer is not None:
        check_step(build, job, device)
    found = [build(job, device)]
    if job.optimizer is None:
        if job.precision != "fp32":
            found.append(_with_cat(found[0]))
        for contender in found:
            check_forward(contender, job, device)
    return found


def versions() -> dict[str, Any]:
    return {"torch": torch.__version__}
