"""Axes: from values to positions between 0 and 1, with round ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .numbers import Show, count, size, size_unit

_LEAST = 1e-300  # stands for zero on a logarithmic axis


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`; `show` formats its ticks, which are round numbers of `unit`."""

    low: float
    high: float
    label: str = ""
    show: Show = count
    log: bool = False
    unit: float = 1.0

    def __post_init__(self) -> None:
        assert math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high, (self.low, self.high)
        assert self.low > 0 or not self.log, self.low

    def at(self, value: float) -> float:
        """The position of a value: 0 at the low end, 1 at the high end, clamped."""
        assert math.isfinite(value), value
        low, high, here = (self._scaled(number) for number in (self.low, self.high, value))
        return min(max((here - low) / (high - low), 0.0), 1.0)

    def ticks(self, most: int = 6) -> list[float]:
        """About `most` round numbers between the ends."""
        return self._decades(most) if self.log and self.high >= 10 * self.low else self._steps(most)

    def _scaled(self, value: float) -> float:
        return math.log(max(value, _LEAST)) if self.log else value

    def _steps(self, most: int) -> list[float]:
        step = nice_step((self.high - self.low) / self.unit / most) * self.unit
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _decades(self, most: int) -> list[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first < 2:  # few decades: some steps between them
            between = [times * 10.0**power for power in range(first - 1, last + 1) for times in (1, 2, 5)]
            return [tick for tick in between if self.low <= tick * (1 + 1e-9) and tick <= self.high * (1 + 1e-9)]
        every = -(-(last - first + 1) // most)
        # Counted from the high end, which is where shares have their 100%.
        return [10.0**power for power in range(last, first - 1, -every)][::-1]


def nice_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least * (1 - 1e-9))


def from_zero(values: Iterable[float], label: str = "", show: Show = count) -> Axis:
    """An axis from zero to a round number above all values. Bytes get ticks in their own units."""
    high = max(values, default=0.0) or 1.0
    assert 0 < high < math.inf, high
    unit = size_unit(high) if show is size else 1.0
    step = nice_step(high / unit / 5) * unit
    return Axis(0.0, step * math.ceil(high / step - 1e-9), label, show, unit=unit)
