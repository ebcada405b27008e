"""Options shared by several commands."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from thermocline.errors import BadInput

DeviceName = Literal["cpu", "cuda"]
T = TypeVar("T", str, Path)


def check_file(target: T | None) -> T | None:
    """Check, before a long run, that its result can be written to the file `target`."""
    if target is None or str(target) == "-":
        return target
    path = Path(target).resolve()
    if path.is_dir():
        raise typer.BadParameter(f"'{target}' is a folder; name a file, such as '{Path(target) / 'result'}'")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder of '{target}' does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"'{target}' cannot be written; check the permissions of {_name(path)}")
    return target


def check_folder(target: Path | None) -> Path | None:
    """Check, before a long run, that a folder can be written, or made with its parents."""
    if target is None:
        return target
    there = next(each for each in (target.resolve(), *target.resolve().parents) if each.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"'{target}' cannot be a folder, because '{there}' is a file")
    if not os.access(there, os.W_OK):
        raise typer.BadParameter(f"'{target}' cannot be written; check the permissions of {_name(there)}")
    return target


def _name(path: Path) -> str:
    return f"the file '{path}'" if path.is_file() else f"the folder '{path if path.is_dir() else path.parent}'"


Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", callback=check_file, help="Write the result as JSON ('-' = stdout)."),
]
Page = Annotated[
    Path | None, typer.Option("--report", metavar="FILE.html", callback=check_file, help="Write an HTML report with charts.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only problems.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[DeviceName | None, typer.Option("--device", help="Run on this device only.")]


def command_group(help: str, example: str) -> typer.Typer:
    """A command with subcommands, whose help ends with an example."""
    return typer.Typer(help=help, epilog=f"Example:  {example}", no_args_is_help=True)


def column_names(columns: str, parameter: str = "columns") -> list[str]:
    """Comma-separated names; C1..C26 is a range."""
    names: list[str] = []
    for word in filter(None, (word.strip() for word in columns.split(","))):
        ends = re.fullmatch(r"(.*?)(\d+)\.\.(.*?)(\d+)", word)
        if ends is None:
            names.append(word)
        elif ends[1] != ends[3] or int(ends[2]) > int(ends[4]):
            raise BadInput(f"'{word}' is not a range of columns; write it as C1..C26", parameter=parameter, value=word)
        else:
            names += [f"{ends[1]}{number}" for number in range(int(ends[2]), int(ends[4]) + 1)]
    return names
