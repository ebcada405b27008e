"""Click logs: files and a generator as streams of batches, and the measures of a model's predictions on them."""

from __future__ import annotations

from .clicks import Clicks, Log, MemoryLog, heat_of, in_memory
from .files import ClickFile, open_log
from .idrows import IdRows, MappedRows, RawIds, Vocabulary, hashed_rows
from .metrics import Scores
from .synthetic import SyntheticLog

__all__ = [
    "ClickFile",
    "Clicks",
    "IdRows",
    "Log",
    "MappedRows",
    "MemoryLog",
    "RawIds",
    "Scores",
    "SyntheticLog",
    "Vocabulary",
    "hashed_rows",
    "heat_of",
    "in_memory",
    "open_log",
]
