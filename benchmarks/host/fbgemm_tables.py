"""FBGEMM's tables in host memory as contenders of the host benchmark: fp32 rows, an LRU or LFU cache on the GPU.

The cache is the smallest one that takes at least as many GPU bytes as ours. FBGEMM keeps there, in bytes:

    per slot    the row in fp32; its id (8); LRU: time of use (8); pipelined: a lock (4)
    per row     its table (4); row-wise Adagrad (4); LFU: number of uses (8)

Temporary memory of a step counts for no contender. `fill` counts what the finished object holds. The host store is registered
host memory (`uvm_host_mapped`), allocated once for all objects of a process: registering 2 GB takes a second. "pipelined"
fetches the next batch's rows on another stream during this step; FBGEMM has it for LRU.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import fbgemm_contender as peer_fbgemm
from benchmarks.kernels.cases import ZIPF, Shape, Workload
from benchmarks.kernels.contender import EPS, LEARNING_RATE, Contender, check_step, random_gradient
from benchmarks.kernels.fbgemm_contender import names, shared_arguments
from benchmarks.kernels.ids import Batch, IdStream
from benchmarks.runner.isolated_process import Measurement, tried
from benchmarks.runner.lookahead import summary, times

WAYS = 32  # slots of a set
_COUNTED = 4
ARMS = {"lru": ("LRU", False), "lfu": ("LFU", False), "lru-pipelined": ("LRU", True)}
SHORT = ("lru", "lfu")  # the pipelined one was never the fastest


def slots_for(shape: Shape, card_bytes: int, arm: str) -> int:
    """Slots of the smallest cache with at least `card_bytes` on the GPU, maps and optimizer state included."""
    policy, pipelined = ARMS[arm]
    of_slot = 4 * shape.dim + 8 + (8 if policy == "LRU" else 0) + (4 if pipelined else 0)
    of_row = 4 + 4 + (8 if policy == "LFU" else 0)
    left = card_bytes - of_row * shape.rows * shape.tables
    return WAYS * max(1, math.ceil(left / of_slot / WAYS))


class FbgemmHostTables:
    """FBGEMM's object for a shape, with `slots` cache slots."""

    def __init__(self, job: Workload, device: str, arm: str, slots: int, bound: float = 1.0) -> None:
        fb, (policy, pipelined), shape = names(), ARMS[arm], job.shape
        place = (fb.EmbeddingLocation.MANAGED_CACHING, fb.ComputeDevice.CUDA)
        rows = shape.rows * shape.tables
        self.job, self.device, self.slots, self.pipelined = job, device, slots, pipelined
        self.module = fb.SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.rows, shape.dim, *place)] * shape.tables,
            weights_precision=fb.SparseType.FP32,
            optimizer=fb.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=EPS,
            stochastic_rounding=False,
            cache_algorithm=getattr(fb.CacheAlgorithm, policy),
            cache_load_factor=(slots - WAYS / 2) / rows,  # FBGEMM rounds up to whole sets
            cache_precision=fb.SparseType.FP32,
            uvm_host_mapped=True,
            **({"prefetch_pipeline": True} if pipelined else {}),
            **shared_arguments(fb, job, device),
        )
        self.module.init_embedding_weights_uniform(-bound, bound)
        self.grad = random_gradient(shape, device)
        self.stream = IdStream(shape, ZIPF, 1, device, torch.int64)
        self._main, self._beside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
        self._ahead = False

    def look_up(self, this: Batch, following: Batch | None) -> Tensor:
        """Look up a batch; pipelined, prefetch the following one."""
        if self.pipelined:
            if not self._ahead:
                self._prefetch(this)
            self._main.wait_stream(self._beside)
        out: Tensor = self.module(this.ids, this.offsets)
        self._ahead = self.pipelined and following is not None
        if self._ahead and following is not None:
            self._prefetch(following)
        return out

    def step(self, this: Batch, following: Batch | None) -> None:
        self.look_up(this, following).backward(self.grad)

    def _prefetch(self, batch: Batch) -> None:
        with torch.cuda.stream(self._beside):
            self.module.prefetch(batch.ids, batch.offsets, forward_stream=self._main)

    def contender(self) -> Contender:
        def read(table: int, rows: Tensor) -> Tensor:
            self.module.flush()
            rows_ND: Tensor = self.module.split_embedding_weights()[table].detach()[rows]
            return rows_ND.clone()

        return Contender("fbgemm fp32", lambda batch: batch, lambda batch: self.step(batch, None), read, self.grad)

    def fill(self) -> dict[str, int]:
        """Persistent bytes on the GPU and in host memory."""
        found = {"card_bytes": 0, "host_bytes": 0}
        for name, tensor in (*self.module.named_buffers(), *self.module.named_parameters()):
            place = "host_bytes" if name.endswith("_uvm") or tensor.device.type == "cpu" else "card_bytes"
            found[place] += tensor.numel() * tensor.element_size()
        return found

    def hits(self) -> dict[str, float]:
        """Hit rate, and distinct rows of a step that are not cached."""
        module, found, rows, missing = self.module, 0.0, 0, 0
        for _ in range(_COUNTED):
            batch = self.stream.draw()
            linear_N = torch.ops.fbgemm.linearize_cache_indices(module.cache_hash_size_cumsum, batch.ids, batch.offsets)
            slot_N = torch.ops.fbgemm.lxu_cache_lookup(linear_N, module.lxu_cache_state, module.total_cache_hash_size)
            found += float((slot_N >= 0).double().mean())
            rows += linear_N.unique().numel()
            missing += linear_N[slot_N < 0].unique().numel()
            self.step(batch, None)
        counts = {"hit_rate": found, "distinct_rows": rows, "rows_not_cached": missing}
        return {name: count / _COUNTED for name, count in counts.items()}

    def timed(self, settle: int, stretches: int) -> Measurement:
        taken = times(self.step, self.stream.draw, self.device, settle, stretches)
        return {**summary(taken), **self.fill(), **self.hits(), "slots": self.slots}


class HostMemory:
    """Registered host memory that FBGEMM's objects reuse; only the latest object is valid."""

    def __init__(self, size: int) -> None:
        names()
        operators: Any = torch.ops.fbgemm
        self._make = operators.new_unified_tensor
        self._pool: Tensor = self._make(torch.zeros(1, dtype=torch.uint8, device="cuda"), [size], True)
        self._used = 0
        operators.new_unified_tensor = self._take

    def begin(self) -> None:
        """Start the next object at the beginning of the memory."""
        self._used = 0

    def _take(self, like: Tensor, sizes: list[int], is_host_mapped: bool = False) -> Tensor:
        first, size = -(-self._used // 4096) * 4096, math.prod(sizes) * like.element_size()
        if first + size > self._pool.numel():
            made: Tensor = self._make(like, sizes, True)
            return made
        self._used = first + size
        return self._pool[first : self._used].view(like.dtype).view(*sizes)


def measure(job: dict[str, Any]) -> Iterator[Measurement]:
    """Measure every policy on one shape, with the GPU bytes of each entry of `card_bytes`; only the first has all arms."""
    wanted = Workload.from_json(job["job"])
    yield tried("versions", versions)
    memory = HostMemory(4 * wanted.shape.dim * wanted.shape.rows * wanted.shape.tables + (1 << 20))
    for turn, (matched, card_bytes) in enumerate(job["card_bytes"].items()):
        for arm in ARMS if turn == 0 else SHORT:
            yield tried(f"{matched}/{arm}", lambda arm=arm, size=card_bytes: _of_one(wanted, arm, memory, size, job))  # type: ignore[misc]
            gc.collect()
            torch.cuda.empty_cache()


def versions() -> Measurement:
    return dict(peer_fbgemm.versions())


def _of_one(job: Workload, arm: str, memory: HostMemory, card_bytes: int, settings: dict[str, Any]) -> Measurement:
    def small(small_job: Workload, device: str) -> Contender:
        memory.begin()
        return FbgemmHostTables(small_job, device, arm, slots=16 * WAYS).contender()

    check_step(small, job, settings["device"])
    memory.begin()
    contender = FbgemmHostTables(job, settings["device"], arm, slots_for(job.shape, card_bytes, arm))
    return contender.timed(settings["peer_settle"], settings["stretches"])
