"""`python -m examples.demo`: from a log to a server on one small machine. `make demo` runs it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from thermocline.cli import main
from thermocline.cli.options import Debug, Json, Quiet
from thermocline.cli.output import console, progress_bar, write_json

from .pipeline import SMALL, DemoSizes, run_demo
from .query_server import check_installed
from .report import HEADS

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(epilog="Example:  python -m examples.demo --data day_0.parquet")
def demo(
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", exists=True, help="Click log with Criteo's columns. [default: a synthetic log]"),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Output folder; an interrupted demo continues there.")
    ] = Path("demo_out"),
    small: Annotated[bool, typer.Option("--small", help="Small sizes, for testing the demo.")] = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run log, heat, plan, training on four processes, serving from four shards, and a report, beside an fp32 baseline.

    Takes a few minutes on two cores, without network. After Ctrl-C, the same command continues with the interrupted stage.
    """
    check_installed()
    sizes = SMALL if small else DemoSizes(None if data is None else str(data))
    out = console()
    with progress_bar(quiet) as progress, _sigterm_as_interrupt():
        found = run_demo(output, sizes, lambda line: None if quiet or json == "-" else out.print(line, markup=False), progress)
    if json:
        write_json(found, json)
    if json != "-" and not quiet:
        out.print(_table(found["table"]))
        out.print(f"report: {found['report']}", markup=False, soft_wrap=True)


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*HEADS, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that child processes end too."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main(app, "examples.demo")
