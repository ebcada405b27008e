"""Output of the commands: text, JSON and progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
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
