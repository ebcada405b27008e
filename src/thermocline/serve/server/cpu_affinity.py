"""Pins the threads of a request to one processor while requests come one at a time.

gRPC wakes three threads for a request, one after another. With one or two clients only one of them runs at a time, and on
several processors each wake-up is another processor to wake, with cold caches (docs/decisions/server.md has the numbers).

The event loop's thread sleeps three times a request if requests come one at a time, once or less under load. Pinned threads
stay pinned until one processor is too few: run time and wait time of the process take most of a second. Unpinned threads cannot
see whether one processor would suffice again, so they stay unpinned for `BACKOFF` updates. Threads that load, look up or
compute are never pinned, and seconds with batches in a worker thread never count as one at a time.
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

BACKOFF = 10  # updates without pinning after one processor was too few
_GRPC_THREADS = ("event_engine", "grpc")  # prefixes of their names
_TASKS = Path("/proc/self/task")
_libc = ctypes.CDLL(None)


class ThreadLoad(NamedTuple):
    """Counters, since the start or between two updates."""

    requests: float
    worker_batches: float
    sleeps: float  # of the event loop's thread
    waited: float  # seconds that the event loop's thread waited for a processor
    ran: float  # seconds of all threads
    seconds: float


class PinLimits(NamedTuple):
    """One processor is enough within these limits."""

    requests: int  # minimum
    sleeps: float  # minimum for each request
    waited: float  # maximum of a second
    busy: float  # maximum of a second, run time and wait time


UNPINNED, PINNED = PinLimits(50, 2.25, math.inf, math.inf), PinLimits(25, 0.8, 0.3, 0.9)


class CpuAffinity:
    """Pins and unpins threads. The event loop's thread makes it and calls `update` once a second.

    Args:
        threads: ids of further threads that requests pass
        count: returns the number of answered requests, and of batches in a worker thread
    """

    def __init__(self, threads: Iterable[int], count: Callable[[], tuple[int, int]]) -> None:
        self._allowed = os.sched_getaffinity(0)
        self._threads, self._count_requests = {threading.get_native_id(), *threads}, count
        self._before = self._count()
        self._backoff = 0
        self._processor: set[int] = set()  # empty while threads are not pinned

    @property
    def pinned(self) -> bool:
        """Whether threads are on one processor."""
        return bool(self._processor)

    def update(self) -> None:
        """Pin or unpin threads by the load since the last update."""
        before, self._before = self._before, self._count()
        enough = self._is_one_enough(ThreadLoad(*(now - then for now, then in zip(self._before, before, strict=True))))
        if enough and not self.pinned:
            self._pin()
        elif self.pinned and not enough:
            self.unpin()
        elif self.pinned:
            self._unpin_others(but=self._request_threads())

    def _count(self) -> ThreadLoad:
        return ThreadLoad(*self._count_requests(), *_sleeps_and_wait(), process_time(), monotonic())

    def _is_one_enough(self, load: ThreadLoad) -> bool:
        """Whether one processor is enough for the load, and pinning is worth it."""
        limit = PINNED if self.pinned else UNPINNED
        if self._backoff:
            self._backoff -= 1
            return False
        if load.requests < limit.requests:
            return False
        waiting, busy = load.waited / load.seconds, (load.ran + load.waited) / load.seconds
        enough = load.sleeps > limit.sleeps * load.requests and waiting < limit.waited and busy < limit.busy
        enough = enough and not load.worker_batches
        if self.pinned and not enough:
            self._backoff = BACKOFF
        return enough

    def unpin(self) -> None:
        """Let all threads run on any processor."""
        self._unpin_others(but=frozenset())
        self._processor = set()

    def release(self) -> None:
        """Unpin the calling thread, which inherits the affinity of the thread that started it."""
        if self.pinned:
            with suppress(OSError):  # forbidden, or the processors have changed
                os.sched_setaffinity(0, self._allowed)

    def _pin(self) -> None:
        self._allowed = os.sched_getaffinity(0)  # may have changed since the last time
        if len(self._allowed) < 2:
            return
        self._processor = {_libc.sched_getcpu()} & self._allowed
        for thread in self._request_threads() if self._processor else ():
            with suppress(OSError):  # the thread has ended
                os.sched_setaffinity(thread, self._processor)

    def _request_threads(self) -> frozenset[int]:
        return frozenset(each for each in _threads() if each in self._threads or _name(each).startswith(_GRPC_THREADS))

    def _unpin_others(self, but: frozenset[int]) -> None:
        """Unpin all threads except `but`: threads inherit the affinity of the thread that started them."""
        for thread in _threads() if self._processor else ():
            with suppress(OSError):
                if thread not in but and os.sched_getaffinity(thread) == self._processor:
                    os.sched_setaffinity(thread, self._allowed)


def _sleeps_and_wait() -> tuple[int, float]:
    """How often this thread slept, and the seconds that it waited for a processor."""
    waited = 0.0
    with suppress(OSError, IndexError):  # needs CONFIG_SCHEDSTATS
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return getrusage(RUSAGE_THREAD).ru_nvcsw, waited


def _threads() -> list[int]:
    return [int(each.name) for each in _TASKS.iterdir()]


def _name(thread: int) -> str:
    try:
        return (_TASKS / str(thread) / "comm").read_text()
    except OSError:  # the thread has ended
        return ""
