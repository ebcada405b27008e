"""A small thread pool: the caller and its helpers take tasks from one counter until none is left.

Kernels release the GIL, so plain Python threads run them side by side. A job is a function and a number of tasks;
whoever is free takes the next number. The caller works too and waits only for tasks that a helper has begun: if all
helpers are busy with another caller's job, the job still finishes, so any number of Python threads may use the pool
at once, and a task may itself run a job.

Which thread does a task never changes a result: tasks write to places of their own, and sums are never split between
tasks. After `fork` the child has none of the parent's threads and starts with an empty pool. Rejected: Numba's
`parallel=True` (dies in forked children under OpenMP, is not thread-safe without) and `concurrent.futures` (a lock
and an object for each task).
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch


class _Job:
    """Tasks 0 to count - 1 of one call."""

    def __init__(self, task: Callable[[int], object], count: int) -> None:
        self.task, self.count = task, count
        self.numbers = itertools.count()  # next() on it is atomic
        self.finished = itertools.count(1)
        self.done = threading.Lock()
        self.done.acquire()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Take tasks until none is left; whoever finishes the last one wakes the caller."""
        while (number := next(self.numbers)) < self.count:
            try:
                if self.error is None:
                    self.task(number)
            except BaseException as error:
                self.error = error
            if next(self.finished) == self.count:
                self.done.release()


class _Pool:
    """Helper threads that wait for jobs. Grows to the most helpers ever asked for, and ends with the process."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.helpers = 0

    def call(self, job: _Job, helpers: int) -> None:
        """Ask so many helpers to join the job."""
        if self.helpers < helpers:
            with self.lock:
                while self.helpers < helpers:
                    thread = threading.Thread(target=self._help, name=f"thermocline-{self.helpers + 1}", daemon=True)
                    thread.start()
                    self.threads.append(thread)
                    self.helpers += 1
        for _ in range(helpers):
            self.jobs.put(job)

    def _help(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.work()

    def close(self) -> None:
        """Let every helper end. A thread that Python kills while it shuts down may abort the whole process."""
        for _ in self.threads:
            self.jobs.put(None)
        for thread in self.threads:
            thread.join(timeout=10)


_pool = _Pool()


def _forget() -> None:
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _pool.close())


def thread_count() -> int:
    """How many threads a kernel may use: what torch was told."""
    return torch.get_num_threads()


def run(task: Callable[[int], object], count: int) -> None:
    """Run task(0) to task(count - 1) on up to `thread_count()` threads; raises the first error after all have ended."""
    helpers = min(thread_count(), count) - 1
    if helpers <= 0:
        for number in range(count):
            task(number)
        return
    job = _Job(task, count)
    _pool.call(job, helpers)
    job.work()
    job.done.acquire()
    if job.error is not None:
        raise job.error
