"""Kernels on a GPU against FBGEMM, torch and the memory bandwidth of the GPU.

All contenders live in this process. FBGEMM is measured where `import fbgemm_gpu` works; otherwise its rows are missing and a
note says so. Required cases run first; other cases are left out, with a note, after `LIMIT_S` seconds.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.cases import KERNELS, UNIFORM, CaseGroup, KernelPlan, Workload, gpu_cases
from benchmarks.kernels.contender import Contender, chunk_of
from benchmarks.kernels.worker import contenders_of
from benchmarks.runner.race import OURS, RaceTimes, ReadyContenders, TimingBudget, active, add_rows, libraries_of, time_all
from benchmarks.runner.record import Recorder, brief
from benchmarks.runner.timing import BACKWARD, Times

BUDGET = TimingBudget(rounds=12, chunk_ms=20.0, least=12, most=40)
QUICK = TimingBudget(rounds=2, chunk_ms=2.0, least=2, most=5)
LIMIT_S = 240.0
CEILING_ROW_BYTES = 128

PEER_HELP = (
    "FBGEMM was not measured on the GPU: its rows are missing. `import fbgemm_gpu` must work in this environment; "
    "install the fbgemm-gpu wheel that matches this torch and CUDA (with --no-deps), or put it on PYTHONPATH."
)


def run(
    recorder: Recorder,
    wanted: Callable[[str], bool],
    quick: bool,
    peers: bool,
    progress: Callable[[int, int, str], None],
    plan: KernelPlan = KERNELS,
    device: str = "cuda",
) -> None:
    """Measure every wanted GPU row."""
    start = time.monotonic()
    if device != "cpu":
        recorder.note(BACKWARD)
    groups = [group for group in plan.gpu() if any(map(wanted, gpu_cases(group)))]
    available = {"torch", "ours-int8", *_fbgemm(recorder)} if peers else set()
    rates = _ceilings(recorder, wanted, quick, plan) if device != "cpu" else {}
    for done, group in enumerate(groups):
        gated = any(case in recorder.asked for case in gpu_cases(group))
        if not gated and time.monotonic() - start > LIMIT_S:
            recorder.note(f"left out after {LIMIT_S:.0f} s: {', '.join(gpu_cases(group))}")
            continue
        progress(done, len(groups), f"{device} {group.job.shape.name} {group.job.stored} {group.job.label}")
        race = _GroupRace(recorder, wanted, group, group.quick() if quick else group, device)
        race.run(available, peers, QUICK if quick else BUDGET, rates.get(CEILING_ROW_BYTES))
        del race
        if not recovered(recorder, device):
            break
    add_geomean(recorder, wanted, plan)
    progress(len(groups), len(groups), device)


class _GroupRace:
    """One group on one GPU: built once, raced with each kind of ids."""

    def __init__(
        self, recorder: Recorder, wanted: Callable[[str], bool], named: CaseGroup, group: CaseGroup, device: str
    ) -> None:
        # `named` has the full shape, for the names of rows; `group` is what runs (smaller in a quick run).
        self.recorder, self.wanted, self.named, self.group, self.device = recorder, wanted, named, group, device
        self.contenders: dict[str, Contender] = {}

    def run(self, available: set[str], peers: bool, budget: TimingBudget, rate: float | None) -> None:
        baselines = active(self.group, available, peers)
        cases = {k: {r: self.named.case("cuda", k, r.suffix) for r in baselines} for k in self.named.kinds}
        cases = {k: {r: case for r, case in of.items() if self.wanted(case)} for k, of in cases.items()}
        ceiling = self.named.case("cuda", UNIFORM, "-of-ceiling")
        held = self.named.ceiling and rate is not None and self.wanted(ceiling)
        ready = ReadyContenders()
        needed = libraries_of(baseline for of in cases.values() for baseline in of)
        if held or any(cases.values()):
            ready.gather(needed, self._build)
        for kind, of in cases.items():
            if not of and not (held and kind == UNIFORM):
                continue
            times = add_rows(self.recorder, of, ready, lambda kind=kind: self._measure(kind, budget))  # type: ignore[misc]
            if held and kind == UNIFORM:
                assert rate is not None
                self._against_ceiling(ceiling, times, ready, rate)

    def _build(self, library: str) -> list[str]:
        contenders = contenders_of(library, self.group.job, self.device)
        self.contenders.update({contender.label: contender for contender in contenders})
        return [contender.label for contender in contenders]

    def _measure(self, kind: str, budget: TimingBudget) -> RaceTimes:
        chunks = {label: chunk_of(contender, self.group.job, kind, self.device) for label, contender in self.contenders.items()}
        return time_all(chunks, budget, self._stats)

    def _stats(self) -> dict[str, int]:
        cache = self.contenders[OURS].cache
        return cache.stats() if cache else {}

    def _against_ceiling(self, case: str, times: dict[str, Times], ready: ReadyContenders, rate: float) -> None:
        if OURS not in times:
            self.recorder.fail(case, ready.errors.get(OURS, "ours was not measured"))
            return
        moved = bytes_to_move(self.group.job)
        reached = moved / times[OURS].median / 1e6
        self.recorder.add(
            case,
            reached,
            "GB/s",
            peer=f"gather of {CEILING_ROW_BYTES}-byte rows",
            peer_value=rate,
            ratio=reached / rate,
            spread=times[OURS].spread,
            bytes=moved,
            ms=times[OURS].median,
        )


def bytes_to_move(job: Workload) -> int:
    """Necessary bytes of a lookup: a row and an id for every lookup, and the output."""
    from thermocline.rows.precision import bytes_per_row

    shape = job.shape
    output = math.prod(shape.out_shape) * {"fp32": 4, "fp16": 2}[job.output]
    return shape.lookups * (bytes_per_row(job.precision, shape.dim) + {"int32": 4, "int64": 8}[job.id_dtype]) + output


def _fbgemm(recorder: Recorder) -> set[str]:
    from benchmarks.kernels import fbgemm_contender as peer_fbgemm

    try:
        recorder.record["versions"].update(peer_fbgemm.versions())
    except (ImportError, OSError) as error:
        recorder.note(f"{PEER_HELP} ({brief(error)})")
        return set()
    return {"fbgemm"}


def _ceilings(recorder: Recorder, wanted: Callable[[str], bool], quick: bool, plan: KernelPlan) -> dict[int, float]:
    """Measure memory bandwidth if a row needs it; row bytes -> GB/s."""
    needed = [*plan.ceilings, *(case for group in plan.gpu() if group.ceiling for case in gpu_cases(group))]
    if not any(wanted(case) for case in needed):
        return {}
    from benchmarks.kernels import bandwidth as ceilings

    rates: dict[int, float] = {}
    for case in plan.ceilings:
        try:
            size = case.rpartition("-")[2]
            rate = ceilings.gather_rate(int(size), quick) if size.isdigit() else ceilings.copy_rate(quick)
        except Exception as error:
            recorder.fail(case, brief(error))
            continue
        if size.isdigit():
            rates[int(size)] = rate
        recorder.add(case, rate, "GB/s")
        torch.cuda.empty_cache()
    return rates


def recovered(recorder: Recorder, device: str) -> bool:
    """Free memory after a race. False if the GPU no longer responds."""
    gc.collect()
    if device == "cpu":
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        recorder.note(f"the GPU stopped responding, remaining cases were left out: {brief(error)}")
        return False
    return True


def add_geomean(recorder: Recorder, wanted: Callable[[str], bool], plan: KernelPlan = KERNELS) -> None:
    """Add the geometric mean of steps over A, B and C with both kinds of ids, if all six were measured."""
    names = plan.averaged
    rows: list[dict[str, Any]] = [row for row in recorder.rows if row["case"] in names and row["ratio"] is not None]
    if not wanted(plan.geomean) or len(rows) < len(names):
        return
    ours, peer = (math.exp(sum(math.log(row[key]) for row in rows) / len(rows)) for key in ("ours", "peer_value"))
    recorder.add(plan.geomean, ours, "ms", peer="geometric mean of the peers", peer_value=peer, ratio=peer / ours)
