"""Reference models of benchmarks and `thermocline train`."""

from __future__ import annotations

from .dlrm import DLRM
from .initialization import initial_rows, initialize
from .sequence import SequenceModel

__all__ = ["DLRM", "SequenceModel", "initial_rows", "initialize"]
