"""Click logs in memory, for many runs over one small log."""

from __future__ import annotations

import torch

from thermocline.data.click_log import ClickLog, Clicks, MemoryLog


def in_memory(log: ClickLog, device: torch.device | str = "cpu", block: int = 1 << 16) -> MemoryLog:
    """Read a log into memory in its order."""
    return MemoryLog(Clicks.cat([batch.to(device) for batch in log.batches(block)]), log.rows)
