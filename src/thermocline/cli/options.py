"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

DeviceName = Literal["cpu", "cuda"]
T = TypeVar("T", str, Path)


def check_folder(target: T | None) -> T | None:
    """Check, before a long run, that the folder of its result exists."""
    if target is not None and str(target) != "-" and not Path(target).resolve().parent.is_dir():
        raise typer.BadParameter(f"the folder of '{target}' does not exist")
    return target


Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", callback=check_folder, help="Write the result as JSON ('-' = stdout)."),
]
Page = Annotated[
    Path | None, typer.Option("--report", metavar="FILE.html", callback=check_folder, help="Write an HTML report with charts.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only problems.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[DeviceName | None, typer.Option("--device", help="Run on this device only.")]


def command_group(help: str, example: str) -> typer.Typer:
    """A command with subcommands, whose help ends with an example."""
    return typer.Typer(help=help, epilog=f"Example:  {example}", no_args_is_help=True)
