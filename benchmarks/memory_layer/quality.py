"""`python -m benchmarks memory_quality`: validation loss of a small GPT with a memory table, against bytes of the table.

    arm        rows of the table
    none       the same network without a memory
    fp32       fp32
    int8+5%    int8, 5% of them cached in fp32
    int4+1%    int4, 1% of them cached in fp32
    tiers      {"fp32": 0.01, "int8": 0.05, "int2": 0.94}

Text is that of `corpus.py`, read once. Runs are paired by seed: equal initial networks and rows, and equal batches. The memory
is gated, as Engram's. Three rules, fixed before the first measurement, on loss in bits per byte of the held-out files:

    helps          of fp32 against none: the 95% interval of the paired differences lies below zero
    within seeds   of int8 against fp32: the mean difference is smaller than the standard deviation of fp32 over seeds
    within 0.2%    of int4 against fp32: the 95% interval of the relative differences ends below 0.2%
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

import thermocline as tc
from benchmarks.memory_layer import corpus
from benchmarks.memory_layer.gpt import GPT, GPTShape, adamw
from benchmarks.runner.noninferiority import interval
from benchmarks.runner.paired import ReportProgress, RunResult, TrainingJob, finish, note_commits
from benchmarks.runner.paired_rows import finite
from benchmarks.runner.record import Recorder
from thermocline.nn import NGramEmbedding, NGramHash

NONE, FP32 = "none", "fp32"
HELPS, WITHIN, NEAR = "helps", "within seeds", "within 0.2%"
MARGIN = 0.002
AUTOCAST = torch.bfloat16


@dataclass(frozen=True)
class MemoryArm:
    """How the rows of the table are stored; without a precision there is no table."""

    name: str
    precision: Any = None
    cache: float | None = None

    def rows(self, lr: float, seed: int) -> tc.RowConfig:
        return tc.RowConfig(self.precision, cache=self.cache, optimizer=tc.RowwiseAdagrad(lr=lr), seed=seed)


ARMS = (
    MemoryArm(NONE),
    MemoryArm(FP32, "fp32"),
    MemoryArm("int8+5%", "int8", 0.05),
    MemoryArm("int4+1%", "int4", 0.01),
    MemoryArm("tiers", {"fp32": 0.01, "int8": 0.05, "int2": 0.94}),
)


@dataclass(frozen=True)
class QualitySettings:
    """One run, but for the arm. `dim` and `rows` are those of the table."""

    shape: GPTShape
    tokens: int
    rows: int
    dim: int
    heads: int
    lr: float
    row_lr: float
    device: str
    text: str  # file of the encoded corpus
    seed: int = 0

    @property
    def steps(self) -> int:
        return self.tokens // self.shape.tokens

    @property
    def log(self) -> str:
        """What results of other settings are not mixed with."""
        told = {**asdict(self), "text": Path(self.text).stem, "seed": None, "device": None}
        return " ".join(f"{name}={value}" for name, value in told.items() if value is not None)


GPU = QualitySettings(
    GPTShape(layers=4, width=256, heads=4, vocabulary=16_384, length=512, batch=128), 100_000_000, 8_000_000, 32, 4,
    lr=2e-3, row_lr=0.2, device="cuda", text="",
)  # fmt: skip
CPU = QualitySettings(
    GPTShape(layers=2, width=64, heads=2, vocabulary=2048, length=128, batch=16), 2_000_000, 200_000, 16, 2,
    lr=3e-3, row_lr=0.2, device="cpu", text="",
)  # fmt: skip


def prepared(settings: QualitySettings, folder: Path, roots: Sequence[Path] | None = None) -> QualitySettings:
    """The settings with the file of the encoded corpus, which is made unless it is there."""
    wanted = f"corpus-{settings.shape.vocabulary}-{settings.tokens}"
    known = sorted(folder.glob(f"{wanted}-*.pt"))
    if known:
        return replace(settings, text=str(known[0]))
    made = corpus.build(roots or corpus.folders(), settings.tokens, settings.shape.vocabulary, settings.device)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{wanted}-{made.digest}.pt"
    torch.save(vars(made), path)
    return replace(settings, text=str(path))


@lru_cache(maxsize=1)
def _text(path: str) -> corpus.Corpus:
    return corpus.Corpus(**torch.load(path))


def run(
    settings: QualitySettings, seeds: int, runs: Path | None = None, jobs: int = 1, progress: ReportProgress | None = None,
    seconds: float = math.inf,
) -> dict[str, Any]:  # fmt: skip
    """Do the runs that the file `runs` lacks, seed by seed while there is time, and return the record."""
    recorder, began = Recorder("memory_quality", lambda line: None), time.monotonic()
    results: list[RunResult] = []
    for seed in range(seeds):
        if seed and (time.monotonic() - began) * (seed + 1) / seed > seconds:
            recorder.note(f"the time was up after {seed} of {seeds} seeds")
            break
        these = [TrainingJob(arm, replace(settings, seed=seed), settings.log) for arm in ARMS]
        results += finish(these, run_job, runs, jobs, progress, recorder.record["commit"])
    shape, text, slots = settings.shape, _text(settings.text), 2 * settings.heads
    recorder.note(
        f"a GPT of {shape.layers} layers x {shape.width}, {settings.steps:,} steps of {shape.tokens:,} tokens; a table of "
        f"{settings.rows:,} x {settings.dim}, {slots} rows a token; {len(text.train) / 1e6:.1f}M tokens of text, "
        f"{text.bytes_per_token:.2f} bytes each, vocabulary {text.vocabulary:,}, {len(text.held_out):,} tokens held out"
    )
    judge(recorder, {arm.name: {one.seed: one for one in results if one.arm == arm.name} for arm in ARMS})
    note_commits(recorder, results)
    return recorder.record | {"settings": settings.log}


# -- one run ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _network(shape: GPTShape, memory: int, device: str) -> tuple[GPT, Callable[..., Tensor]]:
    """One network for all runs of a process: it is compiled once, and given new parameters by every run."""
    model = GPT(shape, memory, gate=True).to(device)
    return model, torch.compile(model, dynamic=False) if device != "cpu" else model


def run_job(job: TrainingJob[MemoryArm]) -> dict[str, Any]:
    """Train a network once, and evaluate it on the held-out text."""
    settings, began = job.settings, time.perf_counter()
    shape, device, text = settings.shape, settings.device, _text(settings.text)
    ngrams = NGramHash(settings.rows, shape.vocabulary, (2, 3), settings.heads, exclude=(0,))
    width = settings.dim * ngrams.slots
    model, network = _network(shape, width, device)
    torch.manual_seed(settings.seed)
    model.load_state_dict(GPT(shape, width, gate=True).state_dict())
    memory = None
    if job.arm.precision is not None:
        torch.manual_seed(settings.seed)
        memory = NGramEmbedding(ngrams, settings.dim, rows=job.arm.rows(settings.row_lr, settings.seed), device=device)

    def loss_of(window_BL: Tensor) -> Tensor:
        tokens = window_BL[:, :-1]
        with torch.autocast(device, AUTOCAST, enabled=device != "cpu"):
            vectors = None if memory is None else memory(tokens)
            return network(tokens, window_BL[:, 1:].long(), vectors)

    losses = _train(model, memory, loss_of, settings, text.train.to(device))
    held_out = _evaluate(loss_of, shape, text.held_out.to(device))
    measures = {"trained": {"loss": held_out, "bits_per_byte": held_out / math.log(2) / text.bytes_per_token}}
    sizes = {"bytes": 0.0, "network_parameters": float(sum(p.numel() for p in model.parameters()))}
    if memory is not None:
        usage = memory.table.memory()
        sizes |= {"bytes": float(usage.total - usage.parts["optimizer state"]), "bytes_with_state": float(usage.total)}
        sizes |= {name: float(count) for name, count in memory.table.stats().items() if name in ("lookups", "hits")}
    sizes["last_training_loss"] = fmean(losses[-20:])
    return vars(RunResult(*job.key, measures, stats=sizes, rows=settings.rows, seconds=time.perf_counter() - began))


def _train(
    model: GPT, memory: NGramEmbedding | None, loss_of: Callable[[Tensor], Tensor], settings: QualitySettings, text: Tensor
) -> list[float]:  # fmt: skip
    shape, steps = settings.shape, settings.steps
    optimizer = adamw(model, settings.lr, settings.device, weight_decay=0.01)
    optimizers = [optimizer] if memory is None else [optimizer, tc.fused_optimizer(memory)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: _rate(step, steps)) for one in optimizers]
    losses = []
    for window_BL in _windows(text, shape, steps, settings.seed):
        loss = loss_of(window_BL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        for one, schedule in zip(optimizers, schedules, strict=True):
            one.step()
            schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in torch.stack(losses)]


def _rate(step: int, steps: int) -> float:
    """Learning rate: a rise, a plateau, and a fall to a tenth."""
    return min((step + 1) / max(1, steps // 20), 1.0, max(0.1, (steps - step) / max(1, steps // 3)))


def _windows(text: Tensor, shape: GPTShape, steps: int, seed: int) -> Iterator[Tensor]:
    """Batches of windows [batch, length + 1] of the text in random order; every window once before any comes again."""
    count = (len(text) - 1) // shape.length
    draws, needed = torch.Generator().manual_seed(seed), steps * shape.batch
    order = torch.cat([torch.randperm(count, generator=draws) for _ in range(-(-needed // count))])[:needed]
    within = torch.arange(shape.length + 1, device=text.device)
    for begin_B in (order * shape.length).view(steps, shape.batch).to(text.device):
        yield text[begin_B[:, None] + within]


@torch.no_grad()
def _evaluate(loss_of: Callable[[Tensor], Tensor], shape: GPTShape, text: Tensor) -> float:
    """Mean loss of the tokens of whole batches of windows."""
    windows = text[: (len(text) - 1) // shape.length * shape.length + 1].unfold(0, shape.length + 1, shape.length)
    batches = [part for part in windows.split(shape.batch) if len(part) == shape.batch] or [windows]
    return fmean(float(loss_of(part)) for part in batches)


# -- rows -------------------------------------------------------------------------------------------------------------

Runs = Mapping[int, RunResult]


def _bits(runs: Runs, seeds: Sequence[int]) -> list[float]:
    return [runs[seed].measures["trained"]["bits_per_byte"] for seed in seeds]


def judge(recorder: Recorder, runs: Mapping[str, Runs]) -> None:
    """Add a row for every arm. Nothing is asked of a single seed."""
    seeds = sorted(set.intersection(*(set(found) for found in runs.values())))
    none, fp32 = _bits(runs[NONE], seeds), _bits(runs[FP32], seeds)
    deviation = stdev(fp32) if len(seeds) > 1 else 0.0
    for arm in ARMS:
        mine = _bits(runs[arm.name], seeds)
        than_none = interval([a - b for a, b in zip(mine, none, strict=True)])
        than_fp32 = interval([a - b for a, b in zip(mine, fp32, strict=True)])
        relative = interval([a / b - 1 for a, b in zip(mine, fp32, strict=True)])
        verdicts = {HELPS} if than_none.high < 0 else set[str]()
        verdicts |= {WITHIN} if arm.name not in (NONE, FP32) and than_fp32.mean < deviation else set()
        verdicts |= {NEAR} if relative.high < MARGIN and arm.name not in (NONE, FP32) else set()
        case = f"text/{arm.name}"
        asked = recorder.asked.get(case) if len(seeds) > 1 else None
        stats = runs[arm.name][seeds[0]].stats
        recorder.add(
            case, fmean(mine), "bits/byte", peer=None if arm.name == NONE else NONE, peer_value=fmean(none), seeds=len(seeds),
            values=mine, than_none=finite(than_none), than_fp32=finite(than_fp32), relative=finite(relative),
            deviation=deviation, verdicts=sorted(verdicts), ok=asked is None or asked in verdicts,
            losses=[runs[arm.name][seed].measures["trained"]["loss"] for seed in seeds],
            seconds=fmean(runs[arm.name][seed].seconds for seed in seeds), **stats,
        )  # fmt: skip


def table(measured: dict[str, Any], only_short: bool = False) -> Table:
    """The record for a terminal."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("arm", "bytes of rows", "bits per byte", "to none", "to fp32", "verdicts", "asked"):
        drawn.add_column(head)
    for row in measured["rows"]:
        if row["ok"] and only_short:
            continue
        spans = (
            "" if row[name][1] is None else "{:+.4f} [{:+.4f}, {:+.4f}]".format(*row[name])
            for name in ("than_none", "than_fp32")
        )
        cells = (
            row["case"],
            f"{row['bytes']:,.0f}",
            f"{row['ours']:.4f}",
            *spans,
            ", ".join(row["verdicts"]),
            row["asked"] or "",
        )
        drawn.add_row(*cells, style=None if row["ok"] else "bold red")
    return drawn
