"""`python -m benchmarks NAME --json FILE` runs one benchmark from a checkout."""

from __future__ import annotations

from benchmarks.cli import app

app()
