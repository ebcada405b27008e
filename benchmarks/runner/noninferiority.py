"""The rule that says whether tables of low precision are as good as fp32 ones. It was fixed before anything was measured.

Runs are paired by seed: same initial rows, same order, same MLPs at the start. What is judged is the mean of the differences
to fp32, with its 95% interval by Student's t. Unpaired, two arms would differ by the luck of their seeds alone.

    passes      the AUC is surely not more than 5e-4 lower, and the LogLoss surely not more than 5e-4 higher
    rejected    anything else: too few seeds to be sure is no pass
    equal       both intervals lie within 5e-4 of zero on both sides: what is asked of fp32 against plain torch
    better      the AUC is surely higher: what is asked of a lever against the plain way to save as much
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
    """A mean and the bounds it surely lies between."""

    mean: float
    low: float
    high: float

    def within(self, margin: float) -> bool:
        return -margin < self.low and self.high < margin


class Difference(NamedTuple):
    """What an arm has more than fp32, by both measures."""

    auc: Interval
    logloss: Interval

    @property
    def verdict(self) -> str:
        return PASSES if self.auc.low > -MARGIN and self.logloss.high < MARGIN else REJECTED

    @property
    def worse(self) -> bool:
        """Whether a loss is certain, however small."""
        return self.auc.high < 0 or self.logloss.low > 0

    def meets(self, asked: str) -> bool:
        """Whether this is what was asked, one of the words above."""
        if asked == EQUAL:
            return self.auc.within(MARGIN) and self.logloss.within(MARGIN)
        if asked == BETTER:
            return self.auc.low > 0
        return self.verdict == asked


def interval(differences: Sequence[float]) -> Interval:
    """The mean of paired differences with its interval; without two of them, anything is possible."""
    count = len(differences)
    mean = sum(differences) / count
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    variance = sum((value - mean) ** 2 for value in differences) / (count - 1)
    reach = student(count - 1) * math.sqrt(variance / count)
    return Interval(mean, mean - reach, mean + reach)


def student(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t that a variable of Student's distribution stays below in absolute value with this probability."""
    low, high = 0.0, 1.0
    while _inside(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """P(|T| < t). For whole degrees of freedom it is a finite sum of powers of cos(angle), one for odd ones, one for even."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    if odd:
        return (angle + math.sin(angle) * total) * 2 / math.pi
    return math.sin(angle) * total
