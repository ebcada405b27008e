"""`thermocline verify`: compare the kernels of this machine with their reference implementations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import typer
from rich.table import Table

from .options import Debug, Device, Json, Quiet
from .output import console, deliver, progress_bar

EXAMPLE = "Example:  thermocline verify --device cpu"

COLUMNS = ("kernel", "case", "device", "implementation", "compared_with", "result", "detail")
STYLES = {"equal": "green", "close": "green", "FAILED": "bold red", "skipped": "dim"}

Check = Mapping[str, str]


def verify(device: Device = None, json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Compare every kernel with its reference on the hardware of this machine. Run it first on a new machine."""
    from thermocline.kernels.verify import run as kernels

    with progress_bar(quiet) as progress:
        checks = kernels.run(device, progress)
    failed = sum(check["result"] == "FAILED" for check in checks)
    if deliver({"ok": not failed, "checks": checks}, json, False):
        _print(checks, quiet)
    if failed:
        raise typer.Exit(1)


def _print(checks: Sequence[Check], quiet: bool) -> None:
    shown = [check for check in checks if check["result"] == "FAILED" or not quiet]
    table = Table(*(column.replace("_", " ") for column in COLUMNS), box=None, pad_edge=False)
    for check in shown:
        table.add_row(*(check[column] for column in COLUMNS), style=STYLES[check["result"]])
    out = console()
    if shown:
        out.print(table)
    count = Counter(check["result"] for check in checks)
    out.print(f"{count['equal'] + count['close']} passed, {count['FAILED']} failed, {count['skipped']} skipped")
