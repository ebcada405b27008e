"""Arrays of a module in a `state_dict`, each as a tensor or all packed into one beside the plain `weight`; id maps as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor

from thermocline.errors import BadInput

if TYPE_CHECKING:
    from .id_maps import FeatureMaps
    from .rows_module import RowsModule

ROW_STATE = "row_state"
without_rows: ContextVar[bool] = ContextVar("without_rows", default=False)  # whether a `state_dict` leaves out rows modules


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


def load_state(
    module: RowsModule, given: Mapping[str, Any], prefix: str, keys: tuple[list[str], list[str]], errors: list[str]
) -> None:
    """Load the arrays of a module or a plain `weight`; adds to the missing and unexpected keys, and to the errors."""
    arrays, plain, (missing, unexpected) = module._arrays(), module.weight_keys(), keys
    unexpected += [prefix + name for name in given if name not in {*arrays, *plain, "tables", "ids"}]
    if why := difference(module.maps, given.get("ids")):
        errors.append(f"{prefix}ids: {why}")
        return
    if any(name in given for name in plain):
        missing += [prefix + name for name in plain if name not in given]
        for name, table in plain.items():
            if name in given:
                try:
                    with torch.no_grad():
                        module.write_table(table, given[name])
                except (BadInput, RuntimeError) as error:
                    errors.append(f"{prefix}{name}: {error}")
        return
    texts = ["tables"] if module.maps is None else ["tables", "ids"]
    missing += [prefix + name for name in [*arrays, *texts] if name not in given]
    if (saved := given.get("tables")) is not None and not torch.equal(saved.cpu(), module._text()):
        texts = [bytes(t.cpu().tolist()).decode(errors="replace") for t in (saved, module._text())]
        way = f"load them as `weight`: load_state_dict({{{', '.join(f'{key!r}: rows' for key in plain)}}})"
        errors.append(f"{prefix}tables: the saved rows are {texts[0]}, this module's {texts[1]}; {way}")
        return
    known = {name: tensor for name, tensor in arrays.items() if name in given}
    wrong = {name: why for name, tensor in known.items() if (why := misfit(name, tensor, given[name]))}
    if wrong:
        errors += [f"{prefix}{name}: {why}" for name, why in wrong.items()]  # and nothing is changed
        return
    module.arena.replaced()
    if module.maps is not None:
        module.maps.replaced()
    with torch.no_grad():
        for name, tensor in known.items():
            tensor.copy_(given[name])
    module.trained.group.read_back()


def misfit(name: str, tensor: Tensor, value: Tensor) -> str:
    """Why a saved array cannot be loaded, or an empty string."""
    if tensor.shape == value.shape and tensor.dtype == value.dtype:
        return ""
    saved, here = f"{tuple(value.shape)} {value.dtype}", f"{tuple(tensor.shape)} {tensor.dtype}"
    cached = "the version of this package that saved it, or load its rows as `weight`"
    way = cached if name.startswith("cache_") else "the optimizer it was saved with"
    return f"the saved array is {saved}, the module's {here}; build the module with {way}"


def maps_as_text(maps: FeatureMaps | None) -> Tensor | None:
    """The maps as a `state_dict` holds them."""
    if maps is None:
        return None
    written = {name: map.to_json() for name, map in zip(maps.features, maps.maps, strict=True)}
    return torch.tensor(list(json.dumps(written, sort_keys=True).encode()), dtype=torch.uint8, device="cpu")


def difference(maps: FeatureMaps | None, saved: Tensor | None) -> str:
    """How saved maps differ from those of the module; empty if they are equal, or none are saved."""
    here = maps_as_text(maps)
    if saved is None or (here is not None and torch.equal(saved.cpu(), here)):
        return ""
    theirs, ours = (_read(text) for text in (saved, here))
    name = next((name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)), None)
    if name is None:
        return ""
    there, own = (maps.get(name, "none") for maps in (theirs, ours))
    return f"feature {name!r} was saved with the id map {there}, this module has {own}; build it with the saved map"


def _read(text: Tensor | None) -> Mapping[str, object]:
    try:
        return {} if text is None else dict(json.loads(bytes(text.cpu().tolist())))
    except ValueError:
        return {"": "that cannot be read"}
