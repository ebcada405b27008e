"""The threads that a request passes, on one processor while that is enough.

A request wakes threads one after another: one of gRPC's that reads it, the one that waits for gRPC's events, the event loop,
and back. While a client or two ask and wait, only one of them runs at any moment; and on several processors every one
that wakes up is another processor to be woken from its sleep, with nothing in its caches. Kept on one, an echo server took
266 to 294 us of processor time for a small request instead of 420, and answered no later. With more requests at a
time the threads do work side by side, and one processor would be too few.

Which of both it is shows in how often the loop's thread goes to sleep: three times a request when they come one by one, once
or less when there is always another. It is looked at once a second. Keeping threads together changes that number, and how much
depends on who else uses the machine, so they are kept until one processor is too few: what the process ran and what its loop
waited for a processor are most of a second, or waiting alone is a good part of it, because others use that processor.
What threads wait while they are free says nothing about that: they wait where they wake up, and those of large answers for
longer. Where it counted, a client that asked for 2,048 ids on a busy machine had its threads kept in some seconds and not in
others. Measured with 64 ids on two processors, in a second:

                        on a quiet machine              beside two busy processes
                        sleeps/request  waited          sleeps/request  waited          ran and waited
    free, 1 client      2.9 to 3.0      0.04 to 0.075   2.8 to 3.4      0.05 to 0.16    0.5 to 0.7
    free, 8 clients                                     0.4 to 0.8      0.16 to 0.26    0.8 to 1.1
    kept, 1 client      1.3 to 1.6      0.10 to 0.18    2.8 to 3.5      0.01 to 0.09    0.39 to 0.45
    kept, 2 clients     0.35 to 0.39    0.25            1.8 to 2.6      0.04 to 0.12    0.64 to 0.72
    kept, 8 clients     0.35 to 0.39    0.25            0.8 to 1.2      0.11 to 0.22    0.86 to 0.97

and with 2,048 ids, beside four and more busy processes: free, 1 client, 2.5 to 3.4 sleeps and 0.001 to 0.55 waited; free, 3
clients and more, at most 2.1 and 0.62; kept, 1 client, 2.0 to 3.2 and 0.001 to 0.09.

Whether one processor would be enough again cannot be seen by those who have left it: they stay free for a while. Large requests
sleep as often as single ones, while a thread of their lane works on them; such a second never counts as one by one. Only the
loop's thread and gRPC's are kept; those that load, look up or compute go anywhere.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from time import monotonic, process_time
from typing import NamedTuple

AWAY = 10  # looks for which threads stay free after one processor was too few
_OF_GRPC = ("event_engine", "grpc")  # what gRPC calls its threads
_TASKS = Path("/proc/self/task")
_libc = ctypes.CDLL(None)


class Seen(NamedTuple):
    """What is counted, so far or from one look to the next."""

    requests: float
    handed: float  # batches to the thread of a lane
    sleeps: float
    waited: float  # seconds for a processor
    ran: float  # seconds of all threads
    seconds: float


class Limit(NamedTuple):
    """Between these, one processor is enough."""

    requests: int  # at least; fewer do not matter
    sleeps: float  # for each request, more than
    waited: float  # of a second, less than
    busy: float  # ran and waited, of a second, less than


FREE, KEPT = Limit(50, 2.25, math.inf, math.inf), Limit(25, 0.8, 0.3, 0.9)


class Together:
    """Made, and asked to `look`, by the thread of the event loop. `threads`: others that requests pass; `done`: requests
    answered so far, and batches that a thread of a lane worked on."""

    def __init__(self, threads: Iterable[int], done: Callable[[], tuple[int, int]]) -> None:
        self._allowed = os.sched_getaffinity(0)
        self._threads, self._done = {threading.get_native_id(), *threads}, done
        self._before = self._count()
        self._away = 0
        self._here: set[int] = set()  # the processor that threads are kept on, if they are

    @property
    def kept(self) -> bool:
        """Whether threads are on one processor."""
        return bool(self._here)

    def look(self) -> None:
        """Keep threads together, or let them go, by what was asked since the last look."""
        before, self._before = self._before, self._count()
        enough = self._judge(Seen(*(now - then for now, then in zip(self._before, before, strict=True))))
        if enough and not self.kept:
            self._keep()
        elif self.kept and not enough:
            self.let_go()
        elif self.kept:
            self._spread(but=self._mine())

    def _count(self) -> Seen:
        return Seen(*self._done(), *_of_this_thread(), process_time(), monotonic())

    def _judge(self, seen: Seen) -> bool:
        """Whether one processor is enough for what came, and it is worth it."""
        limit = KEPT if self.kept else FREE
        if self._away:
            self._away -= 1
            return False
        if seen.requests < limit.requests:
            return False
        enough = (
            not seen.handed
            and seen.sleeps > limit.sleeps * seen.requests
            and seen.waited < limit.waited * seen.seconds
            and seen.ran + seen.waited < limit.busy * seen.seconds
        )
        if self.kept and not enough:
            self._away = AWAY
        return enough

    def let_go(self) -> None:
        """Let all threads run anywhere."""
        self._spread(but=frozenset())
        self._here = set()

    def release(self) -> None:
        """Let the calling thread, which may be a child of one that is kept, run anywhere."""
        if self.kept:
            with suppress(OSError):  # forbidden, or the processors have changed: it runs where it runs
                os.sched_setaffinity(0, self._allowed)

    def _keep(self) -> None:
        self._allowed = os.sched_getaffinity(0)  # anew: somebody may have said where the server is to run
        if len(self._allowed) < 2:
            return
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


def _of_this_thread() -> tuple[int, float]:
    """How often it slept, and for how many seconds it waited for a processor."""
    waited = 0.0
    with suppress(OSError, IndexError):  # not every kernel counts
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return getrusage(RUSAGE_THREAD).ru_nvcsw, waited


def _threads() -> list[int]:
    return [int(each.name) for each in _TASKS.iterdir()]


def _name(thread: int) -> str:
    try:
        return (_TASKS / str(thread) / "comm").read_text()
    except OSError:  # it has ended
        return ""
