"""Dense parameters, buffers and optimizers of a model: tensors in the state file, numbers in the manifest.

torch.distributed.checkpoint is not used: its files are pickles, and opening a checkpoint here must not run code from it. Dense
parameters are small next to tables. Rank 0 writes them; tensors that FSDP has sharded are gathered one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from thermocline.errors import BadInput
from thermocline.nn.rows_module import RowsModule
from thermocline.nn.saved_rows import without_rows

Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of all modules except rows modules, without a copy."""
    rows = tuple(name + "." if name else "" for name, module in model.named_modules() if isinstance(module, RowsModule))
    token = without_rows.set(True)  # the state_dict of a shard is collective work, and refuses elastic ids
    try:
        found = {_unwrapped(model, name): value for name, value in model.state_dict().items() if not name.startswith(rows)}
    finally:
        without_rows.reset(token)
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise BadInput(
                f"{name!r} of the model's state_dict is a {type(value).__name__}; only tensors can be saved", name=name
            )
    return found


def _unwrapped(model: nn.Module, name: str) -> str:
    """The name without the `module` of DistributedDataParallel, so that wrapped and bare models share names."""
    kept: list[str] = []
    part: nn.Module | None = model
    for word in name.split("."):
        if not (word == "module" and isinstance(part, DistributedDataParallel)):
            kept.append(word)
        part = getattr(part, word, None)
    return ".".join(kept)


def full_tensor(value: Tensor) -> Tensor:
    """The full tensor of a DTensor; all ranks call this together."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def load_dense(model: nn.Module, saved: Mapping[str, Tensor], strict: bool = True) -> tuple[list[str], list[str]]:
    """Copy saved parameters and buffers into a model. Raises before any change if names or shapes differ.

    Returns the names that only the model has, and those that only the checkpoint has: none if `strict`.
    """
    here = dense_tensors(model)
    for name in _listed(model, "not_in_old_checkpoints") - saved.keys():
        here.pop(name, None)
    missing, unknown = sorted(here.keys() - saved.keys()), sorted(saved.keys() - here.keys())
    wrong = [n for n in here if n in saved and here[n].shape != saved[n].shape]
    texts = _listed(model, "saved_texts")
    other = [n for n in here if n in saved and n in texts and n not in wrong and not torch.equal(here[n].cpu(), saved[n].cpu())]
    if wrong or other or (strict and (missing or unknown)):
        kinds = {"missing in the checkpoint": missing, "missing in the model": unknown, "of another shape": wrong}
        kinds |= {"of another value": other}
        differences = "; ".join(f"{what}: {', '.join(names[:3])}" for what, names in kinds.items() if names)
        raise BadInput(
            f"dense parameters of the checkpoint do not fit the model ({differences}); build the model that was saved, or load "
            "with strict=False what has the same names and shapes",
            missing=missing, unknown=unknown, wrong_shape=wrong, wrong_value=other,
        )  # fmt: skip
    with torch.no_grad():
        for name, tensor in ((name, tensor) for name, tensor in here.items() if name in saved):
            value = saved[name]
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements)
            tensor.copy_(value)
    return missing, unknown


def _listed(model: nn.Module, attribute: str) -> set[str]:
    """Tensors that modules list: those that older checkpoints lack, and texts that must equal the saved ones."""
    known = ((name, each) for name, part in model.named_modules() for each in getattr(part, attribute, ()))
    return {_unwrapped(model, f"{name}.{each}" if name else each) for name, each in known}


def optimizers_by_name(optimizers: Optimizers) -> dict[str, torch.optim.Optimizer]:
    if optimizers is None:
        return {}
    return {"": optimizers} if isinstance(optimizers, torch.optim.Optimizer) else dict(optimizers)


def optimizer_state(optimizers: Mapping[str, torch.optim.Optimizer]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """State of dense optimizers: numbers for JSON, and tensors. Rows modules hold the optimizer state of rows."""
    numbers: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, optimizer in optimizers.items():
        state = optimizer.state_dict()
        rest: dict[str, dict[str, Any]] = {}
        for number, values in state["state"].items():
            rest[str(number)] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            tensors |= {f"{name}/{number}/{key}": full_tensor(v) for key, v in values.items() if isinstance(v, Tensor)}
        numbers[name] = {"state": rest, "param_groups": [_plain_group(name, group) for group in state["param_groups"]]}
    return numbers, tensors


def _plain_group(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
    try:
        return dict(json.loads(json.dumps(plain)))
    except TypeError as error:
        raise BadInput(f"a parameter group of optimizer {name!r} cannot be written as JSON ({error})", optimizer=name) from None


def load_optimizers(
    optimizers: Mapping[str, torch.optim.Optimizer], numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Load the state that `optimizer_state` returned."""
    if missing := [name for name in optimizers if name not in numbers]:
        names = ", ".join(map(repr, numbers)) or "none"
        raise BadInput(f"the checkpoint has no optimizer {missing[0]!r}; it has {names}", optimizer=missing[0])
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
        optimizer.load_state_dict({"state": state, "param_groups": groups})
