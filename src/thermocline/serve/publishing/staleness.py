"""The age of what a server answers.

A publish has all rows as of one step, except those that wait for a byte budget. Of these the trainer reports how long they have
waited, and their share of all updates: it looks up what it updates, so that is their share of lookups. Ages grow until the next
publish.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

Waiting = tuple[tuple[float, float], ...]


class Staleness(NamedTuple):
    """Ages in seconds, by lookups, of what a model answers now; and its last publish."""

    publish: int
    p50: float
    p99: float
    rows: int  # changed since the server started
    seconds: float  # that the last publish took from the step to lookups


@dataclass
class PublishAge:
    """Ages of the rows of one publish."""

    age: float  # when it was applied
    waiting: Waiting = ()
    applied: float = field(default_factory=time.monotonic)

    def quantile(self, share: float) -> float:
        """The age that a share of lookups does not exceed."""
        now, seen = self.age + time.monotonic() - self.applied, 1.0 - sum(part for _, part in self.waiting)
        for age, part in sorted(self.waiting):
            if seen >= share:
                return now
            now, seen = self.age + age + time.monotonic() - self.applied, seen + part
        return now
