"""Servers on free ports of the loopback; `running.py` says how, and what they serve."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from running import Running, make_folder, start

from thermocline.serve.server.limits import Limits


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with the model 'tables', version 1, for tests that leave it as it was."""
    running, stop = start(make_folder(tmp_path_factory.mktemp("served"), "."))
    yield running
    stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start servers that one test may do anything with."""
    stops = []

    def begin(*names: str, limits: Limits | None = None, **settings: Any) -> Running:
        running, stop = start(make_folder(tmp_path / f"served{len(stops)}", *(names or (".",))), limits, **settings)
        stops.append(stop)
        return running

    yield begin
    for stop in stops:
        stop()
