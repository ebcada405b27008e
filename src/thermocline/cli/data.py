"""`thermocline data`: logs to train on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .options import Debug, Device, Json, Quiet
from .output import console, progress_bar, write_json

app = typer.Typer(
    help="Logs to train on.",
    epilog="Example:  thermocline data synth -o clicks.parquet --samples 1000000",
    no_args_is_help=True,
)

Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE.parquet", help="The file to write.")]
Exponent = Annotated[float, typer.Option("--exponent", min=0, help="Of Zipf's law: how skewed the ids are.")]
Rows = Annotated[int, typer.Option("--rows", min=26, help="Rows of the 26 tables in all; Criteo Kaggle has 33,762,577.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Everything random follows from it.")]


@app.command(epilog="Example:  thermocline data synth -o clicks.parquet --samples 1000000 --rows 200000")
def synth(
    output: Output,
    samples: Annotated[int, typer.Option("--samples", min=1, help="How many samples.")] = 1_000_000,
    rows: Rows = 1_000_000,
    seed: Seed = 0,
    exponent: Exponent = 1.05,
    device: Device = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a synthetic click log in Criteo's columns, and say how well its own truth predicts it."""
    from thermocline.data.synthetic import SyntheticLog, table_rows
    from thermocline.data.write_log import write_parquet

    _check_output(output)
    log = SyntheticLog(table_rows(rows), samples, seed, device=device.value if device else "cpu", exponent=exponent)
    start = time.perf_counter()
    with progress_bar(quiet) as progress:
        best = write_parquet(log, output, progress)
    result = {"file": str(output), "samples": samples, "rows": list(log.rows), "seed": seed, "exponent": exponent}
    result |= {"best": best._asdict(), "seconds": time.perf_counter() - start}
    if json:
        write_json(result, json)
    if json != "-" and not quiet:
        console().print(
            f"{output}: {samples:,} samples over {sum(log.rows):,} rows. No model can do better than the truth behind it:"
            f" AUC {best.auc:.4f}, LogLoss {best.logloss:.4f}, NE {best.ne:.4f}"
        )


@app.command(epilog="Example:  thermocline data sequences -o log.parquet --users 100000 --items 50000 --drift 0.1")
def sequences(
    output: Output,
    users: Annotated[int, typer.Option("--users", min=1, help="How many histories, 20 items each in the mean.")] = 20_000,
    items: Annotated[int, typer.Option("--items", min=32, help="How many items.")] = 10_000,
    seed: Seed = 0,
    exponent: Exponent = 1.05,
    drift: Annotated[
        float, typer.Option("--drift", min=0, max=1, help="Share of the items that heat moves on by, in the course of the log.")
    ] = 0.0,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a synthetic log of histories: user, item and time in milliseconds, in the order of time."""
    from thermocline.data.synthetic_sequences import SyntheticSequences, write_sequences

    _check_output(output)
    made = SyntheticSequences(users, items, seed, exponent, drift)
    with progress_bar(quiet) as progress:
        written = write_sequences(made, output, progress)
    result = {"file": str(output), "users": users, "items": items, "interactions": written, "seed": seed}
    if json:
        write_json(result | {"exponent": exponent, "drift": drift}, json)
    if json != "-" and not quiet:
        console().print(f"{output}: {written:,} interactions of {users:,} users with {items:,} items")


def _check_output(output: Path) -> None:
    if output.suffix != ".parquet":
        raise typer.BadParameter(
            f"'{output}' is written as Parquet, and read by its name: call it '{output.stem}.parquet'", param_hint="--output"
        )
    if not output.resolve().parent.is_dir():
        raise typer.BadParameter(f"the folder of '{output}' does not exist", param_hint="--output")
