"""`thermocline data`: writes synthetic logs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .options import Debug, Device, Json, Quiet, check_file, command_group
from .output import console, deliver, progress_bar

app = command_group("Write synthetic logs.", "thermocline data synth -o clicks.parquet --samples 1000000")


def _check_output(output: Path) -> Path | None:
    if output.suffix != ".parquet":
        raise typer.BadParameter(f"'{output}' must end in .parquet; use '{output.stem}.parquet'")
    return check_file(output)


Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE.parquet", callback=_check_output, help="Output file.")]
Exponent = Annotated[float, typer.Option("--exponent", min=0, help="Zipf exponent of the ids.")]
Rows = Annotated[int, typer.Option("--rows", min=26, help="Rows over all 26 tables (Criteo Kaggle: 33,762,577).")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of all randomness.")]


@app.command(epilog="Example:  thermocline data synth -o clicks.parquet --samples 1000000 --rows 200000")
def synth(
    output: Output,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Number of samples.")] = 1_000_000,
    rows: Rows = 1_000_000,
    seed: Seed = 0,
    exponent: Exponent = 1.05,
    device: Device = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a synthetic click log with Criteo's columns, and report the best metrics that a model can reach."""
    from thermocline.data.synthetic import SyntheticLog, table_rows
    from thermocline.data.write_log import write_parquet

    log = SyntheticLog(table_rows(rows), samples, seed, device=device or "cpu", exponent=exponent)
    start = time.perf_counter()
    with progress_bar(quiet) as progress:
        best = write_parquet(log, output, progress)
    result = {"file": str(output), "samples": samples, "rows": list(log.rows), "seed": seed, "exponent": exponent}
    result |= {"best": best._asdict(), "seconds": time.perf_counter() - start}
    with deliver(result, json, quiet) as shown:
        if shown:
            metrics = f"AUC {best.auc:.4f}, LogLoss {best.logloss:.4f}, NE {best.ne:.4f}"
            written = f"{output}: {samples:,} samples over {sum(log.rows):,} rows"
            console().print(f"{written}. Metrics of the true probabilities: {metrics}")


@app.command(epilog="Example:  thermocline data sequences -o log.parquet --users 100000 --items 50000 --drift 0.1")
def sequences(
    output: Output,
    users: Annotated[int, typer.Option("--users", min=1, help="Number of histories, of 20 items on average.")] = 20_000,
    items: Annotated[int, typer.Option("--items", min=32, help="Number of items.")] = 10_000,
    seed: Seed = 0,
    exponent: Exponent = 1.05,
    drift: Annotated[
        float, typer.Option("--drift", min=0, max=1, help="Share of items by which heat drifts over the log.")
    ] = 0.0,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a synthetic log of histories, sorted by time: user, item and time in milliseconds."""
    from thermocline.data.synthetic_sequences import SyntheticSequences
    from thermocline.data.write_log import write_sequences

    made = SyntheticSequences(users, items, seed, exponent, drift)
    with progress_bar(quiet) as progress:
        written = write_sequences(made, output, progress)
    result = {"file": str(output), "users": users, "items": items, "interactions": written, "seed": seed}
    with deliver(result | {"exponent": exponent, "drift": drift}, json, quiet) as shown:
        if shown:
            console().print(f"{output}: {written:,} interactions of {users:,} users with {items:,} items")
