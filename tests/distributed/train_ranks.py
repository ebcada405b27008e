"""Training runs on ranks for the tests of `train`: final numbers and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.quality.arms import QualityArm, Size, plan_of
from thermocline.data.click_log import heat_of
from thermocline.heat.profile import HeatProfile
from thermocline.heat.profiler import profile_batches
from thermocline.train import ONE_RANK, DLRMRun, DLRMSettings, SequenceRun, SequenceSettings, TrainingRanks

HISTORIES = SequenceSettings(users=43, items=320, dim=8, length=9, negatives=8, batch=7, epochs=2, lr=0.05)
CLICKS = DLRMSettings(samples=503, rows=500, dim=4, batch=50, bottom=(8,), top=(16,))
PLACED = QualityArm(tiers=True)


def training_ranks(arm: QualityArm, sizes: dict[str, Size], counted: dict[str, Any], rank: int, ranks: int) -> TrainingRanks:
    made: list[Any] = []
    if rank == 0:
        heat = HeatProfile(profile_batches([counted]).tables, created="then")  # the same whenever a run is resumed
        made = [plan_of(arm, sizes, heat, nodes=ranks), heat]
    made = made or [None, None]
    if ranks > 1:
        dist.broadcast_object_list(made)
    return TrainingRanks(rank, ranks, *made)


def sequence_ranks(settings: SequenceSettings, rank: int, ranks: int, arm: QualityArm = PLACED) -> TrainingRanks:
    items = settings.log().training_items()
    return training_ranks(arm, {"item": Size(settings.items, settings.dim, ("item",), 100)}, {"item": items}, rank, ranks)


def train_sequence(rank: int, ranks: int, settings: SequenceSettings, planned: bool, folder: str, stops: list[int]) -> Any:
    """Train, maybe interrupted after some steps and resumed; the outcome and all that was learned."""
    run = None
    for stop in [*stops, 10**9]:
        training = sequence_ranks(settings, rank, ranks) if planned else ONE_RANK
        run = SequenceRun(settings, Path(folder) if folder else None, ranks=training)
        at = run.position
        try:
            outcome = run.finish(stop=lambda: at.step >= stop and rank == 0)  # noqa: B023
        except KeyboardInterrupt:
            continue
    assert run is not None
    if run.ranks.sharding:
        run.ranks.sharding.check_replicas()
    dense = torch.cat([parameter.detach().flatten() for parameter in run.model.encoder.parameters()])
    rows = run.model.embeddings.get_rows("item", torch.arange(settings.items))
    learned = rows.cpu().numpy(), dense.cpu().numpy()
    return outcome.hit_rate, outcome.ndcg, outcome.train_loss, *learned, run.position.step, run.run_json


def train_twice(rank: int, ranks: int, settings: SequenceSettings, folder: str) -> Any:
    """In one go, and stopped twice."""
    whole = train_sequence(rank, ranks, settings, True, "", [])
    return whole, train_sequence(rank, ranks, settings, True, folder, [2, 5])


def train_clicks(rank: int, ranks: int, settings: DLRMSettings, planned: bool) -> Any:
    train, _ = settings.logs()
    names = [f"C{n + 1}" for n in range(26)]
    training = ONE_RANK
    if planned:
        (batch,) = train.batches(10**6)
        counted = dict(zip(names, batch.ids_BF.t().numpy(), strict=True))
        assert [len(heat) for heat in heat_of(train)] == list(train.rows)
        sizes = {name: Size(rows, settings.dim, (name,), 50) for name, rows in zip(names, train.rows, strict=True)}
        training = training_ranks(PLACED, sizes, counted, rank, ranks)
    run = DLRMRun(settings, ranks=training)
    outcome = run.finish()
    rows = [run.model.embeddings.get_rows(name).numpy() for name in names]
    return outcome.auc, outcome.logloss, outcome.train_loss, rows
