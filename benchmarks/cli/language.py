"""Commands for memory tables of language models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thermocline.cli.options import Debug, Device, Json, Quiet

from .rows import SmokeTest, gpu_or_quick
from .shared import app, measure


@app.command(name="memory_layer", epilog="Example:  python -m benchmarks memory_layer --json memory_layer.json")
def memory_layer(quick: SmokeTest = False, json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Time training steps of a GPT with memory tables of 100M and 320M rows, and lookups while decoding."""
    from benchmarks.memory_layer import benchmark as bench

    device = gpu_or_quick("memory_layer", quick)
    measure(json, quiet, lambda progress: bench.run(device, quick, progress))


@app.command(name="memory_quality", epilog="Example:  python -m benchmarks memory_quality --device cuda --json quality.json")
def memory_quality(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Paired runs of each arm.")] = 5,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Tokens of a run. [100M on a GPU, 2M on a CPU]")] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="Begin no seed that would end later than this.")] = 1e9,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Concurrent runs, one thread each.")] = 1,
    text: Annotated[
        Path, typer.Option("--text", metavar="FOLDER", help="Where the encoded text is kept; made at the first run.")
    ] = Path("/tmp/thermocline-text"),
    device: Device = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a small GPT on installed Python sources with memory tables of several precisions, and without, paired by seed.

    With --json, finished runs are kept beside FILE: the same command continues after Ctrl-C, and after --minutes.
    """
    from dataclasses import replace

    from benchmarks.memory_layer import quality as bench
    from benchmarks.runner import paired

    usual = bench.GPU if device == "cuda" else bench.CPU
    settings = bench.prepared(replace(usual, tokens=tokens or usual.tokens), text)
    kept = paired.runs_file(json)
    measure(json, quiet, lambda progress: bench.run(settings, seeds, kept, jobs, progress, 60 * minutes), bench.table)
