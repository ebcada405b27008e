"""A new plan for a running job whose heat has drifted, if it pays for moving the rows.

    proposal = thermocline.replan(sharding, horizon=50_000)      # on all ranks together, between two steps
    print(proposal)
    if proposal.pays:
        sharding.migrate(proposal.plan, proposal.heat)

The tables are planned again by recent lookups, in their precisions and budget. Both the present and the new placement are
priced by the recent heat (`cost.py`). A plan pays if it saves more in `horizon` steps than the migration takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from thermocline.distributed.placement.row_index import RowIndex
from thermocline.distributed.planned_tables import map_collections, planned_tables
from thermocline.distributed.shard import Sharding
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile, add_up
from thermocline.ids.idmap import IdMap
from thermocline.plan.cost.memory import state_bytes
from thermocline.plan.cost.phases import exchange_latency
from thermocline.plan.cost.step_cost import Cluster
from thermocline.plan.make import plan_with_heat
from thermocline.plan.model import Plan
from thermocline.plan.units import show_bytes, show_seconds

from .cost import LINKS, MigrationVolume, migration_volume, step_seconds, table_heat, total_step
from .migrate import BLOCK


@dataclass(frozen=True)
class ReplanProposal:
    """A new plan for a running job, its savings, and the cost of the migration.

    Attributes:
        plan: the new plan.
        heat: the lookups that it was made with.
        horizon: steps that the new plan will serve.
        now: seconds of a step with the present placement, by this heat.
        then: seconds of a step with the new placement.
        bytes: bytes that all ranks would send in the migration, by link class.
        rows: rows that change their tier: table -> (old tier, new tier) -> rows.
        seconds: seconds of the migration.

    Example::

        proposal = thermocline.replan(sharding, horizon=50_000)
        print(proposal)  # ends with "migrate" or "stay"
    """

    plan: Plan
    heat: HeatProfile
    horizon: int
    now: float
    then: float
    bytes: dict[str, int]
    rows: dict[str, dict[tuple[int, int], int]]
    seconds: float

    @property
    def saves(self) -> float:
        """Seconds per step."""
        return self.now - self.then

    @property
    def pays_back_after(self) -> float:
        """Steps until the migration has paid for itself."""
        return self.seconds / self.saves if self.saves > 0 else float("inf")

    @property
    def pays(self) -> bool:
        return self.saves * self.horizon > self.seconds

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        lookups = sum(table.lookups for table in self.heat.tables.values())
        yield (
            f"By the last {lookups:,} counted lookups, a step takes {show_seconds(self.now)} with the present placement and "
            f"{show_seconds(self.then)} with a new plan."
        )
        for name, changes in self.rows.items():
            words = [f"{count:,} row{'s' * (count > 1)} from tier {old} to {new}" for (old, new), count in changes.items()]
            yield f"  {name}: {', '.join(words) or 'no row changes its tier'}"
        sent = " and ".join(f"{show_bytes(self.bytes[link])} {words}" for link, words in _WORDS.items())
        yield f"The migration sends {sent}, in about {show_seconds(self.seconds)}."
        if self.saves <= 0:
            yield "The new plan saves nothing: stay."
        else:
            verdict = "migrate" if self.pays else "stay"
            yield (
                f"The new plan saves {show_seconds(self.saves)} per step and pays back after {self.pays_back_after:,.0f} steps "
                f"of {self.horizon:,}: {verdict}."
            )


_WORDS = {"node": "inside nodes", "cluster": "between nodes"}


def replan(sharding: Sharding, heat: HeatProfile | None = None, horizon: int = 10_000) -> ReplanProposal:
    """Plan the tables of a running job by recent lookups, and estimate whether a migration pays. Collective; moves nothing.

    Args:
        sharding: what `shard_` returned.
        heat: lookup counts by raw id and feature; by default `sharding.heat()`.
        horizon: steps that the new plan will serve.

    Returns:
        The same proposal on every rank.

    Raises:
        BadInput: a feature has no counted lookups, or no plan fits the budget.

    Example::

        proposal = thermocline.replan(sharding, horizon=50_000)
        if proposal.pays:
            sharding.migrate(proposal.plan, proposal.heat)
    """
    if horizon < 1:
        raise BadInput(f"horizon is {horizon}; give a number of steps, 1 or more", parameter="horizon", value=horizon)
    sharding.wait_for_exchange()
    counted = sharding.heat() if heat is None else heat
    _check_counted(sharding, counted)
    by_row = heat_by_row(sharding, counted)
    plan = _planned(sharding, by_row).model_copy(update={"heat": counted.sha256})
    heat_of = dict(zip((t.name for t in plan.tables), table_heat(plan, by_row), strict=True))
    now, then, changes = [], [], []
    groups, device = sharding.groups, next(iter(sharding.collections.values())).row_index.device
    planned, maps = map_collections(plan, counted, sharding.collections, groups, device)
    for name, collection in sharding.collections.items():
        row_index, tables = collection.row_index, planned[name]
        other = RowIndex(tables, maps[name], groups.nodes, groups.local_size, device)
        mine = [heat_of[table.name] for table in tables]
        now.append(step_seconds(plan, planned_tables(sharding.plan, collection), row_index, mine))
        then.append(step_seconds(plan, tables, other, mine))
        state = [state_bytes(table.dim, plan.optimizer) for table in tables]
        part = migration_volume(row_index, other, groups.nodes, groups.local_size, state, (groups.rank, groups.size))
        moved = MigrationVolume(*(np.sum(each, axis=0) for each in zip(*groups.all_gather(part), strict=True)))
        changes.append(([table.name for table in tables], moved))
    bytes_L = np.sum([moved.bytes_L for _, moved in changes], axis=0)
    return ReplanProposal(
        plan=plan,
        heat=counted,
        horizon=horizon,
        now=total_step(plan, now),
        then=total_step(plan, then),
        bytes={link: int(count) for link, count in zip(LINKS, bytes_L, strict=True)},
        rows={name: _changes(moved.rows_T33[t]) for names, moved in changes for t, name in enumerate(names)},
        seconds=_seconds(plan, bytes_L),
    )


def _check_counted(sharding: Sharding, heat: HeatProfile) -> None:
    for table in sharding.plan.tables:
        for feature in table.features:
            if feature not in heat.tables or not heat[feature].lookups:
                raise BadInput(
                    f"no lookup of feature {feature!r} was counted; train some steps first (shard_ counts one batch in "
                    "`count_every`), or give a heat profile",
                    parameter="heat", feature=feature,
                )  # fmt: skip


def _changes(rows_33: Any) -> dict[tuple[int, int], int]:
    return {(old + 1, new + 1): int(rows_33[old, new]) for old, new in np.argwhere(rows_33).tolist() if old != new}


def _planned(sharding: Sharding, heat: HeatProfile) -> Plan:
    """The plan that rank 0 makes; an error of rank 0 is raised on all ranks."""
    made: tuple[Plan | None, str] = (None, "")
    if sharding.groups.rank == 0:
        try:
            made = plan_with_heat(sharding.plan, heat), ""
        except BadInput as error:
            made = None, str(error)
    made = sharding.groups.all_gather(made)[0]
    if made[0] is None:
        raise BadInput(made[1])
    return made[0]


def _seconds(plan: Plan, bytes_L: Any) -> float:
    """Seconds of a migration: bytes over the links of all ranks, writing the new shards, and the latency of blocks."""
    machine = Cluster.of(plan.topology)
    held = sum(size for table in plan.tables for part, size in table.bytes.items() if part in ("tables", "optimizer state"))
    blocks = sum(-(-table.rows // BLOCK) for table in plan.tables)
    sent = float(machine.seconds_L @ bytes_L) / machine.world_size
    return sent + 2 * held / machine.world_size / machine.memory_rate + 3 * blocks * exchange_latency(machine, "everyone")


def heat_by_row(sharding: Sharding, heat: HeatProfile) -> HeatProfile:
    """The same profile with rows in place of raw ids, by the id maps of the collections."""
    ids: Mapping[str, IdMap] = {f: map for each in sharding.collections.values() for f, map in each.id_maps.items()}
    tables = {}
    for name, table in heat.tables.items():
        if name in ids:
            rows_H = ids[name](torch.from_numpy(np.ascontiguousarray(table.ids_H))).numpy()
            rows_H, counts_H = add_up(rows_H, table.counts_H)
            distinct = len(rows_H) if table.exact else min(table.distinct, ids[name].rows)
            table = replace(table, ids_H=rows_H, counts_H=counts_H, distinct=max(distinct, len(rows_H)))
        tables[name] = table
    return HeatProfile(tables, heat.source, heat.created)
