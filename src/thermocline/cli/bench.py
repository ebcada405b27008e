"""`thermocline bench NAME` measures; `thermocline bench show` prints and checks what was measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from thermocline.cli.options import Debug, Device, DeviceName, Json, Quiet
from thermocline.cli.output import console, progress_bar, write_json
from thermocline.errors import BadInput

if TYPE_CHECKING:
    from thermocline.bench.cases import Plan

app = typer.Typer(
    help="Measure against peers, and show what was measured.",
    epilog="Example:  thermocline bench kernels --quick --json kernels.json",
    no_args_is_help=True,
)

SYNTHETIC = "synthetic"
DEFAULT_ASKED = Path("benchmarks/asked.json")
DEFAULT_DATA = Path("../shared/data")

# Of benchmarks that train on a log.
Data = Annotated[str, typer.Option("--data", metavar="FILE", help="Criteo TSV or Parquet, or MovieLens pairs; or 'synthetic'.")]
Test = Annotated[Path | None, typer.Option("--test", metavar="FILE", help="To judge on; without it, the last 20% of --data.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Training samples of the synthetic log.")]
SyntheticRows = Annotated[int, typer.Option("--rows", min=26, help="Rows of the synthetic log, in all tables.")]


Filter = Annotated[str | None, typer.Option("--filter", help="Only cases whose name contains this.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, few repeats: a smoke test.")]
SmokeTest = Annotated[bool, typer.Option("--quick", help="Small tables, on a CPU too: a smoke test.")]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Measure the peers in the same run.")]
PeerPython = Annotated[
    Path | None,
    typer.Option("--peer-python", help="Python of the environment with the peers.", exists=True, dir_okay=False),
]


@app.command(epilog="Example:  thermocline bench kernels --device cpu --filter int8 --json kernels_cpu.json")
def kernels(
    device: Device = None,
    filter: Filter = None,
    quick: Quick = False,
    peers: Peers = True,
    peer_python: PeerPython = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time every kernel next to its peers. Without --device, on every device found."""
    from thermocline.bench import cases

    _race(cases.KERNELS, device, filter, quick, peers, peer_python, json, quiet)


@app.command(epilog="Example:  thermocline bench step --device cpu --filter 26x100k --json step_cpu.json")
def step(
    device: Device = None,
    filter: Filter = None,
    quick: Quick = False,
    peers: Peers = True,
    peer_python: PeerPython = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time whole training steps of rows with a cache, upkeep included, next to full-precision peers without one."""
    from thermocline.bench import cases

    _race(cases.STEPS, device, filter, quick, peers, peer_python, json, quiet)


@app.command(epilog="Example:  thermocline bench memory --device cpu --json memory.json")
def memory(device: Device = None, json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Compare the bytes of tables with those of fp32 rows, and `memory()` with what is allocated."""
    from thermocline.bench import kernels
    from thermocline.bench import memory as bench

    with progress_bar(quiet) as progress:
        measured = bench.run(kernels.devices(device.value if device else None), progress)
    _hand_out(measured, json, quiet)


@app.command(epilog="Example:  thermocline bench hits --data log.parquet --json hits.json")
def hits(
    data: Annotated[
        list[Path], typer.Option("--data", metavar="FILE", help="Parquet with C1 to C26, or item and user; may be repeated.")
    ],
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Replay real logs through the cache and through the best possible one. With --json, a plot is written beside it."""
    from thermocline.bench import hits as bench
    from thermocline.bench import hits_plot

    with progress_bar(quiet) as progress:
        measured = bench.run(data, progress)
    _hand_out(measured, json, quiet)
    if json and json != "-":
        Path(json).with_suffix(".svg").write_text(hits_plot.draw(measured), encoding="utf-8")


def _race(
    plan: Plan, device: DeviceName | None, filter: str | None, quick: bool, peers: bool, peer_python: Path | None,
    json: str | None, quiet: bool,
) -> None:  # fmt: skip
    """Measure a plan next to its peers, and hand the record out."""
    from thermocline.bench import kernels as bench

    with progress_bar(quiet) as progress:
        measured = bench.run(
            device=device.value if device else None,
            filter=filter,
            quick=quick,
            peers=peers,
            peer_python=peer_python,
            progress=progress,
            plan=plan,
        )
    _hand_out(measured, json, quiet)


def _hand_out(measured: dict[str, Any], json: str | None, quiet: bool) -> None:
    """The record as JSON where one is asked for, and as a table."""
    from thermocline.bench import show

    if json:
        write_json(measured, json)
    if json != "-":
        console().print(show.table(show.parse(measured, "this run"), only_short=quiet))


@app.command(epilog="Example:  thermocline bench accuracy --data train.parquet --dim 16 --json accuracy.json")
def accuracy(
    data: Data = SYNTHETIC,
    test: Test = None,
    samples: Samples = 400_000,
    rows: SyntheticRows = 100_000,
    dim: Annotated[list[int] | None, typer.Option("--dim", min=1, help="Columns of a row; may be repeated. [16, 64]")] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Paired runs of each arm. [10; 20 for MovieLens and int2]")
    ] = None,
    whole_grid: Annotated[
        bool, typer.Option("--all", help="Every precision, rounding and cache size, not only what is asked for.")
    ] = False,
    filter: Annotated[
        str | None, typer.Option("--filter", help="Only arms whose name contains this, of all, next to fp32.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at a time, one thread each (cores; 1 on a card).")
    ] = None,
    device: Device = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a DLRM with tables of low precision and with fp32 ones, paired by seed, and judge the differences.

    With --json, finished runs are kept beside FILE: Ctrl-C is safe, the same command goes on, and a picture (.svg) is drawn.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as in `thermocline train`
    from thermocline.bench import accuracy as bench
    from thermocline.bench import accuracy_rows, paired, pareto, record
    from thermocline.train import Settings

    file, name = None if data == SYNTHETIC else Path(data), device.value if device else "cpu"
    log = Settings(data=file, test=test, samples=samples, rows=rows, device=name)
    plan = bench.Plan(log, tuple(dim or bench.DIMS), seeds, whole_grid, filter)
    at_once = jobs or (record.cores() if name == "cpu" else 1)
    with progress_bar(quiet) as progress:
        measured = bench.run(plan, paired.runs_file(json), at_once, progress)
    if json:
        write_json(measured, json)
    if json and json != "-":
        Path(json).with_suffix(".svg").write_text(pareto.draw(measured), encoding="utf-8")
    if json != "-":
        console().print(accuracy_rows.table(measured, only_short=quiet))


@app.command(epilog="Example:  thermocline bench levers --data train.parquet --filter 1in8 --json levers.json")
def levers(
    data: Data = SYNTHETIC,
    test: Test = None,
    samples: Samples = 400_000,
    rows: SyntheticRows = 100_000,
    dim: Annotated[list[int] | None, typer.Option("--dim", min=1, help="Columns of a row; may be repeated. [16]")] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Paired runs of each arm.")] = 10,
    filter: Annotated[
        str | None, typer.Option("--filter", help="Only arms whose name contains this, next to those they are compared with.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Runs at a time, one thread each. [cores]")] = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a DLRM with fewer rows, chosen by heat or cut evenly, and with all of them, paired by seed. On a CPU.

    With --json, finished runs are kept beside FILE: Ctrl-C is safe, and the same command goes on.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as in `thermocline train`
    from thermocline.bench import levers as bench
    from thermocline.bench import levers_rows, paired, record
    from thermocline.train import Settings

    log = Settings(data=None if data == SYNTHETIC else Path(data), test=test, samples=samples, rows=rows)
    plan = bench.Plan(log, tuple(dim or bench.DIMS), seeds, filter)
    with progress_bar(quiet) as progress:
        measured = bench.run(plan, paired.runs_file(json), jobs or record.cores(), progress)
    if json:
        write_json(measured, json)
    if json != "-":
        console().print(levers_rows.table(measured, only_short=quiet))


@app.command(epilog="Example:  thermocline bench quality --json quality.json")
def quality(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Paired runs of each arm.")] = 10,
    filter: Annotated[
        str | None, typer.Option("--filter", help="Only arms whose name contains this, of all, next to fp32.")
    ] = None,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train with int8 rows, bf16 gradients and tiers, and with fp32 rows, on two processes; judge what was learned.

    With --json, finished runs are kept beside FILE: Ctrl-C is safe, and the same command goes on.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as in `thermocline train`
    from thermocline.bench import paired
    from thermocline.bench import quality as bench

    with progress_bar(quiet) as progress:
        measured = bench.run(bench.Plan(seeds, filter, quick), paired.runs_file(json), progress)
    if json:
        write_json(measured, json)
    if json != "-":
        console().print(bench.table(measured, only_short=quiet))


def _card(what: str, quick: bool) -> str:
    """The device of a benchmark that only a card can really run."""
    import torch

    if not torch.cuda.is_available() and not quick:
        raise BadInput(f"{what} a CUDA card, and torch finds none here; --quick tries it out on the CPU")
    return "cuda" if torch.cuda.is_available() else "cpu"


@app.command(epilog="Example:  thermocline bench capacity --json capacity.json")
def capacity(
    quick: SmokeTest = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train as many rows as one card holds, and time steps on tables of 10M to 3,000M rows."""
    from thermocline.bench import capacity as bench

    device = _card("capacity is measured on", quick)
    with progress_bar(quiet) as progress:
        measured = bench.run(device, bench.QUICK if quick else bench.SIZES, progress, judged=not quick)
    _hand_out(measured, json, quiet)


@app.command(epilog="Example:  thermocline bench host --filter /B/ --json host.json")
def host(
    filter: Filter = None,
    quick: SmokeTest = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time training steps on tables in host memory, next to FBGEMM's with the same bytes on the card."""
    from thermocline.bench import cases
    from thermocline.bench import host as bench

    device = _card("tables in host memory are for", quick)
    shapes = [shape.quick() if quick else shape for shape in cases.GPU_SHAPES]
    with progress_bar(quiet) as progress:
        measured = bench.run(device, shapes, filter, not quick, progress)
    _hand_out(measured, json, quiet)


@app.command(epilog="Example:  thermocline bench train --json train.json")
def train(
    quick: SmokeTest = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a DLRM end to end on tables in host memory: int8 and int4 rows against fp32 rows, at the same bytes on the card."""
    from thermocline.bench import cases
    from thermocline.bench import train as bench

    device = _card("tables in host memory are for", quick)
    with progress_bar(quiet) as progress:
        measured = bench.run(device, bench.QUICK_SHAPE if quick else cases.A, not quick, progress)
    _hand_out(measured, json, quiet)


@app.command(epilog="Example:  thermocline bench plan --data logs --json plan.json")
def plan(
    data: Annotated[
        Path, typer.Option("--data", metavar="FOLDER", envvar="THERMOCLINE_DATA", help="Real logs, to replay the balance on.")
    ] = DEFAULT_DATA,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Plan for 4,096 cards against the clock, and replay real logs on what plans place where."""
    from thermocline.bench import plan as bench

    with progress_bar(quiet) as progress:
        measured = bench.run(data, quick, progress)
    _hand_out(measured, json, quiet)


@app.command(epilog="Example:  thermocline bench checkpoint --json checkpoint.json")
def checkpoint(
    rows: Annotated[int, typer.Option("--rows", min=1000, help="Rows of 64 columns in int8, in all tables.")] = 8_000_000,
    folder: Annotated[Path | None, typer.Option("--folder", help="On the disk to measure.", show_default="temporary")] = None,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time saving and loading next to torch.save and DCP, steps while a save is written, and bytes of incremental saves."""
    import tempfile

    from thermocline.bench import checkpoint as bench

    with tempfile.TemporaryDirectory(dir=folder) as place, progress_bar(quiet) as progress:
        measured = bench.run(20_000 if quick else rows, Path(place), progress, quick)
    _hand_out(measured, json, quiet)


@app.command(epilog="Example:  thermocline bench crash --kills 200 --json crash.json")
def crash(
    kills: Annotated[int, typer.Option("--kills", min=1, help="How often.")] = 200,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Kill ranks at random moments of saves and steps, and see whether every resume equals the run without kills."""
    import tempfile

    from thermocline.bench import crash as bench

    with tempfile.TemporaryDirectory() as place, progress_bar(quiet) as progress:
        measured = bench.run(kills, Path(place), progress)
    _hand_out(measured, json, quiet)


@app.command(epilog="Example:  thermocline bench serve --device cuda --filter /B/ --json serve_gpu.json")
def serve(
    data: Annotated[
        Path, typer.Option("--data", metavar="FOLDER", envvar="THERMOCLINE_DATA", help="Real logs, to replay the balance on.")
    ] = DEFAULT_DATA,
    kserve_python: Annotated[
        Path | None,
        typer.Option(
            "--kserve-python", envvar="THERMOCLINE_KSERVE_PYTHON", exists=True, help="Python of an environment with KServe."
        ),
    ] = None,
    mlserver_python: Annotated[
        Path | None,
        typer.Option(
            "--mlserver-python", envvar="THERMOCLINE_MLSERVER_PYTHON", exists=True, help="Python of one with MLServer."
        ),
    ] = None,
    device: Device = None,
    filter: Filter = None,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Look rows up on 2, 4 and 8 cards against one, load checkpoints against the clock, replay logs, race other servers."""
    from thermocline.bench import serve as bench

    peers = {"kserve": kserve_python, "mlserver": mlserver_python}
    with progress_bar(quiet) as progress:
        measured = bench.run(device.value if device else "cpu", data, filter, quick, progress=progress, peers=peers)
    _hand_out(measured, json, quiet)


@app.command(epilog="Example:  thermocline bench exchange --only 2x2 --only globo --json exchange.json")
def exchange(
    data: Annotated[
        Path, typer.Option("--data", metavar="FOLDER", envvar="THERMOCLINE_DATA", help="Real logs, to measure on.")
    ] = DEFAULT_DATA,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Only runs whose name contains this, as 4x2, 1in9, zipf-1.2 or /P3/; may be repeated."),
    ] = None,
    peer_python: PeerPython = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train sharded tables over real sockets between nodes whose links are shaped, and compare ways to shard. Needs root.

    With --json, finished runs are kept beside FILE: Ctrl-C is safe, and the same command goes on.
    """
    from thermocline.bench import exchange as bench
    from thermocline.bench import paired

    with progress_bar(quiet) as progress:
        measured = bench.run(bench.Plan(data, tuple(only or ())), paired.runs_file(json), peer_python, progress)
    _hand_out(measured, json, quiet)


@app.command(epilog="Example:  thermocline bench chaos --minutes 10 --json chaos.json")
def chaos(
    minutes: Annotated[float, typer.Option("--minutes", min=0.05, help="How long; judged from 10 on.")] = 10.0,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Load a server while cards die, versions change, and bursts and malformed requests come; check every answer."""
    from thermocline.bench import chaos as bench

    with progress_bar(quiet) as progress:
        measured = bench.run(minutes, progress)
    _hand_out(measured, json, quiet)


@app.command(name="show", epilog="Example:  thermocline bench show benchmarks/results/*.json --check")
def show_files(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Results that --json wrote.")],
    check: Annotated[
        bool, typer.Option("--check", help="Leave with 1 if a row falls short or an asked case is missing.")
    ] = False,
    asked: Annotated[Path, typer.Option("--asked", metavar="FILE", help="The cases asked for.")] = DEFAULT_ASKED,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Print a table for each file of results, with the rows that fall short marked."""
    from thermocline.bench import show

    reports = [show.load(path) for path in files]
    problems = show.problems(reports, show.load_asked(asked)) if check else []
    if json:
        write_json({"checked": check, "problems": problems, "reports": [report.summary() for report in reports]}, json)
    if json != "-":
        out = console()
        for report in reports:
            out.print(show.table(report, only_short=quiet))
        for problem in problems:
            out.print(f"[bold red]short[/] {escape(problem)}", soft_wrap=True)
        if check and not problems:
            out.print("all asked cases are there, and every row holds")
    if problems:
        raise typer.Exit(1)
