"""Precisions by name, and the bytes of a row."""

from __future__ import annotations

from thermocline import formats as F
from thermocline.errors import FormatError

PRECISIONS = F.NAMES
"""Names of the formats that rows are stored in."""


def format_of(precision: str) -> int:
    """The format code of a precision."""
    try:
        return F.NAMES.index(precision)
    except ValueError:
        message = f"precision {precision!r} is not known; use one of {', '.join(F.NAMES)}"
        raise FormatError(message, parameter="precision", value=precision) from None


def bytes_per_row(precision: str, dim: int) -> int:
    """Bytes of one row, codes and metadata, without optimizer state.

    Args:
        precision: a format of `PRECISIONS`.
        dim: columns of a row.

    Returns:
        The bytes.

    Raises:
        FormatError: the precision is unknown.

    Example::

        thermocline.bytes_per_row("int8", 64)  # 68
    """
    format = format_of(precision)
    return F.row_bytes(format, dim) + 4 * F.META_WORDS[format]
