"""Moves of the arrays of a module between devices, by the functions that `nn.Module._apply` gets (`.to`, `.half`, `.cuda`).

Floats are shown to such a function as integers of the same size, so that it changes their device and not their values.
`to_empty` of a module on the meta device builds its arrays anew, with rows of zeros: layout and cache need more than memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from thermocline.errors import BadInput
from thermocline.kernels.layout import Layout

_OURS = __name__.partition(".")[0] + "."
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def as_integers(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function without casts."""

    def move(tensor: Tensor) -> Tensor:
        shown = tensor.detach().view(_INTEGERS.get(tensor.dtype, tensor.dtype))
        moved = fn(shown)
        return (moved if moved.dtype == shown.dtype else shown.to(moved.device)).view(tensor.dtype)  # .type() casts all

    return move


def move_tensors(held: Any, move: Callable[[Tensor], Tensor]) -> None:
    """Replace every tensor that an object of this package holds, also in its own objects."""
    for name, value in vars(held).items():
        if isinstance(value, Tensor):
            setattr(held, name, move(value))
        elif isinstance(value, Layout):
            setattr(held, name, value._replace(fields_F8=move(value.fields_F8)))
        elif isinstance(value, list):
            setattr(held, name, [move(item) if isinstance(item, Tensor) else item for item in value])
            for item in value:
                if type(item).__module__.startswith(_OURS) and hasattr(item, "__dict__"):
                    move_tensors(item, move)
        elif type(value).__module__.startswith(_OURS) and hasattr(value, "__dict__"):
            move_tensors(value, move)


def materialize(module: Any, fn: Callable[[Tensor], Tensor]) -> bool:
    """Give a module on the meta device new arrays, with rows of zeros, where `to_empty` moves it; False for other moves."""
    device = torch.device("meta")
    if module.arena.device == device:
        device = fn(torch.empty(0, dtype=torch.int64, device=device)).device
    if device.type == "meta":
        return False
    names = [name for name in signature(type(module).__init__).parameters if name not in ("self", "torch_arguments")]
    arguments = {name: getattr(module, name) for name in names if name != "ids" or module.maps is not None}
    new = type(module).without_values(**arguments, device=device, dtype=module.dtype)
    new.arena.rename([table.name for table in module.arena.tables], getattr(module, "features", ()))
    new.placeholder.requires_grad_(module.placeholder.requires_grad)
    kept = {name: value for name, value in vars(module).items() if name in vars(nn.Module()) and name != "_parameters"}
    vars(module).update({**vars(new), **kept})
    return True


def check_keeps(fn: Callable[[Tensor], Tensor], device: torch.device) -> None:
    """Raise, before anything moves, if values would be lost: to or from the meta device, and in `to_empty`."""
    random = [byte & 1 for byte in os.urandom(64)]  # no memory holds it by chance
    sent = torch.tensor(random, dtype=torch.int64, device=device)
    came = fn(sent)
    if device.type == came.device.type == "meta":
        return
    if "meta" in (device.type, came.device.type) or not torch.equal(came.to(device, sent.dtype), sent):
        message = f"rows would lose their values on {came.device} (meta device or to_empty); build the model on its device"
        raise BadInput(message, parameter="device", value=came.device)
