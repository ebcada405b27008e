"""Training a DLRM on a click log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from thermocline.data.click_log import ClickLog, Clicks
from thermocline.data.metrics import Measures, measures
from thermocline.errors import BadInput
from thermocline.models import DLRM

from .loop import Measured, RunResult, TrainLoop
from .ranks import ONE_RANK, TrainingRanks
from .settings import DLRMSettings

EVALUATION_BATCH = 8192


@dataclass(frozen=True, kw_only=True)
class DLRMResult(RunResult):
    """Metrics, memory and time of a finished run."""

    auc: float
    logloss: float
    ne: float


class DLRMRun(TrainLoop[Clicks, DLRMResult]):
    """A DLRM in training. `logs` and `model` replace those of the settings.

    Example:
        >>> DLRMRun(DLRMSettings(precision="int8", cache=0.05)).finish().auc
    """

    def __init__(
        self, settings: DLRMSettings, checkpoint: Path | None = None, logs: tuple[ClickLog, ClickLog] | None = None,
        model: DLRM | None = None, ranks: TrainingRanks = ONE_RANK,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.train_log, self.test_log = logs or settings.logs()
        if not self.train_log.samples or not self.test_log.samples:
            counts = f"{self.train_log.samples} samples to train on and {self.test_log.samples} to test"
            raise BadInput(f"the log has {counts}; both parts need some", parameter="data", samples=self.train_log.samples)
        if model is None and ranks.plan is not None:
            self.train_log, self.test_log, model = settings.planned(self.train_log, self.test_log, ranks)
        self.model = model or settings.model(self.train_log)
        super().__init__(settings, self.model, self.train_log.samples, checkpoint, ranks)

    def batches(self) -> Iterator[Clicks]:
        size, at = self.settings.batch, self.position
        for batch in self.train_log.batches(size * self.ranks.size, at.epoch, at.step_in_epoch):
            yield batch.narrow(self.ranks.rank * size, size).to(self.settings.device)

    def lookup_ids(self, batch: Clicks) -> Tensor:
        return batch.ids_BF

    def losses(self, batch: Clicks) -> Tensor:
        logit_B = self.model(batch.dense_BI, batch.ids_BF)
        return binary_cross_entropy_with_logits(logit_B, batch.label_B, reduction="none")

    def evaluate(self) -> Measured:
        return evaluate(self.model, self.test_log, self.settings.device, self.ranks)._asdict()

    def result(self) -> DLRMResult:
        return DLRMResult(**self.common_results(sum(self.train_log.rows)))


@torch.no_grad()
def evaluate(model: DLRM, log: ClickLog, device: str, ranks: TrainingRanks = ONE_RANK) -> Measures:
    """Metrics of a model on a log. Each rank evaluates its part of every batch."""
    model.eval()
    logits, labels = [], []
    for batch in log.batches(EVALUATION_BATCH):
        size = -(-len(batch.label_B) // ranks.size)
        batch = batch.narrow(ranks.rank * size, size).to(device)
        logits.append(model(batch.dense_BI, batch.ids_BF))
        labels.append(batch.label_B)
    mine = torch.cat(logits), torch.cat(labels)
    parts = ranks.gather(tuple(part.cpu() for part in mine) if ranks.size > 1 else mine)
    return measures(*zip(*parts, strict=True))
