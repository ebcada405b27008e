"""`thermocline bench NAME` measures; `bench show` and `bench compare` tell what was measured. A file for each subject."""

from __future__ import annotations

from thermocline.cli.bench import cluster, learning, results, rows, serving
from thermocline.cli.bench.shared import app

__all__ = ["app", "cluster", "learning", "results", "rows", "serving"]
