"""The command line of the benchmarks: one module of commands for each subject."""

from __future__ import annotations

from . import cluster, language, learning, results, rows, serving
from .shared import app

__all__ = ["app", "cluster", "language", "learning", "results", "rows", "serving"]
