"""Structured logs: one JSON object a line on standard error, with `time`, `level`, `event` and further fields.

Mistakes of clients are counted, not logged: a client must not be able to fill a disk.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import datetime, timezone
from logging.handlers import QueueHandler
from typing import Any

LOGGER = logging.getLogger("thermocline.serve")
MAX_FAULTS = 20
MAX_LINES, MAX_FINISH_S = 1000, 1.0  # lines that wait to be written, and seconds to write them at the end


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


class _LogQueue(QueueHandler):
    """Hands lines to a thread, because a pipe whose reader stopped would stop the server. Without room, lines are dropped."""

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.queue.put_nowait(record)


def _write(lines: queue.Queue[Any], descriptor: int) -> None:
    formatter = JsonFormatter()
    while (record := lines.get()) is not None:
        data = f"{formatter.format(record)}\n".encode()
        with suppress(OSError):  # the disk is full
            while data:  # not by `sys.stderr`, whose lock the end of the process would wait for
                data = data[os.write(descriptor, data) :]


def _finish(lines: queue.Queue[Any], writer: threading.Thread) -> None:
    with suppress(queue.Full):
        lines.put_nowait(None)
    writer.join(MAX_FINISH_S)


def write_to_stderr(quiet: bool = False) -> None:
    """Write the server's log to standard error; with `quiet`, only faults."""
    lines = queue.Queue[Any](MAX_LINES)
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError):  # no standard error, or one without a file
        descriptor = os.open(os.devnull, os.O_WRONLY)
    writer = threading.Thread(target=_write, args=(lines, descriptor), name="log", daemon=True)
    writer.start()
    atexit.register(_finish, lines, writer)
    LOGGER.addHandler(_LogQueue(lines))
    LOGGER.setLevel(logging.ERROR if quiet else logging.INFO)
    LOGGER.propagate = False
    logging.getLogger("grpc._cython.cygrpc").disabled = True  # a traceback for every client that leaves; faults are logged here
