"""Metrics of predictions: AUC, LogLoss and normalized entropy; HitRate@10 and NDCG@10 of rankings.

AUC is the probability that a click scores above a non-click, ties counting half. Scores are kept (5 bytes each) and ranked
exactly: histograms would be off by more than the 5e-4 that comparisons turn on. LogLoss is computed from logits, where no
probability rounds to 0 or 1. Normalized entropy is LogLoss divided by that of predicting the click rate.

With one right answer at rank r (0 is first), HitRate@10 is the share with r < 10, and NDCG@10 the mean of 1 / log2(r + 2) over
those, 0 for others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline.errors import BadInput


class Measures(NamedTuple):
    """Metrics of click predictions."""

    auc: float
    logloss: float
    ne: float


def measures(logits: Sequence[Tensor], labels: Sequence[Tensor]) -> Measures:
    """Metrics of predictions in several parts."""
    if [part.shape for part in logits] != [part.shape for part in labels]:
        shapes = (", ".join(str(tuple(part.shape)) for part in parts) for parts in (logits, labels))
        raise BadInput("logits are {}, labels {}; give one logit per sample".format(*shapes), parameter="logit_B")
    if not labels:
        raise BadInput("the test part of the log has 0 samples", samples=0)
    logit_N, label_N = torch.cat(list(logits)).detach().float(), torch.cat(list(labels)).detach() > 0.5
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logit_N.double(), label_N.double()).item()
    rate = label_N.double().mean().item()
    entropy = -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
    return Measures(auc(logit_N, label_N), loss, loss / entropy if entropy else math.nan)


def auc(score_N: Tensor, label_N: Tensor) -> float:
    """Probability that a True sample scores above a False one, ties counting half; NaN without both labels."""
    if not torch.isfinite(score_N).all():
        return math.nan
    _, tie_N, count_T = score_N.unique(return_inverse=True, return_counts=True)
    rank_T = count_T.cumsum(0).double() - (count_T - 1).double() / 2  # mean rank of each group of ties, from 1
    clicks = int(label_N.sum())
    others = label_N.numel() - clicks
    if not clicks or not others:
        return math.nan
    above: float = rank_T[tie_N[label_N]].sum().item() - clicks * (clicks + 1) / 2
    return above / (clicks * others)


TOP = 10


class Ranking(NamedTuple):
    """Metrics of rankings at 10."""

    hit_rate: float
    ndcg: float
    trials: int

    @staticmethod
    def of(sums: Sequence[float]) -> Ranking:
        """From sums of hits, gains and trials."""
        hits, gains, trials = sums
        if not trials:
            raise BadInput("the test part of the log has 0 histories", samples=0)
        return Ranking(hits / trials, gains / trials, int(trials))


def rank_sums(rank_N: Tensor) -> tuple[float, float, float]:
    """Sums over the ranks of right answers (from 0), for `Ranking.of`."""
    hit_N = rank_N < TOP
    gain = (1 / torch.log2(rank_N[hit_N].double() + 2)).sum().item()
    return float(hit_N.sum()), gain, float(len(rank_N))
