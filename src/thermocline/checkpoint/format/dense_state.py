"""The part of a model that is not rows of ours, and its optimizers: tensors beside numbers that JSON holds.

Not through torch.distributed.checkpoint, whose files are pickles (its metadata, and by default its tensors): a checkpoint here
can be opened without running anything that is in it. Dense parts are small next to tables; what FSDP has divided is put
together tensor by tensor, and rank 0 writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from thermocline.errors import BadInput
from thermocline.nn.optimizer import FusedOptimizer
from thermocline.nn.rows_module import RowsModule

Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None


def dense_here(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of everything but the modules of thermocline, where they lie."""
    ours = tuple(name + "." if name else "" for name, module in model.named_modules() if isinstance(module, RowsModule))
    found = {_unwrapped(model, name): value for name, value in model.state_dict().items() if not name.startswith(ours)}
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise BadInput(f"{name!r} of the model's state_dict is a {type(value).__name__}; only tensors can be saved")
    return found


def _unwrapped(model: nn.Module, name: str) -> str:
    """The name without the `module` that DistributedDataParallel puts between: a process alone has the same names."""
    kept: list[str] = []
    part: nn.Module | None = model
    for word in name.split("."):
        if not (word == "module" and isinstance(part, DistributedDataParallel)):
            kept.append(word)
        part = getattr(part, word, None)
    return ".".join(kept)


def whole(value: Tensor) -> Tensor:
    """A tensor that may be divided over ranks, put together. All ranks call this."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def load_dense(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Put parameters and buffers back, and name what does not fit before anything is changed."""
    here = dense_here(model)
    for name in _not_in_old_checkpoints(model) - saved.keys():
        here.pop(name, None)
    missing, unknown = sorted(here.keys() - saved.keys()), sorted(saved.keys() - here.keys())
    wrong = [n for n in here if n in saved and here[n].shape != saved[n].shape]
    if missing or unknown or wrong:
        parts = [f"{what} {', '.join(names[:3])}" for what, names in _misfits(missing, unknown, wrong) if names]
        raise BadInput(f"the dense part of the checkpoint does not fit the model: {'; '.join(parts)}; build the model it is of")
    with torch.no_grad():
        for name, tensor in here.items():
            _copy(tensor, saved[name])


def _not_in_old_checkpoints(model: nn.Module) -> set[str]:
    """Names that modules say they did not always save, and can do without."""
    known = ((name, each) for name, part in model.named_modules() for each in getattr(part, "not_in_old_checkpoints", ()))
    return {_unwrapped(model, f"{name}.{each}" if name else each) for name, each in known}


def _misfits(missing: list[str], unknown: list[str], wrong: list[str]) -> list[tuple[str, list[str]]]:
    return [("it has no", missing), ("the model has no", unknown), ("of another shape is", wrong)]


def _copy(tensor: Tensor, saved: Tensor) -> None:
    if isinstance(tensor, DTensor):
        from torch.distributed.tensor import distribute_tensor

        saved = distribute_tensor(saved.to(tensor.device), tensor.device_mesh, tensor.placements)
    tensor.copy_(saved)


def named(optimizers: Optimizers) -> dict[str, torch.optim.Optimizer]:
    if optimizers is None:
        return {}
    return {"": optimizers} if isinstance(optimizers, torch.optim.Optimizer) else dict(optimizers)


def take_apart(optimizers: Mapping[str, torch.optim.Optimizer]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What JSON can hold of optimizers, and their tensors. Moments of rows are not theirs: the modules have them."""
    numbers: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, optimizer in optimizers.items():
        state = optimizer.state_dict()
        rest: dict[str, dict[str, Any]] = {}
        for number, values in state["state"].items():
            rest[str(number)] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            tensors |= {f"{name}/{number}/{key}": whole(v) for key, v in values.items() if isinstance(v, Tensor)}
        numbers[name] = {"state": rest, "param_groups": [_plain_group(name, group) for group in state["param_groups"]]}
    return numbers, tensors


def _plain_group(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
    try:
        return dict(json.loads(json.dumps(plain)))
    except TypeError as error:
        raise BadInput(f"a parameter group of optimizer {name!r} cannot be written as JSON ({error})") from None


def put_back(
    optimizers: Mapping[str, torch.optim.Optimizer], numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    if missing := [name for name in optimizers if name not in numbers]:
        raise BadInput(f"the checkpoint has no optimizer {missing[0]!r}; it has {', '.join(map(repr, numbers)) or 'none'}")
    for name, optimizer in optimizers.items():
        state: dict[int, dict[str, Any]] = {int(n): dict(values) for n, values in numbers[name]["state"].items()}
        for key, tensor in tensors.items():
            owner, number, field = key.rsplit("/", 2)
            if owner == name:
                state[int(number)][field] = tensor
        groups = [
            {key: tuple(value) if key == "betas" else value for key, value in group.items()}
            for group in numbers[name]["param_groups"]
        ]
        if isinstance(optimizer, FusedOptimizer):
            optimizer.load_state_dict({"param_groups": groups})
        else:
            optimizer.load_state_dict({"state": state, "param_groups": groups})
