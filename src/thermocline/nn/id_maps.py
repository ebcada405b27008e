"""What a module does with id maps beside calling them: which it needs at all, how they are written and compared.

A map that changes nothing (identity over all rows of its table) is not evaluated: ids that are out of range are found by the
lookup itself. Where no feature has another map there is nothing to launch, to move or to save.

`state_dict` has the maps under `ids`, JSON as text (uint8) by feature, as in the manifest of `IdMap.to_json`: kept ids by their
sha256. Rows that were trained behind another map would be rows of other ids, so such a state is refused.
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
    """A map must end within its table."""
    if not isinstance(map, IdMap):
        raise BadInput(f"ids of feature {feature!r} is a {type(map).__name__}; give a thermocline.IdMap, as IdMap.hashed(1000)")
    if map.rows > rows:
        raise BadInput(
            f"feature {feature!r} is mapped to {map.rows} rows ({map}), but table {table!r} has {rows}; "
            f"give the table {map.rows} rows, or the map fewer"
        )


class FeatureMaps:
    """The id maps of a module's features, by name."""

    def __init__(self, features: Sequence[str], maps: Sequence[IdMap], device: torch.device) -> None:
        self.features, self.maps = tuple(features), tuple(maps)
        self.mapped = IdMaps(maps, device)

    @classmethod
    def needed(
        cls, features: Sequence[str], maps: Sequence[IdMap | None], rows: Sequence[int], device: torch.device
    ) -> FeatureMaps | None:
        """None where all maps are identities over all rows of their tables."""
        full = [IdMap.identity(count) for count in rows]
        known = [own if map is None else map for map, own in zip(maps, full, strict=True)]
        return None if known == full else cls(features, known, device)

    def __call__(self, ids_N: Tensor, offsets: Tensor) -> Tensor:
        return self.mapped(ids_N, offsets)

    def name(self, error: IdOutOfRange, tables: Sequence[str]) -> IdOutOfRange:
        """The error with its feature named, and the feature's table (of `tables`), if a map of ours found it."""
        if error.table is None and error.feature < len(self.features):
            start = self.maps[error.feature].start
            if isinstance(start, RowRange) and start.rows == error.rows:
                return error.named(tables[error.feature], self.features[error.feature])
        return error


def text_of(maps: FeatureMaps | None) -> Tensor | None:
    """The maps as a state_dict has them."""
    if maps is None:
        return None
    written = {name: map.to_json() for name, map in zip(maps.features, maps.maps, strict=True)}
    return torch.tensor(list(json.dumps(written, sort_keys=True).encode()), dtype=torch.uint8, device="cpu")


def misfit(maps: FeatureMaps | None, saved: Tensor | None) -> str:
    """Why rows that were saved with these maps cannot be taken, or nothing. Rows without maps are the state_dict's business."""
    here = text_of(maps)
    if saved is None or (here is not None and torch.equal(saved.cpu(), here)):
        return ""
    theirs, ours = (_read(text) for text in (saved, here))
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            there, own = (maps.get(name, "the ids as they are") for maps in (theirs, ours))
            return f"feature {name!r} was saved with the id map {there}, this module has {own}; build it with the saved map"
    return ""


def _read(text: Tensor | None) -> Mapping[str, object]:
    if text is None:
        return {}
    try:
        return dict(json.loads(bytes(text.cpu().tolist())))
    except ValueError:
        return {"": "of an unreadable text"}
