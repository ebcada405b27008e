"""Synthetic histories with structure to learn: a function of (users, items, seed).

Items belong to 32 *tastes*; item w * 32 + g is number w of taste g, and items of a taste follow Zipf's law. A user has three
tastes and a history of 3 items or more, 20 on average. The next item is

    with 35%    the *successor* of the last item: a fixed item of the same taste, drawn by Zipf's law
    with 45%    drawn from the taste of the last item
    with 20%    drawn from one of the user's three tastes

Ranking by heat alone reaches HitRate@10 0.075 with 10,000 items; knowing tastes about four times that, knowing successors eight
times (0.60). So a model must learn rows of items, cold ones too, and the order of a history.

`drift` moves the hottest items of every taste by this share of its items over the course of the log, as in a news log.
Successors stay fixed. All arithmetic is in integers on counter-based bits, as for click logs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thermocline.errors import BadInput

from .random_bits import bits, key_of, right
from .sequences import SequenceLog, by_user
from .zipf import MAX_ROWS, Zipf

TASTES, USER_TASTES = 32, 3
SUCCESSOR, SAME_TASTE = 0.35, 0.45
LEAST, MEAN, MOST = 3, 20, 200  # items of a history
DAY, DAYS = 86_400_000, 28  # milliseconds

# Keys of random bits.
_LENGTH, _START, _TASTE, _WHICH, _CHOICE, _DRAW, _NEXT, _SHIFT = range(8)


ReportProgress = Callable[[int, int, str], None]


class Interactions(NamedTuple):
    """One row for each item of a history, user after user."""

    user_N: Tensor
    item_N: Tensor
    time_N: Tensor  # milliseconds


@dataclass(frozen=True)
class SyntheticSequences:
    """The histories of `users` users over `items` items."""

    users: int = 20_000
    items: int = 10_000
    seed: int = 0
    exponent: float = 1.05
    drift: float = 0.0

    def __post_init__(self) -> None:
        if self.users < 1 or not TASTES <= self.items <= MAX_ROWS:
            message = f"{self.users} users and {self.items} items; use 1 user or more and {TASTES} to {MAX_ROWS} items"
            raise BadInput(message, parameter="items")
        if not 0 <= self.drift <= 1:
            raise BadInput(f"drift is {self.drift}; use a share of the items, 0 to 1", parameter="drift", value=self.drift)

    def log(self, **settings: Any) -> SequenceLog:
        """The histories as a log; `settings` are fields of `SequenceLog`."""
        made = self.interactions()
        return by_user(*(part.numpy() for part in made), **settings)

    def interactions(self, progress: ReportProgress = lambda done, total, what: None) -> Interactions:
        """All interactions, sorted by user and time."""
        length_U, start_U = self._lengths(), self._starts()
        columns = []
        user_U, last_U = torch.arange(self.users), torch.zeros(self.users, dtype=torch.int64)
        longest = int(length_U.max())
        for step in range(longest):
            progress(step, longest, "items of each history")
            on = length_U[user_U] > step
            user_U, last_U = user_U[on], last_U[on]
            time_U = start_U[user_U] + step * 60_000
            last_U = self._next(user_U, step, last_U, time_U)
            columns.append(Interactions(user_U, last_U, time_U))
        user_N, item_N, time_N = (torch.cat(parts) for parts in zip(*columns, strict=True))
        order_N = user_N.argsort(stable=True)
        return Interactions(user_N[order_N], item_N[order_N], time_N[order_N])

    @cached_property
    def _zipf(self) -> Zipf:
        return Zipf(self.items // TASTES, self.exponent, key_of(self.seed, _SHIFT))

    def _next(self, user_U: Tensor, step: int, last_U: Tensor, time_U: Tensor) -> Tensor:
        counter_U = user_U * MOST + step
        choice_U = self._chance(_CHOICE, counter_U)
        which_U = (self._chance(_WHICH, counter_U) * USER_TASTES) >> 32
        own_U = (self._chance(_TASTE, user_U * USER_TASTES + which_U) * TASTES) >> 32
        stays_U = (choice_U < round((SUCCESSOR + SAME_TASTE) * 2**32)) & (step > 0)
        taste_U = torch.where(stays_U, last_U % TASTES, own_U)
        drawn_U = self._zipf.draw(bits(key_of(self.seed, _DRAW), counter_U))[0] + self._drifted(time_U)
        item_U = drawn_U % (self.items // TASTES) * TASTES + taste_U
        follows_U = (choice_U < round(SUCCESSOR * 2**32)) & (step > 0)
        return torch.where(follows_U, self.successor(last_U), item_U)

    def successor(self, item_N: Tensor) -> Tensor:
        """The successor of each item."""
        return self._zipf.draw(bits(key_of(self.seed, _NEXT), item_N))[0] * TASTES + item_N % TASTES

    def _drifted(self, time_N: Tensor) -> Tensor:
        """Offset of item numbers within a taste at a time, by which drift has moved the ranks."""
        ranks_N = time_N * round(self.drift * (self.items // TASTES)) // (DAYS * DAY)
        return ranks_N * (self._zipf.row_of_rank(1) - self._zipf.row_of_rank(0))

    def _lengths(self) -> Tensor:
        """Geometric lengths from 3, cut off at 200."""
        stays = 1 - 1 / (MEAN - LEAST + 1)
        limits = torch.tensor([round((1 - stays**k) * 2**32) for k in range(1, MOST - LEAST)])
        return LEAST + torch.bucketize(self._chance(_LENGTH, torch.arange(self.users)), limits, right=True)

    def _starts(self) -> Tensor:
        return (self._chance(_START, torch.arange(self.users)) * (DAYS * DAY >> 8)) >> 24

    def _chance(self, purpose: int, counter: Tensor) -> Tensor:
        """32 random bits for each counter."""
        return right(bits(key_of(self.seed, purpose), counter), 32)
