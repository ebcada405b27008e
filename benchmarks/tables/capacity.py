"""`python -m benchmarks capacity`: how many rows one GPU trains, and whether steps are slower with more rows.

One stream of Zipf ids is mapped injectively into tables of different sizes, so that every table has the same hits and repeats,
on rows that are further apart. Tables have int4 rows, a cache and row-wise Adagrad. The cache has the same number of slots in
all races, and 1% of the rows in the run of the largest table. Before that run, rows beyond 2**31 are trained and compared with
the reference, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.cases import ZIPF, Shape
from benchmarks.kernels.ids import batches
from benchmarks.runner import record
from benchmarks.runner.timing import quantile
from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels.quantize import reference as quantize
from thermocline.kernels.update import reference as update
from thermocline.nn.config import bytes_needed
from thermocline.rows.arena import Arena
from thermocline.rows.memory import free_bytes
from thermocline.rows.optimizers import RowwiseAdagrad
from thermocline.rows.table_spec import TableSpec
from thermocline.rows.training import Trainer, lookup

SIZES = (10_000_000, 100_000_000, 1_000_000_000, 3_000_000_000)
QUICK = (10_000, 40_000)
DIM = 64
SHAPE = Shape("stream", tables=1, rows=8_000_000, dim=DIM, batch=16_384, pooling=16)
SETS, WARM, TIMED = 32, 264, 64
LARGEST_SHARE = 0.01


def run(
    device: str = "cuda",
    sizes: tuple[int, ...] = SIZES,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    judged: bool = True,
) -> dict[str, Any]:
    """Measure every size that fits, and return the record."""
    recorder = record.Recorder("capacity", lambda line: None, judged=judged)
    shape = Shape("stream", 1, min(SHAPE.rows, sizes[0]), DIM, *((SHAPE.batch, 16) if judged else (64, 4)))
    stream = [batch.ids for batch in batches(shape, ZIPF, SETS if judged else 4, device=device)]
    first_ms = 0.0
    for number, rows in enumerate(sizes):
        progress(number, len(sizes) + 1, f"{rows / 1e6:,.0f}M rows")
        race = _CapacityRace(rows, sizes[0] // 100, device, stream, shape)
        times = race.times(WARM if judged else 4, TIMED if judged else 8)
        median = quantile(times, 0.5)
        first_ms = first_ms or median
        spread = (quantile(times, 0.9) - quantile(times, 0.1)) / median
        size = race.arena.memory(race.trainer.states).total
        name = f"{sizes[0] / 1e6:,.0f}M rows"
        case = f"{device}/int4/{rows // 1_000_000}M/step"
        recorder.add(case, median, "ms", name, first_ms, first_ms / median, spread, bytes=size)
        del race
    progress(len(sizes), len(sizes) + 1, "largest table, cache of 1%")
    race = _CapacityRace(sizes[-1], int(LARGEST_SHARE * sizes[-1]), device, stream, shape)
    checked = race.check_far_rows()
    times = race.times(WARM if judged else 4, TIMED if judged else 8)
    memory = race.arena.memory(race.trainer.states)
    recorder.add(
        f"{device}/int4+1%/{sizes[-1] // 1_000_000}M/step", quantile(times, 0.5), "ms", bytes=memory.total, parts=memory.parts,
        memory_ratio=memory.ratio, hits=race.arena.stats(), rows_checked=checked, seconds_to_fill=race.filled,
    )  # fmt: skip
    return recorder.record


class _CapacityRace:
    """One table, and the stream mapped into it."""

    def __init__(self, rows: int, slots: int, device: str, stream: list[Tensor], shape: Shape) -> None:
        spec, slots, optimizer = TableSpec(rows, DIM, "int4", "rows"), min(slots, rows), RowwiseAdagrad(lr=0.01)
        free, need = free_bytes(torch.device(device)), bytes_needed([spec], [slots], optimizer)
        if free is not None and need > free:
            raise BadInput(f"{rows:,} rows need {need / 2**30:.1f} GiB; {device} has {free / 2**30:.1f} GiB free")
        start = time.perf_counter()
        self.rows, self.device = rows, device
        self.arena = Arena([spec], device=device, slots=[slots])
        self.arena.randomize_(1.0, torch.Generator(device=device).manual_seed(5), block=1 << 20)
        self.filled = time.perf_counter() - start
        self.trainer = Trainer(self.arena, optimizer)
        # An odd stride near the golden section that shares no factor with the rows: distinct ids stay distinct.
        stride = int(rows * 0.6180339887) | 1
        while math.gcd(stride, rows) > 1:
            stride += 2
        self.stream = [_times(ids, stride, rows) for ids in stream]
        self.offsets = torch.arange(shape.batch + 1, device=device) * shape.pooling
        self.grad = torch.randn(shape.batch, DIM, device=device) * 0.01

    def step(self, number: int) -> None:
        ids = self.stream[number % len(self.stream)]
        lookup(self.arena, ids, self.offsets, trainer=self.trainer).backward(self.grad)

    def times(self, warm: int, timed: int) -> list[float]:
        """Milliseconds of a step, the mean of four (the cache updates itself at every fourth)."""
        for number in range(warm):
            self.step(number)
        result = []
        for first in range(0, timed, 4):
            self._wait()
            start = time.perf_counter()
            for number in range(first, first + 4):
                self.step(number)
            self._wait()
            result.append((time.perf_counter() - start) * 250)
        return result

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def check_far_rows(self, count: int = 1000) -> int:
        """Train rows at the end of the table once, and compare codes, metadata and state with the reference."""
        generator = torch.Generator(device=self.device).manual_seed(1)
        span = min(self.rows, 1 << 30)
        rows_N = torch.randint(0, span, (count,), generator=generator, device=self.device).add_(self.rows - span).unique()
        before = self.arena.read(0, rows_N)
        arena, trainer = self.arena, self.trainer
        grad = torch.randn(rows_N.numel(), DIM, generator=generator, device=self.device)
        clock, hyper = trainer.clock.clone(), trainer.hyper.clone()
        old = trainer.states[0][rows_N]
        lookup(arena, rows_N, torch.arange(rows_N.numel() + 1, device=self.device), trainer=trainer).backward(grad)
        self._wait()
        update.advance(clock, hyper)
        weight, states = update.step(before, grad, [old], hyper, F.ROWWISE_ADAGRAD, F.planes(F.INT4))
        assert torch.equal(trainer.states[0][rows_N], states[0]), "optimizer state of far rows differs from the reference"
        after, cached_N = arena.read(0, rows_N), arena.meta[rows_N] < 0
        codes, meta = quantize.quantize_rows(weight, F.INT4, clock, rows_N)
        rounded = quantize.dequantize_rows(codes, meta, F.INT4, DIM)
        wanted = torch.where(cached_N[:, None], weight, rounded)
        assert torch.equal(after, wanted), "far rows differ from the reference"
        return int(rows_N.numel())


def _times(ids: Tensor, stride: int, rows: int) -> Tensor:
    """ids * stride mod rows without overflow: the product of a 23-bit id and a 32-bit stride fits 63 bits."""
    assert int(ids.max()) * stride < 1 << 63
    return ids * stride % rows
