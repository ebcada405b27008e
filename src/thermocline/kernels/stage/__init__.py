"""Rows of a table in host memory, staged on the GPU ahead of their batch. Kernels find the area by `Cache.home`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from torch import Tensor

from thermocline.kernels.layout import Cache

if TYPE_CHECKING:
    from .gpu_area import StagingArea  # which needs Triton

_numbers = itertools.count(1)
_areas: WeakValueDictionary[int, StagingArea] = WeakValueDictionary()


def register(area: StagingArea) -> int:
    """A number by which kernels find this staging area as long as it lives."""
    number = next(_numbers)
    _areas[number] = area
    return number


def area_of(cache: Cache) -> StagingArea | None:
    """The staging area of the cached tables; None where no row is staged."""
    return _areas[int(cache.home[0])] if cache.staged else None


def check_home(area: StagingArea, codes: Tensor, meta: Tensor) -> None:
    """Refuse copies of the arrays, as some backends of torch.compile make them: places lie at distances from the originals."""
    if area.home[1:] != (codes.data_ptr(), meta.data_ptr()):
        raise RuntimeError(
            "rows of this table are prefetched, but the kernel was given a copy of its arrays. Some backends of torch.compile "
            "work on copies; use the default backend (inductor), or do not prefetch"
        )
