"""Ids that came and went: in a training step, and between two publishes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moved(NamedTuple):
    """The ids that came and went in a training step."""

    came_K: Tensor
    rows_K: Tensor  # of the ids that came
    went_E: Tensor
    left_E: Tensor  # rows of the ids that went

    @classmethod
    def none(cls, device: torch.device | str = "cpu") -> Moved:
        return cls(*(torch.zeros(0, dtype=torch.int64, device=device) for _ in range(4)))


class MovedIds(NamedTuple):
    """Rows that got another id, or lost theirs."""

    rows_K: Tensor  # ascending
    ids_K: Tensor
    used_K: Tensor  # whether the row has an id now

    def merged(self, later: MovedIds) -> MovedIds:
        """Both, one after the other: the last id of a row wins."""
        rows_K, ids_K, used_K = (torch.cat(each) for each in zip(self, later, strict=True))
        order_K = rows_K.argsort(stable=True)
        last_K = order_K[torch.cat([rows_K[order_K].diff() != 0, torch.ones(min(1, len(order_K)), dtype=torch.bool)])]
        return MovedIds(rows_K[last_K], ids_K[last_K], used_K[last_K])
