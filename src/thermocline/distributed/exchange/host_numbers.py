"""Numbers on their way between host and GPU, without a wait for the GPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thermocline.distributed.placement.table_map import Counts


class HostNumbers:
    """Integers of a device that the host reads later; one copy for several tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        flat, self._event = torch.cat([tensor.reshape(-1).long() for tensor in tensors]), None
        self._host = flat
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, dtype=torch.int64, pin_memory=True).copy_(flat, non_blocking=True)
            self._event = torch.cuda.current_stream(flat.device).record_event()

    def get(self) -> list[Counts]:
        """The numbers of each tensor. Waits for what was launched before the copy, and for nothing after it."""
        if self._event is not None:
            self._event.synchronize()
        ends = np.cumsum([shape.numel() for shape in self._shapes])
        flat = np.split(self._host.numpy(), ends[:-1])
        return [part.reshape(shape) for part, shape in zip(flat, self._shapes, strict=True)]


def to_device(numbers: Counts, device: torch.device) -> Tensor:
    """Numbers on a device. A GPU copies them from pinned memory: a copy from other memory would wait for the GPU."""
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def positions(flag_N: Tensor, count: int | None) -> Tensor:
    """Positions of set flags; with their number `count`, without a wait for the GPU."""
    if count is None:
        return flag_N.nonzero()[:, 0]
    if count == flag_N.numel():
        return torch.arange(count, device=flag_N.device)
    return torch.nonzero_static(flag_N, size=count)[:, 0]
