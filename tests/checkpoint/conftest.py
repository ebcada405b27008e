"""Real processes for sharded checkpoints: four of them are started once and do what tests ask for (`sharded_ranks.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed")]  # whose small models and plans are used here

MOST = 4
_TIMEOUT = 240.0  # seconds until a test gives up on its processes


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[tuple[list[Any], Any]]:
    import sharded_ranks

    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["thermocline.checkpoint.load", "thermocline.checkpoint.save"])
    results = context.Queue()
    tasks = [context.Queue() for _ in range(MOST)]
    work = sharded_ranks.work
    started = [context.Process(target=work, args=(rank, tasks[rank], results), daemon=True) for rank in range(MOST)]
    for process in started:
        process.start()
    yield tasks, results
    for process in started:
        process.kill()


@pytest.fixture
def on_ranks(rank_processes: tuple[list[Any], Any], tmp_path: Path) -> Callable[..., list[Any]]:
    """Call a function of `sharded_ranks.py` on so many ranks; what each returned, or one failure for all."""
    tasks, results = rank_processes
    calls = 0

    def call(name: str, size: int, *arguments: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        for rank in range(size):
            tasks[rank].put((name, str(tmp_path / f"store{calls}"), size, arguments))
        found: dict[int, Any] = {}
        failed = []
        for _ in range(size):
            rank, good, result = results.get(timeout=_TIMEOUT)
            found[rank] = result
            failed += [] if good else [f"rank {rank}: {result}"]
        assert not failed, "\n".join(failed)
        return [found[rank] for rank in range(size)]

    return call
