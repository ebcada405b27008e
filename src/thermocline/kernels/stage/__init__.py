"""Rows of a table in host memory, staged on the card ahead of their batch (see `reference.py` for the definition)."""

from __future__ import annotations

from torch import Tensor

_homes: dict[int, tuple[int, int]] = {}  # addresses of codes and meta by that of the area that was made for them


def belong(area: Tensor, codes: Tensor, meta: Tensor) -> None:
    """The places of this area are named by their distance from these arrays."""
    _homes[area.data_ptr()] = codes.data_ptr(), meta.data_ptr()


def check_home(area: Tensor, codes: Tensor, meta: Tensor) -> None:
    """Refuse copies of the arrays, as some backends of torch.compile make them: places would be found at wild addresses."""
    if _homes.get(area.data_ptr()) != (codes.data_ptr(), meta.data_ptr()):
        raise RuntimeError(
            "rows of this table are prefetched, but this is a copy of its arrays. Some backends of torch.compile work on "
            "copies; use the default backend (inductor), or do not prefetch"
        )
