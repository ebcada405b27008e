"""Tensors that refuse operations. `ReadOnlyWeight`, a copy of the rows, is what `module.weight` returns.

`nn.init.xavier_uniform_(module.weight)` on an ordinary copy would change nothing, without an error, and a hook on its
gradient would never run. Reading, arithmetic, indexing, `clone` and `numpy` work as on any tensor and return ordinary
tensors; views of the copy stay read-only.

Tools that average models compute with values of `state_dict` (timm's `ModelEma`) or write to detached parameters
(`AveragedModel`). Means of codes are no rows: `StoredArray` and `DetachedPlaceholder` raise before a copy is corrupted.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from thermocline.errors import BadInput

_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITING_METHODS = {"__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS)}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}  # they would be those of a copy
_COPYING_METHODS = {"numpy", "__array__", "__deepcopy__", "__reduce_ex__"}  # torch refuses them where a gradient flows
_OF_MEANS = ("add", "mul", "div", "truediv", "true_divide", "lerp", "stack")
_AVERAGING = {"isub", *(prefix + name for prefix in ("", "i", "r") for name in _OF_MEANS)}
_AVERAGE = "average the dense part alone, as in AveragedModel(model.top)"
_WAY_OUT = "set rows with set_rows(ids, values), all of them with load_state_dict({'weight': values})"


class ReadOnlyTensor(Tensor):
    """A tensor whose in-place operations raise, those of its views too."""

    @classmethod
    def refuse(cls, name: str) -> None:
        """Raise for the in-place operation of this name."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "_is_view":  # of this tensor, not of its plain view
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        written = [*_flat(args[:1]), *kwargs.values()] if _writes(name) else [kwargs.get("out")]
        if any(isinstance(tensor, cls) for tensor in written):
            cls.refuse(name)
        source = next((tensor for tensor in args if isinstance(tensor, cls)), None)
        if source is not None and name in _COPYING_METHODS:
            args = (source.detach(), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*(tensor.as_subclass(Tensor) if isinstance(tensor, cls) else tensor for tensor in args), **kwargs)
            if source is None or type(out) is not Tensor or func is Tensor.as_subclass:
                return out
            is_view = out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            return out.as_subclass(cls) if is_view else out


class ReadOnlyWeight(ReadOnlyTensor):
    """Rows of a module, dequantized to fp32: a copy, so that changing it would not change the rows."""

    @classmethod
    def refuse(cls, name: str) -> None:
        raise BadInput(f"weight is a copy of the rows, so {name} would change nothing; {_WAY_OUT}", parameter="weight")


class DetachedPlaceholder(ReadOnlyTensor):
    """The placeholder parameter without its gradient, to which averages of parameters write."""

    @classmethod
    def refuse(cls, name: str) -> None:
        message = (
            f"{name} on a detached parameter of a table, as in AveragedModel, would change no row of the copy; {_AVERAGE}, or "
        )
        message += "freeze the rows: requires_grad_(False)"
        raise BadInput(message, parameter="model")


class StoredArray(Tensor):
    """An array of rows in a `state_dict`: codes, scales, cache, state. Copies and comparisons work; averages raise."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.__name__).strip("_").removeprefix("foreach_").split(".")[0] in _AVERAGING:
            message = f"{name} on an array of rows in a state_dict: means of stored codes are no rows; {_AVERAGE}"
            raise BadInput(message, parameter="state_dict")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def refuse_assignment() -> None:
    """Raise for `module.weight = ...`."""
    raise BadInput(f"weight cannot be assigned: rows are stored in `rows.precision`; {_WAY_OUT}", parameter="weight")


def _writes(name: str) -> bool:
    """Whether the function of torch of this name changes its first argument, or what its gradient does."""
    return name in _WRITING_METHODS if name.startswith("__") else name.endswith("_") or name in _HOOKS


def _flat(first: tuple[Any, ...]) -> list[Any]:
    """The first argument, or its items if it is a list of tensors."""
    return list(first[0]) if first and isinstance(first[0], (list, tuple)) else list(first)
