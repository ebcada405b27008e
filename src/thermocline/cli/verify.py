"""`thermocline verify`: compare the kernels of this machine with their reference implementations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import typer
from rich.text import Text

from .options import Debug, Device, Json, Quiet
from .output import console, deliver, print_table, progress_bar

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
    with deliver({"ok": not failed, "checks": checks}, json, False) as shown:
        if shown:
            _print(checks, quiet)
    if failed:
        raise typer.Exit(1)


def _print(checks: Sequence[Check], quiet: bool) -> None:
    shown = [check for check in checks if check["result"] == "FAILED" or not quiet]
    heads = [column.replace("_", " ") for column in COLUMNS]
    if shown:
        rows = [[Text(check[column], STYLES[check["result"]]) for column in COLUMNS] for check in shown]
        print_table(heads, rows, heads)
    count = Counter(check["result"] for check in checks)
    console().print(f"{count['equal'] + count['close']} passed, {count['FAILED']} failed, {count['skipped']} skipped")
