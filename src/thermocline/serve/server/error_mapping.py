"""gRPC codes and HTTP statuses of errors. Any other error is a fault of the server: its traceback goes to the log, and the
client
learns only its type."""

from __future__ import annotations

from typing import NamedTuple

from thermocline.errors import BadInput
from thermocline.serve.errors import DeadlineExceeded, NotReady, Overloaded, ShardDown, UnknownModel

from .json_log import log_fault

MAX_MESSAGE = 800  # characters: gRPC sends the message in a header, whose size clients limit


class ErrorStatus(NamedTuple):
    """The name of a gRPC code, an HTTP status, and a message."""

    code: str
    http: int
    message: str


# The first match counts.
_STATUS: tuple[tuple[type[Exception], str, int], ...] = (
    (UnknownModel, "NOT_FOUND", 404),
    (BadInput, "INVALID_ARGUMENT", 400),
    (Overloaded, "RESOURCE_EXHAUSTED", 429),
    (ShardDown, "UNAVAILABLE", 503),
    (NotReady, "UNAVAILABLE", 503),
    (DeadlineExceeded, "DEADLINE_EXCEEDED", 504),
)


def error_status(error: Exception) -> ErrorStatus:
    """How both protocols report an error."""
    for kind, code, http in _STATUS:
        if isinstance(error, kind):
            message = str(error)
            return ErrorStatus(code, http, message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "...")
    log_fault("a request failed", error)
    return ErrorStatus("INTERNAL", 500, f"a fault of the server ({type(error).__name__}); see its log")
