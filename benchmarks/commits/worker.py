"""One checkout's side of a race between commits: a process that builds tables and times them on request.

The process imports `thermocline` from the checkout's `src` and the harness from the new checkout. Tables are made by public
names, with the old or the new signature: `EmbeddingCollection(..., precision=, cache=)` or `(..., rows=RowConfig(...))`.
Requests and answers are those of `benchmarks.kernels.worker`.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import thermocline
from benchmarks.commits.cases import HOST_STEP, LOOKUP, SERVED, Case
from benchmarks.kernels.cases import Shape
from benchmarks.kernels.ids import Batch, IdStream, batches
from benchmarks.kernels.worker import serve
from benchmarks.runner.lookahead import STRETCH, stretch
from benchmarks.runner.timing import SETS, Chunk, chunk_on, fresh_chunk

SHARDS = 4  # of a served lookup


class FeatureBatch:
    """A batch as `EmbeddingCollection` takes it without joining tensors."""

    def __init__(self, batch: Batch, tables: int) -> None:
        self._batch, self._keys = batch, [f"t{i}" for i in range(tables)]

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._batch.ids

    def offsets(self) -> Tensor:
        return self._batch.offsets


def make_tables(case: Case) -> Any:
    """The collection of a case, by the signature that this checkout has."""
    shape = case.shape
    torch.manual_seed(5)  # initial rows
    settings: dict[str, Any] = {
        "precision": case.precision,
        "cache": case.cache or None,
        "optimizer": thermocline.RowwiseAdagrad(lr=0.05),
        "residency": "host" if case.operation == HOST_STEP else "device",
    }
    if hasattr(thermocline, "RowConfig"):
        settings = {"rows": thermocline.RowConfig(**settings)}
    tables = [thermocline.Table(f"t{i}", shape.rows, shape.dim) for i in range(shape.tables)]
    mode = "sum" if shape.pooled else "none"
    return thermocline.EmbeddingCollection(tables, mode=mode, device=case.device, **settings)


class ServedTables:
    """Tables over shards on one device, as the serve benchmark of each checkout makes them. The old one is in the package."""

    def __init__(self, case: Case) -> None:
        try:
            self._parity = import_module("thermocline.bench.serve_parity")
            shape_type = import_module("thermocline.bench.cases").Shape
        except ImportError:
            self._parity, shape_type = import_module("benchmarks.serve.parity"), Shape
        self._shape = shape_type(**asdict(case.shape))
        made = self._parity._field(self._shape, case.precision, [case.ids], case.device)
        self.calls = made.calls[case.ids]
        self._version = self._parity._placed(made.arena, self._shape, case.precision, SHARDS, case.device, None)

    def __call__(self, call: Any) -> Tensor:
        out: Tensor = self._parity._look_up(self._version, self._shape, call)
        return out


class CommitServer:
    """The tables of this checkout, one case at a time."""

    def __init__(self) -> None:
        self._tables: Any = None
        self._stored: tuple[object, ...] = ()
        self._chunk: Chunk | None = None

    def hello(self) -> dict[str, Any]:
        return {"source": str(thermocline.__file__), "torch": torch.__version__}

    def build(self, case: dict[str, Any]) -> dict[str, Any]:
        """Make a case ready to be timed. Returns a digest of its output, to compare between checkouts."""
        wanted = Case.from_json(case)
        if wanted.stored != self._stored:
            self.drop()
            self._tables = ServedTables(wanted) if wanted.operation == SERVED else make_tables(wanted)
            self._stored = wanted.stored
        self._chunk = _chunk(self._tables, wanted)
        self._chunk(4)
        return {"digest": _digest(self._tables, wanted)}

    def run(self, iterations: int) -> dict[str, Any]:
        assert self._chunk is not None
        return {"ms": self._chunk(iterations)}

    def drop(self) -> dict[str, Any]:
        self._tables, self._chunk, self._stored = None, None, ()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {}


def _chunk(tables: Any, case: Case) -> Chunk:
    """Times a case; a cache is in its steady state afterwards."""
    shape, device = case.shape, case.device
    stream = IdStream(shape, case.ids, 1, device, torch.int64)
    if case.operation == SERVED:
        return chunk_on(device, tables, tables.calls)

    def draw() -> FeatureBatch:
        return FeatureBatch(stream.draw(), shape.tables)

    if case.operation == LOOKUP:
        return chunk_on(device, _lookup(tables), [draw() for _ in range(SETS)])
    grad = torch.randn(shape.out_shape, generator=torch.Generator(device).manual_seed(7), device=device)

    def step(batch: FeatureBatch, _: object = None) -> None:
        tables(batch).values().backward(grad)

    if case.operation == HOST_STEP:
        return _host_chunk(tables, case, step, draw)
    for _ in range(case.settle):
        step(draw())
    return fresh_chunk(device, step, draw)


def _host_chunk(tables: Any, case: Case, step: Callable[..., None], draw: Callable[[], FeatureBatch]) -> Chunk:
    """Steps of tables in host memory whose rows are prefetched, a stretch of steps at a time."""

    def prefetched(batches: Any) -> Any:
        """The batches; the newer checkout yields each with its prefetched rows."""
        return (each[0] if isinstance(each, tuple) else each for each in tables.prefetched(batches))

    def chunk(iterations: int) -> list[float]:
        return stretch(step, draw, case.device, max(iterations, STRETCH), prefetched)

    for _ in range(-(-case.settle // STRETCH)):
        chunk(STRETCH)
    return chunk


def _lookup(tables: Any) -> Callable[[FeatureBatch], Tensor]:
    def look_up(batch: FeatureBatch) -> Tensor:
        with torch.no_grad():
            out: Tensor = tables(batch).values()
        return out

    return look_up


def _digest(tables: Any, case: Case) -> str:
    """SHA-256 of the output of a fixed batch."""
    batch = batches(case.shape, case.ids, 1, 99, case.device)[0]
    if case.operation == SERVED:
        out: Tensor = tables(tables.calls[0])
    else:
        out = _lookup(tables)(FeatureBatch(batch, case.shape.tables))
    return hashlib.sha256(out.cpu().numpy().tobytes()).hexdigest()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what a library prints to standard output goes to standard error
    os.dup2(2, 1)
    serve(CommitServer(), sys.stdin, answers)


if __name__ == "__main__":
    main()
