"""Heat profiles of modules: counts that warm a cache, and the profile of a cache that has trained.

To warm a cache, id maps turn the raw ids of a profile into rows; counts of ids that share a row are added. A sketched profile
has counts of its heavy hitters only, so the remaining lookups are spread evenly over all rows.

A cache knows recent counts of the rows in its slots (`kernels/cache/reference.py`), and its totals of hits and lookups give the
share of all other rows. Rows with nonzero optimizer state were updated at least once. Samples, repeats and drift are unknown;
for those, profile the log or its batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from thermocline.errors import BadInput, IdOutOfRange
from thermocline.heat.cardinality import REGISTERS, registers_of
from thermocline.heat.profile import HeatProfile, TableHeat, hottest_first
from thermocline.ids.idmap import IdMap
from thermocline.rows.arena import Arena
from thermocline.rows.cache import RecentCounts

Heat: TypeAlias = HeatProfile | TableHeat | Path | str
_BLOCK = 1 << 20


def read_heat(heat: Heat) -> HeatProfile | TableHeat:
    """A heat profile, loaded if it is a path."""
    if isinstance(heat, (str, Path)):
        return HeatProfile.load(heat)
    if not isinstance(heat, (HeatProfile, TableHeat)):
        message = f"heat is a {type(heat).__name__}; use a tensor of counts, one a row, a heat profile, or its file"
        raise BadInput(message, parameter="heat", value=type(heat).__name__)
    return heat


def counts_of_one(heat: HeatProfile | TableHeat, map: IdMap, rows: int) -> Tensor:
    """Counts of the rows of a module with one table."""
    if isinstance(heat, HeatProfile):
        if len(heat.tables) != 1:
            message = f"the heat profile has the tables {', '.join(heat.tables)}; choose one, as in profile[name]"
            raise BadInput(message, parameter="heat", available=tuple(heat.tables))
        (heat,) = heat.tables.values()
    return _counts([heat], [map], rows)


def counts_of_table(heat: HeatProfile, table: str, rows: int, maps: Mapping[str, IdMap]) -> Tensor:
    """Counts of the rows of a table, from the heat of its features (`maps` by feature) or, with one map, of its own name."""
    if known := [feature for feature in maps if feature in heat.tables]:
        return _counts([heat[feature] for feature in known], [maps[feature] for feature in known], rows)
    (map, *others) = dict.fromkeys(maps.values())
    if table not in heat.tables or others:
        message = f"the heat profile has {', '.join(heat.tables)}, but no feature of table {table!r}: {', '.join(maps)}"
        raise BadInput(message, parameter="heat", table=table, needed=tuple(maps), available=tuple(heat.tables))
    return _counts([heat[table]], [map], rows)


def _counts(heats: Sequence[TableHeat], maps: Sequence[IdMap], rows: int) -> Tensor:
    exact = all(heat.exact for heat in heats)
    total_R = torch.zeros(rows, dtype=torch.int64 if exact else torch.float64)
    for heat, map in zip(heats, maps, strict=True):
        try:
            rows_H = map(torch.from_numpy(heat.ids_H))
        except IdOutOfRange as error:
            message = (
                f"heat of {heat.name!r} has the id {error.id}, the table {error.rows} rows; use the module's input, or an IdMap"
            )
            raise BadInput(message, parameter="heat", table=heat.name, value=error.id, available=error.rows) from None
        total_R.index_add_(0, rows_H, torch.from_numpy(heat.counts_H).to(total_R.dtype))
        if not heat.exact:
            total_R += (heat.lookups - int(heat.counts_H.sum())) / rows
    return total_R


def heat_of(arena: Arena, states: Sequence[Tensor]) -> HeatProfile:
    """The heat profile of an arena, from its cache and the optimizer's state."""
    tables = [
        _table(spec.name or f"table{index}", counted, arena.touched(index, states))
        for index, (spec, counted) in enumerate(zip(arena.tables, arena.recent_counts(), strict=True))
    ]
    return HeatProfile({table.name: table for table in tables}, "live training")


def _table(name: str, counted: RecentCounts, touched_R: Tensor) -> TableHeat:
    ids_H, counts_H = hottest_first(counted.rows_K.cpu().numpy(), counted.counts_K.cpu().numpy())
    registers = np.zeros(REGISTERS, np.uint8)
    for first, part_R in enumerate(touched_R.split(_BLOCK)):
        rows_N = part_R.nonzero()[:, 0].cpu().numpy() + first * _BLOCK
        np.maximum(registers, registers_of(rows_N), out=registers)
    lookups, distinct = int(counts_H.sum()) + counted.missed, max(int(touched_R.sum()), len(ids_H))
    none = np.zeros(0, np.int64)
    return TableHeat(
        name=name, samples=0, lookups=lookups, distinct=distinct, exact=False, ids_H=ids_H, counts_H=counts_H,
        lengths_L=none, bags_L=none, slack=counted.missed, registers=registers,
    )  # fmt: skip
