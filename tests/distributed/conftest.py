"""Real processes: eight of them are started once and carry out what tests ask for, on as many ranks as a test needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))

MOST = 8
_TIMEOUT = 90.0  # seconds until a test gives up on its processes


@pytest.fixture(scope="session")
def processes() -> Iterator[tuple[list[Any], Any]]:
    import ranks

    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["thermocline.distributed.shard", "thermocline.train"])  # imported once
    results = context.Queue()
    tasks = [context.Queue() for _ in range(MOST)]
    started = [context.Process(target=ranks.work, args=(rank, tasks[rank], results), daemon=True) for rank in range(MOST)]
    for process in started:
        process.start()
    yield tasks, results
    for process in started:
        process.kill()


@pytest.fixture
def on_ranks(processes: tuple[list[Any], Any], tmp_path: Path) -> Callable[..., list[Any]]:
    """Call a function of `ranks.py`, or `module.function`, on so many ranks; what each returned, or one failure for all."""
    tasks, results = processes

    def call(name: str, size: int, *arguments: Any) -> list[Any]:
        for rank in range(size):
            tasks[rank].put((name, str(tmp_path / "store"), size, arguments))
        found: dict[int, Any] = {}
        failed = []
        for _ in range(size):
            rank, good, result = results.get(timeout=_TIMEOUT)
            found[rank] = result
            failed += [] if good else [f"rank {rank}: {result}"]
        assert not failed, "\n".join(failed)
        return [found[rank] for rank in range(size)]

    return call
