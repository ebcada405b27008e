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

import torch
from torch import Tensor

from .. import formats as F
from ..errors import BadInput
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
        numbers = {"learning rate": self.lr, "eps": self._of("eps"), "weight decay": self._of("weight_decay")}
        for what, number in numbers.items():
            if not number >= 0:
                raise BadInput(f"{what} is {number}; it must be 0 or more")
        if not all(0 <= beta < 1 for beta in self._betas):
            raise BadInput(f"betas are {self._betas}; both must be 0 or more, and less than 1")

    def _of(self, name: str) -> float:
        return float(getattr(self, name, 0.0))  # not every optimizer has all of them

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
