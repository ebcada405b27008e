"""Output of the commands: text, JSON and progress bars."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from thermocline.errors import write_text

# Called with the steps done, the total number of steps, and a description of the current step.
ReportProgress = Callable[[int, int, str], None]

# Width in a pipe or a log file, where rich would wrap every line at 80 columns.
WIDTH_WITHOUT_TERMINAL = 200

_WRAPPED = 20  # columns of text get at least this many columns of the console


def console() -> Console:
    """A console on standard output, as wide as the terminal or as COLUMNS says."""
    return Console(width=known_width() or WIDTH_WITHOUT_TERMINAL, highlight=False)


def known_width() -> int | None:
    """The columns of the terminal, or those that COLUMNS says; None in a pipe or a file."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console().width if known else None


def write_json(result: object, target: str) -> None:
    """Write `result` to the file `target`, or to standard output for '-'."""
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        write_text(target, text)


@contextmanager
def deliver(result: object, json: str | None, quiet: bool) -> Iterator[bool]:
    """Yield whether to print text, and then write the result as JSON if that is asked for: what is printed is not lost if the
    disk is full. With '-', JSON goes to standard output first."""
    if json == "-":
        write_json(result, json)
    yield json != "-" and not quiet
    if json and json != "-":
        sys.stdout.flush()
        write_json(result, json)


def print_table(
    heads: Sequence[str], rows: Iterable[Sequence[str | Text]], left: Collection[str] = (), title: str = "", caption: str = "",
    **options: Any,
) -> None:  # fmt: skip
    """Print a table whose columns are aligned to the right, except for `left`, which may wrap.

    A table wider than the console is printed in parts, each with the first column. Cells are plain: names come from files.
    """
    out = console()
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    around = 2 if options.get("box") is None else 3
    needs = [around + _needed(out.width, at, head, head in left, cells) for at, head in enumerate(heads)]
    parts, used = [[0]], needs[0]
    for at, need in enumerate(needs[1:], 1):
        if used + need > out.width and len(parts[-1]) > 1:
            parts.append([0])
            used = needs[0]
        parts[-1].append(at)
        used += need
    for number, columns in enumerate(parts):
        last = number == len(parts) - 1
        drawn = Table(
            **{"box": None, "pad_edge": False, **options}, title=Text(title) if title and not number else None,
            caption=Text(caption) if caption and last else None, title_justify="left", caption_justify="left",
        )  # fmt: skip
        for at in columns:
            wraps = heads[at] in left
            drawn.add_column(heads[at], justify="left" if wraps else "right", no_wrap=not wraps, overflow="fold")
        for row in cells:
            drawn.add_row(*(row[at] for at in columns if at < len(row)))
        out.print(drawn)
        if not last:
            out.print()


def _needed(width: int, at: int, head: str, wraps: bool, rows: Sequence[Sequence[Text]]) -> int:
    """The width that a column needs."""
    texts = [head, *(row[at].plain for row in rows if at < len(row))]
    widest = max(cell_len(line) for text in texts for line in text.split("\n"))
    return min(widest, width if not wraps else width // 3 if at == 0 else max(cell_len(head), _WRAPPED))


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
