"""The arguments of the row kernels: the arrays of an arena, those of its optimizer, and one batch of lookups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Cache, Layout


class RowArrays(NamedTuple):
    """The rows of an arena."""

    codes: Tensor
    meta: Tensor
    layout: Layout
    cache: Cache | None = None


class OptimizerArrays(NamedTuple):
    """The optimizer of an arena's rows: its state, hyperparameters, clock of the rounding bits, and kind."""

    states: Sequence[Tensor]
    hyper: Tensor
    clock: Tensor
    optimizer: int  # a constant of `formats.py`
    stochastic: bool = True


class LookupCall(NamedTuple):
    """One batch of lookups: ids of all features, feature-major, and how they are pooled."""

    ids_N: Tensor
    offsets: Tensor  # features * batch + 1; for F.NONE features + 1
    weights_N: Tensor | None
    mode: int  # a constant of `formats.py`
    dtype: torch.dtype = torch.float32
    checked: bool = True  # False: ids and offsets are trusted
