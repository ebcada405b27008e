"""Which implementation serves a tensor: Triton for CUDA tensors, Numba for CPU tensors. Each is imported when first needed."""

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


def serving(kernel: str, tensor: Tensor) -> ModuleType:
    """The module that implements `kernel` where `tensor` lies (of a table: meta; codes may lie in host memory)."""
    return _module(kernel, tensor.device.type)
