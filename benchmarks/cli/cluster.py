"""Commands for plans, the exchange between ranks, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thermocline.cli.options import Debug, Json, Quiet

from .shared import DEFAULT_DATA, Filter, Logs, PeerPython, Quick, app, measure


@app.command(epilog="Example:  python -m benchmarks plan --data logs --json plan.json")
def plan(
    data: Logs = DEFAULT_DATA,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time plans for 4,096 GPUs, and replay real logs on their placements."""
    from benchmarks.plan import benchmark as bench

    measure(json, quiet, lambda progress: bench.run(data, quick, progress))


@app.command(epilog="Example:  python -m benchmarks exchange --only 2x2 --only globo --json exchange.json")
def exchange(
    data: Logs = DEFAULT_DATA,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", help="Only runs whose name contains this, for example 4x2, 1in9, zipf-1.2 or /P3/; may be repeated."
        ),
    ] = None,
    peer_python: PeerPython = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train sharded tables over real sockets with shaped links, and compare sharding plans. Needs root.

    With --json, finished runs are kept beside FILE: after Ctrl-C the same command continues.
    """
    from benchmarks.exchange import benchmark as bench
    from benchmarks.runner import paired

    plan, kept = bench.ExchangePlan(data, tuple(only or ())), paired.runs_file(json)
    measure(json, quiet, lambda progress: bench.run(plan, kept, peer_python, progress))


@app.command(epilog="Example:  python -m benchmarks plan-runs --runs 40 --json plan_runs.json")
def plan_runs(
    runs: Annotated[int, typer.Option("--runs", min=1, help="Number of random cases.")] = 40,
    first: Annotated[int, typer.Option("--first", min=0, help="Number of the first case.")] = 0,
    peer_python: PeerPython = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare predictions of plans with runs of random tables over shaped links, and with TorchRec's planner. Needs root.

    With --json, finished runs are kept beside FILE: after Ctrl-C the same command continues.
    """
    from benchmarks.plan_runs import benchmark as bench
    from benchmarks.runner import paired

    kept = paired.runs_file(json)
    measure(json, quiet, lambda progress: bench.run(runs, first, kept, peer_python, progress))


@app.command(epilog="Example:  python -m benchmarks exchange-step --traces traces --json exchange_step.json")
def exchange_step(
    filter: Filter = None,
    traces: Annotated[Path | None, typer.Option("--traces", help="Folder for a Chrome trace of each case.")] = None,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time the sharded step of 1, 2, 4 and 8 ranks that share a GPU against the unsharded step."""
    from benchmarks.exchange import device_step as bench

    measure(json, quiet, lambda progress: bench.run(quick, traces, filter, progress))


@app.command(epilog="Example:  python -m benchmarks checkpoint --json checkpoint.json")
def checkpoint(
    rows: Annotated[int, typer.Option("--rows", min=1000, help="Rows of all tables together (64 columns, int8).")] = 8_000_000,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder on the disk to measure.", show_default="temporary")
    ] = None,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time saves and loads against torch.save and DCP, steps during a save, and bytes of incremental saves."""
    import tempfile

    from benchmarks.checkpoint import benchmark as bench

    rows = 20_000 if quick else rows
    with tempfile.TemporaryDirectory(dir=folder) as place:
        measure(json, quiet, lambda progress: bench.run(rows, Path(place), progress, quick))


@app.command(epilog="Example:  python -m benchmarks crash --kills 200 --json crash.json")
def crash(
    kills: Annotated[int, typer.Option("--kills", min=1, help="Number of kills.")] = 200,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Kill ranks at random moments of saves and steps, and compare every resumed run with a run without kills."""
    import tempfile

    from benchmarks.checkpoint import crash as bench

    with tempfile.TemporaryDirectory() as place:
        measure(json, quiet, lambda progress: bench.run(kills, Path(place), progress))
