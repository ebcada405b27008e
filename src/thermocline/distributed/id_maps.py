"""The id maps of a planned table: a plan has their numbers, the heat file has the ids that they keep.

Every rank makes the same maps, since the order of a heat file is part of its format: hottest first, ties by id.
"""

from __future__ import annotations

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.plan.cost.heat_input import hottest_ids
from thermocline.plan.model import Lever, TablePlan


def id_maps(table: TablePlan, heat: HeatProfile | None = None) -> dict[str, IdMap]:
    """How the ids of each feature become rows of the table. `heat`: what the plan was made from, needed where ids are kept."""
    cuts = {lever.features: lever for lever in table.levers if lever.kind != "unify"}  # of several the last
    parts = [(lever.features, lever.rows, lever.offset) for lever in table.levers if lever.kind == "unify"]
    maps: dict[str, IdMap] = {}
    for features, rows, offset in parts or [(table.features, table.rows, 0)]:
        map = _map(cuts[features], heat) if features in cuts else IdMap.identity(rows)
        assert map.rows == rows
        maps |= {feature: map.offset(offset) for feature in features}
    return maps


def _map(lever: Lever, heat: HeatProfile | None) -> IdMap:
    if not lever.kept:
        return IdMap.hashed(lever.shared, lever.salt)
    if heat is None:
        raise BadInput(f"{lever.kept:,} ids of {', '.join(lever.features)} have rows of their own; give the plan's heat file")
    ids_H, _ = hottest_ids(heat, lever.features)
    if len(ids_H) < lever.kept:
        raise BadInput(
            f"the plan keeps {lever.kept:,} ids of {', '.join(lever.features)}, the heat file has {len(ids_H):,}; "
            "give the heat file that the plan was made from"
        )
    return IdMap.pruned(ids_H[: lever.kept], lever.shared, lever.salt)
