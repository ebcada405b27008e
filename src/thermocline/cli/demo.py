"""`thermocline demo`: the whole story, small enough for a laptop. `make demo` runs it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from thermocline.cli.checkup import examine
from thermocline.cli.doctor import summary
from thermocline.cli.options import Debug, Json, Quiet
from thermocline.cli.output import console, progress_bar, write_json

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLE = "Example:  thermocline demo"

ROWS, DIM, BATCH, POOLING, STEPS = 20_000, 64, 256, 8, 300
PRECISIONS = ("fp32", "bf16", "fp8", "int8", "int4", "int2")


class Outcome(NamedTuple):
    """One table, trained: its bytes, how far its rows are from the truth, and how long a step took."""

    bytes: int
    error: float
    nearest_error: float
    step_ms: float


def demo(json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Show in a few minutes, on any machine, what this version can do."""
    outcomes = {}
    with progress_bar(quiet) as progress:
        for done, precision in enumerate(PRECISIONS):
            progress(done, len(PRECISIONS), precision)
            outcomes[precision] = _train(precision)
    if json:
        write_json({precision: outcome._asdict() for precision, outcome in outcomes.items()}, json)
    if json != "-" and not quiet:
        _print(outcomes)


def _print(outcomes: Mapping[str, Outcome]) -> None:
    out = console()
    out.print(summary(examine()))
    out.print(
        f"\nOne table of {ROWS:,} rows x {DIM}, trained for {STEPS} steps in each precision to find hidden rows from pooled"
        " sums of them. Ids are skewed: a few rows take most of the lookups. The first run compiles the CPU kernels."
    )
    table = Table("precision", "bytes", "of fp32", "error", "error if rounded to nearest", "ms a step")
    baseline = outcomes["fp32"].bytes
    for precision, outcome in outcomes.items():
        table.add_row(
            precision,
            f"{outcome.bytes:,}",
            f"1/{baseline / outcome.bytes:.1f}",
            f"{outcome.error:.4f}",
            "-" if precision == "fp32" else f"{outcome.nearest_error:.4f}",
            f"{outcome.step_ms:.2f}",
        )
    out.print(table)
    out.print(
        "Error: root mean square distance from the truth over the rows looked up, weighted by lookups (untrained: 0.577)."
        " Rows are trained in the precision they are stored in. Below int8 the rounding begins to cost; int2 is for cold rows"
        " only, under a full-precision cache."
    )


def _train(precision: str) -> Outcome:
    error, size, step_ms = _run(precision, stochastic=True)
    nearest, _, _ = _run(precision, stochastic=False) if precision != "fp32" else (error, 0, 0.0)
    return Outcome(size, error, nearest, step_ms)


def _run(precision: str, stochastic: bool) -> tuple[float, int, float]:
    """(error, bytes, median milliseconds of a step) of training one table."""
    import torch

    from thermocline import Arena, RowwiseAdagrad, TableSpec, Trainer, lookup

    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(ROWS, DIM, generator=generator) * 2 - 1
    arena = Arena([TableSpec(ROWS, DIM, precision, "demo")])
    trainer = Trainer(arena, RowwiseAdagrad(lr=0.1), stochastic=stochastic)
    offsets = torch.arange(0, BATCH * POOLING + 1, POOLING)
    counts, times = torch.zeros(ROWS), []
    for _ in range(STEPS):
        ids = _skewed(generator)
        counts += torch.bincount(ids, minlength=ROWS)
        target = truth[ids].view(BATCH, POOLING, DIM).sum(1)
        start = time.perf_counter()
        out = lookup(arena, ids, offsets, trainer=trainer)
        ((out - target) ** 2).mean().mul(BATCH).backward()
        times.append((time.perf_counter() - start) * 1e3)
    distance = (arena.read(0) - truth).square().mean(1)
    error = float((distance * counts).sum() / counts.sum()) ** 0.5
    return error, arena.bytes, sorted(times)[len(times) // 2]


def _skewed(generator: object) -> Tensor:
    import torch

    uniform = torch.rand(BATCH * POOLING, generator=generator)  # type: ignore[call-overload]
    ids: Tensor = (uniform**6 * ROWS).long()
    return ids
