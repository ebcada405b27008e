"""Training the reference models: `thermocline train`, and the arms of the benchmarks that compare what was learned."""

from __future__ import annotations

from .distributed import ALONE, Cards, cards_of
from .dlrm import Outcome, Run, evaluate
from .sequence import SequenceOutcome, SequenceRun, judge_sequences
from .sequence_settings import SequenceSettings
from .settings import Settings

__all__ = [
    "ALONE",
    "Cards",
    "Outcome",
    "Run",
    "SequenceOutcome",
    "SequenceRun",
    "SequenceSettings",
    "Settings",
    "cards_of",
    "evaluate",
    "judge_sequences",
]
