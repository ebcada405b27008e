"""Choose the implementation of a kernel by device: Triton for CUDA tensors, Numba for CPU tensors. Imports are lazy."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor

_OF_DEVICE = {"cpu": "cpu", "cuda": "gpu"}


@cache
def _module(kernel: str, device: str) -> ModuleType:
    if device not in _OF_DEVICE:
        raise NotImplementedError(f"no kernels for device {device!r}; move the tables to 'cpu' or 'cuda'")
    return import_module(f".{kernel}.{_OF_DEVICE[device]}", __package__)


def implementation_for(kernel: str, tensor: Tensor) -> ModuleType:
    """The module that implements `kernel` on the device of `tensor`; of a table, its meta words: codes may be on the host."""
    return _module(kernel, tensor.device.type)
