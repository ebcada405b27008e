"""What one row costs in each precision, by name."""

from __future__ import annotations

from thermocline import formats as F
from thermocline.errors import FormatError

PRECISIONS = F.NAMES


def format_of(precision: str) -> int:
    """The number kernels know a precision by."""
    try:
        return F.NAMES.index(precision)
    except ValueError:
        raise FormatError(f"precision {precision!r} is not known; use one of {', '.join(F.NAMES)}") from None


def bytes_per_row(precision: str, dim: int) -> int:
    """Bytes of one row, codes and metadata, without optimizer state. There is no padding."""
    format = format_of(precision)
    return F.row_bytes(format, dim) + 4 * F.META_WORDS[format]
