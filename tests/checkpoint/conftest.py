"""Real processes for sharded checkpoints: four of them are started once and do what tests ask for (`sharded_ranks.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # whose small models, plans and processes are used here
sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import Pool, caller, started

MOST = 4
_TIMEOUT = 600.0  # seconds until a test gives up on its processes


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[Pool]:
    import sharded_ranks

    yield from started(sharded_ranks.work, MOST, ["thermocline.checkpoint.loading", "thermocline.checkpoint.save_job"])


@pytest.fixture
def on_ranks(rank_processes: Pool, tmp_path: Path) -> Callable[..., list[Any]]:
    """Call a function of `sharded_ranks.py` on so many ranks; what each returned, or one failure for all."""
    return caller(rank_processes, tmp_path, _TIMEOUT)
