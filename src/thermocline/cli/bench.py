"""`thermocline bench NAME` measures; `thermocline bench show` prints and checks what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from thermocline.cli.options import Debug, Device, Json, Quiet
from thermocline.cli.output import console, progress_bar, write_json

app = typer.Typer(
    help="Measure against peers, and show what was measured.",
    epilog="Example:  thermocline bench kernels --quick --json kernels.json",
    no_args_is_help=True,
)

DEFAULT_ASKED = Path("benchmarks/asked.json")


Filter = Annotated[str | None, typer.Option("--filter", help="Only cases whose name contains this.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, few repeats: a smoke test.")]
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
    from thermocline.bench import kernels as bench

    with progress_bar(quiet) as progress:
        measured = bench.run(
            device=device.value if device else None,
            filter=filter,
            quick=quick,
            peers=peers,
            peer_python=peer_python,
            progress=progress,
            plan=cases.KERNELS,
        )
    _hand_out(measured, json, quiet)


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
    from thermocline.bench import kernels as bench

    with progress_bar(quiet) as progress:
        measured = bench.run(
            device=device.value if device else None,
            filter=filter,
            quick=quick,
            peers=peers,
            peer_python=peer_python,
            progress=progress,
            plan=cases.STEPS,
        )
    _hand_out(measured, json, quiet)


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


def _hand_out(measured: dict[str, Any], json: str | None, quiet: bool) -> None:
    """The record as JSON where one is asked for, and as a table."""
    from thermocline.bench import show

    if json:
        write_json(measured, json)
    if json != "-":
        console().print(show.table(show.parse(measured, "this run"), only_short=quiet))


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
