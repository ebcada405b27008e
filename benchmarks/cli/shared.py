"""Shared options of the commands, and how a command runs a benchmark and writes its record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from thermocline.cli.output import ReportProgress, console, progress_bar, write_json

app = typer.Typer(
    help="Run benchmarks against peers, and show results.",
    epilog="Example:  python -m benchmarks kernels --quick --json kernels.json",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)

DEFAULT_DATA = Path("../shared/data")

Filter = Annotated[str | None, typer.Option("--filter", help="Only cases whose name contains this.")]
Logs = Annotated[Path, typer.Option("--data", metavar="FOLDER", envvar="THERMOCLINE_DATA", help="Folder with real logs.")]
PeerPython = Annotated[
    Path | None,
    typer.Option("--peer-python", help="Python of an environment with the peers.", exists=True, dir_okay=False),
]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, few repeats: a smoke test.")]

Record = dict[str, Any]


def measure(
    json: str | None,
    quiet: bool,
    run: Callable[[ReportProgress], Record],
    table: Callable[[Record, bool], Table] | None = None,
    picture: Callable[[Record], str] | None = None,
) -> None:
    """Run a benchmark with a progress bar; write its record as JSON, with a picture beside it, and print a table."""
    with progress_bar(quiet) as progress:
        measured = run(progress)
    if json:
        write_json(measured, json)
    if picture and json and json != "-":
        Path(json).with_suffix(".svg").write_text(picture(measured), encoding="utf-8")
    if json != "-":
        console().print((table or _table)(measured, quiet))


def _table(measured: Record, only_short: bool) -> Table:
    from benchmarks.runner import show

    return show.table(show.parse(measured, "this run"), only_short=only_short)
