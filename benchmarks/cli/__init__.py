"""`thermocline bench NAME` measures; `bench show` and `bench compare` tell what was measured. A file for each subject."""

from __future__ import annotations

from . import cluster, learning, results, rows, serving
from .shared import app

__all__ = ["app", "cluster", "learning", "results", "rows", "serving"]
