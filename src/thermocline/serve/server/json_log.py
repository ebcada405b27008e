"""Structured logs: one JSON object a line on standard error, with `time`, `level`, `event` and further fields.

Mistakes of clients are counted, not logged: a client must not be able to fill a disk.
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
MAX_FAULTS = 20


class JsonFormatter(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        return json.dumps(line | getattr(record, "fields", {}), default=str)


def log(event: str, level: int = logging.INFO, **fields: object) -> None:
    """Log an event with fields."""
    LOGGER.log(level, event, extra={"fields": fields})


_recent: list[float] = []


def log_fault(event: str, error: BaseException) -> None:
    """Log a fault of the server with its traceback, at most `MAX_FAULTS` in a minute."""
    now = time.monotonic()
    _recent[:] = [moment for moment in _recent if now - moment < 60]
    if len(_recent) < MAX_FAULTS:
        _recent.append(now)
        log(event, logging.ERROR, error=repr(error)[:500], traceback="".join(traceback.format_exception(error))[-4000:])


def write_to_stderr(quiet: bool = False) -> None:
    """Write the server's log to standard error; with `quiet`, only faults."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonFormatter())
    LOGGER.addHandler(lines)
    LOGGER.setLevel(logging.ERROR if quiet else logging.INFO)
    LOGGER.propagate = False
    logging.getLogger("grpc._cython.cygrpc").disabled = True  # a traceback for every client that leaves; faults are logged here
