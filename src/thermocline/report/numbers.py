"""Numbers for people: three digits and a unit. Each keeps its value, for sorting and drawing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

_BYTES = (("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40), ("PiB", 1 << 50))
_SECONDS = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
_COUNTS = (("", 1.0), ("k", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12))


@dataclass(frozen=True)
class Number:
    """A value and its text; `good` colours a win or a loss."""

    value: float
    text: str
    good: bool | None = None

    def __str__(self) -> str:
        return self.text


Show = Callable[[float], Number]


def size(value: float) -> Number:
    """Bytes, as 1.50 GiB."""
    unit, times = _unit(value, _BYTES)
    return Number(value, f"{value:.0f} B" if times == 1 else f"{_digits(value / times)} {unit}")


def seconds(value: float) -> Number:
    """Seconds, as 3.20 ms."""
    unit, times = _unit(value, _SECONDS) if value else _SECONDS[-1]
    return Number(value, f"{_digits(value / times)} {unit}")


def count(value: float) -> Number:
    """A count, as 12,345 or 5.68M."""
    if abs(value) < 99_999.5 and value == round(value):
        return Number(value, f"{value:,.0f}")
    unit, times = _unit(value, _COUNTS)
    return Number(value, _digits(value / times) + unit)


def share(value: float) -> Number:
    """A share of a whole, as 43.2%."""
    return Number(value, f"{_digits(100 * value)}%")


def signed(number: Number) -> Number:
    """The number with its sign, for differences."""
    return Number(number.value, f"+{number.text}" if number.value > 0 else number.text.replace("-", "\N{MINUS SIGN}"))


def brief(number: Number) -> str:
    """The text without trailing zeros: 4 ms for 4.00 ms. For round numbers on axes."""
    return re.sub(r"(\.\d*?)0+(?!\d)", r"\1", number.text).replace(".%", "%").replace(". ", " ").rstrip(".")


def size_unit(value: float) -> float:
    """The unit that `size` uses for this many bytes, for round ticks of an axis."""
    return float(_unit(value, _BYTES)[1])


def _unit(value: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    """The largest unit of which there is at least one after rounding."""
    return next((unit for unit in reversed(units) if abs(value) >= 0.9995 * unit[1]), units[0])


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    power = (
        int(f"{value:.2e}".split("e")[1]) if value and isfinite(value) else 2
    )  # after rounding: 9.996 has one digit more than it seems
    return f"{value:.{min(max(2 - power, 0), 9)}f}"
