"""`python -m benchmarks NAME --json FILE` runs one benchmark from a checkout."""

from __future__ import annotations

from benchmarks.cli import app
from thermocline.cli import main

if __name__ == "__main__":  # processes of the accuracy benchmark are spawned and import this module
    main(app, "benchmarks")
