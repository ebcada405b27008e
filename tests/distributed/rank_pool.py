"""A pool of processes that run functions of tests on any number of ranks."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

Pool = tuple[list[Any], Any]  # a queue of tasks for each process, and one of results


def started(work: Callable[..., None], most: int, preload: list[str]) -> Iterator[Pool]:
    """A pool of `most` processes that run `work(rank, tasks, results)`; `preload` is imported once for all."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(preload)
    results = context.Queue()
    tasks = [context.Queue() for _ in range(most)]
    processes = [context.Process(target=work, args=(rank, tasks[rank], results), daemon=True) for rank in range(most)]
    for process in processes:
        process.start()
    yield tasks, results
    for process in processes:
        process.kill()


def caller(pool: Pool, folder: Path, timeout: float) -> Callable[..., list[Any]]:
    """A function that calls another by name on some ranks: the result of each, or one failure for all.

    Every call has a file of its own in `folder` for ranks to meet: one that was used before may name processes that are gone.
    """
    tasks, results = pool
    calls = 0

    def call(name: str, size: int, *arguments: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        for rank in range(size):
            tasks[rank].put((name, str(folder / f"store{calls}"), size, arguments))
        found: dict[int, Any] = {}
        failed = []
        for _ in range(size):
            try:
                rank, good, result = results.get(timeout=timeout)
            except queue.Empty:
                missing = sorted(set(range(size)) - set(found))
                raise AssertionError("\n".join([f"ranks {missing} gave no answer in {timeout:.0f} s", *failed])) from None
            found[rank] = result
            failed += [] if good else [f"rank {rank}: {result}"]
        assert not failed, "\n".join(failed)
        return [found[rank] for rank in range(size)]

    return call
