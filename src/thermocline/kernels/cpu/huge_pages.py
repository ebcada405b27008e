"""Zeroed CPU memory in huge pages: 20 to 25% off a random lookup. Linux grants them only to memory never written."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

_MADV_HUGEPAGE = 14
_PAGE = 4096
_MIN_BYTES = 4 << 20


def huge_page_zeros(count: int, dtype: torch.dtype) -> Tensor:
    """`torch.zeros(count, dtype=dtype)`, in huge pages if the tensor is large and the system grants them."""
    tensor = torch.empty(count, dtype=dtype)
    _advise_huge_pages(tensor)
    return tensor.zero_()


def _advise_huge_pages(tensor: Tensor) -> bool:
    """Request huge pages for a tensor; returns whether the system accepts."""
    size = tensor.numel() * tensor.element_size()
    if sys.platform != "linux" or size < _MIN_BYTES:
        return False
    first = -(-tensor.data_ptr() // _PAGE) * _PAGE
    length = (tensor.data_ptr() + size) // _PAGE * _PAGE - first
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return bool(madvise(first, length, _MADV_HUGEPAGE) == 0)
