"""When heat has drifted: a new plan, if it pays for moving the rows.

    proposal = thermocline.replan(sharding, horizon=50_000)      # on all ranks together, between two steps
    print(proposal)
    if proposal.pays:
        sharding.migrate(proposal.plan, proposal.heat)

The tables are planned again by what was looked up lately, in the precisions and the budget that they have. Where rows lie now
and where they would lie then are both priced by that heat (`replan_price.py`), never the old plan by the heat of its own time:
that drift made it slower is what is to be found out. A plan pays if it saves more in `horizon` steps than migration takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from thermocline.distributed.placement.row_index import Atlas
from thermocline.distributed.shard import Sharding, mapped, planned_tables
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile, add_up
from thermocline.ids.idmap import IdMap
from thermocline.plan.cost.memory import state_bytes
from thermocline.plan.cost.phases import exchange_latency
from thermocline.plan.cost.step_cost import Cluster
from thermocline.plan.model import Plan
from thermocline.plan.replan_inputs import plan_with_heat
from thermocline.plan.units import show_bytes, show_seconds

from .cost import LINKS, Moved, known, rows_moved, step_seconds, whole_step
from .migrate import BLOCK


@dataclass(frozen=True)
class Proposal:
    """A new plan for a running job, and whether to carry it out."""

    plan: Plan
    heat: HeatProfile
    horizon: int  # steps
    now: float  # seconds of a step as rows lie, by this heat
    then: float  # as they would lie
    bytes: dict[str, int]  # that all cards would send, by link class
    rows: dict[str, dict[tuple[int, int], int]]  # table -> (tier, other tier) -> rows that would change it
    seconds: float  # that migration takes

    @property
    def saves(self) -> float:
        """Seconds a step."""
        return self.now - self.then

    @property
    def pays_back_after(self) -> float:
        """Steps until migration has paid for itself."""
        return self.seconds / self.saves if self.saves > 0 else float("inf")

    @property
    def pays(self) -> bool:
        return self.saves * self.horizon > self.seconds

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        lookups = sum(table.lookups for table in self.heat.tables.values())
        yield (
            f"By the last {lookups:,} lookups that were counted, a step takes {show_seconds(self.now)} as rows lie now, and "
            f"{show_seconds(self.then)} by a new plan."
        )
        for name, changes in self.rows.items():
            words = [f"{count:,} row{'s' * (count > 1)} from tier {old} to {new}" for (old, new), count in changes.items()]
            yield f"  {name}: {', '.join(words) or 'every row stays in its tier'}"
        sent = " and ".join(f"{show_bytes(self.bytes[link])} {words}" for link, words in _WORDS.items())
        yield f"To migrate, cards send {sent}, in about {show_seconds(self.seconds)}."
        if self.saves <= 0:
            yield "Nothing would be saved: stay."
        else:
            verdict = "migrate" if self.pays else "stay"
            yield (
                f"That saves {show_seconds(self.saves)} a step, and pays back after {self.pays_back_after:,.0f} steps of "
                f"{self.horizon:,}: {verdict}."
            )


_WORDS = {"node": "inside nodes", "cluster": "between them"}


def replan(sharding: Sharding, heat: HeatProfile | None = None, horizon: int = 10_000) -> Proposal:
    """Plan the tables of a running job by what is looked up now, and say whether moving the rows pays. Moves nothing.

    `heat`: counts by raw id and feature; without it those of `sharding.heat()`. `horizon`: steps that the new plan is expected
    to serve. All ranks call this together and get the same.
    """
    if horizon < 1:
        raise BadInput(f"horizon is {horizon}; give the steps that a new plan is to serve, 1 or more")
    sharding.wait()
    counted = sharding.heat() if heat is None else heat
    _check_counted(sharding, counted)
    by_row = heat_by_row(sharding, counted)
    plan = _planned(sharding, by_row).model_copy(update={"heat": counted.sha256})
    told = dict(zip((t.name for t in plan.tables), known(plan, by_row), strict=True))
    now, then, changes = [], [], []
    world, device = sharding.world, next(iter(sharding.collections.values())).atlas.device
    planned, maps = mapped(plan, counted, sharding.collections, world, device)
    for name, collection in sharding.collections.items():
        atlas, tables = collection.atlas, planned[name]
        other = Atlas(tables, maps[name], world.nodes, world.cards, device)
        mine = [told[table.name] for table in tables]
        now.append(step_seconds(plan, planned_tables(sharding.plan, collection), atlas, mine))
        then.append(step_seconds(plan, tables, other, mine))
        state = [state_bytes(table.dim, plan.optimizer) for table in tables]
        part = rows_moved(atlas, other, world.nodes, world.cards, state, (world.rank, world.size))
        moved = Moved(*(np.sum(each, axis=0) for each in zip(*world.gather(part), strict=True)))
        changes.append(([table.name for table in tables], moved))
    bytes_L = np.sum([moved.bytes_L for _, moved in changes], axis=0)
    return Proposal(
        plan=plan,
        heat=counted,
        horizon=horizon,
        now=whole_step(plan, now),
        then=whole_step(plan, then),
        bytes={link: int(count) for link, count in zip(LINKS, bytes_L, strict=True)},
        rows={name: _changes(moved.rows_T33[t]) for names, moved in changes for t, name in enumerate(names)},
        seconds=_seconds(plan, bytes_L),
    )


def _check_counted(sharding: Sharding, heat: HeatProfile) -> None:
    for table in sharding.plan.tables:
        for feature in table.features:
            if feature not in heat.tables or not heat[feature].lookups:
                raise BadInput(
                    f"no lookup of feature {feature!r} was counted; train some steps first (one in `count_every` of them is "
                    "counted, as shard_ was told), or give a heat profile"
                )


def _changes(rows_33: Any) -> dict[tuple[int, int], int]:
    return {(old + 1, new + 1): int(rows_33[old, new]) for old, new in np.argwhere(rows_33).tolist() if old != new}


def _planned(sharding: Sharding, heat: HeatProfile) -> Plan:
    """The plan that rank 0 makes; its error, if it has one, on all ranks."""
    made: tuple[Plan | None, str] = (None, "")
    if sharding.world.rank == 0:
        try:
            made = plan_with_heat(sharding.plan, heat), ""
        except BadInput as error:
            made = None, str(error)
    plan, error_there = sharding.world.gather(made)[0]
    if plan is None:
        raise BadInput(error_there)
    found: Plan = plan
    return found


def _seconds(plan: Plan, bytes_L: Any) -> float:
    """How long rows are under way: their bytes over the links of all cards, the new part written, and the waits of blocks."""
    machine = Cluster.of(plan.topology)
    held = sum(size for table in plan.tables for part, size in table.bytes.items() if part in ("tables", "optimizer state"))
    blocks = sum(-(-table.rows // BLOCK) for table in plan.tables)
    sent = float(machine.seconds_L @ bytes_L) / machine.world_size
    return sent + 2 * held / machine.world_size / machine.memory_rate + 3 * blocks * exchange_latency(machine, "everyone")


def heat_by_row(sharding: Sharding, heat: HeatProfile) -> HeatProfile:
    """The same counts with rows for ids, by the maps that the collections have."""
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
