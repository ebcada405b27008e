"""A thread on which exchanges go on behind the caller, one after another.

Every card gives its lane the same exchanges in the same order, so cards meet in each of them, whatever their callers do
meanwhile; and while a caller exchanges by itself its lane is idle. What a lane has not done yet is waited for wherever somebody
could see the difference.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

Job = Callable[[], None]


class Lane:
    """Jobs of one collection. The thread begins with the first of them."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left = threading.Semaphore(0)
        self._under_way = 0
        self._errors: list[Exception] = []

    @property
    def is_own(self) -> bool:
        """Whether this is asked in the lane itself."""
        return threading.current_thread() is self._thread

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to wait for; in the lane itself there never is."""
        return self._under_way == 0 or self.is_own

    def submit(self, job: Job) -> None:
        """Let a job be done after those that were submitted before."""
        if self._thread is None:
            work = (self._jobs, self._left, self._errors)
            self._thread = threading.Thread(target=_work, args=work, name="thermocline-exchange", daemon=True)
            self._thread.start()
            weakref.finalize(self, _end, self._jobs, self._thread)
        self._under_way += 1
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until all jobs are done; raise what the first that failed has raised."""
        assert not self.is_own
        while self._under_way:
            self._left.acquire()
            self._under_way -= 1
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error


def _work(jobs: SimpleQueue[Job | None], left: threading.Semaphore, errors: list[Exception]) -> None:
    while (job := jobs.get()) is not None:
        try:
            with torch.no_grad():
                if not errors:  # an exchange that failed has left the cards out of step
                    job()
        except Exception as error:
            errors.append(error)
        job = None  # what it holds is not needed until the next one comes
        left.release()


def _end(jobs: SimpleQueue[Job | None], thread: threading.Thread) -> None:
    """Let the thread end: one that Python kills while it shuts down may abort the whole process."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout=10)
