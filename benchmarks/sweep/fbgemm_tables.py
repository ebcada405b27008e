"""FBGEMM's table-batched embeddings as contenders of the sweep, with bounds checks.

    fp32 lookup and step    the training object with row-wise Adagrad; on a GPU its experimental lookup too, where pooled
    int8, int4 lookup       the inference object

What FBGEMM cannot do is converted to the nearest that it can, untimed, and listed in `converted`: unpooled tables of mixed
width are one object for each width; training takes int64 ids; inference takes int32 ids on a GPU; on a CPU outputs are fp32
where it has no kernel for 16 bits. FBGEMM is imported at run time: it is no dependency of this package.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.contender import EPS, LEARNING_RATE
from benchmarks.kernels.fbgemm_contender import names
from benchmarks.sweep.contender import gradient
from benchmarks.sweep.family import MEAN, NONE, SweepWorkload
from benchmarks.sweep.ids import SweepBatch

_BITS = {"int8": 8, "int4": 4}


class _Group(NamedTuple):
    """Tables that one object of FBGEMM holds."""

    tables: list[int]
    module: Any
    weights: Any  # views of its rows, by table


class _GroupInput(NamedTuple):
    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


class FbgemmTables:
    """Tables of one precision: fp32 is the training object. `lookups`: ids of the largest batch that it trains on."""

    def __init__(self, workload: SweepWorkload, device: str, precision: str, lookups: int | None = None) -> None:
        self.workload, self.device, self.precision = workload, device, precision
        self.label, self.converted = f"fbgemm {precision}", []
        self.output = workload.output
        widths = sorted(set(workload.dims))
        members = [list(range(workload.tables))]
        if workload.mode == NONE and len(widths) > 1:
            members = [[table for table in members[0] if workload.dims[table] == width] for width in widths]
            self.converted.append("an object for each width: FBGEMM has no unpooled tables of mixed width")
        self._ids = self._id_dtype()
        try:
            self._groups = [self._build(tables) for tables in members]
            if device == "cpu" and self.output != "fp32":
                self._try_output(device)
        except Exception:
            if device != "cpu" or self.output == "fp32":
                raise
            self.converted.append(f"output fp32: FBGEMM has no {self.output} output here")
            self.output = "fp32"
            self._groups = [self._build(tables) for tables in members]
        self._group_of = {table: at for at, group in enumerate(self._groups) for table in group.tables}
        self.grad = None if lookups is None else gradient(workload, lookups, self.output, device)

    def _id_dtype(self) -> torch.dtype:
        drawn: torch.dtype = getattr(torch, self.workload.id_dtype)
        taken = torch.int64 if self.precision == "fp32" else drawn if self.device == "cpu" else torch.int32
        if taken != drawn:
            self.converted.append(f"ids {str(taken).removeprefix('torch.')}")
        return taken

    def _try_output(self, device: str) -> None:
        """Raise where the output type has no kernel."""
        for group in self._groups:
            nothing = torch.zeros(1, dtype=self._ids, device=device)
            offsets = torch.ones(len(group.tables) + 1, dtype=self._ids, device=device)
            offsets[0] = 0
            with torch.no_grad():
                self._call(group, _GroupInput(nothing, offsets, None))

    def _build(self, tables: list[int]) -> _Group:
        fb, on_cpu = names(), self.device == "cpu"
        pooling = {NONE: fb.PoolingMode.NONE, MEAN: fb.PoolingMode.MEAN}.get(self.workload.mode, fb.PoolingMode.SUM)
        shared = {
            "output_dtype": {"fp32": fb.SparseType.FP32, "fp16": fb.SparseType.FP16, "bf16": fb.SparseType.BF16}[self.output],
            "pooling_mode": pooling,
            "bounds_check_mode": fb.BoundsCheckMode.FATAL if on_cpu else fb.BoundsCheckMode.WARNING,
        }
        sizes = [(self.workload.rows[table], self.workload.dims[table]) for table in tables]
        location = fb.EmbeddingLocation.HOST if on_cpu else fb.EmbeddingLocation.DEVICE
        if self.precision == "fp32":
            place = (location, fb.ComputeDevice.CPU if on_cpu else fb.ComputeDevice.CUDA)
            module = fb.SplitTableBatchedEmbeddingBagsCodegen(
                [(*size, *place) for size in sizes],
                weights_precision=fb.SparseType.FP32,
                optimizer=fb.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                learning_rate=LEARNING_RATE,
                eps=EPS,
                stochastic_rounding=False,
                **shared,
            )
            module.init_embedding_weights_uniform(-1.0, 1.0)
            return _Group(tables, module, module.split_embedding_weights())
        kind = fb.SparseType.INT8 if self.precision == "int8" else fb.SparseType.INT4
        module = fb.IntNBitTableBatchedEmbeddingBagsCodegen(
            [(f"t{table}", *size, kind, location) for table, size in zip(tables, sizes, strict=True)],
            device=self.device,
            **shared,
        )
        module.initialize_weights()
        weights = module.split_embedding_weights_with_scale_bias(2)
        for codes_RB, scale_R1, bias_R1 in weights:
            codes_RB.random_(0, 256)
            scale_R1.uniform_(1e-3, 5e-3)
            bias_R1.uniform_(-0.5, 0.5)
        return _Group(tables, module, weights)

    def prepare(self, batch: SweepBatch) -> list[_GroupInput]:
        ids, offsets = batch.ids.to(self._ids), batch.offsets.to(self._ids)
        if len(self._groups) == 1:
            return [_GroupInput(ids, offsets, batch.weights)]
        ids_T, lengths_TB = ids.split(batch.counts), offsets.diff().view(self.workload.tables, -1)
        found = []
        for group in self._groups:
            lengths = lengths_TB[group.tables].reshape(-1)
            ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(self._ids)
            found.append(_GroupInput(torch.cat([ids_T[table] for table in group.tables]), ends, None))
        return found

    def _call(self, group: _Group, given: _GroupInput) -> Tensor:
        out: Tensor = group.module(given.ids, given.offsets, given.weights)
        return out

    def lookup(self, args: list[_GroupInput]) -> list[Tensor]:
        with torch.no_grad():
            return [self._call(group, given) for group, given in zip(self._groups, args, strict=True)]

    def experimental_lookup(self, args: list[_GroupInput]) -> list[Tensor]:
        """The lookup by FBGEMM's experimental kernels (training object on a GPU)."""
        for group in self._groups:
            group.module.is_experimental = True
        try:
            return self.lookup(args)
        finally:
            for group in self._groups:
                group.module.is_experimental = False

    def step(self, args: list[_GroupInput]) -> None:
        assert self.grad is not None
        first = 0
        for group, given in zip(self._groups, args, strict=True):
            out = self._call(group, given)
            grad = self.grad[first : first + out.shape[0]] if self.workload.mode == NONE else self.grad
            out.backward(grad[:, : out.shape[1]])
            first += out.shape[0] if self.workload.mode == NONE else 0

    def read(self, table: int, rows_N: Tensor) -> Tensor:
        group = self._groups[self._group_of[table]]
        stored = group.weights[group.tables.index(table)]
        if self.precision == "fp32":
            rows_ND: Tensor = stored.detach()[rows_N]
            return rows_ND.clone()
        codes_RB, scale_R1, bias_R1 = stored
        codes_ND = codes_RB[rows_N]
        if _BITS[self.precision] == 4:
            codes_ND = torch.stack([codes_ND & 15, codes_ND >> 4], 2).flatten(1)
        values_ND: Tensor = (
            codes_ND[:, : self.workload.dims[table]].float() * scale_R1[rows_N].float() + bias_R1[rows_N].float()
        )
        return values_ND

    def part(self, out: Any, batch: SweepBatch, table: int) -> Tensor:
        group, dims = self._groups[self._group_of[table]], self.workload.dims
        full: Tensor = out[self._group_of[table]]
        before = group.tables[: group.tables.index(table)]
        if self.workload.mode == NONE:
            first = sum(batch.counts[each] for each in before)
            return full[first : first + batch.counts[table], : dims[table]]
        first = sum(dims[each] for each in before)
        return full[:, first : first + dims[table]]
