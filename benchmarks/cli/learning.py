"""Commands for paired training experiments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from thermocline.cli.options import Debug, Device, Json, Quiet
from thermocline.errors import BadInput

from .shared import DEFAULT_DATA, Logs, Quick, app, measure

SYNTHETIC = "synthetic"

Data = Annotated[str, typer.Option("--data", metavar="FILE", help="Criteo TSV or Parquet, or MovieLens pairs; or 'synthetic'.")]
Test = Annotated[
    Path | None, typer.Option("--test", metavar="FILE", help="Log to evaluate on (default: the last 20% of --data).")
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Training samples of the synthetic log.")]
SyntheticRows = Annotated[int, typer.Option("--rows", min=26, help="Rows of the synthetic log, in all tables.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Paired runs of each arm.")]


@app.command(epilog="Example:  python -m benchmarks accuracy --data train.parquet --dim 16 --json accuracy.json")
def accuracy(
    data: Data = SYNTHETIC,
    test: Test = None,
    samples: Samples = 400_000,
    rows: SyntheticRows = 100_000,
    dim: Annotated[
        list[int] | None, typer.Option("--dim", min=1, help="Embedding dimension; may be repeated. [16, 64]")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Paired runs of each arm. [10; 20 for MovieLens and int2]")
    ] = None,
    whole_grid: Annotated[
        bool, typer.Option("--all", help="Every precision, rounding and cache size, not only the required arms.")
    ] = False,
    filter: Annotated[str | None, typer.Option("--filter", help="Only arms whose name contains this, and fp32.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Concurrent runs, one thread each (default: cores; 1 on a GPU).")
    ] = None,
    device: Device = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a DLRM with low-precision tables and with fp32 tables, paired by seed, and judge the differences.

    With --json, finished runs are kept beside FILE: after Ctrl-C the same command continues. A picture (.svg) is drawn.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as in `thermocline train`
    from benchmarks.accuracy import benchmark as bench
    from benchmarks.accuracy import pareto
    from benchmarks.accuracy import rows as accuracy_rows
    from benchmarks.runner import paired, record
    from thermocline.train import DLRMSettings

    file, name = None if data == SYNTHETIC else Path(data), device or "cpu"
    log = DLRMSettings(data=file, test=test, samples=samples, rows=rows, device=name)
    plan = bench.AccuracyPlan(log, tuple(dim or bench.DIMS), seeds, whole_grid, filter)
    at_once = jobs or (record.cores() if name == "cpu" else 1)
    kept = paired.runs_file(json)
    measure(json, quiet, lambda progress: bench.run(plan, kept, at_once, progress), accuracy_rows.table, pareto.draw)


@app.command(epilog="Example:  python -m benchmarks levers --data train.parquet --filter 1in8 --json levers.json")
def levers(
    data: Data = SYNTHETIC,
    test: Test = None,
    samples: Samples = 400_000,
    rows: SyntheticRows = 100_000,
    dim: Annotated[list[int] | None, typer.Option("--dim", min=1, help="Embedding dimension; may be repeated. [16]")] = None,
    seeds: Seeds = 10,
    filter: Annotated[
        str | None, typer.Option("--filter", help="Only arms whose name contains this, and the arms they are compared with.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Concurrent runs, one thread each. [cores]")] = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a DLRM with fewer rows, chosen by heat or cut evenly, and with all rows, paired by seed. CPU only.

    With --json, finished runs are kept beside FILE: after Ctrl-C the same command continues.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as in `thermocline train`
    from benchmarks.levers import benchmark as bench
    from benchmarks.levers import rows as levers_rows
    from benchmarks.runner import paired, record
    from thermocline.train import DLRMSettings

    log = DLRMSettings(data=None if data == SYNTHETIC else Path(data), test=test, samples=samples, rows=rows)
    plan = bench.LeversPlan(log, tuple(dim or bench.DIMS), seeds, filter)
    kept, at_once = paired.runs_file(json), jobs or record.cores()
    measure(json, quiet, lambda progress: bench.run(plan, kept, at_once, progress), levers_rows.table)


@app.command(epilog="Example:  python -m benchmarks quality --json quality.json")
def quality(
    seeds: Seeds = 10,
    filter: Annotated[str | None, typer.Option("--filter", help="Only arms whose name contains this, and fp32.")] = None,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train with int8 rows, bf16 gradients and tiers, and with fp32 rows, on two ranks; judge the metrics.

    With --json, finished runs are kept beside FILE: after Ctrl-C the same command continues.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as in `thermocline train`
    from benchmarks.quality import benchmark as bench
    from benchmarks.runner import paired

    plan, kept = bench.QualityPlan(seeds, filter, quick), paired.runs_file(json)
    measure(json, quiet, lambda progress: bench.run(plan, kept, progress), bench.table)


@app.command(epilog="Example:  python -m benchmarks online --log globo --json online.json")
def online(
    data: Logs = DEFAULT_DATA,
    log: Annotated[
        list[str] | None, typer.Option("--log", help="globo, diginetica or criteo; may be repeated. [all that are in FOLDER]")
    ] = None,
    seeds: Seeds = 10,
    filter: Annotated[str | None, typer.Option("--filter", help="Only arms whose name contains this, and the ceiling.")] = None,
    share: Annotated[float, typer.Option("--share", min=0.001, max=1.0, help="Part of each log, from its beginning.")] = 1.0,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Concurrent runs, one thread each.")] = 1,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Predict each period of real logs, then train on it, with several ways to find rows for ids, paired by seed. CPU only.

    Arms with TorchRec's managed collisions run in an environment that has TorchRec (CONTRIBUTING.md). With --json, finished
    runs are kept beside FILE: after Ctrl-C the same command continues.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as in `thermocline train`
    from benchmarks.online import benchmark as bench
    from benchmarks.online import logs
    from benchmarks.runner import paired

    if unknown := set(log or ()) - set(logs.FILES):
        raise BadInput(f"--log is {', '.join(sorted(unknown))}; use {', '.join(logs.FILES)}", parameter="log")
    plan, kept = bench.OnlinePlan(data, tuple(log or logs.FILES), seeds, filter, share), paired.runs_file(json)
    measure(json, quiet, lambda progress: bench.run(plan, kept, jobs, progress), bench.table)


@app.command(epilog="Example:  python -m benchmarks zoo --json zoo.json")
def zoo(
    seeds: Seeds = 5,
    filter: Annotated[str, typer.Option("--filter", help="Only models whose name contains this.")] = "",
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train models of other libraries, converted and unconverted, paired by seed. CPU only.

    Their libraries must be installed (docs/zoo.md). With --json, finished runs are kept beside FILE: after Ctrl-C the same
    command continues.
    """
    from benchmarks.runner import paired
    from benchmarks.zoo import benchmark as bench

    kept = paired.runs_file(json)
    measure(json, quiet, lambda progress: bench.run(filter, seeds, kept, progress), bench.table)
