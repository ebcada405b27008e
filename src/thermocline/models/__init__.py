"""Reference models: what a table has to be good for."""

from __future__ import annotations

from .dlrm import DLRM
from .initial import initial_rows, initialize
from .plain import PlainTables, TorchRowwiseAdagrad
from .sequence import PlainItems, SequenceModel

__all__ = [
    "DLRM",
    "PlainItems",
    "PlainTables",
    "SequenceModel",
    "TorchRowwiseAdagrad",
    "initial_rows",
    "initialize",
]
