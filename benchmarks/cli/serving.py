"""Commands for servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thermocline.cli.options import Debug, Device, Json, Quiet

from .shared import DEFAULT_DATA, Filter, Logs, Quick, app, measure


@app.command(epilog="Example:  python -m benchmarks serve --device cuda --filter /B/ --json serve_gpu.json")
def serve(
    data: Logs = DEFAULT_DATA,
    kserve_python: Annotated[
        Path | None,
        typer.Option(
            "--kserve-python", envvar="THERMOCLINE_KSERVE_PYTHON", exists=True, help="Python of an environment with KServe."
        ),
    ] = None,
    mlserver_python: Annotated[
        Path | None,
        typer.Option(
            "--mlserver-python",
            envvar="THERMOCLINE_MLSERVER_PYTHON",
            exists=True,
            help="Python of an environment with MLServer.",
        ),
    ] = None,
    device: Device = None,
    filter: Filter = None,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare lookups on 2, 4 and 8 shards with one, time checkpoint loading, replay logs, race other servers."""
    from benchmarks.serve import benchmark as bench

    peers = {"kserve": kserve_python, "mlserver": mlserver_python}
    name = device or "cpu"
    measure(json, quiet, lambda progress: bench.run(name, data, filter, quick, progress=progress, peers=peers))


@app.command(epilog="Example:  python -m benchmarks chaos --minutes 10 --json chaos.json")
def chaos(
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.05, help="Duration of each part; results are judged from 10 minutes.")
    ] = 10.0,
    filter: Annotated[str | None, typer.Option("--filter", help="One part: requests or publishes.")] = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Load a server while shards are killed, versions change, and bursts and malformed requests arrive; check every answer."""
    from benchmarks.chaos import benchmark as bench

    measure(json, quiet, lambda progress: bench.run(minutes, filter, progress))


@app.command(epilog="Example:  python -m benchmarks freshness --json freshness.json")
def freshness(
    data: Logs = DEFAULT_DATA,
    filter: Filter = None,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Publish from a trainer to a server: step to lookups, reads meanwhile, memory, and a tenth of the bytes on real logs."""
    from benchmarks.freshness import benchmark as bench

    measure(json, quiet, lambda progress: bench.run(data, filter, quick, progress))


@app.command(epilog="Example:  python -m benchmarks fuzz --json fuzz.json")
def fuzz(
    mutations: Annotated[
        int, typer.Option("--mutations", min=10, help="Files to spoil; results are judged from 10,000.")
    ] = 10_000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the mutations.")] = 1,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Open thousands of hostile checkpoints, plans and heat files: each is refused, or has the values of the good one."""
    from benchmarks.fuzz import benchmark as bench

    measure(json, quiet, lambda progress: bench.run(mutations, seed, progress))
