"""Options that several verbs share, so that they read the same everywhere."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, TypeVar

import typer


class DeviceName(str, Enum):
    """Where to run."""

    cpu = "cpu"
    cuda = "cuda"


T = TypeVar("T", str, Path)


def check_folder(target: T | None) -> T | None:
    """Fail before a long run, not after it, when its result would have no place to go."""
    if target is not None and str(target) != "-" and not Path(target).resolve().parent.is_dir():
        raise typer.BadParameter(f"the folder of '{target}' does not exist")
    return target


Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", callback=check_folder, help="Write the result as JSON ('-' = stdout)."),
]
Page = Annotated[
    Path | None, typer.Option("--report", metavar="FILE.html", callback=check_folder, help="Also write a page, with pictures.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what needs attention.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[DeviceName | None, typer.Option("--device", help="Run on this device only.")]
