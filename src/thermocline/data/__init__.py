"""Click logs and histories as streams of batches, from files and generators, and metrics of predictions."""

from __future__ import annotations

from .click_files import ClickFile, open_log
from .click_log import ClickLog, Clicks, MemoryLog, heat_of, in_memory
from .id_rows import IdRows, MappedRows, RawIds, Vocabulary, hashed_rows
from .metrics import Scores
from .sequence_files import open_sequences
from .sequences import SequenceLog
from .synthetic import SyntheticLog
from .synthetic_sequences import SyntheticSequences

__all__ = [
    "ClickFile",
    "ClickLog",
    "Clicks",
    "IdRows",
    "MappedRows",
    "MemoryLog",
    "RawIds",
    "Scores",
    "SequenceLog",
    "SyntheticLog",
    "SyntheticSequences",
    "Vocabulary",
    "hashed_rows",
    "heat_of",
    "in_memory",
    "open_log",
    "open_sequences",
]
