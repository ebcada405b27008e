"""Servers with fake tables on free ports of the loopback (`fake_server.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import Running, make_folder, start

from thermocline.serve.server.config import ServerLimits


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with the model 'tables', version 1, for tests that do not change it."""
    running, stop = start(make_folder(tmp_path_factory.mktemp("served"), "."))
    yield running
    stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts servers for one test."""
    stops = []

    def begin(*names: str, limits: ServerLimits | None = None, **settings: Any) -> Running:
        running, stop = start(make_folder(tmp_path / f"served{len(stops)}", *(names or (".",))), limits, **settings)
        stops.append(stop)
        return running

    yield begin
    for stop in stops:
        stop()
