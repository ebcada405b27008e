"""FBGEMM's table-batched embeddings as contenders, with bounds checks.

    workload                object
    fp32 forward            the training object; on a GPU also its experimental kernels where they apply (pooled)
    int8, int4 forward      the inference object with the same output type
    a step, any precision   the training object in fp32: FBGEMM does not train integer rows

On a CPU the inference object also holds fp32 rows; it measured within 2% of the training object on large bags and 10% slower on
single ids, so it is not raced. FBGEMM is imported at run time: it is no dependency of this package.
"""

from __future__ import annotations

import logging
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.cases import FORWARD, Workload
from benchmarks.kernels.contender import EPS, LEARNING_RATE, Contender, check_forward, check_step, random_gradient
from benchmarks.kernels.ids import Batch

_BITS = {"int8": 8, "int4": 4}


def names() -> SimpleNamespace:
    """The classes of FBGEMM that are used here."""
    logging.getLogger().setLevel(logging.ERROR)  # FBGEMM logs the arguments of every object
    import_module("fbgemm_gpu")
    found: dict[str, Any] = {}
    for module in ("common", "training", "inference"):
        found |= vars(import_module(f"fbgemm_gpu.split_table_batched_embeddings_ops_{module}"))
    found |= vars(import_module("fbgemm_gpu.split_embedding_configs"))
    return SimpleNamespace(**found)


def shared_arguments(fb: SimpleNamespace, job: Workload, device: str) -> dict[str, Any]:
    return {
        "output_dtype": {"fp32": fb.SparseType.FP32, "fp16": fb.SparseType.FP16}[job.output],
        "pooling_mode": fb.PoolingMode.SUM if job.shape.pooled else fb.PoolingMode.NONE,
        "bounds_check_mode": fb.BoundsCheckMode.FATAL if device == "cpu" else fb.BoundsCheckMode.WARNING,
    }


def _training(job: Workload, device: str, experimental: bool = False) -> Contender:
    fb, shape = names(), job.shape
    place = (fb.EmbeddingLocation.DEVICE, fb.ComputeDevice.CUDA)
    if device == "cpu":
        place = (fb.EmbeddingLocation.HOST, fb.ComputeDevice.CPU)
    optimizer = fb.EmbOptimType.EXACT_SGD if job.optimizer == "sgd" else fb.EmbOptimType.EXACT_ROWWISE_ADAGRAD
    options = {"use_experimental_tbe": True} if experimental else {}
    module = fb.SplitTableBatchedEmbeddingBagsCodegen(
        [(shape.rows, shape.dim, *place)] * shape.tables,
        weights_precision=fb.SparseType.FP32,
        optimizer=optimizer,
        learning_rate=LEARNING_RATE,
        eps=EPS,
        stochastic_rounding=False,
        **options,
        **shared_arguments(fb, job, device),
    )
    module.init_embedding_weights_uniform(-1.0, 1.0)
    label = "fbgemm fp32 experimental" if experimental else "fbgemm fp32"

    def read(table: int, rows: Tensor) -> Tensor:
        rows_ND: Tensor = module.split_embedding_weights()[table].detach()[rows]
        return rows_ND.clone()

    if job.optimizer is None:

        def forward(args: Batch) -> Tensor:
            with torch.no_grad():
                out: Tensor = module(args.ids, args.offsets)
            return out

        return Contender(label, lambda batch: batch, forward, read)
    grad = random_gradient(shape, device)

    def step(args: Batch) -> None:
        module(args.ids, args.offsets).backward(grad)

    return Contender(f"{label} step", lambda batch: batch, step, read, grad)


def _inference(job: Workload, device: str) -> Contender:
    fb, shape, bits = names(), job.shape, _BITS[job.precision]
    place = fb.EmbeddingLocation.HOST if device == "cpu" else fb.EmbeddingLocation.DEVICE
    kind = fb.SparseType.INT8 if bits == 8 else fb.SparseType.INT4
    module = fb.IntNBitTableBatchedEmbeddingBagsCodegen(
        [(f"t{i}", shape.rows, shape.dim, kind, place) for i in range(shape.tables)],
        device=device,
        **shared_arguments(fb, job, device),
    )
    module.initialize_weights()
    tables = module.split_embedding_weights_with_scale_bias(2)
    for codes_RB, scale_R1, bias_R1 in tables:
        codes_RB.random_(0, 256)
        scale_R1.uniform_(1e-3, 5e-3)
        bias_R1.uniform_(-0.5, 0.5)

    def run(args: Batch) -> Tensor:
        with torch.no_grad():
            out: Tensor = module(args.ids, args.offsets)
        return out

    def read(table: int, rows: Tensor) -> Tensor:
        codes_RB, scale_R1, bias_R1 = tables[table]
        codes_ND = codes_RB[rows]
        if bits == 4:
            codes_ND = torch.stack([codes_ND & 15, codes_ND >> 4], 2).flatten(1)
        values_ND: Tensor = codes_ND.float() * scale_R1[rows].float() + bias_R1[rows].float()
        return values_ND

    return Contender(f"fbgemm {job.precision}", lambda batch: batch, run, read)


def contenders(job: Workload, device: str) -> list[Contender]:
    """FBGEMM's contenders, checked."""
    if job.optimizer is not None:
        check_step(_training, job, device)
        return [_training(job, device)]
    if job.precision in _BITS:
        found = [_inference(job, device)]
    else:
        found = [_training(job, device)]
        if device != "cpu" and job.operation == FORWARD and job.shape.pooled:
            found.append(_training(job, device, experimental=True))
    for contender in found:
        check_forward(contender, job, device)
    return found


def versions() -> dict[str, Any]:
    import fbgemm_gpu  # type: ignore[import-not-found, unused-ignore]

    return {"fbgemm": str(fbgemm_gpu.__version__), "fbgemm's torch": torch.__version__}
