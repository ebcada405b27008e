"""Output of the commands: text, JSON and progress bars."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# Called with the steps done, the total number of steps, and a description of the current step.
ReportProgress = Callable[[int, int, str], None]

# Width in a pipe or a log file, where rich would wrap every line at 80 columns.
WIDTH_WITHOUT_TERMINAL = 200


def console() -> Console:
    """A console on standard output."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)


def write_json(result: object, target: str) -> None:
    """Write `result` to the file `target`, or to standard output for '-'."""
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def deliver(result: object, json: str | None, quiet: bool) -> bool:
    """Write a result as JSON if that is asked for. Returns whether to print text."""
    if json:
        write_json(result, json)
    return json != "-" and not quiet


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = (), **options: Any) -> Table:
    """A table whose columns are aligned to the right, except for `left`."""
    drawn = Table(**{"box": None, "pad_edge": False, **options})
    for head in heads:
        drawn.add_column(head, justify="left" if head in left else "right")
    for row in rows:
        drawn.add_row(*row)
    return drawn


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C requests a stop after the current step; the second interrupts at once."""
    requested = False

    def request(*_: object) -> None:
        nonlocal requested
        requested = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, request)
    try:
        yield lambda: requested
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def at_work(quiet: bool, what: str) -> Iterator[None]:
    """Show a spinner on standard error; nothing if `quiet` or not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(what):
        yield


class _Rate(ProgressColumn):
    """Steps per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "", style="progress.data.speed")


@contextmanager
def progress_bar(quiet: bool) -> Iterator[ReportProgress]:
    """Yield a function that reports progress to a bar on standard error; to nothing if `quiet` or not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
