"""Rows of a table by Zipf's law, from random bits in integer arithmetic: equal on every device.

Rank r = 1, 2, ... has a probability proportional to r^-exponent. Ranks up to 64 have their own probabilities; above, there are
32 bins per octave with equally likely ranks, so a table of a billion rows needs about a thousand numbers. Rank r becomes row
(r * a + b) mod rows, with a near the golden section of `rows` and coprime to it: a bijection that spreads hot rows.
"""

from __future__ import annotations

import math
from itertools import accumulate, count

import torch
from torch import Tensor

from .random_bits import right

MAX_ROWS = 3_000_000_000  # rank times multiplier must stay below 2^63
_SINGLE, _BINS = 64, 32
_GOLDEN_SECTION = 0.6180339887498949


class Zipf:
    """Draws rows of a table; `shift` selects the hottest row."""

    def __init__(self, rows: int, exponent: float, shift: int, device: torch.device | str = "cpu") -> None:
        assert 1 <= rows <= MAX_ROWS
        starts = _starts(rows)
        ends = [*starts[1:], rows]
        cumulative = list(accumulate(_mass(start + 1, end + 1, exponent) for start, end in zip(starts, ends, strict=True)))
        total = cumulative[-1]
        self._limit_K = torch.tensor([round(mass / total * 2**32) for mass in cumulative], device=device)
        self._start_K = torch.tensor(starts, device=device)
        widths = [end - start for start, end in zip(starts, ends, strict=True)]
        self._width_K = torch.tensor(widths, device=device)
        masses = [high - low for low, high in zip([0.0, *cumulative], cumulative, strict=False)]
        # Draws of a row of each bin, relative to uniform draws.
        self.relative_heat = [mass / total * rows / width for mass, width in zip(masses, widths, strict=True)]
        self._rows, self._multiplier, self._shift = rows, _coprime(rows), shift % rows

    def draw(self, bits_B: Tensor) -> tuple[Tensor, Tensor]:
        """The row for each 64 random bits, and its bin: the upper half draws the bin, the lower half the rank inside."""
        bin_B = torch.bucketize(right(bits_B, 32), self._limit_K, right=True)
        rank_B = self._start_K[bin_B] + (((bits_B & 0xFFFFFFFF) * self._width_K[bin_B]) >> 32)
        return (rank_B * self._multiplier + self._shift) % self._rows, bin_B

    def row_of_rank(self, rank: int) -> int:
        """The row of a rank, from 0 (the hottest)."""
        return (rank * self._multiplier + self._shift) % self._rows


def _starts(rows: int) -> list[int]:
    """First rank (from 0) of each bin."""
    starts = list(range(min(rows, _SINGLE)))
    step = 0
    while (start := int(_SINGLE * 2 ** (step / _BINS))) < rows:
        if start > starts[-1]:
            starts.append(start)
        step += 1
    return starts


def _mass(first: int, end: int, exponent: float) -> float:
    """The sum of r^-exponent for r = first .. end - 1: exact for one rank, the midpoint integral for a bin."""
    if end == first + 1:
        return float(first**-exponent)
    low, high = first - 0.5, end - 0.5
    if exponent == 1:
        return math.log(high / low)
    return float((high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent))


def _coprime(rows: int) -> int:
    """The smallest number from the golden section of `rows` on that is coprime to it."""
    return next(number for number in count(max(1, int(rows * _GOLDEN_SECTION))) if math.gcd(number, rows) == 1)
