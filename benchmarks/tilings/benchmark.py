"""`python -m benchmarks lookup-tilings`: the bag kernel with many tilings against the lookup of today.

Every tiling is compared with the reference before it is timed; wrong ones are named and left out. Times are kernel times by
torch's profiler, medians over rounds. On a GPU all kernels are compiled first, by several processes. Where `import fbgemm_gpu`
works, FBGEMM's inference object or, for fp32, its training object is measured in the same run.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner.record import Recorder, brief
from benchmarks.sweep import limits
from benchmarks.sweep.family import SweepWorkload
from benchmarks.sweep.fbgemm_tables import FbgemmTables
from benchmarks.sweep.ids import BatchStream, SweepBatch
from benchmarks.sweep.kernel_time import kernel_times
from benchmarks.tilings import tiling as T
from benchmarks.tilings import workloads as W
from benchmarks.tilings.tiling import Tiling
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.gather import gpu, reference
from thermocline.rows.arena import Arena

TODAY = "today"
SHAPES = ((128, 4), (128, 8), (64, 4), (64, 8), (32, 4), (32, 8), (32, 16))  # width, rows
BAGS = (1, 2, 4, 8)
ALL = [Tiling(*shape, bags) for shape in SHAPES for bags in BAGS]
FETCHING = [Tiling(*shape, bags, fetch=True) for shape in ((128, 4), (32, 8)) for bags in (4, 8, 16)]
CONVERTING = [Tiling(128, 4, 2, convert=False), Tiling(32, 8, 2, convert=False)]
MIXED = [Tiling(*shape, bags) for shape in ((128, 4), (32, 4)) for bags in (2, 4)]  # tables of many widths take long to compile
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # norm of the error over that of the result
CALLS, ROUNDS = 6, 3
Case = tuple[str, SweepWorkload, str]


def cases(drawn: int) -> list[Case]:
    """(name, workload, stored rows): the most telling first."""
    found = [(name, workload, "int8+5%") for name, workload in W.NAMED.items()]
    found += [(name, workload, "int8+5%") for name, workload in W.drawn(101, drawn).items()]
    for stored in ("int4+1%", "fp32"):
        found += [(name, W.NAMED[name], stored) for name in ("96 geo8 zipf", "48 fix20 uniform", "128 fix32 zipf")]
    return found


def tilings(workload: SweepWorkload) -> list[Tiling]:
    """Tilings that differ for a workload."""
    widest, kinds = max(workload.dims), len(set(workload.dims))
    every = [*ALL, *FETCHING, *CONVERTING] if kinds <= 2 else MIXED
    if kinds > 1:
        every = [*every, *(tiling._replace(split=True) for tiling in (*ALL, *FETCHING))]
    return [tiling for tiling in every if tiling.width == 32 or widest > tiling.width // 2]


def call_of(workload: SweepWorkload, batch: SweepBatch) -> LookupCall:
    return LookupCall(batch.ids, batch.offsets, batch.weights, W.mode_of(workload), W.dtype_of(workload), True)


# -- compilation ------------------------------------------------------------------------------------------------------------


def compile_all(chosen: list[Case], processes: int) -> float:
    """Compile the kernels of all cases in parallel processes, on small tables; returns the seconds."""
    begin = time.monotonic()
    kinds = {(w.dims, w.mode, w.output, w.id_dtype, stored): (name, w, stored) for name, w, stored in chosen}
    jobs = [(case, tiling) for case in kinds.values() for tiling in tilings(case[1]) if tiling.bags == 2 or tiling.fetch]
    jobs = [(case, tiling) for case, tiling in jobs if not tiling.fetch or tiling.bags == 4]  # bags are no constant
    jobs.sort(key=lambda job: len(set(job[0][1].dims)), reverse=True)  # those that take longest
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_one_thread) as pool:
        pool.starmap(_compile, jobs, chunksize=1)
    return time.monotonic() - begin


def _one_thread() -> None:
    torch.set_num_threads(1)


def _compile(case: Case, tiling: Tiling) -> None:
    """Run a kernel on one bag of one table of each width: the layout of the features is a run-time argument."""
    _, workload, stored = case
    try:
        arena = W.filled_arena(_few_rows(workload), "cuda", stored)
        batch = BatchStream(_few_rows(workload), "cuda", seed=2).draw()
        T.gather_pool(arena.arrays, call_of(workload, batch), tiling)
        torch.cuda.synchronize()
    except Exception as error:  # the race names it again
        print(f"compiling {tiling.label}: {brief(error)}", flush=True)


def _few_rows(workload: SweepWorkload) -> SweepWorkload:
    """The same tables with few rows: constants of kernels are the same."""
    return SweepWorkload(**{**vars(workload), "rows": (64,) * workload.tables, "batch": 2, "most_lookups": 100})


# -- race -------------------------------------------------------------------------------------------------------------------


def expected(arrays: RowArrays, call: LookupCall) -> Tensor:
    """The result of a lookup in fp32, by the reference."""
    return reference.gather_pool(arrays, call._replace(dtype=torch.float32))[0]


def check(wanted: Tensor, out: Tensor) -> str:
    """What is wrong with the result of a lookup, or nothing."""
    error = float((out.float() - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return "" if error <= TOLERANCE[out.dtype] else f"error {error:.2g}"  # NaN fails


def checked(arrays: RowArrays, call: LookupCall, wanted: Tensor, chosen: list[Tiling]) -> Iterator[tuple[Tiling, str]]:
    """Each tiling and what is wrong with its result."""
    for tiling in chosen:
        try:
            out = torch.full(wanted.shape, float("nan"), dtype=call.dtype, device=wanted.device)
            yield tiling, check(wanted, T.gather_pool(arrays, call, tiling, out))
        except Exception as error:
            yield tiling, brief(error)


def run(
    device: str, limit_s: float = 230.0, quick: bool = False, processes: int = 12, drawn: int = 4, peers: bool = True,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:  # fmt: skip
    """Race all tilings on all workloads; no workload starts after `limit_s` seconds."""
    begin = time.monotonic()
    recorder = Recorder("lookup-tilings", lambda line: None, judged=False)
    chosen = cases(drawn)
    if quick:
        chosen = [(name, W.small(workload), stored) for name, workload, stored in chosen]
    if device != "cpu":
        taken = compile_all(chosen, min(processes, os.cpu_count() or 1))
        recorder.note(f"compiled in {taken:.0f} s by {processes} processes")
    rate = limits.copy_rate(device, True) if device != "cpu" else 100.0
    recorder.record["times"] = {}
    for number, (name, workload, stored) in enumerate(chosen):
        if time.monotonic() - begin > limit_s:
            recorder.note(f"left out after {limit_s:.0f} s: {[f'{each[0]} {each[2]}' for each in chosen[number:]]}")
            break
        progress(number, len(chosen), name)
        try:
            _race(recorder, name, workload, stored, device, rate, peers)
        except Exception as error:
            recorder.fail(f"{device}/{name}/{stored}", brief(error))
        print(_latest(recorder), flush=True)
    progress(len(chosen), len(chosen), "done")
    return recorder.record


def _race(
    recorder: Recorder, name: str, workload: SweepWorkload, stored: str, device: str, rate: float, peers: bool
) -> None:  # fmt: skip
    case = f"{device}/{name}/{stored}"
    arena, stream = W.filled_arena(workload, device, stored), BatchStream(workload, device, seed=1)
    batches = [stream.draw() for _ in range(4)]
    calls = [call_of(workload, batch) for batch in batches]
    wanted = expected(arena.arrays, calls[0])
    wrong = check(wanted, gpu.gather_pool(arena.arrays, calls[0])[0])
    good: list[Tiling] = []
    for tiling, problem in checked(arena.arrays, calls[0], wanted, tilings(workload)):
        if problem:
            recorder.note(f"{case}: {tiling.label} is left out: {problem}")
        else:
            good.append(tiling)
    if wrong:
        recorder.note(f"{case}: today's lookup is wrong: {wrong}")
    times = _times(arena, calls, good, device)
    peer = _peer(recorder, workload, stored, batches, device) if peers else None
    best = min(good, key=lambda tiling: times[tiling.label])
    recorder.record["times"][case] = {label: round(1e3 * ms, 1) for label, ms in sorted(times.items(), key=lambda at: at[1])}
    further: dict[str, Any] = {
        "tiling": best.label, "peer_ms": peer, "limit_ms": W.bytes_of(workload, batches[0], stored) / rate / 1e6,
        "lookups": batches[0].ids.numel(), "cached": W.share_cached(arena, batches[0].ids[: batches[0].counts[0]].long()),
    }  # fmt: skip
    ratio = times[TODAY] / times[best.label]
    recorder.add(case, times[best.label], "ms", TODAY, times[TODAY], ratio, **further)


def _pool(arrays: RowArrays, tiling: Tiling, call: LookupCall) -> Tensor:
    return T.gather_pool(arrays, call, tiling)


def _times(arena: Arena, calls: list[LookupCall], good: list[Tiling], device: str) -> dict[str, float]:
    """Kernel times in milliseconds; wall times on a CPU, in the interpreter."""
    runs: dict[str, Callable[[LookupCall], Any]] = {TODAY: lambda call: gpu.gather_pool(arena.arrays, call)}
    for tiling in good:
        runs[tiling.label] = functools.partial(_pool, arena.arrays, tiling)
    if device == "cpu":
        return {label: _seconds(run, calls[0]) * 1e3 for label, run in runs.items()}
    turn = {label: 0 for label in runs}

    def draw(label: str) -> LookupCall:
        turn[label] += 1
        return calls[turn[label] % len(calls)]

    draws = {label: functools.partial(draw, label) for label in runs}
    return kernel_times(runs, draws, CALLS, ROUNDS)


def _seconds(run: Callable[[LookupCall], Any], call: LookupCall) -> float:
    begin = time.perf_counter()
    run(call)
    return time.perf_counter() - begin


def _peer(
    recorder: Recorder, workload: SweepWorkload, stored: str, batches: list[SweepBatch], device: str
) -> float | None:  # fmt: skip
    """FBGEMM's kernel time in milliseconds."""
    if device == "cpu" or not importlib.util.find_spec("fbgemm_gpu"):
        return None
    try:
        precision = stored.split("+")[0]
        most = max(batch.ids.numel() for batch in batches) if precision == "fp32" else None
        tables = FbgemmTables(workload, device, precision, most)
        inputs = [tables.prepare(batch) for batch in batches]
        turn = iter(range(1 << 30))
        return kernel_times({"peer": tables.lookup}, {"peer": lambda: inputs[next(turn) % len(inputs)]}, CALLS, ROUNDS)["peer"]
    except Exception as error:
        recorder.note(f"{workload.name} {stored}: FBGEMM failed: {brief(error)}")
        return None


def _latest(recorder: Recorder) -> str:
    """The last row in one line, with the five best tilings."""
    row = recorder.rows[-1]
    times = recorder.record["times"].get(row["case"], {})
    if not times:
        return f"{row['case']}: {row}"
    best = ", ".join(f"{label} {us}" for label, us in list(times.items())[:6])
    peer = f"{1e3 * row['peer_ms']:.1f}" if row.get("peer_ms") else "-"
    worst = list(times.items())[-1]
    return (
        f"{row['case']}: today {times[TODAY]} fbgemm {peer} limit {1e3 * row['limit_ms']:.1f} us, lookups {row['lookups']}, "
        f"cached {row['cached']:.2f} | {best} | worst {worst[0]} {worst[1]}"
    )
