"""Set-up for every test: without a card, Triton kernels run in Triton's interpreter; hypothesis draws the same cases always."""

from __future__ import annotations

import os

# Read when torch is imported. By default idle OpenMP threads spin, and on a busy machine they spin in the way of the one
# thread that works: 43 s instead of 7 for the tests of the definitions, on two cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("COLUMNS", None)  # xdist sets it in its workers, and tables would be printed in parts

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, so before any test is

# Cases that are drawn slowly on a busy machine are no reason to fail.
slowly = [HealthCheck.too_slow]
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=25, suppress_health_check=slowly)
settings.load_profile("fixed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `exhaustive` out, unless `-m` names the mark."""
    if "exhaustive" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
