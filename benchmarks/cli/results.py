"""`show` prints and checks results; `compare` compares files of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from thermocline.cli.options import Debug, Json, Page, Quiet
from thermocline.cli.output import console, write_json

from .shared import app

DEFAULT_ASKED = Path("benchmarks/asked.json")


@app.command(name="show", epilog="Example:  python -m benchmarks show benchmarks/results/*.json --check")
def show_files(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Results written by --json.")],
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a row falls short or a required case is missing.")
    ] = False,
    asked: Annotated[Path, typer.Option("--asked", metavar="FILE", help="File of required cases.")] = DEFAULT_ASKED,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Print a table for each file of results, and mark rows that fall short."""
    from benchmarks.runner import show

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


@app.command(epilog="Example:  python -m benchmarks compare before.json after.json --report compared.html")
def compare(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Results written by --json; the first is the reference.")
    ],
    report: Page = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Set files of results side by side, case by case: better, worse, or the same within their spread."""
    from benchmarks.runner import compare as bench
    from benchmarks.runner import show
    from benchmarks.runner.compare_page import compare_page

    found = bench.Comparison.of([show.load(path) for path in files])
    if json:
        write_json(found.summary(), json)
    if report:
        report.write_text(compare_page(found), encoding="utf-8")
    if json != "-":
        out = console()
        out.print(bench.table(found, only_changed=quiet))
        for note in found.notes():
            out.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
        for at, name in enumerate(found.names[1:], 1):
            counted = ", ".join(f"{number} {word}" for word, number in found.count(at).items())
            out.print(f"{name}: {counted}", markup=False, soft_wrap=True)
