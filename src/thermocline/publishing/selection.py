"""A byte budget, how long rows have waited for it, and which go whole.

A quarter of it goes to the rows that wait longest, so each is sent within `pending bytes / (budget / 4)` seconds. Rows that
became another id's go first, whatever the budget: a lookup of the new id must not read the old id's values.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

OLDEST = 0.25  # share of the budget for the rows that wait longest
_TICK_S, _TICKS = 0.25, 65_535
_AGES = 16  # classes of ages that servers learn
_BURST_S = 2.0  # seconds of the budget that one publish may spend


class SendBudget:
    """Bytes a second. Unspent bytes are kept for `_BURST_S`."""

    def __init__(self, bytes_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._clock = bytes_per_second, clock
        self._at, self._left = clock(), 0.0

    def available(self) -> float:
        now = self._clock()
        self._left = min(self._left + self.rate * (now - self._at), self.rate * _BURST_S)
        self._at = now
        return self._left

    def spend(self, size: float) -> None:
        self._left -= size


class RowAges:
    """When each arena row changed first since it was last sent, in quarters of a second: two bytes a row."""

    def __init__(self, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows = rows
        self._since_R: NDArray[np.uint16] = np.zeros(rows, np.uint16)
        self._clock, self._start = clock, clock()

    def seconds(self, rows_K: NDArray[np.int64]) -> NDArray[np.float64]:
        """Ages of changed rows; those that are new are zero."""
        now = int((self._clock() - self._start) / _TICK_S) % _TICKS
        since_K = self._since_R[rows_K]
        since_K = np.where(since_K == 0, now + 1, since_K)
        self._since_R[rows_K] = since_K
        return ((now + 1 - since_K.astype(np.int64)) % _TICKS).astype(np.float64) * _TICK_S

    def forget(self, rows_K: NDArray[np.int64]) -> None:
        self._since_R[rows_K] = 0


def choose(
    bytes_K: NDArray[np.int64], first_K: NDArray[np.bool_], error_K: NDArray[np.float32], age_K: NDArray[np.float64],
    small_K: NDArray[np.bool_], available: float,
) -> NDArray[np.bool_]:  # fmt: skip
    """Which rows to send whole with the available bytes. Those of `first_K` go in any case, `small_K` may go as steps."""
    if bytes_K.sum() <= available:
        return np.ones(len(bytes_K), np.bool_)
    chosen_K: NDArray[np.bool_] = first_K.copy()
    available -= float(bytes_K[chosen_K].sum())
    large_K = ~small_K & ~chosen_K
    share = float(error_K[large_K].sum(dtype=np.float64) / max(error_K[~chosen_K].sum(dtype=np.float64), 1e-30))
    for key_K, those_K, size in (
        (age_K, ~chosen_K, OLDEST * available),
        (error_K, large_K, (1 - OLDEST) * share * available),
    ):
        left_K = np.flatnonzero(those_K & ~chosen_K)
        order_K = left_K[np.argsort(-key_K[left_K], kind="stable")]
        chosen_K[order_K[np.cumsum(bytes_K[order_K]) <= size]] = True
    return chosen_K


def waiting_ages(
    counts_K: NDArray[Any], age_K: NDArray[np.float64], chosen_K: NDArray[np.bool_]
) -> tuple[tuple[float, float], ...]:
    """(age, share of all updates) of the rows that wait, in at most `_AGES` classes."""
    rate_K = counts_K / np.maximum(age_K, _TICK_S)
    total = float(rate_K.sum())
    if chosen_K.all() or not total:
        return ()
    age_W, rate_W = age_K[~chosen_K], rate_K[~chosen_K]
    class_W = np.minimum(np.log2(1 + age_W / _TICK_S).astype(np.int64), _AGES - 1)
    found = []
    for number in np.unique(class_W).tolist():
        here_W = class_W == number
        found.append((float(age_W[here_W].max()), float(rate_W[here_W].sum()) / total))
    return tuple(found)
