"""Reproducible initial rows: a function of (seed, table, row), the same on every device and in any order, uniform in
±1/sqrt(rows of the table).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from thermocline.kernels.quantize.reference import random_bits

BLOCK = 1 << 18
_DOMAIN = 0x696E6974  # other bits than those that round the same rows


class Settable(Protocol):
    """Tables with `set_rows`."""

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> None: ...


def initial_rows(seed: int, table: int, rows_N: Tensor, dim: int, rows: int) -> Tensor:
    """Initial values of rows of table number `table`, which has `rows` rows."""
    clock = torch.tensor([seed ^ _DOMAIN << 32, table], device=rows_N.device)
    uniform_ND = (random_bits(clock, rows_N, dim) >> 8).float() * 2.0**-23 - 1.0
    return uniform_ND * float(rows**-0.5)


def initialize(tables: Settable, rows: Mapping[str, int], dim: int, seed: int, device: torch.device | str = "cpu") -> None:
    """Set all rows of all tables, a block at a time; `rows` has the tables in the order of their numbers."""
    for number, (name, count) in enumerate(rows.items()):
        for first in range(0, count, BLOCK):
            rows_N = torch.arange(first, min(first + BLOCK, count), device=device)
            tables.set_rows(name, rows_N, initial_rows(seed, number, rows_N, dim, count))
