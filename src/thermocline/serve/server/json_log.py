"""Structured logs: one JSON object a line on standard error, with `time`, `level`, `event` and whatever belongs to it.

What clients do wrong is counted, not logged: a client must not be able to fill a disk. Faults of ours are logged with their
traceback, and no more than `FAULTS` of them in a minute.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from datetime import datetime, timezone
from typing import Any

LOGGER = logging.getLogger("thermocline.serve")
FAULTS = 20


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        return json.dumps(said | getattr(record, "fields", {}), default=str)


def log(event: str, level: int = logging.INFO, **fields: object) -> None:
    LOGGER.log(level, event, extra={"fields": fields})


_recent: list[float] = []


def log_fault(event: str, error: BaseException) -> None:
    """An error of ours, with where it came from."""
    now = time.monotonic()
    _recent[:] = [moment for moment in _recent if now - moment < 60]
    if len(_recent) < FAULTS:
        _recent.append(now)
        log(event, logging.ERROR, error=repr(error)[:500], traceback="".join(traceback.format_exception(error))[-4000:])


def write_to_stderr(quiet: bool = False) -> None:
    """Let the server's lines be written, or only faults of ours. A program that embeds the server may configure logging as it
    likes instead."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonLines())
    LOGGER.addHandler(lines)
    LOGGER.setLevel(logging.ERROR if quiet else logging.INFO)
    LOGGER.propagate = False
