"""A small thread pool: the caller and its helpers take tasks from one counter. After `fork` the pool is empty."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch


class _TaskSet:
    """Tasks 0 to count - 1 of one call."""

    def __init__(self, task: Callable[[int], object], count: int) -> None:
        self.task, self.count = task, count
        self.numbers = itertools.count()  # next() on it is atomic
        self.finished = itertools.count(1)
        self.done = threading.Lock()
        self.done.acquire()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Run tasks until none is left; the thread that finishes the last task wakes the caller."""
        while (number := next(self.numbers)) < self.count:
            try:
                if self.error is None:
                    self.task(number)
            except BaseException as error:
                self.error = error
            if next(self.finished) == self.count:
                self.done.release()


class _ThreadPool:
    """Helper threads that wait for jobs. Grows to the largest number of helpers requested, and ends with the process."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_TaskSet | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []

    def call(self, job: _TaskSet, helpers: int) -> None:
        """Queue the job for `helpers` threads; starts missing threads."""
        if len(self.threads) < helpers:
            with self.lock:
                while len(self.threads) < helpers:
                    thread = threading.Thread(target=self._help, name=f"thermocline-{len(self.threads) + 1}", daemon=True)
                    thread.start()
                    self.threads.append(thread)
        for _ in range(helpers):
            self.jobs.put(job)

    def _help(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.work()

    def close(self) -> None:
        """End every helper: a thread killed at interpreter shutdown may abort the process."""
        for _ in self.threads:
            self.jobs.put(None)
        for thread in self.threads:
            thread.join(timeout=10)


_pool = _ThreadPool()


def _reset_after_fork() -> None:
    global _pool
    _pool = _ThreadPool()


os.register_at_fork(after_in_child=_reset_after_fork)
atexit.register(lambda: _pool.close())


def run(task: Callable[[int], object], count: int) -> None:
    """Run task(0) to task(count - 1) on up to `torch.get_num_threads()` threads; raises the first error once all have ended."""
    helpers = min(torch.get_num_threads(), count) - 1
    if helpers <= 0:
        for number in range(count):
            task(number)
        return
    job = _TaskSet(task, count)
    _pool.call(job, helpers)
    while (number := next(job.numbers)) < count:  # as `work` does, one Python call less
        try:
            if job.error is None:
                task(number)
        except BaseException as error:
            job.error = error
        if next(job.finished) == count:
            job.done.release()
    job.done.acquire()
    if job.error is not None:
        raise job.error


def run_chunks(task: Callable[[int, int], object], count: int, size: int) -> None:
    """Run task(first, last) for all ranges of `size` numbers below `count`."""
    run(lambda number: task(number * size, min((number + 1) * size, count)), -(-count // size))
