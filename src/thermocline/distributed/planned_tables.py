"""From a plan to collections: the plan of every table, its id maps, and its row maps.

Every rank makes the same maps, since the order of a heat file is part of its format: hottest first, ties by id.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.nn.collection import Table
from thermocline.plan.cost.heat_input import hottest_ids
from thermocline.plan.model import Lever, Plan, TablePlan, Tier

from .placement.table_map import TableMap, make_maps
from .process_groups import ProcessGroups, check_same
from .shard_source import ShardSource, residency
from .sharded_collection import ShardedCollection

Collection = ShardSource | ShardedCollection


def id_maps(table: TablePlan, heat: HeatProfile | None = None) -> dict[str, IdMap]:
    """The map from raw ids to rows of a planned table, by feature.

    Args:
        table: the plan of the table.
        heat: the heat profile of the plan; needed if the plan keeps ids.

    Returns:
        The map of each feature.

    Raises:
        BadInput: the heat profile is missing, or has fewer ids than the plan keeps.

    Example::

        table = plan.table("user")
        tc.Table(table.name, table.rows, table.dim, table.features, ids=id_maps(table, heat))
    """
    cuts = {lever.features: lever for lever in table.levers if lever.kind != "unify"}  # the last one wins
    parts = [(lever.features, lever.rows, lever.offset) for lever in table.levers if lever.kind == "unify"]
    maps: dict[str, IdMap] = {}
    for features, rows, offset in parts or [(table.features, table.rows, 0)]:
        map = _id_map(cuts[features], heat) if features in cuts else IdMap.identity(rows)
        assert map.rows == rows
        maps |= {feature: map.offset(offset) for feature in features}
    return maps


def _id_map(lever: Lever, heat: HeatProfile | None) -> IdMap:
    if not lever.kept:
        return IdMap.hashed(lever.shared, lever.salt)
    names = ", ".join(lever.features)
    if heat is None:
        raise BadInput(f"the plan keeps {lever.kept:,} ids of {names}; give the heat file of the plan", parameter="heat")
    ids_H, _ = hottest_ids(heat, lever.features)
    if len(ids_H) < lever.kept:
        raise BadInput(
            f"the plan keeps {lever.kept:,} ids of {names}, the heat file has {len(ids_H):,}; give the heat file of the plan",
            parameter="heat", needed=lever.kept, available=len(ids_H),
        )  # fmt: skip
    return IdMap.pruned(ids_H[: lever.kept], lever.shared, lever.salt)


def planned_tables(plan: Plan, collection: Collection) -> list[TablePlan]:
    """The plans of the tables of a collection."""
    found = [_planned_table(plan, table, collection.mode) for table in collection.tables]
    residency(found, collection.model_rows, collection.name)
    return found


def _planned_table(plan: Plan, table: Table, mode: str) -> TablePlan:
    names = [each.name for each in plan.tables]
    if table.name not in names:
        raise BadInput(
            f"table {table.name!r} is not in the plan, which has {', '.join(names)}; plan for the tables of the model",
            table=table.name,
        )
    planned = plan.table(table.name)
    if (planned.rows, planned.dim) != (table.rows, table.dim):
        raise BadInput(
            f"table {table.name!r} is {table.rows} x {table.dim} in the model and {planned.rows} x {planned.dim} in the plan; "
            "build it as planned, or plan again",
            table=table.name, needed=(planned.rows, planned.dim), available=(table.rows, table.dim),
        )  # fmt: skip
    check_table(planned)
    if planned.pooled_by == "owner" and mode not in ("sum", "mean"):
        raise BadInput(
            f"table {table.name!r} is planned to be pooled by owners, by sum or mean, but the collection has "
            f"mode={mode!r}; plan again with pooling: {mode}",
            parameter="mode", value=mode, table=table.name,
        )  # fmt: skip
    return planned


def check_table(planned: TablePlan) -> None:
    """Raise if sharded tables cannot carry out the plan of a table."""
    if planned.pooled_by == "owner" and planned.exchange == "node":
        raise BadInput(
            f"table {planned.name!r} is planned to be pooled by owners and requested once per node, but sums go straight to "
            "the requester; plan again, or set its exchange to flat",
            parameter="exchange", table=planned.name,
        )  # fmt: skip


def check_heat(plan: Plan, heat: HeatProfile | None) -> None:
    """Raise if the heat is not that of the plan."""
    if heat is not None and plan.heat and not heat.is_named_by(plan.heat):
        raise BadInput(
            f"the plan was made with heat {plan.heat[:12]}, but this is {heat.sha256[:12]}; give the heat file of the plan",
            parameter="heat", needed=plan.heat, available=heat.sha256,
        )  # fmt: skip


def map_collections(
    plan: Plan, heat: HeatProfile | None, found: Mapping[str, Collection], groups: ProcessGroups, device: torch.device
) -> tuple[dict[str, list[TablePlan]], dict[str, list[TableMap]]]:
    """The table plans and row maps of every collection."""
    tables = {name: planned_tables(plan, each) for name, each in found.items()}
    shape, live = (groups.nodes, groups.local_size), {name: each.live_maps for name, each in found.items()}
    maps = {name: make_maps(tables[name], heat, live[name], *shape, device) for name in found}
    if groups.size == 1:
        tables = {name: [_merge_tiers(table) for table in each] for name, each in tables.items()}
        maps = {name: make_maps(tables[name], heat, live[name], 1, 1, device) for name in found}
    return tables, maps


def check_maps(groups: ProcessGroups, tables: Mapping[str, list[TablePlan]], maps: Mapping[str, list[TableMap]]) -> None:
    """Raise on every rank if ranks made different row maps. Collective."""
    each = [(table.name, map.digest()) for name in tables for table, map in zip(tables[name], maps[name], strict=True)]
    digests = {f"the map of {name!r}": digest for name, digest in each}
    check_same(groups.all_gather(digests), "maps of rows, made from plan and heat")


def _merge_tiers(planned: TablePlan) -> TablePlan:
    """The plan of a table on one rank: one tier, if all tiers have one precision."""
    precisions = {tier.precision for tier in planned.tiers} or {planned.precision}
    if len(precisions) > 1:
        return planned
    slots = {kind: sum(getattr(tier, kind) for tier in planned.tiers) for kind in ("cached", "near")}
    merged = Tier(tier=3, rows=planned.rows, threshold=0.0, lookups=1.0, precision=precisions.pop(), **slots)
    return planned.model_copy(update={"placement": "card", "rank": 0, "tiers": (merged,), "precision": merged.precision})
