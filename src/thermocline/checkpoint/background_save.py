"""`thermocline.save_async`: `save`, written while training continues.

The save holds the model at the moment of the call (`snapshot.py`). Each rank writes in its own thread and leaves a report in
the folder; the thread of rank 0 polls for the reports and publishes the save. These threads run no collectives, which would
interleave with those of training; `rank_watch.py` ends their waiting for a rank that died.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from thermocline.errors import ThermoclineError
from thermocline.nn.rows_module import RowsModule

from .format.dense_state import Optimizers
from .format.folder import current_manifest
from .format.write import read_reports, report_failure
from .rank_watch import RankWatch
from .save_job import PENDING_SAVES, SaveJob, begin_save, save

_POLL_SECONDS = 0.02
_NICE = 5
_EXIT_TIMEOUT = 60.0  # seconds to wait for other ranks after the main thread has ended


def save_async(
    model: nn.Module,
    folder: str | Path,
    *,
    optimizers: Optimizers = None,
    progress: Mapping[str, Any] | None = None,
    incremental: bool = False,
    keep: int = 1,
) -> BackgroundSave:
    """Save a model as it is now, while training continues.

    A row is copied only if it changes before it is written. Copies take 256 MiB or a tenth of the rows' bytes; beyond that, a
    training step waits. Another save, and a load, wait for a pending one. Rows in host memory (residency="host") are written
    before the call returns.

    Args:
        model: as in `save`.
        folder: as in `save`.
        optimizers: as in `save`.
        progress: as in `save`.
        incremental: as in `save`.
        keep: as in `save`.

    Returns:
        A handle: `wait()` returns when the save is durable, or raises its error, at the latest when a rank gave no sign of life
        for the timeout of the process group; `done` tells whether it has ended.

    Raises:
        BadInput: as in `save`.

    Example:
        >>> pending = tc.save_async(model, "checkpoint", optimizers=adam)
        >>> train_more(model)
        >>> pending.wait()
    """
    modules = [module for module in model.modules() if isinstance(module, RowsModule)]
    if any(module.arena.codes.device != module.arena.device for module in modules):
        save(model, folder, optimizers=optimizers, progress=progress, incremental=incremental, keep=keep)
        return BackgroundSave(None)
    return BackgroundSave(begin_save(model, folder, optimizers, progress, incremental, keep, background=True))


class BackgroundSave:
    """A pending save, made by `save_async`: `wait` returns when it is durable, and raises its error if it failed.

    Attributes:
        done: whether the save has ended, with or without an error.

    Example:
        >>> pending = tc.save_async(model, "checkpoint")
        >>> pending.done
        False
        >>> pending.wait()
    """

    def __init__(self, job: SaveJob | None) -> None:
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if job is not None:
            PENDING_SAVES.append(self)
            watch = RankWatch(job.ranks, job.token)
            self._thread = threading.Thread(target=self._run, args=[job, watch], name="thermocline save")
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the save is durable; raise its error if it failed."""
        if self._thread is None:
            return
        self._thread.join()
        if self in PENDING_SAVES:
            PENDING_SAVES.remove(self)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: SaveJob, watch: RankWatch) -> None:
        _lower_priority()
        with watch:
            try:
                try:
                    job.write(background=True)
                except Exception as error:
                    if job.ranks.rank and watch.failure_of(0) is not None:  # rank 0 has removed the files
                        raise _abandoned(job, watch) from error
                    with contextlib.suppress(ThermoclineError, OSError):
                        report_failure(job.subfolder, job.ranks.rank, str(error))
                    raise
                if job.ranks.rank == 0:
                    _poll(lambda: read_reports(job.subfolder, job.ranks.size) is not None, watch, range(1, job.ranks.size))
                    job.publish()
                else:
                    _poll(lambda: _is_published(job, watch), watch, [0])
            except Exception as error:
                watch.report(str(error))
                job.abandon()
                self._error = error


def _lower_priority() -> None:
    """Let this thread, and threads that it starts, run when training leaves a core idle."""
    if sys.platform == "linux":  # threads have their own priority
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            if os.sched_getscheduler(thread) in (os.SCHED_FIFO, os.SCHED_RR):  # its time slice of 100 ms would delay steps
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)


def _is_published(job: SaveJob, watch: RankWatch) -> bool:
    """Whether rank 0 has published a save; raises if rank 0 has abandoned it."""
    pending = job.subfolder.exists()  # read before the manifest: a compaction may remove a published subfolder
    now = current_manifest(job.folder)
    if now is not None and job.token in [save.token for save in now.saves]:
        return True
    if not pending:
        raise _abandoned(job, watch)
    return False


def _abandoned(job: SaveJob, watch: RankWatch) -> ThermoclineError:
    reason = watch.failure_of(0) or "its error has the reason"
    return ThermoclineError(f"rank 0 abandoned the save to '{job.folder}': {reason}")


def _poll(ready: Callable[[], bool], watch: RankWatch, others: Sequence[int]) -> None:
    """Wait for other ranks while they live; with a short timeout once the main thread of this program has ended."""
    ended: float | None = None
    while not ready():
        time.sleep(_POLL_SECONDS)
        try:
            watch.check(others)
        except ThermoclineError:
            if ready():  # the other rank has ended since, with the save
                return
            raise
        if not threading.main_thread().is_alive():
            ended = time.monotonic() if ended is None else ended
            if time.monotonic() - ended > _EXIT_TIMEOUT:
                raise ThermoclineError("another rank has not written its part of the save; the save before is intact")
