"""Errors in the words of the two protocols. What is not listed is a fault of ours: it is logged, and the client learns no more
than its kind."""

from __future__ import annotations

from typing import NamedTuple

from thermocline.errors import BadInput
from thermocline.serve.errors import CardDown, NotReady, Overloaded, TooLate, UnknownModel

from .json_log import log_fault

LONGEST = 800  # letters of a message: it travels in a header, which clients bound


class Refusal(NamedTuple):
    """A status of gRPC by name, one of HTTP, and what is said."""

    code: str
    status: int
    words: str


# The first that fits.
_KINDS: tuple[tuple[type[Exception], str, int], ...] = (
    (UnknownModel, "NOT_FOUND", 404),
    (BadInput, "INVALID_ARGUMENT", 400),
    (Overloaded, "RESOURCE_EXHAUSTED", 429),
    (CardDown, "UNAVAILABLE", 503),
    (NotReady, "UNAVAILABLE", 503),
    (TooLate, "DEADLINE_EXCEEDED", 504),
)


def refusal(error: Exception) -> Refusal:
    for kind, code, status in _KINDS:
        if isinstance(error, kind):
            return Refusal(code, status, _brief(str(error)))
    log_fault("a request failed", error)
    return Refusal("INTERNAL", 500, f"a fault of the server ({type(error).__name__}); its log says more")


def _brief(words: str) -> str:
    return words if len(words) <= LONGEST else words[: LONGEST - 3] + "..."
