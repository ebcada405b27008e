"""This package as a contender of the sweep: the public module, with the input that a user gives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import thermocline
from benchmarks.kernels.contender import EPS, LEARNING_RATE
from benchmarks.sweep.contender import OUTPUTS, gradient
from benchmarks.sweep.family import MEAN, NONE, SweepWorkload
from benchmarks.sweep.ids import SweepBatch


class KeyedBatch:
    """A batch with the methods of TorchRec's KeyedJaggedTensor that a collection uses."""

    def __init__(self, batch: SweepBatch, keys: list[str]) -> None:
        self._batch, self._keys = batch, keys

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._batch.ids

    def offsets(self) -> Tensor:
        return self._batch.offsets

    def weights_or_none(self) -> Tensor | None:
        return self._batch.weights


class CollectionTables:
    """An `EmbeddingCollection`. `lookups`: ids of the largest batch that it trains on."""

    def __init__(
        self, workload: SweepWorkload, device: str, precision: str, cache: float = 0.0, lookups: int | None = None
    ) -> None:
        torch.manual_seed(5)  # initial rows
        self.workload, self.output = workload, workload.output
        self.converted: list[str] = []
        self.label = f"ours {precision}" + (f"+{cache:.0%}" if cache else "")
        self._keys = [f"t{index}" for index in range(workload.tables)]
        sizes = zip(self._keys, workload.rows, workload.dims, strict=True)
        optimizer = thermocline.RowwiseAdagrad(lr=LEARNING_RATE, eps=EPS)
        self.collection = thermocline.EmbeddingCollection(
            [thermocline.Table(name, rows, dim) for name, rows, dim in sizes],
            mode=workload.mode if workload.mode in (MEAN, NONE) else "sum",
            rows=thermocline.RowConfig(precision, cache=cache or None, optimizer=optimizer),
            device=device,
            dtype=OUTPUTS[workload.output],
        )
        self.grad = None if lookups is None else gradient(workload, lookups, workload.output, device)

    def prepare(self, batch: SweepBatch) -> KeyedBatch:
        return KeyedBatch(batch, self._keys)

    def lookup(self, args: KeyedBatch) -> Tensor:
        with torch.no_grad():
            return self.collection(args).values()  # type: ignore[no-any-return]

    def step(self, args: KeyedBatch) -> None:
        assert self.grad is not None
        out = self.collection(args).values()
        out.backward(self.grad[: out.shape[0]])

    def read(self, table: int, rows_N: Tensor) -> Tensor:
        return self.collection.get_rows(self._keys[table], rows_N)

    def part(self, out: Any, batch: SweepBatch, table: int) -> Tensor:
        dims, full = self.workload.dims, out
        if self.workload.mode == NONE:
            first = sum(batch.counts[:table])
            unpooled: Tensor = full[first : first + batch.counts[table], : dims[table]]
            return unpooled
        first = sum(dims[:table])
        pooled: Tensor = full[:, first : first + dims[table]]
        return pooled
