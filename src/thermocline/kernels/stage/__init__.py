"""Rows of a table in host memory, staged on the card ahead of their batch (see `reference.py` for the definition).

Which area the rows of a table are staged in is known here, by where its arrays lie. A graph of torch.compile keeps the tensors
that its forward was given, and areas come and go with prefetches: its backward may bring one that was given up since, or none.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from torch import Tensor

from thermocline.kernels.layout import Cache

_NONE: Tensor = Cache._field_defaults["area"]
_homes: dict[int, tuple[int, int]] = {}  # addresses of codes and meta by that of the area that was made for them
_areas: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()  # and the area that their rows are staged in now


def belong(area: Tensor, codes: Tensor, meta: Tensor) -> None:
    """The places of this area are named by their distance from these arrays, whose rows are staged there from now on."""
    home = codes.data_ptr(), meta.data_ptr()
    _homes[area.data_ptr()] = home
    _areas[home] = area


def given_up(codes: Tensor, meta: Tensor) -> None:
    """No row of these arrays is staged any more."""
    _areas[codes.data_ptr(), meta.data_ptr()] = _NONE


def as_staged(cache: Cache, codes: Tensor, meta: Tensor) -> Cache:
    """The cache with the area that rows are staged in now, whichever it was when the caller took its tensors."""
    if not _areas:
        return cache
    area = _areas.get((codes.data_ptr(), meta.data_ptr()), cache.area)
    return cache if area is cache.area else cache._replace(area=area)


def check_home(area: Tensor, codes: Tensor, meta: Tensor) -> None:
    """Refuse copies of the arrays, as some backends of torch.compile make them: places would be found at wild addresses."""
    if _homes.get(area.data_ptr()) != (codes.data_ptr(), meta.data_ptr()):
        raise RuntimeError(
            "rows of this table are prefetched, but this is a copy of its arrays. Some backends of torch.compile work on "
            "copies; use the default backend (inductor), or do not prefetch"
        )
