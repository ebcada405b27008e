"""Training of the reference models: `thermocline train`, and the quality benchmarks."""

from __future__ import annotations

from .dlrm import DLRMResult, DLRMRun, evaluate
from .ranks import ONE_RANK, TrainingRanks, init_ranks
from .sequence import SequenceResult, SequenceRun, evaluate_sequences
from .settings import DLRMSettings, SequenceSettings

__all__ = [
    "ONE_RANK", "DLRMResult", "DLRMRun", "DLRMSettings", "SequenceResult", "SequenceRun", "SequenceSettings", "TrainingRanks",
    "evaluate", "evaluate_sequences", "init_ranks",
]  # fmt: skip
