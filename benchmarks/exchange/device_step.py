"""`python -m benchmarks exchange-step`: the sharded step of ranks that share one device, against the unsharded step.

The batch is divided over the ranks. One rank exchanges with itself, by NCCL on a GPU; several ranks go by gloo, because NCCL
refuses two ranks on one GPU. A case is device/shape/ids/ranks. Beside the time of a step stand the host time of a step without
waits, and how often the host read sizes. With a folder for traces, rank 0 writes a Chrome trace of three steps in which these
reads are marked.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import thermocline as tc
from benchmarks.kernels.cases import A, B, C, Shape
from benchmarks.runner import record
from thermocline.distributed import process_groups
from thermocline.distributed.comm_thread import CommThread
from thermocline.distributed.exchange.host_numbers import HostNumbers
from thermocline.distributed.placement.row_index import RowIndex
from thermocline.plan.model import Plan
from thermocline.plan.topology import GpuSpec, Link, Links, Topology

RANKS = (1, 2, 4, 8)
WARM, STEPS = 12, 40


class StepTimes(NamedTuple):
    """Milliseconds a step: of rank 0, and of its host without waits; and reads of sizes a step."""

    steps: list[float]
    host: float
    reads: float


def run(
    quick: bool = False, traces: Path | None = None, only: str | None = None,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure all shapes and numbers of ranks whose case contains `only`. Returns the record."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks, workloads = ((1, 2), ("zipf",)) if quick else (RANKS, ("zipf", "uniform"))
    shapes = [A.quick()] if quick else [A, B, C]
    cases = [(shape, ids, size) for shape in shapes for ids in workloads for size in ranks]
    cases = [case for case in cases if (only or "") in _name(device, *case)]
    told = iter(range(1, len(cases) + 1))
    recorder = record.Recorder("exchange-step", lambda text: progress(next(told), len(cases), text), judged=False)
    alone: dict[tuple[str, str], StepTimes] = {}
    for shape, ids, size in cases:
        key = shape.name, ids
        alone[key] = alone.get(key) or _spawn(shape, ids, 1, device, sharded=False)
        trace = None if traces is None else traces / f"{shape.name}_{ids}_{size}.json"
        found, base = _spawn(shape, ids, size, device, True, trace), statistics.median(alone[key].steps)
        ours = statistics.median(found.steps)
        tenths = statistics.quantiles(found.steps, n=10)
        recorder.add(
            _name(device, shape, ids, size), ours, "ms", "unsharded", base, base / ours, (tenths[-1] - tenths[0]) / ours,
            host_ms=found.host, reads=found.reads, steps=len(found.steps),
        )  # fmt: skip
    return recorder.record


def _name(device: str, shape: Shape, ids: str, size: int) -> str:
    return f"{device}/{shape.name}/{ids}/{size}"


def _spawn(shape: Shape, ids: str, size: int, device: str, sharded: bool, trace: Path | None = None) -> StepTimes:
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (shape, ids, size, device, sharded, trace, f"{folder}/store", results), nprocs=size)  # type: ignore[attr-defined, no-untyped-call]
        return StepTimes(*results.get())


def _rank(
    rank: int, shape: Shape, ids: str, size: int, device: str, sharded: bool, trace: Path | None, store: str, results: Any
) -> None:  # fmt: skip
    backend = "nccl" if device == "cuda" and size == 1 else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    batches = [_batch(shape, ids, size, rank, n, device) for n in range(4)]
    with _to_itself() if sharded and size == 1 else nullcontext():
        with torch.device("meta" if sharded else device):
            tables = [tc.Table(f"t{n}", shape.rows, shape.dim) for n in range(shape.tables)]
            config = tc.RowConfig(precision="int8", cache=0.0)
            module = tc.EmbeddingCollection(tables, mode="sum" if shape.pooled else "none", rows=config)
        model: Any = torch.nn.ModuleDict({"rows": module})
        if sharded:
            tc.shard_(model, _plan(shape, size), device=device, count_every=0)
        found = _measure(model["rows"], batches, device)
        if trace is not None:
            _write_trace(model["rows"], batches, trace if rank == 0 else None)
    if rank == 0:
        results.put(tuple(found))
    dist.destroy_process_group()


def _batch(shape: Shape, ids: str, size: int, rank: int, seed: int, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    draw, samples = torch.Generator().manual_seed(100 * seed + rank), shape.batch // size
    offsets = (torch.arange(samples + 1) * shape.pooling).to(device)
    found = {}
    for n in range(shape.tables):
        share_N = torch.rand(samples * shape.pooling, generator=draw, dtype=torch.float64)
        rows_N = shape.rows**share_N - 1 if ids == "zipf" else share_N * shape.rows  # log-uniform: Zipf with exponent 1
        found[f"t{n}"] = rows_N.long().to(device), offsets
    return found


def _plan(shape: Shape, size: int) -> Plan:
    """All rows in tier 3."""
    link = Link(bandwidth=1e9, latency=1e-5)
    topology = Topology(
        nodes=1, gpus_per_node=size, gpu=GpuSpec(memory=1 << 40, bandwidth=1e12), links=Links(node=link, cluster=link)
    )  # fmt: skip
    tier = {"tier": 3, "rows": shape.rows, "threshold": 0, "lookups": 0, "precision": "int8"}
    table = {
        "rows": shape.rows, "dim": shape.dim, "pooling": "sum", "lookups": 1, "precision": "int8", "cache": 0, "near": 0,
        "placement": "tiers", "card": None, "tiers": [tier], "exchange": "flat", "pooled_by": "asker", "wire_rows": "int8",
        "wire_gradients": "fp32", "bytes": {}, "traffic": [], "time": {}, "runner_up": None, "binding": "", "curve": [],
    }  # fmt: skip
    plan = {
        "goal": "train", "objective": "", "heat": "", "topology": topology, "budget": 1 << 40, "batch": shape.batch, "dense": 0,
        "optimizer": "rowwise_adagrad", "gradients": "fp32", "cards": [], "traffic": [], "balance": 1, "binding": "",
        "step": {"parts": {"dense": 0.0}, "overlaps": [], "hidden": 0, "total": 1, "throughput": 1}, "marginals": [],
        "tables": [table | {"name": f"t{n}", "features": [f"t{n}"]} for n in range(shape.tables)], "candidates": [],
    }  # fmt: skip
    return Plan.model_validate(plan)


@contextmanager
def _to_itself() -> Iterator[None]:
    """One rank that exchanges with itself."""

    def made(nodes: int, local_size: int, device: torch.device) -> process_groups.ProcessGroups:
        thread = CommThread(device)
        world, intra_node, cross_node = process_groups._make_groups(1, 1, device, thread)
        return process_groups.ProcessGroups(0, 1, 1, world, intra_node, cross_node, device, thread)

    with (
        mock.patch.object(process_groups.ProcessGroups, "make", made),
        mock.patch.object(process_groups.RankGroup, "is_single", False),
        mock.patch.object(RowIndex, "unsharded", property(lambda _: False, lambda _, value: None), create=True),
    ):
        yield


def _measure(module: Any, batches: list[Any], device: str) -> StepTimes:
    """Times of steps, each of which ends when the device is idle."""
    waited, reads, known = 0.0, 0, HostNumbers.get

    def get(numbers: HostNumbers) -> Any:
        nonlocal waited, reads
        begin = time.perf_counter()
        found = known(numbers)
        waited, reads = waited + time.perf_counter() - begin, reads + 1
        return found

    times, host = [], []
    with mock.patch.object(HostNumbers, "get", get):
        for step in range(WARM + STEPS):
            _synchronize(device)
            waited, reads = 0.0, reads * (step > WARM)
            begin = time.perf_counter()
            _step(module, batches[step % len(batches)])
            host.append(time.perf_counter() - begin - waited)
            _synchronize(device)
            times.append(time.perf_counter() - begin)
    return StepTimes([1e3 * t for t in times[WARM:]], 1e3 * statistics.median(host[WARM:]), reads / STEPS)


def _step(module: Any, batch: Any) -> None:
    values = module(batch).values()
    values.backward(torch.ones_like(values) / values.numel())
    if hasattr(module, "wait_for_exchange"):
        module.wait_for_exchange()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _write_trace(module: Any, batches: list[Any], trace: Path | None) -> None:
    known = HostNumbers.get

    def get(numbers: HostNumbers) -> Any:
        with torch.profiler.record_function("host reads sizes"):
            return known(numbers)

    with mock.patch.object(HostNumbers, "get", get), torch.profiler.profile() as profiler:
        for batch in batches[:3]:
            with torch.profiler.record_function("step"):
                _step(module, batch)
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
