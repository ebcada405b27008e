"""Zeroed CPU memory in huge pages.

Random lookups in 4 KiB pages miss the TLB for nearly every row. 2 MiB pages took 20 to 25% off the time of a lookup (8 x 1M x
128, int8: 7.5 to 6.2 ms; fp32: 16.0 to 12.2). Linux usually grants huge pages only on request ("madvise") and only to memory
that was never written, so this is an allocation: `torch.zeros` writes. Systems without huge pages return ordinary memory.
"""

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
