"""`thermocline train`: the reference models, on a click log or on histories; on many cards under torchrun."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from thermocline.errors import BadInput

from .options import Debug, Device, DeviceName, Json, Page, Quiet
from .output import console, progress_bar, write_json

if TYPE_CHECKING:
    from thermocline.train import Cards, Outcome, Run, SequenceOutcome, SequenceRun

_CACHE = 0.05

_MEASURES = {
    "auc": "test AUC", "logloss": "test LogLoss", "ne": "test NE", "hit_rate": "test HitRate@10", "ndcg": "test NDCG@10",
    "train_loss": "train loss",
}  # fmt: skip

# What both models have.
Hash = Annotated[
    int | None, typer.Option("--hash", min=1, metavar="ROWS", help="Hash the ids of --data to so many rows a table.")
]
Precision = Annotated[
    str | None,
    typer.Option("--precision", help="Of the rows: fp32, bf16, fp16, fp8, int8, int4, int2; or auto, with --budget. [int8]"),
]
Cache = Annotated[
    float | None, typer.Option("--cache", min=0, max=1, help="Share of rows in a full-precision cache. [default: 0.05]")
]
Policy = Annotated[str, typer.Option("--policy", help="Which rows the cache keeps: lfu, lru, adaptive, fixed.")]
Dim = Annotated[int, typer.Option("--dim", min=1, help="Columns of a row.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Samples of a step, on each card.")]
Epochs = Annotated[int, typer.Option("--epochs", min=1, help="Passes over the log.")]
Lr = Annotated[float, typer.Option("--lr", min=0, help="Learning rate of the rows (row-wise Adagrad).")]
DenseLr = Annotated[float, typer.Option("--dense-lr", min=0, help="Learning rate of the dense part (Adam).")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Everything random follows from it.")]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="PLAN", help="Spread the tables over the cards of torchrun by this plan.")
]
HeatFile = Annotated[Path | None, typer.Option("--heat", metavar="FILE.tc", help="The heat file that the plan was made with.")]
RunFile = Annotated[
    Path | None, typer.Option("--run-json", metavar="RUN", help="With --plan: write what was measured, for `plan check`.")
]
Checkpoint = Annotated[Path | None, typer.Option("--checkpoint", metavar="FOLDER", help="Save here, and resume what is here.")]
Logdir = Annotated[Path | None, typer.Option("--logdir", metavar="FOLDER", help="Scalars for TensorBoard.")]

app = typer.Typer(
    help="Train a reference model.",
    epilog="Example:  thermocline train dlrm --precision int8",
    no_args_is_help=True,
)


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
    hashed: Hash = None,
    precision: Precision = None,
    cache: Cache = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="BYTES", help="Of rows and cache, for --precision auto: 512MiB, 2GiB.")
    ] = None,
    policy: Policy = "lfu",
    residency: Annotated[
        str, typer.Option("--residency", help="Where the tables are: device, or host (with a card; rows are prefetched).")
    ] = "device",
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
    """Train a DLRM in one pass over a click log and judge it on what comes after.

    With --checkpoint, Ctrl-C saves, and the same command resumes.
    """
    _calm()
    from thermocline.train import Run, Settings, cards_of

    _check_planned(plan, run, precision=precision, cache=cache, budget=budget)
    settings = Settings(
        data=data, test=test, samples=samples, rows=rows, hashed=hashed, precision=precision or "int8", budget=budget,
        cache=_CACHE if cache is None and precision != "auto" else cache or 0.0, policy=policy, residency=residency,
        dim=dim, batch=batch, epochs=epochs, lr=lr, dense_lr=dense_lr, seed=seed, device=_name(device),
    )  # fmt: skip
    with cards_of(plan, heat, settings.device) as cards:
        _finish(Run(settings, checkpoint, cards=cards), cards, logdir, Told(run, report, json, quiet))


@app.command(epilog="Example:  thermocline train sequence --data log.parquet --precision int8 --checkpoint run1")
def sequence(
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="Parquet: user, item, time; or lists of items. Without it, synthetic."),
    ] = None,
    users: Annotated[int, typer.Option("--users", min=1, help="Histories of the synthetic log.")] = 20_000,
    items: Annotated[int, typer.Option("--items", min=32, help="Items of the synthetic log.")] = 10_000,
    hashed: Hash = None,
    precision: Precision = None,
    cache: Cache = None,
    policy: Policy = "lfu",
    dim: Dim = 32,
    length: Annotated[int, typer.Option("--length", min=1, help="Items that the model looks back on.")] = 50,
    blocks: Annotated[int, typer.Option("--blocks", min=1, help="Blocks of attention.")] = 2,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads of a block; they divide --dim.")] = 2,
    negatives: Annotated[int, typer.Option("--negatives", min=1, help="Items a sample is told from.")] = 64,
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
    """Train self-attention over users' histories, and rank the item that each was last seen with.

    HitRate@10 and NDCG@10 are of the last item of at most 10,000 histories, ranked among all items. With
    --checkpoint, Ctrl-C saves, and the same command resumes.
    """
    _calm()
    from thermocline.train import SequenceRun, SequenceSettings, cards_of

    _check_planned(plan, run, precision=precision, cache=cache)
    settings = SequenceSettings(
        data=data, users=users, items=items, hashed=hashed, precision=precision or "int8",
        cache=_CACHE if cache is None else cache, policy=policy, dim=dim, length=length, blocks=blocks, heads=heads,
        negatives=negatives, batch=batch, epochs=epochs, lr=lr, dense_lr=dense_lr, seed=seed, device=_name(device),
    )  # fmt: skip
    with cards_of(plan, heat, settings.device) as cards:
        _finish(SequenceRun(settings, checkpoint, cards=cards), cards, logdir, Told(run, report, json, quiet))


def _calm() -> None:
    """Idle OpenMP threads otherwise spin, and on a busy machine in the way of the one that works: 89 s instead of 14 for the
    default of `dlrm` on two shared cores. Read when torch is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _name(device: DeviceName | None) -> str:
    return device.value if device else "cpu"


def _check_planned(plan: Path | None, run: Path | None, **chosen: object) -> None:
    """What a plan decides is not chosen twice."""
    if plan is None:
        if run is not None:
            raise BadInput(f"--run-json is '{run}', for what was measured of a plan, but there is no --plan")
        return
    for name, value in chosen.items():
        if value is not None:
            raise BadInput(
                f"--{name} is {value}, and --plan '{plan}' says how rows are kept; leave --{name} away, or plan with it"
            )


@dataclass(frozen=True)
class Told:
    """Where what was found goes."""

    run: Path | None
    report: Path | None
    json: str | None
    quiet: bool


def _finish(training: Run | SequenceRun, cards: Cards, logdir: Path | None, told: Told) -> None:
    """Train to the end; the first rank tells how it was."""
    from thermocline.train.loop import Interrupted

    quiet = told.quiet or not cards.first
    try:
        with progress_bar(quiet) as progress, _stop_on_interrupt() as stop:
            outcome = training.finish(progress, stop, logdir)
    except Interrupted as kept:
        if cards.first:
            print(f"thermocline: {kept}", file=sys.stderr)
        raise
    if not cards.first:
        return
    settings = _as_json(asdict(training.settings))
    if told.run is not None and training.run_json is not None:
        training.run_json.save(told.run)
    if told.report is not None:
        told.report.write_text(_page(training, settings, outcome), encoding="utf-8")
    if told.json:
        write_json({"settings": settings, "cards": cards.size, **_as_json(asdict(outcome))}, told.json)
    if told.json != "-":
        _print(outcome, cards.size)


def _page(training: Run | SequenceRun, settings: Any, outcome: Outcome | SequenceOutcome) -> str:
    from thermocline.train.report_page import train_page

    model, at = "DLRM" if hasattr(outcome, "auc") else "sequence model", training.position
    return train_page(model, settings, asdict(outcome), at.curve, at.measured, training.cards.size)


def _as_json(value: Any) -> Any:
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


def _print(outcome: Outcome | SequenceOutcome, cards: int) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for field, name in _MEASURES.items():
        if hasattr(outcome, field):
            table.add_row(name, f"{getattr(outcome, field):.4f}")
    parts = ", ".join(f"{part} {count:,}" for part, count in outcome.memory.items())
    there = "" if cards == 1 else f" on the first of {cards} cards"
    table.add_row("tables", f"{outcome.rows:,} rows, {sum(outcome.memory.values()):,} bytes{there} ({parts})")
    table.add_row("time", f"{outcome.seconds:.1f} s for {outcome.samples:,} samples")
    console().print(table)
