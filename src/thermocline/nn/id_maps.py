"""The id maps of a module, and how they are saved and compared (`elastic_maps.py`: those whose ids come and go).

A map that changes nothing (identity over all rows of its table) is not evaluated, because the lookup checks the ids itself. A
`state_dict` holds the other maps under `ids`, as JSON text in uint8. Loading refuses a state with other maps: its rows would
belong to other ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thermocline.errors import IdOutOfRange
from thermocline.ids.feature_maps import IdMaps
from thermocline.ids.idmap import IdMap, RowRange

if TYPE_CHECKING:
    from thermocline.rows.memory import MemoryUsage

    from .rows_module import RowsModule


Factors = tuple[Tensor | None, Tensor | None]


class FeatureMaps(IdMaps):
    """The id maps of a module's features, by name."""

    def __init__(self, features: Sequence[str], maps: Sequence[IdMap], device: torch.device) -> None:
        super().__init__(maps, device)
        self.features, self.maps = tuple(features), tuple(maps)

    def tensors(self) -> dict[str, Tensor]:
        """What a `state_dict` holds beside the text of the maps."""
        return {}

    def count_bytes(self, memory: MemoryUsage, module: RowsModule) -> None:
        """Add the maps to the memory of their module, and leave out rows that it has not grown to."""
        memory.parts["maps"] += self.bytes

    def totals(self) -> dict[str, int]:
        """Counts for `stats`."""
        return {}

    def holds(self, table: int, first: int) -> bool:
        """Whether ids come and go in the part of a table that begins at a row."""
        return False

    def replaced(self) -> None:
        """Record that all ids are replaced."""

    def start(self, module: RowsModule) -> None:
        """Set the rows that ids share to their first values."""

    def check_zeros(self, table: int, rows_N: Tensor | None, values_ND: Tensor) -> None:
        """Raise if a row of a table that ids read as zeros is among those that are set, all by default, to other values."""

    def wait_for_backward(self) -> None:
        """Keep all rows until no read of the module waits for its backward."""

    def check_device(self, device: torch.device) -> None:
        """Raise unless the maps work on a device."""

    def rows_now(self, ids_N: Tensor, offsets: Tensor) -> Tensor:
        """Rows of the ids of all features, before anything comes or goes."""
        return self(ids_N, offsets)

    def admit(self, module: RowsModule, ids_N: Tensor, offsets: Tensor) -> Tensor:
        """Rows of the ids of all features. In train(), new ids get rows and cold ones lose theirs, once in each forward."""
        return self(ids_N, offsets)

    def factors(self, rows_N: Tensor, offsets: Tensor, weights_N: Tensor | None, mode: str) -> Factors:
        """Weights of the lookups of a batch that trains, and factors of unpooled rows: 0 for ids that read zeros."""
        return weights_N, None

    def name(self, error: IdOutOfRange, tables: Sequence[str]) -> IdOutOfRange:
        """The error with its feature and table named, if one of these maps raised it."""
        if error.table is None and error.feature < len(self.features):
            start = self.maps[error.feature].start
            if isinstance(start, RowRange) and start.rows == error.rows:
                return error.named(tables[error.feature], self.features[error.feature])
        return error
