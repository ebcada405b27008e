"""Who may talk to the server, and how nobody else listens."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Secrets(NamedTuple):
    """A bearer token, and a certificate with its key; without them, whoever reaches the ports."""

    token: str | None = None
    certificate: Path | None = None
    key: Path | None = None
