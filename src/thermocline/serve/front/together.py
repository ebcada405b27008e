"""The threads that a request passes, on one processor while that is enough.

A request wakes threads one after another: one of gRPC's that reads it, the one that waits for gRPC's events, the event loop,
and back. While a client or two ask and wait, only one of them runs at any moment; and on several processors every one
that wakes up is another processor to be woken from its sleep, with nothing in its caches. Kept on one, an echo server took
266 to 294 us of processor time for a small request instead of 420, and answered no later. With more requests at a
time the threads do work side by side, and one processor would be too few.

Which of both it is shows in how often the loop's thread goes to sleep: three times a request when they come one by one, once
or less when there is always another. It is looked at once a second. A processor that others use too is left again: there
the thread waits for its turn. Only the loop's thread and gRPC's are kept; those that load, look up or compute go anywhere.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage

SLEEPS = 2.25  # for each request: more are of requests that come one by one
FEWEST = 50  # requests from one look to the next: fewer do not matter
WAITED = 0.1  # seconds for a processor from one look to the next, nearly a second later
_OF_GRPC = ("event_engine", "grpc")  # what gRPC calls its threads
_TASKS = Path("/proc/self/task")
_libc = ctypes.CDLL(None)


class Together:
    """Made, and asked to `look`, by the thread of the event loop. `threads`: others that requests pass; `answered`: requests
    so far."""

    def __init__(self, threads: Iterable[int], answered: Callable[[], int]) -> None:
        self._allowed = os.sched_getaffinity(0)
        self._threads, self._answered = {threading.get_native_id(), *threads}, answered
        self._before = self._counts()
        self._here: set[int] = set()  # the processor that threads are kept on, if they are

    @property
    def kept(self) -> bool:
        """Whether threads are on one processor."""
        return bool(self._here)

    def look(self) -> None:
        """Keep threads together, or let them go, by what was asked since the last look."""
        if len(self._allowed) < 2:
            return
        (answered, slept, waited), self._before = self._before, self._counts()
        requests = self._before[0] - answered
        if requests >= FEWEST:
            serial = self._before[1] - slept > SLEEPS * requests
            if not (serial and self._before[2] - waited < WAITED):
                self.let_go()
            elif not self.kept:
                self._keep()
        self._spread(but=self._mine())

    def let_go(self) -> None:
        """Let all threads run anywhere."""
        self._spread(but=frozenset())
        self._here = set()

    def release(self) -> None:
        """Let the calling thread, which may be a child of one that is kept, run anywhere."""
        os.sched_setaffinity(0, self._allowed)

    def _counts(self) -> tuple[int, int, float]:
        """Requests so far, sleeps of this thread, and seconds that it waited for a processor."""
        waited = 0.0
        with suppress(OSError, IndexError):  # not every kernel counts
            waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
        return self._answered(), getrusage(RUSAGE_THREAD).ru_nvcsw, waited

    def _keep(self) -> None:
        self._here = {_libc.sched_getcpu()} & self._allowed
        for thread in self._mine() if self._here else ():
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(thread, self._here)

    def _mine(self) -> frozenset[int]:
        return frozenset(thread for thread in _threads() if thread in self._threads or _name(thread).startswith(_OF_GRPC))

    def _spread(self, but: frozenset[int]) -> None:
        """Let others run anywhere: a thread begins where the one is kept that made it."""
        for thread in _threads() if self._here else ():
            with suppress(OSError):
                if thread not in but and os.sched_getaffinity(thread) == self._here:
                    os.sched_setaffinity(thread, self._allowed)


def _threads() -> list[int]:
    return [int(each.name) for each in _TASKS.iterdir()]


def _name(thread: int) -> str:
    try:
        return (_TASKS / str(thread) / "comm").read_text()
    except OSError:  # it has ended
        return ""
