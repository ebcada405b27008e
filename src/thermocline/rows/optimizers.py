"""The optimizers of rows and their state.

    optimizer         state              a row costs
    SGD               none               0 bytes
    RowwiseAdagrad    1 number a row     4 bytes
    Adagrad           1 number a column  4 * dim bytes
    Adam              2 numbers a column 8 * dim bytes

State is fp32. Only rows that were looked up are updated, as in torch's SparseAdam.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput

from .memory import table_zeros


@dataclass(frozen=True)
class RowOptimizer:
    """Base of the optimizers."""

    lr: float

    code = -1
    states_per_row = 0
    states_per_column = 0

    def __post_init__(self) -> None:
        if self.code < 0:
            raise BadInput("RowOptimizer is not an optimizer itself; use SGD, RowwiseAdagrad, Adagrad or Adam")
        for name in (field.name for field in fields(self)):
            numbers = _numbers(name, getattr(self, name))
            object.__setattr__(self, name, numbers if name == "betas" else numbers[0])

    def hyper(self, device: torch.device | str = "cpu") -> Tensor:
        """The hyperparameters as kernels take them."""
        values = {F.LR: self.lr, F.BETA1_POWER: 1.0, F.BETA2_POWER: 1.0}
        values[F.EPS], values[F.WEIGHT_DECAY] = getattr(self, "eps", 0.0), getattr(self, "weight_decay", 0.0)
        values[F.BETA1], values[F.BETA2] = getattr(self, "betas", (0.0, 0.0))
        return torch.tensor([values.get(n, 0.0) for n in range(F.HYPER_FIELDS)], dtype=torch.float64, device=device)

    def states(self, rows: int, elements: int, device: torch.device | str = "cpu") -> list[Tensor]:
        """Zero state for an arena of this size."""
        counts = [rows] * self.states_per_row + [elements] * self.states_per_column
        return [table_zeros(count, torch.float32, device) for count in counts]


def _numbers(name: str, given: Any) -> tuple[float, ...]:
    """Two betas, or one number, as plain floats: a manifest cannot hold those of numpy."""
    betas = name == "betas"
    try:
        numbers = tuple(float(number) for number in (given if betas else (given,)))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != (2 if betas else 1) or not all(number >= 0 and (number < 1 or not betas) for number in numbers):
        way = "two numbers in [0, 1)" if betas else "a number >= 0"
        raise BadInput(f"{name} is {given!r}; use {way}", parameter=name, value=given)
    return numbers


@dataclass(frozen=True)
class SGD(RowOptimizer):
    """SGD without momentum: g += weight_decay * w; w -= lr * g. Equals `torch.optim.SGD`.

    Args:
        lr: learning rate.
        weight_decay: factor of the L2 penalty of the rows that were looked up.

    Raises:
        BadInput: a number is missing, negative or too large; `error.parameter` names it.

    Example::

        rows = thermocline.RowConfig("int8", optimizer=thermocline.SGD(lr=0.1))
    """

    weight_decay: float = 0.0

    code = F.SGD


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """Adagrad, column by column: s += g^2; w -= lr * g / (sqrt(s) + eps). Equals `torch.optim.Adagrad`.

    Args:
        lr: learning rate.
        eps: term that keeps the denominator above 0.
        weight_decay: factor of the L2 penalty of the rows that were looked up: g += weight_decay * w, before all else.

    Raises:
        BadInput: a number is missing, negative or too large; `error.parameter` names it.

    Example::

        rows = thermocline.RowConfig("int8", optimizer=thermocline.Adagrad(lr=0.02))
    """

    eps: float = 1e-10
    weight_decay: float = 0.0

    code = F.ADAGRAD
    states_per_column = 1


@dataclass(frozen=True)
class RowwiseAdagrad(RowOptimizer):
    """Row-wise Adagrad, with one s a row: s += mean(g^2); w -= lr * g / (sqrt(s) + eps). Equals FBGEMM's.

    Args:
        lr: learning rate.
        eps: term that keeps the denominator above 0. The default is FBGEMM's; DLRM's RWSAdagrad uses 1e-10.
        weight_decay: factor of the L2 penalty of the rows that were looked up: g += weight_decay * w, before all else.

    Raises:
        BadInput: a number is missing, negative or too large; `error.parameter` names it.

    Example::

        rows = thermocline.RowConfig("int8", optimizer=thermocline.RowwiseAdagrad(lr=0.02))
    """

    eps: float = 1e-8
    weight_decay: float = 0.0

    code = F.ROWWISE_ADAGRAD
    states_per_row = 1


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """Adam over the rows that were looked up: `torch.optim.SparseAdam`, with decoupled weight decay.

    Args:
        lr: learning rate.
        betas: decay of the two moments, each in [0, 1).
        eps: term that keeps the denominator above 0.
        weight_decay: decay of the rows that were looked up, times lr.

    Raises:
        BadInput: a number is missing, negative or too large; `error.parameter` names it.

    Example::

        rows = thermocline.RowConfig("int8", optimizer=thermocline.Adam(lr=1e-3))
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    code = F.ADAM
    states_per_column = 2
