"""`thermocline train`: the reference models on a click log."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from thermocline.cli.options import Debug, Device, Json, Quiet
from thermocline.cli.output import console, progress_bar, write_json

if TYPE_CHECKING:
    from thermocline.train import Outcome

_CACHE = 0.05

app = typer.Typer(
    help="Train a reference model on a click log.",
    epilog="Example:  thermocline train dlrm --precision int8",
    no_args_is_help=True,
)


@app.callback()
def group() -> None:
    """Keeps `dlrm` a verb of a group, though it is the only one so far."""


@app.command(epilog="Example:  thermocline train dlrm --data train.txt.gz --precision int8 --checkpoint run1")
def dlrm(
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="Criteo TSV or Parquet, or MovieLens pairs; without it, a synthetic log."),
    ] = None,
    test: Annotated[
        Path | None, typer.Option("--test", metavar="FILE", help="To judge on; without it, the last 20% of --data.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Training samples of the synthetic log.")] = 400_000,
    rows: Annotated[int, typer.Option("--rows", min=26, help="Rows of the synthetic log, in all tables.")] = 100_000,
    hashed: Annotated[
        int | None, typer.Option("--hash", min=1, metavar="ROWS", help="Hash the ids of --data to so many rows a table.")
    ] = None,
    precision: Annotated[
        str, typer.Option("--precision", help="Of the rows: fp32, bf16, fp16, fp8, int8, int4, int2; or auto, with --budget.")
    ] = "int8",
    cache: Annotated[
        float | None, typer.Option("--cache", min=0, max=1, help="Share of rows in a full-precision cache. [default: 0.05]")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="BYTES", help="Of rows and cache, for --precision auto: 512MiB, 2GiB.")
    ] = None,
    policy: Annotated[str, typer.Option("--policy", help="Which rows the cache keeps: lfu, lru, adaptive.")] = "lfu",
    residency: Annotated[
        str, typer.Option("--residency", help="Where the tables are: device, or host (with a card; rows are prefetched).")
    ] = "device",
    dim: Annotated[int, typer.Option("--dim", min=1, help="Columns of a row.")] = 16,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples of a step.")] = 256,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the log.")] = 1,
    lr: Annotated[float, typer.Option("--lr", min=0, help="Learning rate of the rows (row-wise Adagrad).")] = 0.02,
    dense_lr: Annotated[float, typer.Option("--dense-lr", min=0, help="Learning rate of the MLPs (Adam).")] = 2e-3,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Everything random follows from it.")] = 0,
    device: Device = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="FOLDER", help="Save here, and resume what is here.")
    ] = None,
    logdir: Annotated[Path | None, typer.Option("--logdir", metavar="FOLDER", help="Scalars for TensorBoard.")] = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a DLRM in one pass over a click log and judge it on what comes after. Ctrl-C saves; the same command resumes."""
    # Read when torch is loaded. Idle OpenMP threads otherwise spin, and on a busy machine in the way of the one that works:
    # 89 s instead of 14 for the default on two shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from thermocline.train import Run, Settings

    settings = Settings(
        data=data, test=test, samples=samples, rows=rows, hashed=hashed, precision=precision, budget=budget,
        cache=_CACHE if cache is None and precision != "auto" else cache or 0.0, policy=policy, residency=residency,
        dim=dim, batch=batch, epochs=epochs, lr=lr, dense_lr=dense_lr, seed=seed,
        device=device.value if device else "cpu",
    )  # fmt: skip
    run = Run(settings, checkpoint)
    with progress_bar(quiet) as progress, _stop_on_interrupt() as stop:
        outcome = run.finish(progress, stop, logdir)
    if json:
        write_json(_as_json({"settings": asdict(settings), **asdict(outcome)}), json)
    if json != "-":
        _print(outcome)


def _as_json(value: object) -> object:
    """The same with what JSON lacks replaced: paths by text, NaN (the AUC of a test part without clicks) by null."""
    if isinstance(value, dict):
        return {name: _as_json(part) for name, part in value.items()}
    if isinstance(value, float) and math.isnan(value):
        return None
    return str(value) if isinstance(value, Path) else value


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a wish to stop after this step; the second interrupts at once."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _print(outcome: Outcome) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("test AUC", f"{outcome.auc:.4f}")
    table.add_row("test LogLoss", f"{outcome.logloss:.4f}")
    table.add_row("test NE", f"{outcome.ne:.4f}")
    table.add_row("train loss", f"{outcome.train_loss:.4f}")
    parts = ", ".join(f"{part} {count:,}" for part, count in outcome.memory.items())
    table.add_row("tables", f"{outcome.rows:,} rows, {sum(outcome.memory.values()):,} bytes ({parts})")
    table.add_row("time", f"{outcome.seconds:.1f} s for {outcome.samples:,} samples")
    console().print(table)
