"""Training the sequence model, and its evaluation by the rank of the next item among all items.

**Loss**: sampled softmax at every position of a history, with the logQ correction: the log of an item's probability of being
drawn is subtracted from its score. A negative that equals the next item does not count.

**Evaluation**: all rows are ranked. The rank is the number of other rows whose score is as high or higher, so a constant model
ranks last. An item that the training part does not have is a miss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thermocline.data.metrics import Ranking, rank_sums
from thermocline.data.sequences import Histories, SequenceLog
from thermocline.errors import BadInput
from thermocline.ids.idmap import IdMap
from thermocline.models import SequenceModel
from thermocline.models.sequence import Predictions

from .loop import Measured, RunResult, TrainLoop
from .ranks import ONE_RANK, TrainingRanks
from .settings import ITEM_TABLE, SequenceSettings

EVALUATION_BATCH = 512
ROW_BLOCK = 1 << 14  # rows ranked at a time


@dataclass(frozen=True, kw_only=True)
class SequenceResult(RunResult):
    """Metrics, memory and time of a finished run. HitRate and NDCG are at 10."""

    hit_rate: float
    ndcg: float


class SequenceRun(TrainLoop[Histories, SequenceResult]):
    """A sequence model in training. `log` replaces that of the settings."""

    def __init__(
        self, settings: SequenceSettings, checkpoint: Path | None = None, log: SequenceLog | None = None,
        ranks: TrainingRanks = ONE_RANK,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.log = log or settings.log()
        if not self.log.samples or not self.log.trials:
            counts = f"{self.log.samples} samples to train on and {self.log.trials} to test"
            raise BadInput(f"the log has {counts}; both parts need some", parameter="data", samples=self.log.samples)
        self.ids = settings.id_map(self.log, ranks)
        self.model = settings.model(self.log, ranks)
        super().__init__(settings, self.model, self.log.samples, checkpoint, ranks)

    def batches(self) -> Iterator[Histories]:
        at = self.position
        for batch in self.log.batches(self.settings.batch, at.epoch, at.step_in_epoch, self.ranks.rank, self.ranks.size):
            yield batch.to(self.settings.device)

    def lookup_ids(self, batch: Histories) -> dict[str, tuple[Tensor, Tensor]]:
        return self.model.bags(batch.items_N, batch.offsets, batch.negatives_BK)

    def losses(self, batch: Histories) -> Tensor:
        return sampled_softmax(self.model(batch.items_N, batch.offsets, batch.negatives_BK), batch)

    def evaluate(self) -> Measured:
        found = evaluate_sequences(self.model, self.log, self.ids, self.settings.device, self.ranks)
        return {"hit_rate": found.hit_rate, "ndcg": found.ndcg}

    def result(self) -> SequenceResult:
        return SequenceResult(**self.common_results(self.ids.rows))


def sampled_softmax(scores: Predictions, batch: Histories) -> Tensor:
    """The loss at each position with a next item."""
    target_T, sample_T = scores.target_T, scores.sample_T
    right_T = scores.next_T - batch.chance_N[target_T]
    wrong_TK = scores.negative_TK - batch.chance_BK[sample_T]
    same_TK = batch.negatives_BK[sample_T] == batch.items_N[target_T][:, None]
    wrong_TK = wrong_TK.masked_fill(same_TK, -torch.inf)
    return torch.logsumexp(torch.cat([right_T[:, None], wrong_TK], dim=1), dim=1) - right_T


@torch.no_grad()
def evaluate_sequences(
    model: SequenceModel, log: SequenceLog, ids: IdMap, device: str = "cpu", ranks: TrainingRanks = ONE_RANK
) -> Ranking:
    """Rank the next item of each test history among all rows. Each rank evaluates its part of the histories."""
    model.eval()
    tables: Any = model.embeddings
    states, nexts = [], []
    for batch in log.test_batches(EVALUATION_BATCH, ranks.rank, ranks.size):
        states.append(model.encode(batch.items_N.to(device), batch.offsets.to(device)))
        nexts.append(batch.next_B)
    state_UD, row_U = torch.cat(states), ids(torch.cat(nexts)).to(device)
    known = ids.rows if ids.kept is None else ids.kept.count  # later rows are for unknown items
    score_U = (state_UD * tables.get_rows(ITEM_TABLE, row_U)).sum(1)
    above_U = torch.zeros_like(row_U)
    for first in range(0, known, ROW_BLOCK):
        rows_R = torch.arange(first, min(first + ROW_BLOCK, known), device=device)
        values_RD = tables.get_rows(ITEM_TABLE, rows_R)
        for part in torch.arange(len(row_U), device=device).split(EVALUATION_BATCH):
            higher_UR = state_UD[part] @ values_RD.t() >= score_U[part, None]
            above_U[part] += (higher_UR & (row_U[part, None] != rows_R)).sum(1)
    return Ranking.of(ranks.add(*rank_sums(torch.where(row_U < known, above_U, known))))
