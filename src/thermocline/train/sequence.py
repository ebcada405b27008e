"""Training the sequence model, and judging it by the place of what came next among all items.

**Loss**: at every place of a history, the softmax of the score of what followed against those of the sample's negatives. As
negatives are drawn by heat, each score is first lessened by the log of its item's chance to be drawn: scores then estimate what
they would against all items evenly, and hot items are not punished for being drawn often. A negative that is the right answer
does not count.

**Judging**: all rows are ranked, none are sampled: of few candidates a model that is no better than chance on cold items looks
good. The held-out item's rank is the number of other rows whose score is as high or higher, so that a model without an opinion
is last and not first. An item that the training part does not have is a miss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thermocline.data.metrics import Ranking, Ranks
from thermocline.data.sequences import Histories, SequenceLog
from thermocline.errors import BadInput
from thermocline.ids.idmap import IdMap
from thermocline.models import SequenceModel
from thermocline.models.sequence import Predictions

from .distributed import ALONE, Cards
from .loop import Loop, Measured
from .sequence_settings import TABLE, SequenceSettings

EVALUATION_BATCH = 512
ROW_BLOCK = 1 << 14  # rows that are ranked at a time


@dataclass(frozen=True)
class SequenceOutcome:
    """How a run ended. HitRate and NDCG are at 10."""

    hit_rate: float
    ndcg: float
    train_loss: float  # mean over the last epoch, while it was trained
    samples: int  # trained on, over all epochs
    rows: int
    memory: dict[str, int]  # bytes of the table, by part; of this card's, where there are several
    stats: dict[str, int]
    seconds: float  # over all parts of a run that was resumed


class SequenceRun(Loop[Histories, SequenceOutcome]):
    """A sequence model in training. `settings` say all about it, but for a `log` that is made already; then `finish()`."""

    def __init__(
        self,
        settings: SequenceSettings,
        checkpoint: Path | None = None,
        log: SequenceLog | None = None,
        cards: Cards = ALONE,
    ) -> None:
        self.settings = settings
        self.log = log or settings.log()
        if not self.log.samples or not self.log.trials:
            raise BadInput(
                f"the log has {self.log.samples} samples to train on and {self.log.trials} to test; both parts need some"
            )
        self.ids = settings.id_map(self.log, cards)
        self.model = settings.model(self.log, cards)
        super().__init__(settings, self.model, self.log.samples, checkpoint, cards)

    def batches(self) -> Iterator[Histories]:
        at = self.position
        for batch in self.log.batches(self.settings.batch, at.epoch, at.step_in_epoch, self.cards.share):
            yield batch.to(self.settings.device)

    def looked_up(self, batch: Histories) -> dict[str, tuple[Tensor, Tensor]]:
        return self.model.bags(batch.items_N, batch.offsets, batch.negatives_BK)

    def losses(self, batch: Histories) -> Tensor:
        return sampled_softmax(self.model(batch.items_N, batch.offsets, batch.negatives_BK), batch)

    def judge(self) -> Measured:
        found = judge_sequences(self.model, self.log, self.ids, self.settings.device, self.cards)
        return {"hit_rate": found.hit_rate, "ndcg": found.ndcg}

    def outcome(self) -> SequenceOutcome:
        return SequenceOutcome(**self.ended(self.ids.rows))


def sampled_softmax(scores: Predictions, batch: Histories) -> Tensor:
    """The loss at each place that something follows."""
    target_T, sample_T = scores.target_T, scores.sample_T
    right_T = scores.next_T - batch.chance_N[target_T]
    wrong_TK = scores.negative_TK - batch.chance_BK[sample_T]
    same_TK = batch.negatives_BK[sample_T] == batch.items_N[target_T][:, None]
    wrong_TK = wrong_TK.masked_fill(same_TK, -torch.inf)
    return torch.logsumexp(torch.cat([right_T[:, None], wrong_TK], dim=1), dim=1) - right_T


@torch.no_grad()
def judge_sequences(model: SequenceModel, log: SequenceLog, ids: IdMap, device: str = "cpu", cards: Cards = ALONE) -> Ranking:
    """Rank what came next among all rows; changes nothing in the model. Of several cards each ranks its part of the trials."""
    model.eval()
    tables: Any = model.embeddings
    states, nexts = [], []
    for batch in log.judging(EVALUATION_BATCH, cards.share):
        states.append(model.encode(batch.items_N.to(device), batch.offsets.to(device)))
        nexts.append(batch.next_B)
    state_UD, row_U = torch.cat(states), ids(torch.cat(nexts)).to(device)
    known = ids.rows if ids.kept is None else ids.kept.count  # of a pruned map, the rows after them are for unknown items
    score_U = (state_UD * tables.get_rows(TABLE, row_U)).sum(1)
    above_U = torch.zeros_like(row_U)
    for first in range(0, known, ROW_BLOCK):
        rows_R = torch.arange(first, min(first + ROW_BLOCK, known), device=device)
        values_RD = tables.get_rows(TABLE, rows_R)
        for part in torch.arange(len(row_U), device=device).split(EVALUATION_BATCH):
            higher_UR = state_UD[part] @ values_RD.t() >= score_U[part, None]
            above_U[part] += (higher_UR & (row_U[part, None] != rows_R)).sum(1)
    ranks = Ranks()
    ranks.add(torch.where(row_U < known, above_U, known))
    return Ranking.of(cards.add(*ranks.sums))
