"""The optimizers that update rows, and the state they keep beside them.

    optimizer         state              a row costs
    SGD               none               0 bytes
    RowwiseAdagrad    1 number a row     4 bytes
    Adagrad           1 number a column  4 * dim bytes
    Adam              2 numbers a column 8 * dim bytes

State is fp32 and apart from the rows. Only rows that were looked up are updated (as torch's SparseAdam does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput

from .memory import table_zeros


@dataclass(frozen=True)
class RowOptimizer:
    """What all optimizers share: a learning rate, and a name kernels know."""

    lr: float

    code = -1
    states_per_row = 0
    states_per_column = 0

    def __post_init__(self) -> None:
        if self.code < 0:
            raise BadInput("RowOptimizer is not an optimizer itself; use SGD, RowwiseAdagrad, Adagrad or Adam")
        for name in ("lr", "eps", "weight_decay"):  # not every optimizer has all of them
            if hasattr(self, name):
                what = "learning rate" if name == "lr" else name.replace("_", " ")
                object.__setattr__(self, name, _number(what, getattr(self, name)))
        if hasattr(self, "betas"):
            object.__setattr__(self, "betas", _two_numbers("betas", self.betas))

    def _of(self, name: str) -> float:
        return float(getattr(self, name, 0.0))

    @property
    def _betas(self) -> tuple[float, float]:
        return getattr(self, "betas", (0.0, 0.0))

    def hyper(self, device: torch.device | str = "cpu") -> Tensor:
        """The numbers kernels read, as they take them."""
        values = [0.0] * F.HYPER_FIELDS
        values[F.LR] = self.lr
        values[F.EPS], values[F.WEIGHT_DECAY] = self._of("eps"), self._of("weight_decay")
        values[F.BETA1], values[F.BETA2] = self._betas
        values[F.BETA1_POWER] = values[F.BETA2_POWER] = 1.0
        return torch.tensor(values, dtype=torch.float64, device=device)

    def states(self, rows: int, elements: int, device: torch.device | str = "cpu") -> list[Tensor]:
        """Fresh state for an arena of so many rows and elements."""
        counts = [rows] * self.states_per_row + [elements] * self.states_per_column
        return [table_zeros(count, torch.float32, device) for count in counts]


def _number(what: str, given: Any) -> float:
    """As a plain float: other numbers cannot be written into a manifest."""
    try:
        number = float(given)
    except (TypeError, ValueError):
        raise BadInput(f"{what} is {given!r}; use a number") from None
    if not number >= 0:
        raise BadInput(f"{what} is {given}; it must be 0 or more")
    return number


def _two_numbers(what: str, given: Any) -> tuple[float, float]:
    try:
        first, second = (float(number) for number in given)
    except (TypeError, ValueError):
        raise BadInput(f"{what} are {given!r}; use two numbers") from None
    if not (0 <= first < 1 and 0 <= second < 1):
        raise BadInput(f"{what} are {given}; both must be 0 or more, and less than 1")
    return first, second


@dataclass(frozen=True)
class SGD(RowOptimizer):
    """w -= lr * g."""

    code = F.SGD


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """s += g^2; w -= lr * g / (sqrt(s) + eps), column by column."""

    eps: float = 1e-10

    code = F.ADAGRAD
    states_per_column = 1


@dataclass(frozen=True)
class RowwiseAdagrad(RowOptimizer):
    """s += mean(g^2); w -= lr * g / (sqrt(s) + eps), one s a row."""

    eps: float = 1e-8

    code = F.ROWWISE_ADAGRAD
    states_per_row = 1


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """Adam over the rows that were looked up, with decoupled weight decay."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    code = F.ADAM
    states_per_column = 2
