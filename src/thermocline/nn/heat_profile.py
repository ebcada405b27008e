"""Between heat profiles and modules: a profile warms a cache, and a cache that has trained for a while tells its heat.

**Into a module.** A profile holds raw ids; the module's id maps make rows of them, and ids that share a row add up. Of a
sketched table the rows of its heavy hitters get their counts, and all rows the same share of the rest, so that sums stay right.

**Out of a module.** What a cache knows is the recent counts of the rows in its slots: sampled in large batches, halved from
time to time (`kernels/cache/reference.py`). Hits and lookups of all time say what part of the lookups those rows take; the rest
is the tail. Which rows were ever updated, the optimizer's state shows, if it has any: only they have one that is not zero. Not
known are counts of rows outside the cache, samples, repeats and drift: for those, profile the log, or batches as they come.
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
    """Heat that may be the path of a heat file."""
    if isinstance(heat, (str, Path)):
        return HeatProfile.load(heat)
    if not isinstance(heat, (HeatProfile, TableHeat)):
        raise BadInput(f"heat is a {type(heat).__name__}; give a tensor of counts, one a row, a heat profile, or its file")
    return heat


def counts_of_one(heat: HeatProfile | TableHeat, map: IdMap, rows: int) -> Tensor:
    """Counts of the rows of a module with one table."""
    if isinstance(heat, HeatProfile):
        if len(heat.tables) != 1:
            raise BadInput(
                f"the heat profile has the tables {', '.join(heat.tables)}; give the one that is meant: profile[name]"
            )
        (heat,) = heat.tables.values()
    return _counts([heat], [map], rows)


def counts_of_table(heat: HeatProfile, table: str, rows: int, maps: Mapping[str, IdMap]) -> Tensor:
    """Counts of the rows of a table, from the heat of its features, or else from that under its own name.

    `maps`: by feature. A table that several features look up by different maps needs the heat of the features.
    """
    if known := [feature for feature in maps if feature in heat.tables]:
        return _counts([heat[feature] for feature in known], [maps[feature] for feature in known], rows)
    (map, *others) = dict.fromkeys(maps.values())
    if table not in heat.tables or others:
        names = ", ".join(maps)
        raise BadInput(
            f"the heat profile has none of {names}, which table {table!r} is looked up by; it has {', '.join(heat.tables)}"
        )
    return _counts([heat[table]], [map], rows)


def _counts(heats: Sequence[TableHeat], maps: Sequence[IdMap], rows: int) -> Tensor:
    exact = all(heat.exact for heat in heats)
    total_R = torch.zeros(rows, dtype=torch.int64 if exact else torch.float64)
    for heat, map in zip(heats, maps, strict=True):
        try:
            rows_H = map(torch.from_numpy(heat.ids_H))
        except IdOutOfRange as error:
            raise BadInput(
                f"heat of {heat.name!r} has the id {error.id}, but ids are rows of a table of {error.rows} rows; "
                "profile what the module is given, or give the module an IdMap"
            ) from None
        total_R.index_add_(0, rows_H, torch.from_numpy(heat.counts_H).to(total_R.dtype))
        if not heat.exact:
            total_R += (heat.lookups - int(heat.counts_H.sum())) / rows
    return total_R


# -- live training --


def heat_of(arena: Arena, states: Sequence[Tensor]) -> HeatProfile:
    """What the cache of an arena and the optimizer's state know of the heat of its rows."""
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
    none = np.zeros(0, np.int64)
    return TableHeat(
        name=name,
        samples=0,
        lookups=int(counts_H.sum()) + counted.missed,
        distinct=max(int(touched_R.sum()), len(ids_H)),
        exact=False,
        ids_H=ids_H,
        counts_H=counts_H,
        lengths_L=none,
        bags_L=none,
        slack=counted.missed,
        registers=registers,
    )
