"""Where the arrays of tables come from, and what they cost."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thermocline.kernels.cpu.huge_pages import huge_page_zeros


def table_zeros(count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros for rows or optimizer state; on a CPU in large pages, which random lookups are a quarter faster in."""
    if torch.device(device).type == "cpu":
        return huge_page_zeros(count, dtype)
    return torch.zeros(count, dtype=dtype, device=device)


def pinned_zeros(count: int, card: torch.device) -> Tensor:
    """Bytes in host memory that a card can reach."""
    return kept_for(card, torch.zeros(count, dtype=torch.uint8, pin_memory=True))


def pin(codes: Tensor, card: torch.device) -> Tensor:
    """A copy of bytes in host memory that a card can reach."""
    return kept_for(card, codes.pin_memory())


class _Kept:
    """Pinned memory that is not given back before a card is done with it.

    PyTorch gives pinned memory to the next who asks as soon as no tensor has it: it knows of its own copies, but not of kernels
    that write there. As the owner of the memory this sees the last tensor go, whoever had it: a module, a view, a graph.
    """

    def __init__(self, card: torch.device, codes: Tensor) -> None:
        self._card, self._codes = card, codes
        self.__array_interface__ = codes.numpy().__array_interface__

    def __del__(self) -> None:
        if not sys.is_finalizing():
            torch.cuda.synchronize(self._card)


def kept_for(card: torch.device, codes: Tensor) -> Tensor:
    """The same memory as a tensor that waits for the card when it goes."""
    return torch.from_numpy(np.asarray(_Kept(card, codes)))


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes that tables take, everything counted.

    `parts`: codes, metadata, cache (the rows in slots), maps (what is kept beside a cached row, and the counters), optimizer
    state, and after a prefetch staging (rows that came ahead of their batch). `fp32`: what the same rows would take in fp32,
    without optimizer state. `host`: how much of all lies in host memory while lookups run on a card.
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
    """A ratio to fp32 rows in words; of small tables, where maps and slots weigh more than rows, it may be below one."""
    return f"{ratio:.{digits}f}x smaller" if ratio >= 1 else f"{1 / ratio:.{digits}f}x larger"


def size_of(*tensors: Tensor) -> int:
    """Bytes of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a device, as far as the system tells."""
    if device.type == "cuda":
        return (
            int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        )
    lines = Path("/proc/meminfo")
    if device.type != "cpu" or not lines.exists():
        return None
    found = [line for line in lines.read_text().splitlines() if line.startswith("MemAvailable:")]
    return 1024 * int(found[0].split()[1]) if found else None
