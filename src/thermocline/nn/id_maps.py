"""The id maps of a module: which of them it needs, and how they are saved and compared.

A map that changes nothing (identity over all rows of its table) is not evaluated, because the lookup checks the ids itself. A
`state_dict` holds the other maps under `ids`, as JSON text in uint8. Loading refuses a state with other maps: its rows would
belong to other ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thermocline.errors import BadInput, IdOutOfRange
from thermocline.ids.feature_maps import IdMaps
from thermocline.ids.idmap import IdMap, RowRange


def check_map(map: IdMap, rows: int, table: str, feature: str) -> None:
    """Raise unless `map` is an `IdMap` to rows of its table."""
    if not isinstance(map, IdMap):
        raise BadInput(
            f"ids of feature {feature!r} is a {type(map).__name__}; use a thermocline.IdMap, as in IdMap.hashed(1000)",
            parameter="ids", feature=feature, value=map,
        )  # fmt: skip
    if map.rows > rows:
        raise BadInput(
            f"feature {feature!r} is mapped to {map.rows} rows ({map}), but table {table!r} has {rows}; make them equal",
            parameter="ids", feature=feature, table=table, needed=map.rows, available=rows,
        )  # fmt: skip


class FeatureMaps(IdMaps):
    """The id maps of a module's features, by name."""

    def __init__(self, features: Sequence[str], maps: Sequence[IdMap], device: torch.device) -> None:
        super().__init__(maps, device)
        self.features, self.maps = tuple(features), tuple(maps)

    @classmethod
    def needed(
        cls, features: Sequence[str], maps: Sequence[IdMap | None], rows: Sequence[int], device: torch.device
    ) -> FeatureMaps | None:
        """The maps, or None where all are identities over all rows of their tables."""
        full = [IdMap.identity(count) for count in rows]
        known = [own if map is None else map for map, own in zip(maps, full, strict=True)]
        return None if known == full else cls(features, known, device)

    def name(self, error: IdOutOfRange, tables: Sequence[str]) -> IdOutOfRange:
        """The error with its feature and table named, if one of these maps raised it."""
        if error.table is None and error.feature < len(self.features):
            start = self.maps[error.feature].start
            if isinstance(start, RowRange) and start.rows == error.rows:
                return error.named(tables[error.feature], self.features[error.feature])
        return error


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
