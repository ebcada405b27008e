"""Trains models of other libraries unconverted and converted, paired by seed, and judges the differences.

    arm        what
    plain      the model as its library makes it
    rounding   the same, with parameters changed by half a unit in the last place: how far rounding alone takes a model;
               three such controls, each with other random bits
    fp32       converted, fp32 rows
    int8       converted, int8 rows with a cache of 5%

"equal": losses and metric of fp32 are apart from those of plain, seed by seed, by at most `TIMES` times as much as the median
of the controls, or by less than `LEAST`. One control is not enough: in some seeds a model takes one of two ways, as rounding
decides. The median of three is as strict as one control on average; their maximum would be looser. "within seeds": on average,
int8 loses less than the standard deviation of plain over seeds.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import fmean, median, stdev
from types import SimpleNamespace
from typing import Any

import torch
from rich import box
from rich.markup import escape
from rich.table import Table
from torch import nn

import thermocline as tc
from benchmarks.runner.noninferiority import interval
from benchmarks.runner.paired import ReportProgress, RunResult, TrainingJob, finish, note_commits
from benchmarks.runner.record import Recorder
from thermocline.nn import ConversionReport

from .case import ZooCase

FILES = ("facebook_dlrm", "deepctr", "recbole_models", "geometric", "torchrec_dlrm")  # each imports its library
TIMES, LEAST = 10, 1e-5
EQUAL, WITHIN = "equal", "within seeds"
CONTROLS = ("rounding", "rounding 2", "rounding 3")


@dataclass(frozen=True)
class ZooArm:
    """What is done with a model before its training."""

    name: str
    rows: tc.RowConfig | None = None  # to convert it
    bits: int | None = None  # seed of the last bits of its parameters


ARMS = (
    ZooArm("plain"),
    *(ZooArm(name, bits=bits) for bits, name in enumerate(CONTROLS)),
    ZooArm("fp32", tc.RowConfig("fp32")),
    ZooArm("int8", tc.RowConfig("int8", cache=0.05)),
)


def cases(filter: str, note: Callable[[str], None]) -> Iterator[ZooCase]:
    """The models whose name contains `filter`; notes libraries that are missing."""
    for file in FILES:
        try:
            found = import_module(f"{__package__}.{file}").CASES
        except ImportError as error:
            note(f"{file} is left out: there is no {error.name}")
        else:
            yield from (case for case in found if filter in case.name)


def run(
    filter: str = "", seeds: int = 5, runs: Path | None = None, progress: ReportProgress | None = None
) -> dict[str, Any]:  # fmt: skip
    """Do the runs that the file `runs` lacks, and return the record."""
    warnings.filterwarnings("ignore")  # of the libraries
    recorder = Recorder("zoo", lambda line: None)
    done: list[RunResult] = []
    for case in cases(filter, recorder.note):
        every = [(seed, arm) for seed in range(seeds) for arm in ARMS]
        jobs = [TrainingJob(arm, SimpleNamespace(dim=0, seed=seed, case=case), case.name) for seed, arm in every]
        results = finish(jobs, run_job, runs, 1, progress, recorder.record["commit"])
        done += results
        judge(recorder, case, {arm.name: [one for one in results if one.arm == arm.name] for arm in ARMS})
    if done:
        note_commits(recorder, done)
    return recorder.record


def run_job(job: TrainingJob[ZooArm]) -> dict[str, Any]:
    """Train a model once."""
    case, began = job.settings.case, time.perf_counter()
    reports: list[ConversionReport] = []
    trained = case.train(job.settings.seed, lambda model: reports.append(prepare(model, job.arm, case)))
    measures = {
        "trained": {"metric": float(trained.metric)},
        "losses": {str(at): float(loss) for at, loss in enumerate(trained.losses)},
    }
    sizes = {"bytes_before": reports[0].bytes_before, "bytes_after": reports[0].bytes_after}
    return vars(RunResult(*job.key, measures, stats=sizes, seconds=time.perf_counter() - began))


def prepare(model: nn.Module, arm: ZooArm, case: ZooCase) -> ConversionReport:
    """Do to a model what the arm says."""
    if arm.rows is not None:
        return tc.convert_(model, replace(arm.rows, optimizer=case.optimizer))
    if arm.bits is not None:
        draw = torch.Generator().manual_seed(arm.bits)
        for parameter in model.parameters():
            parameter.data.mul_(1 + 1.2e-7 * (torch.rand(parameter.shape, generator=draw) - 0.5))
    return ConversionReport(())


def apart(mine: RunResult, plain: RunResult) -> float:
    """How far two runs are apart: the largest relative difference of losses, or the difference of the metric if larger."""
    pairs = zip(mine.measures["losses"].values(), plain.measures["losses"].values(), strict=True)
    metric = abs(mine.measures["trained"]["metric"] - plain.measures["trained"]["metric"])
    return max(metric, *(abs(one - other) / abs(other) for one, other in pairs))


def is_equal(distance: float, by_rounding: float) -> bool:
    """Whether fp32 rows that are this far apart from the unconverted model equal it."""
    return distance <= max(TIMES * by_rounding, LEAST)


def judge(recorder: Recorder, case: ZooCase, runs: dict[str, list[RunResult]]) -> None:
    """Add the rows of one model. Runs are in the order of seeds."""
    metrics = {arm: [one.measures["trained"]["metric"] for one in found] for arm, found in runs.items()}
    plain = metrics["plain"]
    apart_of = {arm: [apart(*pair) for pair in zip(runs[arm], runs["plain"], strict=True)] for arm in (*CONTROLS, "fp32")}
    by_rounding = [median(controls) for controls in zip(*(apart_of[name] for name in CONTROLS), strict=True)]
    equal = all(is_equal(*pair) for pair in zip(apart_of["fp32"], by_rounding, strict=True))
    lost = interval([ours - theirs for ours, theirs in zip(metrics["int8"], plain, strict=True)])
    deviation = stdev(plain) if len(plain) > 1 else 0.0
    details: dict[str, dict[str, Any]] = {
        "fp32": {"verdict": EQUAL if equal else "not equal", "apart": apart_of["fp32"], "by_rounding": by_rounding},
        "int8": {
            "verdict": WITHIN if lost.mean > -deviation else "below seeds",
            "difference": list(lost) if len(plain) > 1 else None, "deviation": deviation,
        },
    }  # fmt: skip
    recorder.record["versions"][case.library] = case.version.split()[-1]
    for arm, detail in details.items():
        asked = recorder.asked.get(f"{case.name}/{arm}")
        seconds = fmean(one.seconds for one in runs[arm])
        recorder.add(
            f"{case.name}/{arm}", fmean(metrics[arm]), case.metric, peer="unconverted", peer_value=fmean(plain),
            library=case.version, lines=case.lines, seeds=len(plain), values=metrics[arm], peer_values=plain, seconds=seconds,
            **runs[arm][0].stats, **detail, ok=asked in (None, detail["verdict"]),
        )  # fmt: skip


# -- the table --

HEADS = ("model", "library", "lines changed", "metric", "unconverted", "fp32 rows", "int8 rows, 5% cache", "bytes of tables")


def cells(fp32: dict[str, Any], int8: dict[str, Any]) -> Sequence[str]:
    """One model, for a terminal and for the documentation."""
    low_high = "" if int8["difference"] is None else " [{:+.4f}, {:+.4f}]".format(*int8["difference"][1:])
    return (
        fp32["case"].rpartition("/")[0], fp32["library"], str(fp32["lines"]), fp32["unit"],
        f"{fp32['peer_value']:.4f} ± {int8['deviation']:.4f}",
        f"{fp32['verdict']} ({max(fp32['apart']):.0e}; rounding {max(fp32['by_rounding']):.0e})",
        f"{int8['verdict']} ({int8['ours'] - int8['peer_value']:+.4f}{low_high})",
        f"{int8['bytes_before']:,} to {int8['bytes_after']:,}",
    )  # fmt: skip


def table(measured: dict[str, Any], only_short: bool = False) -> Table:
    """The record as a table for a terminal."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in HEADS:
        drawn.add_column(head, overflow="fold")
    rows = measured["rows"]
    for fp32, int8 in zip(rows[::2], rows[1::2], strict=True):
        short = not (fp32["ok"] and int8["ok"])
        if short or not only_short:
            drawn.add_row(*map(escape, cells(fp32, int8)), style="bold red" if short else None)
    return drawn


def markdown(measured: dict[str, Any]) -> Iterator[str]:
    """Lines of the table in `docs/zoo.md`."""
    rows = measured["rows"]
    yield f"| {' | '.join(HEADS)} |"
    yield "|---|---|---:|---|---|---|---|---|"
    for fp32, int8 in zip(rows[::2], rows[1::2], strict=True):
        yield f"| {' | '.join(cells(fp32, int8))} |"
