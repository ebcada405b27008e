"""The heat of a table as a curve: a few hundred steps of rows, from the hottest to the coldest.

Rows of about equal heat are alike to every decision, so they form one step: a number of rows, and their lookups. The hottest
rows have steps of their own, and steps grow with the rank. Hundreds of steps describe billions of rows to within 1%.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadInput

Floats = NDArray[np.float64]

ALONE = 128  # the hottest rows, each with a step of its own
GROWTH = 1.08  # reach of every step after them, relative to the step before


@dataclass(frozen=True)
class Curve:
    """Rows and lookups of each step, hottest first. Rows never looked up are in no step, or in one without lookups.

    Attributes:
        rows_K: rows of each step.
        lookups_K: lookups of all rows of the step together.

    Example::

        Curve.zipf(rows=1_000_000, exponent=1.05).share_K[0]  # share of the lookups of the hottest row
    """

    rows_K: Floats
    lookups_K: Floats

    def __post_init__(self) -> None:
        assert self.rows_K.shape == self.lookups_K.shape and self.rows_K.ndim == 1
        assert (self.rows_K > 0).all() and (self.lookups_K >= 0).all()

    @property
    def rows(self) -> float:
        return float(self.rows_K.sum())

    @property
    def lookups(self) -> float:
        return float(self.lookups_K.sum())

    @property
    def share_K(self) -> Floats:
        """The probability that a lookup goes to one given row of each step."""
        return self.lookups_K / self.rows_K / max(self.lookups, 1.0)

    @classmethod
    def of_counts(cls, counts_R: NDArray[np.int64] | Floats) -> Curve:
        """The curve of rows with these lookup counts, in any order."""
        counts_R = np.sort(counts_R[counts_R > 0])[::-1].astype(np.float64)
        edges_K = edges(len(counts_R))
        before_K = np.concatenate([[0.0], np.cumsum(counts_R)])[edges_K]
        return cls(np.diff(edges_K).astype(np.float64), np.diff(before_K))

    @classmethod
    def with_tail(cls, counts_H: NDArray[np.int64], rows: int, lookups: int) -> Curve:
        """The curve of a table whose hottest rows were counted, and whose other rows are known by number only.

        The other rows had at least one lookup each. The remaining lookups follow a power of the rank that begins at the
        coldest counted row and is as steep as the sum requires; flat if even that is not enough.
        """
        counted = cls.of_counts(counts_H)
        colder, left = rows - len(counts_H), max(0.0, float(lookups - counts_H.sum()))
        if colder <= 0 or left == 0:
            return cls(counted.rows_K, counted.lookups_K * (lookups / max(counted.lookups, 1.0)))
        reach_K = edges(rows)
        beyond_K: Floats = np.append(len(counts_H), reach_K[reach_K > len(counts_H)]).astype(np.float64)
        rows_K = np.diff(beyond_K)
        least, most = min(1.0, left / colder), float(counts_H.min()) if len(counts_H) else left
        excess, height = left - least * colder, most - least
        if excess >= height * colder or height <= 0:
            tail_K = rows_K * (left / colder)
        else:
            start = max(1, len(counts_H))
            low, high = 0.0, 64.0
            for _ in range(60):
                exponent = (low + high) / 2
                tail_K = height * np.diff(_power_integral((beyond_K + 0.5) / (start + 0.5), exponent)) * (start + 0.5)
                low, high = (exponent, high) if tail_K.sum() > excess else (low, exponent)
            tail_K = least * rows_K + tail_K * (excess / max(tail_K.sum(), 1e-300))
        rows_K, lookups_K = np.concatenate([counted.rows_K, rows_K]), np.concatenate([counted.lookups_K, tail_K])
        falling = np.argsort(-lookups_K / rows_K, kind="stable")  # a flat tail may be hotter than rows that were counted late
        return cls(rows_K[falling], lookups_K[falling])

    @classmethod
    def zipf(cls, rows: int, exponent: float, lookups: float = 1.0) -> Curve:
        """The curve of Zipf's law, for planning without a log.

        Args:
            rows: Rows of the table.
            exponent: 0 (all rows equal) or more, such as 1.05.
            lookups: Sum of all lookups.
        """
        if not 0 <= exponent < np.inf:
            message = f"the exponent of Zipf's law is {exponent:g}; give 0 (all rows equal) or more, such as 1.05"
            raise BadInput(message, parameter="exponent", value=exponent)
        edges_K = edges(rows)
        # The sum over the ranks of a step by the midpoint rule, which is exact to 1e-6 where steps hold many rows.
        heat_K = np.diff(_power_integral(edges_K.astype(np.float64) + 0.5, exponent))
        alone = min(ALONE, rows)
        heat_K[:alone] = np.arange(1, alone + 1, dtype=np.float64) ** -exponent
        return cls(np.diff(edges_K).astype(np.float64), heat_K * (lookups / heat_K.sum()))


def edges(rows: int) -> NDArray[np.int64]:
    """The row ranks where steps begin and end: 0, 1, 2, ..., rows."""
    reach = [*range(min(rows, ALONE) + 1)]
    while reach[-1] < rows:
        reach.append(min(rows, int(reach[-1] * GROWTH) + 1))
    return np.array(reach, np.int64)


def _power_integral(x_K: Floats, exponent: float) -> Floats:
    """An integral of x^-exponent."""
    return np.log(x_K) if abs(exponent - 1) < 1e-9 else x_K ** (1 - exponent) / (1 - exponent)
