"""What a step costs as rows lie, whatever heat they were laid out by, and what it costs to lay them out otherwise.

A plan prices the rows that are hottest by its own heat. When heat has drifted, other rows are: the same tiers are then priced
by where the rows of the new heat lie. Formulas are the planner's (`step_cost.py`), applied to each row that was seen, in the
tier that its map says; what is left for rows not seen goes to all of them alike. Both layouts are priced so. Rows seen once
count for less than once (see `heat_input.py`), or the plan that was made from the counts would look better than it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from thermocline.distributed.exchange.routes import Counts, Routes
from thermocline.distributed.placement.row_index import Atlas, Part
from thermocline.heat.profile import HeatProfile, add_up
from thermocline.plan.cost.heat_input import row_stats_of
from thermocline.plan.cost.memory import state_bytes
from thermocline.plan.cost.phases import exchange_latency, exchange_phases, phase_latency, prefetch_latency
from thermocline.plan.cost.step_cost import (
    CLUSTER,
    GRADIENTS,
    IDS,
    NODE,
    ROWS,
    SYNC,
    TOUCHES,
    Cluster,
    EffectiveShare,
    Floats,
    bytes_sent,
    expected_owners,
    memory_traffic,
    request_probability,
)
from thermocline.plan.cost.step_work import Workload
from thermocline.plan.model import LINK_CLASSES, Plan, TablePlan
from thermocline.plan.replan_inputs import tables_of_plan

BLOCK = 1 << 18  # rows that are compared at a time


class Known(NamedTuple):
    """Heat of one table by row: rows seen and their shares of the lookups, hottest first; the share of those not seen."""

    rows_H: Counts
    share_H: Floats
    rest: float
    lookups: float  # of a card and step
    fresh: EffectiveShare


def known(plan: Plan, heat: HeatProfile) -> list[Known]:
    """What `heat`, whose ids are rows, says of the tables of a plan."""
    found = []
    cluster = plan.topology
    for table, file in zip(plan.tables, tables_of_plan(plan).tables, strict=True):
        parts = [heat[name] for name in table.features]
        none = np.zeros(0, np.int64)
        rows_H, counts_H = add_up(
            np.concatenate([none, *(p.ids_H for p in parts)]), np.concatenate([none, *(p.counts_H for p in parts)])
        )
        seen = row_stats_of(heat, file)
        once, twice = int((counts_H == 1).sum()), int((counts_H == 2).sum())
        less = once / (once + 2 * twice) if once and len(rows_H) < table.rows else 0.0
        total = max(sum(part.lookups for part in parts), 1)
        share_H = (counts_H - less) / total
        fresh = seen.effective_share(plan.batch, cluster.gpus_per_node, cluster.nodes)
        found.append(Known(rows_H, share_H, max(1 - float(share_H.sum()), 0.0), seen.per_sample * plan.batch, fresh))
    return found


class Priced(NamedTuple):
    """Seconds of a step of one collection: by part, nothing hidden; of these, what may hide, and waits that there are only
    where the next batch comes ahead."""

    parts: dict[str, float]
    hidden: float
    more: float


def step_seconds(plan: Plan, tables: Sequence[TablePlan], atlas: Atlas, heat: Sequence[Known]) -> Priced:
    """What a step of one collection costs; `heat` is of its tables, which lie as `atlas` says."""
    machine = Cluster.of(plan.topology, atlas.id_bytes)
    found = dict.fromkeys(("lookup", "rows", "gradients", "update", "ids", "sync"), 0.0)
    early = 0.0
    for k, part in enumerate(atlas.parts):
        table, told = tables[part.table], heat[part.table]
        share, rows = _rows_of(atlas, k, told)
        price = _sums_seconds if part.summed else _part_seconds
        sent, local = price(plan, machine, part, share, rows, told)
        over = machine.seconds_L @ sent * (machine.world_size if table.placement == "card" else 1)
        if table.placement != "card" and not part.summed:
            early += _early(machine, part, share, rows, told)
        for name, direction in (("ids", IDS), ("rows", ROWS), ("gradients", GRADIENTS), ("sync", SYNC)):
            found[name] += float(over[direction])
        found["lookup"] += local[0] / machine.memory_rate
        found["update"] += local[1] / machine.memory_rate
    hidden = found["ids"] + early
    uses = Routes(atlas.parts, machine.nodes, machine.gpus_per_node, atlas.id_bytes).uses
    coming = list(exchange_phases(uses, machine.nodes, machine.gpus_per_node))
    for turn in coming:
        found[turn.part] += exchange_latency(machine, turn.scope)
    return Priced(found, hidden + phase_latency(machine, coming).hidden, prefetch_latency(machine, uses))


def _rows_of(atlas: Atlas, k: int, told: Known) -> tuple[Floats, Floats]:
    """Shares of the rows of a part, and how many rows have each: those seen, and in a last step all others."""
    part = atlas.parts[k]
    map, first = atlas.maps[part.table], atlas.first[part.table]
    part_H = atlas((torch.from_numpy(told.rows_H) + first).to(atlas.device)).part_N.cpu().numpy()
    share = told.share_H[part_H == k]
    unseen = max(map.count(part.tier) - len(share), 0)
    each = told.rest / max(map.rows - len(told.rows_H), 1)
    return np.append(share, each), np.append(np.ones(len(share)), unseen)


def _part_seconds(
    plan: Plan, machine: Cluster, part: Part, share: Floats, rows: Floats, told: Known
) -> tuple[Floats, tuple[float, float]]:
    """Bytes [link, direction] that a card sends for a part in a step, and bytes of its memory in lookup and update."""
    asked = request_probability(share, told.lookups, machine, told.fresh)
    wire, gradient = np.full(len(share), float(part.row_bytes)), float(part.gradient_bytes)
    sent = (bytes_sent(asked, machine, part.tier, part.exchange, wire, gradient) * rows).sum(axis=-1)
    update = 2.0 * (part.row_bytes + state_bytes(part.dim, plan.optimizer)) + 4 * part.dim
    looked, updated = memory_traffic(asked, machine, part.tier, part.exchange, wire, gradient, update)
    read = told.lookups * float((share * rows).sum()) * part.row_bytes
    return sent, (float((looked * rows).sum()) + read, float((updated * rows).sum()))


def _sums_seconds(
    plan: Plan, machine: Cluster, part: Part, share: Floats, rows: Floats, told: Known
) -> tuple[Floats, tuple[float, float]]:
    """`_part_seconds` of a part whose owners pool it, as `plan/cost/unsharded_cost.py` has it."""
    table = plan.table(part.name)
    lookups, bags = told.lookups * float((share * rows).sum()), float(plan.batch * len(table.features))
    sums = bags * expected_owners(lookups / bags, 1 if table.placement == "card" else machine.world_size)
    asked = np.array([lookups * machine.id_bytes, sums * 4 * part.dim, sums * part.gradient_bytes, 0.0])
    sent = (
        asked * np.array([machine.gpus_per_node - 1, machine.world_size - machine.gpus_per_node])[:, None] / machine.world_size
    )
    update = 2.0 * (part.row_bytes + state_bytes(part.dim, plan.optimizer)) + 4 * part.dim
    any_row = request_probability(share, told.lookups, machine, told.fresh).any
    updated = TOUCHES * asked[GRADIENTS] + float((any_row * rows).sum()) * update / machine.world_size
    return sent, (TOUCHES * asked[ROWS] + lookups * part.row_bytes, updated)


def _early(machine: Cluster, part: Part, share: Floats, rows: Floats, told: Known) -> float:
    """Seconds of rows that the step before leaves alone."""
    asked = request_probability(share, told.lookups, machine, told.fresh)
    wire = np.full(len(share), float(part.row_bytes))
    sent = bytes_sent(asked, machine, part.tier, part.exchange, wire, float(part.gradient_bytes))[:, ROWS]
    return float(machine.seconds_L @ (sent * (1 - asked.any) * rows).sum(axis=-1))


def whole_step(plan: Plan, found: Sequence[Priced]) -> float:
    """Seconds of a step of all collections, as the planner has it; a plan does not know what lies below its lookups."""
    hidden, more = sum(one.hidden for one in found), sum(one.more for one in found)
    exposed = sum(sum(one.parts.values()) for one in found) - hidden
    return float(Workload(Cluster.of(plan.topology), (), 0, plan.dense, plan.gradients).step(exposed, hidden, more))


class Moved(NamedTuple):
    """What a migration of one collection would move: rows [table, old tier, new tier], bytes by link [node, cluster]."""

    rows_T33: Counts
    bytes_L: Counts


def rows_moved(old: Atlas, new: Atlas, nodes: int, cards: int, state: Sequence[int], turn: tuple[int, int]) -> Moved:
    """Of every `turn[1]`-th block of rows, from block `turn[0]` on. `state`: bytes of a row's state, by table."""
    rows_T33, bytes_L, number = np.zeros((len(old.maps), 4, 4), np.int64), np.zeros(2, np.int64), 0
    size_K = np.array([part.moved_bytes + state[part.table] for part in old.parts])
    for table, map in enumerate(old.maps):
        for first in range(0, map.rows, BLOCK):
            number += 1
            if (number - 1) % turn[1] != turn[0]:
                continue
            rows_N = torch.arange(first, min(first + BLOCK, map.rows), device=old.device)
            was, will = old(rows_N + old.first[table]), new(rows_N + new.first[table])
            tiers = [atlas.tier_K[where.part_N].cpu().numpy() for atlas, where in ((old, was), (new, will))]
            np.add.at(rows_T33[table], (tiers[0], tiers[1]), 1)
            homes = [where.home_N.cpu().numpy() for where in (was, will)]
            sends_L = _sends((tiers[0], tiers[1]), (homes[0], homes[1]), nodes, cards)
            sizes_N = size_K[was.part_N.cpu().numpy()]
            bytes_L += np.array([int((sends_N * sizes_N).sum()) for sends_N in sends_L])
    return Moved(rows_T33[:, 1:, 1:], bytes_L)


def _sends(tiers: tuple[Counts, Counts], homes: tuple[Counts, Counts], nodes: int, cards: int) -> tuple[Counts, Counts]:
    """How often each row is sent inside nodes and between them, by the rule of `migrate.py`. Tiers and homes: then and now."""
    (was_N, will_N), (from_N, to_N) = tiers, homes
    same_number = from_N % cards == to_N % cards
    same_node, same = from_N // cards == to_N // cards, from_N == to_N
    near = {
        (2, 1): np.full_like(from_N, nodes * (cards - 1)),
        (3, 1): np.full_like(from_N, cards - 1),
        (2, 2): nodes * ~same_number,
        (3, 2): 1 * ~same_number,
        (2, 3): 1 * ~same_number,
        (3, 3): 1 * (same_node & ~same),
    }
    far = {(3, 1): np.full_like(from_N, (nodes - 1) * cards), (3, 2): np.full_like(from_N, nodes - 1), (3, 3): 1 * ~same_node}
    found = [np.zeros_like(from_N), np.zeros_like(from_N)]
    for sends, counts in zip(found, (near, far), strict=True):
        for (old, new), count_N in counts.items():
            at = (was_N == old) & (will_N == new)
            sends[at] = count_N[at]
    return found[0], found[1]


LINKS = tuple(link for link in LINK_CLASSES if link in ("node", "cluster"))
assert (NODE, CLUSTER) == (0, 1)
