"""The tables a plan is for, and the work of one training step or one request on them.

version: 1
batch: 2048            # samples a card and step
dense: 4ms             # forward and backward of the dense part, which exchange may hide behind
optimizer: rowwise_adagrad
tables:
  - name: item
    rows: 1000000
    dim: 128
    pooling: none      # sum, mean, max, or none: every row is returned (sequences)
    features: [item, history]   # names in the heat file that look up this table; its own name if left away
    lookups: 20        # of one sample in all; from the heat file if left away
    precision: int8    # chosen by the plan if left away; so is the cache
    cache: 0.05
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from .topology import STRICT

Pooling = Literal["sum", "mean", "max", "none"]
Optimizer = Literal["sgd", "rowwise_adagrad", "adagrad", "adam"]


class TableFile(BaseModel):
    """One table as users describe it."""

    model_config = STRICT
    name: str
    rows: int
    dim: int
    pooling: Pooling = "sum"
    features: tuple[str, ...] = ()
    lookups: float | None = None
    precision: str | None = None
    cache: float | None = None


class Tables(BaseModel):
    """All tables of a model, and what one step asks of them. `dense` is in seconds."""

    model_config = STRICT
    version: int = 1
    batch: int
    dense: float = 0.0
    optimizer: Optimizer = "rowwise_adagrad"
    tables: tuple[TableFile, ...]
