"""Training a DLRM on a click log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from thermocline.data import Clicks, Log, Scores
from thermocline.data.metrics import Measures
from thermocline.errors import BadInput
from thermocline.models import DLRM

from .distributed import ALONE, Cards
from .loop import Loop, Measured
from .settings import Settings

EVALUATION_BATCH = 8192


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    auc: float
    logloss: float
    ne: float
    train_loss: float  # mean over the last epoch, while it was trained
    samples: int  # trained on, over all epochs
    rows: int
    memory: dict[str, int]  # bytes of the tables, by part; of this card's, where there are several
    stats: dict[str, int]
    seconds: float  # over all parts of a run that was resumed


class Run(Loop[Clicks, Outcome]):
    """A model in training. `settings` say all about it, but for `logs` or a `model` that are made already; then `finish()`."""

    def __init__(
        self,
        settings: Settings,
        checkpoint: Path | None = None,
        logs: tuple[Log, Log] | None = None,
        model: DLRM | None = None,
        cards: Cards = ALONE,
    ) -> None:
        self.settings = settings
        self.train_log, self.test_log = logs or settings.logs()
        if not self.train_log.samples or not self.test_log.samples:
            counts = f"{self.train_log.samples} samples to train on and {self.test_log.samples} to test"
            raise BadInput(f"the log has {counts}; both parts need some")
        if model is None and cards.plan is not None:
            self.train_log, self.test_log, model = settings.planned(self.train_log, self.test_log, cards)
        self.model = model or settings.model(self.train_log)
        super().__init__(settings, self.model, self.train_log.samples, checkpoint, cards)

    def batches(self) -> Iterator[Clicks]:
        size, at = self.settings.batch, self.position
        for batch in self.train_log.batches(size * self.cards.size, at.epoch, at.step_in_epoch):
            yield batch.narrow(self.cards.rank * size, size).to(self.settings.device)

    def looked_up(self, batch: Clicks) -> Tensor:
        return batch.ids_BF

    def losses(self, batch: Clicks) -> Tensor:
        logit_B = self.model(batch.dense_BI, batch.ids_BF)
        return binary_cross_entropy_with_logits(logit_B, batch.label_B, reduction="none")

    def judge(self) -> Measured:
        return evaluate(self.model, self.test_log, self.settings.device, self.cards)._asdict()

    def outcome(self) -> Outcome:
        return Outcome(**self.ended(sum(self.train_log.rows)))


@torch.no_grad()
def evaluate(model: DLRM, log: Log, device: str, cards: Cards = ALONE) -> Measures:
    """Judge the model on a log; changes nothing in it. Of several cards each looks at its part of every batch."""
    model.eval()
    logits, labels = [], []
    for batch in log.batches(EVALUATION_BATCH):
        size = -(-len(batch.label_B) // cards.size)
        batch = batch.narrow(cards.rank * size, size).to(device)
        logits.append(model(batch.dense_BI, batch.ids_BF))
        labels.append(batch.label_B)
    mine = torch.cat(logits), torch.cat(labels)
    scores = Scores()
    for logit_N, label_N in cards.gather(tuple(part.cpu() for part in mine) if cards.size > 1 else mine):
        scores.add(logit_N, label_N)
    return scores.measures()
