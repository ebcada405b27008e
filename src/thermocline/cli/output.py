"""What verbs print: text for people, JSON for programs, a progress bar while they wait."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

# Told the steps done, the steps in all, and what is being worked on.
ReportProgress = Callable[[int, int, str], None]

# In a pipe or a log file there is no width to respect; rich would fold every line at 80 columns.
WIDTH_WITHOUT_TERMINAL = 200


def console() -> Console:
    """Standard output, for tables and lines of text."""
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
    """Show that something is done that cannot say how far it is; nothing when `quiet` or not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(what):
        yield


class _Rate(ProgressColumn):
    """Steps in a second, once there is a measurement."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "", style="progress.data.speed")


@contextmanager
def progress_bar(quiet: bool) -> Iterator[ReportProgress]:
    """Give a function to report progress to: a bar on standard error, or nothing when `quiet` or not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
