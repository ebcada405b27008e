"""Elastic ids against ids that are hashed to the same table: training steps and lookups, and the key table alone.

One table has the rows of all tables of a shape. It is full, and 1% of the lookups of each batch are ids that no batch before it
had. In `flood` these ids are chosen to collide: all of them fall into one bucket. `find-or-insert` looks up known ids in
training, without rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import thermocline as tc
from benchmarks.kernels.cases import CPU_SHAPES, GPU_SHAPES, Shape
from benchmarks.kernels.ids import ZipfSampler
from benchmarks.runner.record import Recorder
from benchmarks.runner.timing import fresh_chunk, interleave
from thermocline import IdMap, RowConfig
from thermocline.ids.elastic import KeyTable
from thermocline.ids.gpu_keys import look_up
from thermocline.ids.idmap import SaltedHash
from thermocline.ids.keyed_map import new_keys
from thermocline.kernels.elastic.fields import STEP, GpuBatch
from thermocline.kernels.ids.fields import GOLDEN, MIX1, MIX2
from thermocline.kernels.ids.reference import right, signed

NEW = 0.01  # of the lookups
FILL = 1 << 20  # ids at a time
KEYS = 1 << 20  # of a batch of find-or-insert
ROUNDS, ITERATIONS = 5, 16


def run(device: str, quick: bool, progress: Callable[[int, int, str], None]) -> dict[str, Any]:
    """Measure all shapes of a device."""
    recorder = Recorder("elastic", lambda line: None, judged=not quick)
    shapes = GPU_SHAPES if device == "cuda" else CPU_SHAPES[:1]
    for done, shape in enumerate(shapes):
        progress(done, len(shapes) + 1, shape.name)
        _race(recorder, shape.quick() if quick else shape, device)
    progress(len(shapes), len(shapes) + 1, "find-or-insert")
    for load, goal in ((0.5, 1000.0), (1.0, 600.0)):
        _race_keys(recorder, device, (1 << 16 if quick else 10_000_000) + 16, KEYS >> 6 if quick else KEYS, load, goal)
    return recorder.record


def _race_keys(recorder: Recorder, device: str, rows: int, count: int, load: float, goal: float) -> None:
    keys, generator = _keys(rows, load, device), torch.Generator(device).manual_seed(1)
    known = keys.keys[keys.occupied()]

    def draw() -> Tensor:
        return known[torch.randint(0, len(known), (count,), generator=generator, device=device)]

    times = interleave({"ours": fresh_chunk(device, lambda ids: _step(keys, ids), draw)}, ROUNDS, {"ours": ITERATIONS})["ours"]
    speed = count / 1e3 / times.median
    ratio = speed / goal if device == "cuda" else None
    peer, value = ("published", goal) if device == "cuda" else (None, None)
    recorder.add(f"{device}/find-or-insert/load {load}", speed, "M keys/s", peer, value, ratio, times.spread)


def _race(recorder: Recorder, shape: Shape, device: str) -> None:
    rows = shape.tables * shape.rows
    modules = {
        name: _module(shape, ids, device) for name, ids in (("elastic", IdMap.elastic(rows)), ("hashed", IdMap.hashed(rows)))
    }
    stream = _Stream(shape, device)
    for ids in stream.all_known().split(FILL):
        modules["elastic"](ids[: len(ids) // shape.pooling * shape.pooling].view(-1, shape.pooling))
    grad = torch.randn_like(modules["hashed"](stream.draw())) * 1e-3

    def train(name: str) -> Callable[[Tensor], None]:
        return lambda ids: modules[name].train()(ids).backward(grad)

    def look_up(name: str) -> Callable[[Tensor], object]:
        return torch.no_grad()(lambda ids: modules[name].eval()(ids))

    for what, work in (("step", train), ("lookup", look_up)):
        runs = {name: fresh_chunk(device, work(name), stream.draw) for name in modules}
        _add(recorder, f"{device}/{shape.name}/{what}", "hashed ids", runs)
    runs = {
        "flood": fresh_chunk(device, train("elastic"), stream.flood),
        "new": fresh_chunk(device, train("elastic"), stream.draw),
    }
    _add(recorder, f"{device}/{shape.name}/flood", "other new ids", runs)


def _module(shape: Shape, ids: IdMap, device: str) -> tc.EmbeddingBag | tc.Embedding:
    rows, config = shape.tables * shape.rows, RowConfig("int8", cache=0.05)
    if shape.pooled:
        return tc.EmbeddingBag(rows, shape.dim, mode="sum", rows=config, ids=ids, device=device)
    return tc.Embedding(rows, shape.dim, rows=config, ids=ids, device=device)


def _add(recorder: Recorder, case: str, peer: str, runs: dict[str, Any]) -> None:
    """Race the first of two contenders against the second."""
    ours, other = interleave(runs, ROUNDS, dict.fromkeys(runs, ITERATIONS)).values()
    recorder.add(case, ours.median, "ms", peer, other.median, other.median / ours.median, ours.spread)


def _keys(rows: int, load: float, device: str) -> KeyTable:
    """A key table of this load."""
    keys = new_keys(IdMap.elastic(rows).start)  # type: ignore[arg-type]
    count = int(load * rows * (1.3 if load == 1.0 else 1.0))  # buckets fill unevenly
    for ids_N in (torch.arange(count) * 7919).split(FILL):
        keys.step(ids_N, protect=False)
    for name, tensor in keys.tensors().items():
        setattr(keys, name, tensor.to(device))
    return keys


def _step(keys: KeyTable, ids_N: Tensor) -> None:
    if not keys.on_gpu:
        keys.step(ids_N, protect=False)
        return
    one = torch.zeros(2, dtype=torch.int32, device=ids_N.device)
    look_up(keys, GpuBatch(ids_N, one, one[:1], torch.empty_like(ids_N)), STEP)


class _Stream:
    """Batches of Zipf ids of which some are new."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device, self.born = shape, device, shape.tables * shape.rows
        self.generator = torch.Generator(device).manual_seed(1)
        self.sampler = ZipfSampler(self.born, self.generator, device)

    def all_known(self) -> Tensor:
        return torch.arange(self.born, device=self.device) * 7919

    def draw(self) -> Tensor:
        """The next batch."""
        fresh_K = torch.arange(self.born, self.born + int(NEW * self.shape.lookups), device=self.device)
        return self._batch(fresh_K * 7919)

    def flood(self) -> Tensor:
        """The next batch, whose new ids fall into the first bucket."""
        hashes_K = torch.arange(self.born, self.born + int(NEW * self.shape.lookups), device=self.device)
        return self._batch(_ids_of(hashes_K))

    def _batch(self, fresh_K: Tensor) -> Tensor:
        count = self.shape.lookups
        ids_N = self.sampler.rows_of_rank[self.sampler.draw(count, self.generator)] * 7919
        ids_N[torch.randperm(count, generator=self.generator, device=self.device)[: len(fresh_K)]] = fresh_K
        self.born += len(fresh_K)
        return ids_N.view(-1, self.shape.pooling)


def _ids_of(hashes_K: Tensor) -> Tensor:
    """Ids with these hashes, by the default salt: the inverse of `hash_ids`."""
    key, z = SaltedHash(1).key, hashes_K
    for shift, factor in ((31, MIX2), (27, MIX1), (30, GOLDEN)):
        found = z
        for _ in range(64 // shift + 1):
            found = z ^ right(found, shift)
        z = found * signed(pow(factor, -1, 1 << 64))
    return z ^ signed(key)
