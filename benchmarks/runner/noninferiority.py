"""The rule that decides whether tables of low precision are as good as fp32 tables. It was fixed before the first measurement.

Runs are paired by seed: equal initial rows, order and MLPs. The rule judges the mean of the differences to fp32 with its 95%
interval by Student's t. Unpaired, two arms would differ by their seeds alone.

    passes      AUC at most 5e-4 lower and LogLoss at most 5e-4 higher, with confidence
    rejected    anything else; too few seeds are no pass
    equal       both intervals within 5e-4 of zero: asked of fp32 against plain torch
    better      AUC higher, with confidence: asked of a lever against the uniform cut of equal bytes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MARGIN = 5e-4
CONFIDENCE = 0.95
SEEDS, MANY_SEEDS = 10, 20  # many where pairs differ more: MovieLens and int2

PASSES, REJECTED, EQUAL, BETTER = "passes", "rejected", "equal", "better"


class Interval(NamedTuple):
    """A mean and its confidence bounds."""

    mean: float
    low: float
    high: float

    def within(self, margin: float) -> bool:
        return -margin < self.low and self.high < margin


class Difference(NamedTuple):
    """Arm minus fp32, by both metrics."""

    auc: Interval
    logloss: Interval

    @property
    def verdict(self) -> str:
        return PASSES if self.auc.low > -MARGIN and self.logloss.high < MARGIN else REJECTED

    @property
    def worse(self) -> bool:
        """Whether a loss of any size is significant."""
        return self.auc.high < 0 or self.logloss.low > 0

    def meets(self, asked: str) -> bool:
        """Whether the difference meets `asked`, one of the words above."""
        if asked == EQUAL:
            return self.auc.within(MARGIN) and self.logloss.within(MARGIN)
        if asked == BETTER:
            return self.auc.low > 0
        return self.verdict == asked


def interval(differences: Sequence[float]) -> Interval:
    """The mean of paired differences with its interval; infinite for a single pair."""
    count = len(differences)
    mean = sum(differences) / count
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    variance = sum((value - mean) ** 2 for value in differences) / (count - 1)
    reach = student(count - 1) * math.sqrt(variance / count)
    return Interval(mean, mean - reach, mean + reach)


def student(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Two-sided quantile of Student's t distribution."""
    low, high = 0.0, 1.0
    while _inside(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """P(|T| < t): for integer degrees of freedom a finite sum of powers of cos(angle)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    if odd:
        return (angle + math.sin(angle) * total) * 2 / math.pi
    return math.sin(angle) * total
