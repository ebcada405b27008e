"""`thermocline demo`: the whole story on one small machine, from a log to a server. `make demo` runs it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .options import Debug, Json, Quiet
from .output import console, progress_bar, write_json

EXAMPLE = "Example:  thermocline demo --data day_0.parquet"


def demo(
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", exists=True, help="A log in Criteo's columns; without it, a synthetic one."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where everything goes; what is there goes on.")
    ] = Path("demo_out"),
    small: Annotated[bool, typer.Option("--small", help="Sizes for a test of the demo itself.")] = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Log, heat, plan, training on four processes, serving over four cards, and a report, next to an fp32 baseline.

    Takes a few minutes on two cores and no network. Ctrl-C is safe: the same command goes on with the stage that had not ended.
    """
    from thermocline.demo.query_server import check_installed
    from thermocline.demo.story import SMALL, Sizes, tell

    check_installed()
    sizes = SMALL if small else Sizes(None if data is None else str(data))
    out = console()
    with progress_bar(quiet) as progress, _ended_politely():
        found = tell(output, sizes, lambda line: None if quiet or json == "-" else out.print(line, markup=False), progress)
    if json:
        write_json(found, json)
    if json != "-" and not quiet:
        out.print(_table(found["table"]))
        out.print(f"report: {found['report']}", markup=False, soft_wrap=True)


def _table(rows: Sequence[Sequence[str]]) -> Table:
    from thermocline.demo.report import HEADS

    table = Table(*HEADS, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def _ended_politely() -> Iterator[None]:
    """SIGTERM as Ctrl-C, so that the processes that were started end with this one."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
