"""Id maps as text, which states of modules hold, and how two of them differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .id_maps import FeatureMaps


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
