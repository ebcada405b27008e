"""`thermocline train`: trains the reference models on a click log or on histories; on several ranks under torchrun."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thermocline.errors import BadInput, ThermoclineError, write_text

from .options import Debug, Device, Json, Page, Quiet, check_file, check_folder, column_names, command_group
from .output import deliver, print_table, progress_bar, stop_on_interrupt

if TYPE_CHECKING:
    from thermocline.train import DLRMResult, DLRMRun, SequenceResult, SequenceRun

_CACHE = 0.05

# Options of both models.
SkipBad = Annotated[
    int, typer.Option("--skip-bad", min=0, metavar="LINES", help="Leave out up to this many bad lines of a text file.")
]
Hash = Annotated[
    int | None, typer.Option("--hash", min=1, metavar="ROWS", help="Hash the ids of --data to this number of rows per table.")
]
Elastic = Annotated[
    int | None,
    typer.Option("--elastic", min=1, metavar="ROWS", help="Let ids of --data come and go in this number of rows per table."),
]
Precision = Annotated[
    str | None,
    typer.Option("--precision", help="Row precision: fp32, bf16, fp16, fp8, int8, int4, int2; or auto, with --budget. [int8]"),
]
Cache = Annotated[float | None, typer.Option("--cache", min=0, max=1, help="Share of rows in the fp32 cache. [default: 0.05]")]
Policy = Annotated[str, typer.Option("--policy", help="Cache policy: lfu, lru, adaptive, fixed.")]
Dim = Annotated[int, typer.Option("--dim", min=1, help="Columns of a row.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Samples per step and rank.")]
Epochs = Annotated[int, typer.Option("--epochs", min=1, help="Passes over the log.")]
Lr = Annotated[float, typer.Option("--lr", min=0, help="Learning rate of the rows (row-wise Adagrad).")]
DenseLr = Annotated[float, typer.Option("--dense-lr", min=0, help="Learning rate of dense parameters (Adam).")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of all randomness.")]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="PLAN", help="Shard the tables over the ranks of torchrun by this plan.")
]
HeatFile = Annotated[Path | None, typer.Option("--heat", metavar="FILE.tc", help="Heat file of the plan.")]
RunFile = Annotated[
    Path | None,
    typer.Option("--run-json", metavar="RUN", callback=check_file, help="Write measurements for `plan check` (with --plan)."),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="FOLDER", callback=check_folder, help="Folder to save to and resume from."),
]
Logdir = Annotated[
    Path | None, typer.Option("--logdir", metavar="FOLDER", callback=check_folder, help="Folder for TensorBoard scalars.")
]

# Options of the DLRM.
ClickFile = Annotated[
    Path | None,
    typer.Option("--data", metavar="FILE", help="Parquet, CSV with a header, or Criteo TSV. [default: a synthetic log]"),
]
Label = Annotated[
    str, typer.Option("--label", metavar="COLUMN", help="Label column of 0 and 1; or COLUMN>=NUMBER.", show_default="label")
]
Ids = Annotated[str, typer.Option("--ids", help="Id columns, such as user,item or C1..C26.", show_default="C1, C2, ...")]
Dense = Annotated[
    str, typer.Option("--dense", help="Columns of numbers, such as price,age or I1..I13.", show_default="I1, I2, ...")
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", metavar="BYTES", help="With --precision auto, bytes of rows and cache: 2GiB, or 1/8 of fp32."),
]
Residency = Annotated[
    str, typer.Option("--residency", help="Memory of the tables: device, or host (rows are prefetched to the GPU).")
]

app = command_group("Train a reference model.", "thermocline train dlrm --precision int8")


@app.command(epilog="Example:  thermocline train dlrm --data clicks.csv --label clicked --ids user,item --precision int8")
def dlrm(
    data: ClickFile = None,
    label: Label = "",
    ids: Ids = "",
    dense: Dense = "",
    skip_bad: SkipBad = 0,
    test: Annotated[
        Path | None, typer.Option("--test", metavar="FILE", help="Test log. [default: the last 20% of --data]")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Training samples of the synthetic log.")] = 400_000,
    rows: Annotated[int, typer.Option("--rows", min=26, help="Rows of the synthetic log, over all tables.")] = 100_000,
    hashed: Hash = None,
    elastic: Elastic = None,
    precision: Precision = None,
    cache: Cache = None,
    budget: Budget = None,
    policy: Policy = "lfu",
    residency: Residency = "device",
    dim: Dim = 16,
    batch: Batch = 256,
    epochs: Epochs = 1,
    lr: Lr = 0.02,
    dense_lr: DenseLr = 2e-3,
    seed: Seed = 0,
    device: Device = None,
    plan: PlanFile = None,
    heat: HeatFile = None,
    run: RunFile = None,
    checkpoint: Checkpoint = None,
    logdir: Logdir = None,
    report: Page = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a DLRM on a click log and test it on later clicks.

    With --checkpoint, Ctrl-C saves, and the same command resumes.
    """
    _passive_openmp()
    from thermocline.data.click_files import CRITEO, ClickColumns
    from thermocline.train import DLRMRun, DLRMSettings, init_ranks

    _check_planned(plan, run, precision=precision, cache=cache, budget=budget)
    columns = ClickColumns(label, tuple(column_names(dense, "dense")), tuple(column_names(ids, "ids")))
    if data is None and (columns != CRITEO or skip_bad):
        raise BadInput("--label, --ids, --dense and --skip-bad describe a file; name it with --data", parameter="data")
    settings = DLRMSettings(
        data=data, test=test, columns=columns, skip_bad=skip_bad, samples=samples, rows=rows, hashed=hashed, elastic=elastic,
        precision=precision or "int8", budget=budget,
        cache=_CACHE if cache is None and precision != "auto" else cache or 0.0, policy=policy, residency=residency,
        dim=dim, batch=batch, epochs=epochs, lr=lr, dense_lr=dense_lr, seed=seed, device=device or "cpu",
    )  # fmt: skip
    with init_ranks(plan, heat, settings.device) as ranks:
        _finish(DLRMRun(settings, checkpoint, ranks=ranks), logdir, run, report, json, quiet)


@app.command(epilog="Example:  thermocline train sequence --data log.csv --columns visitor,product,at --precision int8")
def sequence(
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="Parquet, or CSV with a header. [default: a synthetic log]"),
    ] = None,
    columns: Annotated[
        str, typer.Option("--columns", help="Columns of user, item and time; or one of lists.", show_default="user,item,time")
    ] = "",
    skip_bad: SkipBad = 0,
    users: Annotated[int, typer.Option("--users", min=1, help="Histories of the synthetic log.")] = 20_000,
    items: Annotated[int, typer.Option("--items", min=32, help="Items of the synthetic log.")] = 10_000,
    hashed: Hash = None,
    precision: Precision = None,
    cache: Cache = None,
    policy: Policy = "lfu",
    dim: Dim = 32,
    length: Annotated[int, typer.Option("--length", min=1, help="Last items that the model reads.")] = 50,
    blocks: Annotated[int, typer.Option("--blocks", min=1, help="Attention blocks.")] = 2,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Attention heads; they divide --dim.")] = 2,
    negatives: Annotated[int, typer.Option("--negatives", min=1, help="Negative items per sample.")] = 64,
    batch: Batch = 128,
    epochs: Epochs = 2,
    lr: Lr = 0.1,
    dense_lr: DenseLr = 1e-3,
    seed: Seed = 0,
    device: Device = None,
    plan: PlanFile = None,
    heat: HeatFile = None,
    run: RunFile = None,
    checkpoint: Checkpoint = None,
    logdir: Logdir = None,
    report: Page = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a self-attention model on users' histories and rank the last item of each history.

    HitRate@10 and NDCG@10 rank the last item of at most 10,000 histories among all items. With --checkpoint, Ctrl-C
    saves, and the same command resumes.
    """
    _passive_openmp()
    from thermocline.train import SequenceRun, SequenceSettings, init_ranks

    _check_planned(plan, run, precision=precision, cache=cache)
    if data is None and (columns or skip_bad):
        raise BadInput("--columns and --skip-bad describe a file; name it with --data", parameter="data")
    settings = SequenceSettings(
        data=data, columns=tuple(column_names(columns)), skip_bad=skip_bad, users=users, items=items,
        hashed=hashed, precision=precision or "int8",
        cache=_CACHE if cache is None else cache, policy=policy, dim=dim, length=length, blocks=blocks, heads=heads,
        negatives=negatives, batch=batch, epochs=epochs, lr=lr, dense_lr=dense_lr, seed=seed, device=device or "cpu",
    )  # fmt: skip
    with init_ranks(plan, heat, settings.device) as ranks:
        _finish(SequenceRun(settings, checkpoint, ranks=ranks), logdir, run, report, json, quiet)


def _passive_openmp() -> None:
    """Let idle OpenMP threads sleep: spinning threads slowed `dlrm` from 14 s to 89 s on two shared cores. torch reads this."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _check_planned(plan: Path | None, run: Path | None, **chosen: object) -> None:
    """Refuse options that the plan decides."""
    if plan is None:
        if run is not None:
            raise BadInput(f"--run-json '{run}' needs --plan, whose prediction it is compared with", parameter="plan")
        return
    for name, value in chosen.items():
        if value is not None:
            words = f"--{name} is {value}, but --plan decides it; omit --{name}, or plan with it"
            raise BadInput(words, parameter=name, value=value)


def _finish(
    training: DLRMRun | SequenceRun, logdir: Path | None, run: Path | None, report: Path | None, json: str | None, quiet: bool
) -> None:
    """Train to the end; the first rank prints and writes the results."""
    from thermocline.train.loop import TrainingInterrupted
    from thermocline.train.report_page import train_page

    ranks = training.ranks
    try:
        with progress_bar(quiet or not ranks.first) as progress, stop_on_interrupt() as stop:
            result = training.finish(progress, stop, logdir)
    except TrainingInterrupted as interrupted:
        if ranks.first:
            print(f"thermocline: {interrupted}", file=sys.stderr)
        raise
    except ThermoclineError:
        if ranks.first and training.position.epoch == training.settings.epochs:  # the last save failed
            _print(training.result(), ranks.size)
        raise
    if not ranks.first:
        return
    settings, found, at = _as_json(asdict(training.settings)), asdict(result), training.position
    with deliver({"settings": settings, "cards": ranks.size, **_as_json(found)}, json, False) as shown:
        if shown:
            _print(result, ranks.size)
        if run is not None and training.run_json is not None:
            training.run_json.save(run)
        if report is not None:
            model = "DLRM" if "auc" in found else "sequence model"
            write_text(report, train_page(model, settings, found, at.curve, at.measured, ranks.size))


def _as_json(value: Any) -> Any:
    """Paths as text, and NaN (the AUC of a test part without clicks) as null."""
    if isinstance(value, dict):
        return {name: _as_json(part) for name, part in value.items()}
    if isinstance(value, float) and math.isnan(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _print(result: DLRMResult | SequenceResult, ranks: int) -> None:
    from thermocline.train.report_page import MEASURES

    measures = {**MEASURES, "train_loss": "train loss"}
    rows = [(name, f"{getattr(result, field):.4f}") for field, name in measures.items() if hasattr(result, field)]
    parts = ", ".join(f"{part} {count:,}" for part, count in result.memory.items())
    where = "" if ranks == 1 else f" on the first of {ranks} ranks"
    rows.append(("tables", f"{result.rows:,} rows, {sum(result.memory.values()):,} bytes{where} ({parts})"))
    rows.append(("time", f"{result.seconds:.1f} s for {result.samples:,} samples"))
    print_table(("", " "), rows, ("", " "), show_header=False)
