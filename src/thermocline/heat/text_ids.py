"""The id of a text, for logs, training and requests alike. The hash will not change."""

from __future__ import annotations

import hashlib


def id_of_text(text: str | bytes | memoryview) -> int:
    """The id of a text: BLAKE2b of its UTF-8 bytes with a digest of 8 bytes, as a little-endian signed integer."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
