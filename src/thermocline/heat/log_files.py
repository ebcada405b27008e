"""Profiling of log files, with resumption after an interruption.

The state is saved beside the result as `heat.tc.partial`, every few minutes and when `stop` requests an end. The same call
continues from there; another log, other columns or other settings start over. The result appears when it is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from thermocline.errors import BadInput

from .log_columns import LogIds
from .log_reader import LogFile, open_logs
from .profile import HeatProfile
from .profiler import Profiler, ProfilerSettings

SAVE_EVERY = 120.0  # seconds
Report = Callable[[int, int, str], None]  # samples done, samples in all, what is being read

T = TypeVar("T")


class ProfilingInterrupted(KeyboardInterrupt):
    """Profiling was interrupted, and its state was saved; the same call continues.

    Example::

        try:
            profile_files(["clicks.parquet"], output="heat.tc", stop=lambda: time.monotonic() > deadline)
        except ProfilingInterrupted:
            print("run again to continue")
    """


def profile_files(
    paths: Sequence[Path | str],
    columns: Sequence[str] = (),
    *,
    settings: ProfilerSettings | None = None,
    output: Path | str | None = None,
    skip_bad: int = 0,
    report: Report = lambda done, total, what: None,
    stop: Callable[[], bool] = lambda: False,
) -> HeatProfile:
    """Profile the columns of a log.

    Args:
        paths: Parquet, CSV or Criteo TSV files, oldest first.
        columns: Columns of ids, integers or text; default: C1, C2, ...
        settings: Memory limit, and batch sizes for repeats.
        output: The heat file to write. Work can then be interrupted and resumed.
        skip_bad: Bad lines of text files to leave out, at most: too few columns, or no integer in a column of integers.
        report: Called with (samples done, samples in total, file name).
        stop: Called between chunks; True interrupts the work.

    Returns:
        The heat profile.

    Raises:
        ProfilingInterrupted: `stop` returned True. The same call continues later.
        BadInput: A file or column does not exist, or there are no samples.
        FormatError: A file is damaged, or has more bad lines than `skip_bad`.

    Example::

        profile_files(["day_0.parquet", "day_1.parquet"], ["user", "item"], output="heat.tc")
    """
    partial = None if output is None else Path(f"{output}.partial")
    files, columns = open_logs(paths, columns, skip_bad)
    result = count_files(files, columns, settings, partial, report, stop)
    if output is not None and partial is not None:
        result.save(output)
        partial.unlink(missing_ok=True)
    return result


def count_files(
    files: Sequence[LogFile], columns: Sequence[str], settings: ProfilerSettings | None, partial: Path | None,
    report: Report, stop: Callable[[], bool],
) -> HeatProfile:  # fmt: skip
    """As `profile_files`, with the state in `partial` and without a result file."""
    total = sum(file.samples for file in files)
    if total == 0:
        raise BadInput(f"there are no samples in {', '.join(str(file.path) for file in files)}", parameter="paths")
    profiler = Profiler(columns, settings or ProfilerSettings(), total)
    of = {"files": [_mark(file.path) for file in files], "columns": columns, "skipped": [file.skipped for file in files]}
    if partial is not None and partial.is_file():
        profiler.restore(partial, of)
    saved = time.monotonic()
    for path, chunk in _ahead(_chunks(files, columns, profiler.done)):
        if partial is not None and (stop() or time.monotonic() - saved > SAVE_EVERY):
            profiler.save(partial, of)
            saved = time.monotonic()
            if stop():
                message = f"{profiler.done:,} of {total:,} samples are profiled; run the same command again to continue"
                raise ProfilingInterrupted(message)
        report(profiler.done, total, path.name)
        profiler.add(chunk)
    return profiler.result(", ".join(str(file.path) for file in files))


def _chunks(files: Sequence[LogFile], columns: Sequence[str], first: int) -> Iterator[tuple[Path, dict[str, LogIds]]]:
    """The chunks of all files from sample `first` of the log on."""
    for file in files:
        if first < file.samples:
            yield from ((file.path, chunk) for chunk in file.chunks(columns, first))
        first = max(0, first - file.samples)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each read while the one before is processed."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(next, items, None)
        while (item := future.result()) is not None:
            future = pool.submit(next, items, None)
            yield item


def _mark(path: Path) -> list[str | int]:
    """Path, size and time of a file, to recognize a changed log."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
