"""Arrays of a module in a `state_dict`: as tensors of their own, or packed into one beside the plain `weight`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

ROW_STATE = "row_state"


def pack(arrays: Mapping[str, Tensor]) -> Tensor:
    """The arrays as a file of safetensors in a tensor of bytes."""
    contents = safetensors.torch.save({name: tensor.contiguous() for name, tensor in arrays.items()})
    return torch.frombuffer(bytearray(contents), dtype=torch.uint8)


def unpack(given: Mapping[str, Any], arrays: Mapping[str, Tensor], text: Tensor) -> Mapping[str, Any]:
    """A state with its packed arrays in place of the weight, if they are those of a module of the same kind."""
    if ROW_STATE not in given:
        return given
    saved = safetensors.torch.load(given[ROW_STATE].cpu().numpy().tobytes())
    fits = all(name in saved and not misfit(name, tensor, saved[name]) for name, tensor in arrays.items())
    if fits and torch.equal(saved["tables"], text):
        return saved
    return {name: value for name, value in given.items() if name != ROW_STATE}


def misfit(name: str, tensor: Tensor, value: Tensor) -> str:
    """Why a saved array cannot be loaded, or an empty string."""
    if tensor.shape == value.shape and tensor.dtype == value.dtype:
        return ""
    saved, here = f"{tuple(value.shape)} {value.dtype}", f"{tuple(tensor.shape)} {tensor.dtype}"
    cached = "the version of this package that saved it, or load its rows as `weight`"
    way = cached if name.startswith("cache_") else "the optimizer it was saved with"
    return f"the saved array is {saved}, the module's {here}; build the module with {way}"
