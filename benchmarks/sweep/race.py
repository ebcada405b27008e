"""One workload of the sweep: build, check and time our tables and FBGEMM's, and add a row for each measure.

    cuda/1.07-26t-d96-.../fp32/lookup       against FBGEMM's training object
    cuda/1.07-26t-d96-.../int8+5%/step      lookup, backward, row-wise Adagrad and cache upkeep, against FBGEMM's fp32 step
    cuda/1.07-26t-d96-.../int8+5%/lookup    against FBGEMM's INT8 inference; the cache is as the steps before left it
    cuda/1.07-26t-d96-.../int4+1%/lookup    against FBGEMM's INT4 inference

On a GPU `ours`, `peer_value` and `ratio` are kernel times, and `wall_ms`, `peer_wall_ms` and `wall_ratio` wall times. On a CPU
both are the same, and names end in the number of threads. A measure that raises or computes a wrong result is a row with an
error.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.runner.record import Recorder, brief
from benchmarks.runner.timing import SETS, Chunk, chunk_on, fresh_chunk, quantile
from benchmarks.sweep import limits
from benchmarks.sweep.contender import PEER_QUANTIZED, SweepTables, check_lookup, check_step
from benchmarks.sweep.family import NONE, SweepWorkload
from benchmarks.sweep.fbgemm_tables import FbgemmTables
from benchmarks.sweep.ids import BatchStream
from benchmarks.sweep.kernel_time import kernel_times, timed
from benchmarks.sweep.thermocline_tables import CollectionTables

OURS = "ours"
LOOKUP, STEP = "lookup", "step"
Runs = dict[str, tuple[SweepTables, Callable[[Any], Any]]]  # label -> tables, what is timed
MEASURES = (("fp32", LOOKUP), ("int8+5%", STEP), ("int8+5%", LOOKUP), ("int4+1%", LOOKUP))
STORED = {"fp32": ("fp32", 0.0), "int8+5%": ("int8", 0.05), "int4+1%": ("int4", 0.01)}
SHARES = {LOOKUP: 0.15, STEP: 0.25, "settle": 0.15}  # of the seconds of a workload
SETTLE = 288  # steps after which a cache refreshes itself at every fourth large batch
INT8_LEVELS = 254
KERNEL_CALLS, KERNEL_ROUNDS = 8, 4


@dataclass
class SweepSettings:
    """How every workload is measured. `rate`: memory bandwidth in GB/s."""

    device: str
    seconds: float
    rate: float
    fbgemm: bool
    threads: int | None = None
    settle: int = SETTLE
    chunk_ms: float = 10.0


def case(settings: SweepSettings, name: str, stored: str, operation: str) -> str:
    """The name of a row."""
    parts = [settings.device, name, stored, operation]
    return "/".join(parts if settings.threads is None else [*parts, str(settings.threads)])


class WorkloadRace:
    """Measures one workload."""

    def __init__(self, recorder: Recorder, workload: SweepWorkload, settings: SweepSettings) -> None:
        self.recorder, self.workload, self.settings = recorder, workload, settings
        self.stream = BatchStream(workload, settings.device, seed=1)
        self.batch = self.stream.draw()
        self._trained_peer: FbgemmTables | str | None = None

    def run(self) -> None:
        for stored in STORED:
            operations = [operation for each, operation in MEASURES if each == stored]
            try:
                ours = self._ours(stored)
            except Exception as error:
                for operation in operations:
                    self.recorder.fail(case(self.settings, self.workload.name, stored, operation), brief(error))
                continue
            for operation in operations:
                self._measure(ours, stored, operation)
            del ours
            gc.collect()

    def _ours(self, stored: str) -> CheckedTables:
        """Our tables, checked, with a cache in its steady state."""
        (precision, cache), workload, device = STORED[stored], self.workload, self.settings.device
        begin = time.monotonic()
        trains = stored != "fp32"
        if (stored, STEP) in MEASURES:

            def build(job: SweepWorkload) -> SweepTables:
                return CollectionTables(job, device, precision, cache, BatchStream(job, device).most_ids)

            check_step(build, workload, device, INT8_LEVELS)
        tables = CollectionTables(workload, device, precision, cache, self.stream.most_ids if trains else None)
        check_lookup(tables, workload, device)
        further = {"ready_s": time.monotonic() - begin}  # with compilation
        if trains:
            further["settled_steps"] = self._settle(tables)
            check_lookup(tables, workload, device)
        return CheckedTables(tables, further)

    def _settle(self, tables: SweepTables) -> int:
        """Train until the cache is in its steady state or time is up. Returns the number of steps."""
        end = time.monotonic() + SHARES["settle"] * self.settings.seconds
        for done in range(self.settings.settle):
            tables.step(tables.prepare(self.stream.draw()))
            if done % 8 == 7:
                _wait(self.settings.device)
                if time.monotonic() > end:
                    return done + 1
        return self.settings.settle

    def _measure(self, ours: CheckedTables, stored: str, operation: str) -> None:
        name = case(self.settings, self.workload.name, stored, operation)
        try:
            peers, converted, problem = self._peers(stored, operation)
            runs: Runs = {OURS: (ours.tables, _run(ours.tables, operation)), **peers}
            further = {"converted": converted} | ours.further | ({"peer_error": problem} if problem else {})
            self._add_row(name, runs, stored, operation, further)
        except Exception as error:
            self.recorder.fail(name, brief(error))

    def _peers(self, stored: str, operation: str) -> tuple[Runs, list[str], str]:
        """FBGEMM's contenders, what was converted for them, and why there are none."""
        if not self.settings.fbgemm:
            return {}, [], ""
        try:
            tables = self._trained() if operation == STEP or stored == "fp32" else self._quantized(STORED[stored][0])
            _run(tables, operation)(tables.prepare(self.batch))
            _wait(self.settings.device)
        except Exception as error:
            return {}, [], brief(error)
        found: Runs = {tables.label: (tables, _run(tables, operation))}
        converted = list(tables.converted)
        if (stored, operation) == ("fp32", LOOKUP) and self.settings.device != "cpu" and self.workload.mode != NONE:
            args = tables.prepare(self.batch)
            try:
                torch.testing.assert_close(tables.experimental_lookup(args), tables.lookup(args), rtol=2e-2, atol=1e-3)
                found[f"{tables.label} experimental"] = (tables, tables.experimental_lookup)
            except Exception as error:
                converted.append(f"experimental kernels left out: {brief(error, 100)}")
        return found, converted, ""

    def _trained(self) -> FbgemmTables:
        """FBGEMM's training object, built once for lookups and steps; an error is remembered."""
        if self._trained_peer is None:
            try:
                tables = FbgemmTables(self.workload, self.settings.device, "fp32", self.stream.most_ids)
                check_lookup(tables, self.workload, self.settings.device)
                self._trained_peer = tables
            except Exception as error:
                self._trained_peer = brief(error)
        if isinstance(self._trained_peer, str):
            raise RuntimeError(self._trained_peer)
        return self._trained_peer

    def _quantized(self, precision: str) -> FbgemmTables:
        tables = FbgemmTables(self.workload, self.settings.device, precision)
        check_lookup(tables, self.workload, self.settings.device, PEER_QUANTIZED)
        return tables

    def _add_row(self, name: str, runs: Runs, stored: str, operation: str, further: dict[str, Any]) -> None:
        settings = self.settings
        chunks = {label: self._chunk(tables, run, operation) for label, (tables, run) in runs.items()}
        wall = timed(chunks, SHARES[operation] * settings.seconds, settings.chunk_ms)
        taken = {label: found.median for label, found in wall.items()}
        kernels = self._kernels(runs, taken, further)
        quiet = {label: quantile(found.all, 0.1) for label, found in wall.items()}  # on a busy machine more telling
        further |= {"wall_ms": taken[OURS], "wall_p10_ms": quiet[OURS], **self._limits(stored, operation, kernels[OURS])}
        peers = [label for label in runs if label != OURS]
        if not peers:
            self.recorder.add(name, kernels[OURS], "ms", spread=wall[OURS].spread, **further)
            return
        best, least = min(peers, key=kernels.__getitem__), min(taken[label] for label in peers)
        further |= {"peer_wall_ms": least, "peer_wall_p10_ms": min(quiet[label] for label in peers)}
        further |= {"wall_ratio": least / taken[OURS], "peer_spread": wall[best].spread}
        ratio = kernels[best] / kernels[OURS]
        label = f"{best} {operation}" if operation == STEP else best
        self.recorder.add(name, kernels[OURS], "ms", label, kernels[best], ratio, wall[OURS].spread, **further)

    def _kernels(self, runs: Runs, wall: dict[str, float], further: dict[str, Any]) -> dict[str, float]:
        """Kernel times; wall times on a CPU, and where the profiler fails, which the row then says."""
        if self.settings.device == "cpu":
            return wall
        draws = {label: self._draw(tables) for label, (tables, _) in runs.items()}
        try:
            return kernel_times({label: run for label, (_, run) in runs.items()}, draws, KERNEL_CALLS, KERNEL_ROUNDS)
        except RuntimeError as error:
            further["kernel_error"] = f"wall times stand for kernel times: {brief(error)}"
            return wall

    def _draw(self, tables: SweepTables) -> Callable[[], Any]:
        return lambda: tables.prepare(self.stream.draw())

    def _chunk(self, tables: SweepTables, run: Callable[[Any], Any], operation: str) -> Chunk:
        draw = self._draw(tables)
        if operation == STEP:
            return fresh_chunk(self.settings.device, run, draw)
        return chunk_on(self.settings.device, run, [draw() for _ in range(SETS)])

    def _limits(self, stored: str, operation: str, ms: float) -> dict[str, Any]:
        """Limits of a measure, and the share of each that a time reaches."""
        precision, rate = STORED[stored][0], self.settings.rate
        needed = getattr(limits.bytes_to_move(self.workload, self.batch, precision), operation)
        found: dict[str, Any] = {"lookups": self.batch.ids.numel(), "bytes": needed, "limit_ms": needed / rate / 1e6}
        found["of_limit"] = found["limit_ms"] / ms
        if (stored, operation) == ("int8+5%", LOOKUP):
            sectors = limits.sector_bytes(self.workload, self.batch)
            found |= {
                "sector_limit_ms": sectors.touched / rate / 1e6,
                "distinct_sector_limit_ms": sectors.distinct / rate / 1e6,
            }
            found["of_sectors"] = found["sector_limit_ms"] / ms
        return found


@dataclass
class CheckedTables:
    """Our tables after their checks."""

    tables: SweepTables
    further: dict[str, Any] = field(default_factory=dict)


def _run(tables: SweepTables, operation: str) -> Callable[[Any], Any]:
    return tables.step if operation == STEP else tables.lookup


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
