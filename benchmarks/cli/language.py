"""Commands for memory tables of language models."""

from __future__ import annotations

from thermocline.cli.options import Debug, Json, Quiet

from .rows import SmokeTest, gpu_or_quick
from .shared import app, measure


@app.command(name="memory_layer", epilog="Example:  python -m benchmarks memory_layer --json memory_layer.json")
def memory_layer(quick: SmokeTest = False, json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Time training steps of a GPT with memory tables of 100M and 320M rows, and lookups while decoding."""
    from benchmarks.memory_layer import benchmark as bench

    device = gpu_or_quick("memory_layer", quick)
    measure(json, quiet, lambda progress: bench.run(device, quick, progress))
