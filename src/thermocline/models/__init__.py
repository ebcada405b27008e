"""Reference models of benchmarks and `thermocline train`, and their fp32 baselines."""

from __future__ import annotations

from .dlrm import DLRM
from .plain import PlainItems, PlainTables, TorchRowwiseAdagrad, initial_rows, initialize
from .sequence import SequenceModel

__all__ = ["DLRM", "PlainItems", "PlainTables", "SequenceModel", "TorchRowwiseAdagrad", "initial_rows", "initialize"]
