"""`python -m benchmarks online`: progressive validation on logs whose ids come and go, paired by seed.

    logs.py          logs cut into periods
    tables.py        the arms
    torchrec_ids.py  the map of TorchRec

Each period is predicted in eval(), then trained on in batches. The first tenth of the periods only warms up. AUC and LogLoss
are those of all predictions after it; `pairs` is the share of clicks ranked above the item that was not clicked beside them.
The model is the same for all arms: embeddings, their products with each other, and a layer of 32.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.online import logs, tables
from benchmarks.online.tables import CEILING, OnlineArm, OnlineTables
from benchmarks.runner.noninferiority import BETTER, MARGIN, PASSES, REJECTED, SEEDS, Interval, interval
from benchmarks.runner.paired import ReportProgress, RunResult, TrainingJob, finish, note_commits
from benchmarks.runner.paired_rows import Runs, asked_cell, by_arm, draw, finite, mean, seeds_cell, span
from benchmarks.runner.record import Recorder, Row
from thermocline.data.metrics import measures
from thermocline.errors import BadInput

WARM_UP = 0.1  # of the periods
PEERS = ("hashed", "two-hash", "mch-lfu", "mch-distance-lfu")  # that elastic ids are compared with, beside the ceiling
# Tuned with seed 100: batch and learning rates for the ceiling; half-life, and batches between evictions of TorchRec, by log.
RECIPES: dict[str, dict[str, Any]] = {
    "globo": {"batch": 2048, "lr": 0.05, "dense_lr": 1e-3, "half_life": 5, "interval": 3},
    "diginetica": {"batch": 1024, "lr": 0.05, "dense_lr": 1e-3, "half_life": 100, "interval": 10},
    "criteo": {"batch": 256, "lr": 0.02, "dense_lr": 2e-3, "half_life": 1000, "interval": 10},
}


@dataclass(frozen=True)
class OnlineSettings:
    """One run."""

    log: str
    folder: Path
    seed: int = 0
    dim: int = 16
    share: float = 1.0  # of the log
    batch: int = 2048
    lr: float = 0.05
    dense_lr: float = 1e-3
    half_life: int = 100
    interval: int = 10  # batches between evictions of TorchRec


@dataclass(frozen=True)
class OnlinePlan:
    """The arms and runs of the experiment."""

    folder: Path
    logs: Sequence[str] = tuple(logs.FILES)
    seeds: int = SEEDS
    filter: str | None = None
    share: float = 1.0

    def arms(self) -> list[OnlineArm]:
        """Arms whose name contains the filter, and the ceiling. Those of TorchRec need TorchRec."""
        known = [arm for arm in tables.ARMS if tables.has_torchrec() or not arm.name.startswith("mch")]
        return [arm for arm in known if arm == CEILING or self.filter is None or self.filter in arm.name]

    def jobs(self) -> list[TrainingJob[OnlineArm]]:
        """All runs, ordered by seed; logs without a file are left out."""
        found = [name for name in self.logs if (self.folder / logs.FILES[name]).is_file()]
        if not found:
            names = ", ".join(logs.FILES[name] for name in self.logs)
            raise BadInput(f"'{self.folder}' has none of {names}; name their folder with --data", parameter="data")
        settings = [
            OnlineSettings(name, self.folder, seed, share=self.share, **RECIPES[name])
            for seed in range(self.seeds)
            for name in found
        ]
        return [TrainingJob(arm, each, _key(each)) for each in settings for arm in self.arms()]


def _key(settings: OnlineSettings) -> str:
    part = f" (first {settings.share:g})" if settings.share < 1 else ""
    return f"{settings.log}{part}: " + ", ".join(f"{name} {value:g}" for name, value in RECIPES[settings.log].items())


class OnlineModel(nn.Module):
    """Click logits from the embeddings of a batch."""

    def __init__(self, embeddings: OnlineTables, features: int, dense: int, dim: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.Sequential(nn.Linear(dense + features * dim + features * (features - 1) // 2, 32), nn.ReLU())
        self.last = nn.Linear(32, 1)
        self.register_buffer("pairs", torch.triu_indices(features, features, 1), persistent=False)

    def forward(self, batch: logs.Batch) -> Tensor:
        rows_BFD = self.embeddings(batch.ids)
        first, second = self.get_buffer("pairs")
        products_BP = torch.bmm(rows_BFD, rows_BFD.transpose(1, 2))[:, first, second]
        out: Tensor = self.last(self.layers(torch.cat([batch.dense_BJ, rows_BFD.flatten(1), products_BP], dim=1)))
        return out[:, 0]


def run_job(job: TrainingJob[OnlineArm]) -> dict[str, Any]:
    """Predict and train on one log with one arm and seed; returns a `RunResult` as a dict, which can be pickled."""
    settings, started = job.settings, time.perf_counter()
    log = logs.read(settings.log, settings.folder, settings.share)
    assert log is not None
    torch.manual_seed(settings.seed)
    warm_up = max(1, int(WARM_UP * (len(log.periods) - 1)))
    embeddings = OnlineTables(job.arm, log, settings, int(log.periods[warm_up]))
    model = OnlineModel(embeddings, len(log.columns), log.dense_NJ.shape[1], settings.dim)
    dense = torch.optim.Adam([*model.layers.parameters(), *model.last.parameters()], lr=settings.dense_lr)
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    for period in range(len(log.periods) - 1):
        if period >= warm_up:
            model.eval()
            with torch.no_grad():
                for batch in log.batches(period, 4 * settings.batch, settings.seed):
                    logits.append(model(batch))
                    labels.append(batch.label_B)
        model.train()
        for batch in log.batches(period, settings.batch, settings.seed):
            loss = functional.binary_cross_entropy_with_logits(model(batch), batch.label_B)
            dense.zero_grad()
            loss.backward()
            dense.step()
    found = measures(logits, labels)
    judged = {"auc": found.auc, "logloss": found.logloss}
    if log.label_N is None:
        clicked, other = torch.cat(logits).view(-1, 2).t()
        judged["pairs"] = float(((clicked > other).double() + 0.5 * (clicked == other)).mean())
    stats = {"bytes": float(embeddings.bytes), "shared": embeddings.shared(), "samples": float(sum(map(len, labels)))}
    rows = sum(table.rows for table in embeddings.rows.tables)
    return asdict(RunResult(*job.key, {"trained": judged}, stats=stats, rows=rows, seconds=time.perf_counter() - started))


def run(plan: OnlinePlan, runs: Path | None = None, jobs: int = 1, progress: ReportProgress | None = None) -> dict[str, Any]:
    """Do the runs that are missing in the file `runs`, `jobs` at a time, and return the record."""
    recorder = Recorder("online", lambda line: None, judged=plan.share == 1.0)
    results = finish(plan.jobs(), run_job, runs, jobs, progress, recorder.record["commit"])
    for name in plan.logs:
        if of_log := [result for result in results if result.log.split(":")[0].split(" ")[0] == name]:
            write(recorder, name, plan.arms(), of_log)
    note_commits(recorder, results)
    if not tables.has_torchrec():
        recorder.note("TorchRec is not installed: its arms are left out")
    return recorder.record | {"recipes": RECIPES}


# -- rows --


def write(recorder: Recorder, log: str, arms: Sequence[OnlineArm], results: Iterable[RunResult]) -> None:
    """Add a row for every arm beside the ceiling, and for elastic ids beside each peer of equal bytes.

    An arm *passes* beside the ceiling if its AUC is at most 5e-4 lower, with confidence, and is *better* than a peer if the
    interval of its paired differences lies above zero.
    """
    (runs,) = by_arm(results).values()
    for arm in arms:
        _add(recorder, f"{log}/{arm.name}", runs[arm.name], None if arm == CEILING else runs[CEILING.name], CEILING.name)
        peers = [*PEERS, *(["elastic"] if arm.precision != "fp32" else [])] if arm.is_elastic else []
        for peer in peers:
            if peer in runs:
                _add(recorder, f"{log}/{arm.name}-vs-{peer}", runs[arm.name], runs[peer], peer)


def _add(recorder: Recorder, case: str, mine: Runs, peers: Runs | None, peer: str) -> None:
    first, bytes = next(iter(mine.values())), fmean(run.stats["bytes"] for run in mine.values())
    fields: Row = {
        "seeds": len(mine), "seeds_wanted": SEEDS, "bytes": bytes, "table_rows": first.rows, "samples": first.stats["samples"],
        "shared": fmean(run.stats["shared"] for run in mine.values()), "logloss": mean(mine, "trained", "logloss"),
        "pairs": mean(mine, "trained", "pairs") if "pairs" in first.measures["trained"] else None,
        "seconds": median(run.seconds for run in mine.values()), "asked": None, "ok": True,
    }  # fmt: skip
    if peers is None:
        recorder.add(case, mean(mine, "trained", "auc"), "AUC", **fields)
        return
    both = [seed for seed in mine if seed in peers]
    found = interval([mine[seed].measures["trained"]["auc"] - peers[seed].measures["trained"]["auc"] for seed in both])
    said = verdict(found)
    asked = recorder.asked.get(case) if len(both) >= SEEDS else None
    fields |= {"difference": finite(found), "verdict": said, "asked": asked, "seeds": len(both)}
    fields |= {"ok": asked is None or said == asked or (asked == PASSES and said == BETTER)}
    recorder.add(case, mean(mine, "trained", "auc"), "AUC", peer=peer, peer_value=mean(peers, "trained", "auc"), **fields)


def verdict(difference: Interval) -> str:
    """The result for paired differences of AUC."""
    return BETTER if difference.low > 0 else PASSES if difference.low > -MARGIN else REJECTED


# -- the table --


def table(measured: dict[str, Any], only_short: bool = False) -> Table:
    """The record as a table for a terminal; differences in units of 1e-4."""
    names = ("arm", "seeds", "AUC", "peer", "difference", "pairs", "MB", "rows", "shared", "verdict", "asked")
    return draw(measured, "differences", names, _cells, only_short)


def _cells(row: Row) -> list[str]:
    return [
        row["case"],
        seeds_cell(row),
        f"{row['ours']:.4f}",
        "" if row["peer_value"] is None else f"{row['peer_value']:.4f}",
        span(row.get("difference")),
        "" if row["pairs"] is None else f"{row['pairs']:.4f}",
        f"{row['bytes'] / 1e6:.2f}",
        f"{row['table_rows']:,}",
        f"{row['shared']:.1%}",
        row.get("verdict", ""),
        asked_cell(row),
    ]
