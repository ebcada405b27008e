"""Eight real processes, started once, that run functions of tests on any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import Pool, caller, started

MOST = 8
_TIMEOUT = 600.0  # seconds until a test gives up on its processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Pool]:
    import ranks

    yield from started(ranks.work, MOST, ["thermocline.distributed.shard", "thermocline.train"])


@pytest.fixture
def on_ranks(processes: Pool, tmp_path: Path) -> Callable[..., list[Any]]:
    """Call a function of `ranks.py`, or `module.function`, on some ranks; the result of each, or one failure for all."""
    return caller(processes, tmp_path, _TIMEOUT)
