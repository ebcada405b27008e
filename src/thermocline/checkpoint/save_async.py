"""`thermocline.save_async`: the same as `save`, written while training goes on.

What is saved is the model at the moment of the call (`snapshot.py`). Every rank writes in a thread of its own and leaves a note
in the folder; rank 0's thread waits for the notes and makes the save visible. No collective runs in those threads, so none can
come between those of training.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from thermocline.errors import ThermoclineError
from thermocline.nn.rows_module import RowsModule

from .format.dense_state import Optimizers
from .format.folder import last
from .format.write import leave_failure, notes
from .pending_saves import SAVES
from .save import Saving, begin_save, save

_PAUSE = 0.02  # seconds between two looks at the folder
_BACK = 5  # steps of priority
_PATIENCE = 60.0  # seconds after the end of the program


class BackgroundSave:
    """A save that is under way. `wait` returns once it is there whatever happens, and raises what went wrong."""

    def __init__(self, saving: Saving | None) -> None:
        self._saving, self._failed = saving, None if saving is None else _Failed()
        if saving is not None:
            SAVES.append(self)
            self._thread = threading.Thread(target=self._run, name="thermocline save")
            self._thread.start()

    @property
    def done(self) -> bool:
        return self._saving is None or not self._thread.is_alive()

    def wait(self) -> None:
        if self._saving is None or self._failed is None:
            return
        self._thread.join()
        if self in SAVES:
            SAVES.remove(self)
        if self._failed.error is not None:
            error, self._failed.error = self._failed.error, None
            raise error

    def _run(self) -> None:
        assert self._saving is not None and self._failed is not None
        saving = self._saving
        _step_back()
        try:
            try:
                saving.write(gently=True)
            except Exception as error:
                with contextlib.suppress(ThermoclineError):
                    leave_failure(saving.aside, saving.team.rank, str(error))
                raise
            if saving.team.rank == 0:
                _until(lambda: notes(saving.aside, saving.team.size) is not None)
                saving.publish()
            else:
                _until(lambda: _visible(saving))
        except Exception as error:
            saving.give_up()
            self._failed.error = error


def _step_back() -> None:
    """Let this thread, and those it starts, run when training does not want the core."""
    if sys.platform == "linux":  # where threads have a priority of their own
        with contextlib.suppress(OSError):
            here = threading.get_native_id()
            if os.sched_getscheduler(here) in (os.SCHED_FIFO, os.SCHED_RR):
                # Steps would wait for its turns of 100 ms.
                os.sched_setscheduler(here, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, here, os.getpriority(os.PRIO_PROCESS, here) + _BACK)


class _Failed:
    error: Exception | None = None


def _visible(saving: Saving) -> bool:
    """Whether rank 0 has made a save visible; raises if it has given up."""
    now = last(saving.root)
    if now is not None and saving.token in [save.token for save in now.saves]:
        return True
    if not saving.aside.exists():
        now = last(saving.root)  # it may have been compacted, or replaced by the next save, between the two looks
        if now is None or saving.token not in [save.token for save in now.saves]:
            raise ThermoclineError(f"rank 0 has given up the save to '{saving.root}'; its error says why")
    return False


def _until(come: Any) -> None:
    """Wait for other ranks; not for ever once this program has come to its end."""
    ended: float | None = None
    while not come():
        time.sleep(_PAUSE)
        if not threading.main_thread().is_alive():
            ended = time.monotonic() if ended is None else ended
            if time.monotonic() - ended > _PATIENCE:
                raise ThermoclineError("another rank has not written its part of the save; the one before is intact")


def save_async(
    model: nn.Module,
    folder: str | Path,
    *,
    optimizers: Optimizers = None,
    progress: Mapping[str, Any] | None = None,
    incremental: bool = False,
) -> BackgroundSave:
    """Save a model as it is now, while training goes on. Arguments are those of `save`.

    Rows are copied only where they change before they are written, into 256 MiB or a tenth of the rows' bytes; where that is
    full, a step waits. Another save, and a load, wait for one that is under way. Rows that a card has in host memory are
    written before this returns.
    """
    modules = [module for module in model.modules() if isinstance(module, RowsModule)]
    if any(module.arena.codes.device != module.arena.device for module in modules):
        save(model, folder, optimizers=optimizers, progress=progress, incremental=incremental)
        return BackgroundSave(None)
    return BackgroundSave(begin_save(model, folder, optimizers, progress, incremental, background=True))
