"""Allocation of table arrays, and their sizes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thermocline.kernels.cpu.huge_pages import huge_page_zeros


def table_zeros(count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros for rows or optimizer state; on a CPU in huge pages, which make random lookups a quarter faster."""
    if torch.device(device).type == "cpu":
        return huge_page_zeros(count, dtype)
    return torch.zeros(count, dtype=dtype, device=device)


def pin(codes: Tensor, card: torch.device) -> Tensor:
    """A pinned copy of bytes in host memory."""
    return kept_for(card, codes.pin_memory())


class _Kept:
    """Owner of pinned memory, which waits for a GPU before the memory is freed.

    PyTorch reuses pinned memory as soon as no tensor holds it: it knows of its own copies, but not of kernels that write there.
    """

    def __init__(self, card: torch.device, codes: Tensor) -> None:
        self._card, self._codes = card, codes
        self.__array_interface__ = codes.numpy().__array_interface__

    def __del__(self) -> None:
        if not sys.is_finalizing():
            torch.cuda.synchronize(self._card)


def kept_for(card: torch.device, codes: Tensor) -> Tensor:
    """The same memory as a tensor that waits for the GPU when its memory is freed."""
    return torch.from_numpy(np.asarray(_Kept(card, codes)))


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes of tables.

    `parts` has codes, metadata, cache (rows in slots), maps (bookkeeping of the cache, id maps), optimizer state and, after a
    prefetch, staging. `fp32` is the size of the same rows in fp32. `host` is the part in host memory while lookups run on a
    GPU.
    """

    parts: dict[str, int]
    fp32: int
    host: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def ratio(self) -> float:
        """How many times smaller than fp32 rows, without optimizer state."""
        return self.fp32 / (self.total - self.parts["optimizer state"])

    @property
    def ratio_with_state(self) -> float:
        """The same with optimizer state counted on both sides."""
        return (self.fp32 + self.parts["optimizer state"]) / self.total

    def __str__(self) -> str:
        lines = [f"{name:16}{count:>20,}" for name, count in (*self.parts.items(), ("total", self.total))]
        ratios = f"{times_smaller(self.ratio)} than fp32 rows ({times_smaller(self.ratio_with_state)} with optimizer state)"
        return "\n".join([*lines, ratios])


def times_smaller(ratio: float, digits: int = 2) -> str:
    """A ratio to fp32 rows in words. It may be below one for small tables with a cache."""
    return f"{ratio:.{digits}f}x smaller" if ratio >= 1 else f"{1 / ratio:.{digits}f}x larger"


def size_of(*tensors: Tensor) -> int:
    """Bytes of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device, or None where it is unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    lines = Path("/proc/meminfo")
    if device.type != "cpu" or not lines.exists():
        return None
    found = [line for line in lines.read_text().splitlines() if line.startswith("MemAvailable:")]
    return 1024 * int(found[0].split()[1]) if found else None
