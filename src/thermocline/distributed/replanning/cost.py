"""The cost of a step for any placement of rows under any heat, and the volume of a migration.

A plan prices the hottest rows of its own heat. After drift other rows are hot, so tiers are priced by where the rows of the new
heat lie. The formulas are the planner's (`plan/cost/step_cost.py`), applied to each row with lookups in the tier of its map;
the remaining share is spread over the rows without lookups. Both placements are priced this way. A row with one lookup counts
for less than one (see `heat_input.py`); otherwise the plan made from these counts would look better than it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from thermocline.distributed.exchange.routes import Routes
from thermocline.distributed.placement.row_index import RowIndex, TablePart
from thermocline.distributed.placement.table_map import Counts
from thermocline.heat.profile import HeatProfile, add_up
from thermocline.plan.cost import step_cost as C
from thermocline.plan.cost.heat_input import row_stats_of
from thermocline.plan.cost.memory import state_bytes
from thermocline.plan.cost.phases import exchange_latency, exchange_phases, phase_latency, prefetch_latency
from thermocline.plan.cost.step_cost import Cluster, Floats, request_probability
from thermocline.plan.cost.step_work import Workload
from thermocline.plan.make import tables_of_plan
from thermocline.plan.model import LINK_CLASSES, Plan, TablePlan

BLOCK = 1 << 18  # rows compared at a time


class LookupShares(NamedTuple):
    """Heat of one table: rows with lookups and their shares, hottest first, and the share of all other rows."""

    rows_H: Counts
    share_H: Floats
    rest: float
    lookups: float  # per rank and step
    fresh: C.EffectiveShare


def table_heat(plan: Plan, heat: HeatProfile) -> list[LookupShares]:
    """The heat of the tables of a plan, from a profile whose ids are rows."""
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
        found.append(LookupShares(rows_H, share_H, max(1 - float(share_H.sum()), 0.0), seen.per_sample * plan.batch, fresh))
    return found


class CollectionCost(NamedTuple):
    """Seconds of a step of one collection: by part, nothing hidden; the part that may be hidden; extra waits of prefetching."""

    parts: dict[str, float]
    hidden: float
    extra: float


def step_seconds(plan: Plan, tables: Sequence[TablePlan], row_index: RowIndex, heat: Sequence[LookupShares]) -> CollectionCost:
    """The cost of a step of one collection, whose rows lie as `row_index` says. `heat` is that of its tables."""
    machine = Cluster.of(plan.topology, row_index.id_bytes)
    found = dict.fromkeys(("lookup", "rows", "gradients", "update", "ids", "sync"), 0.0)
    early = 0.0
    for k, part in enumerate(row_index.parts):
        table, known = tables[part.table], heat[part.table]
        share, rows = _rows_of(row_index, k, known)
        price = _sums_cost if part.owner_pooled else _rows_cost
        sent, local, part_early = price(plan, machine, part, share, rows, known)
        straight = C.at_once(part.tier, part.exchange)
        over = machine.even_seconds(sent, straight) * (machine.world_size if table.placement == "card" else 1)
        if table.placement != "card":
            early += part_early
        for name, direction in (("ids", C.IDS), ("rows", C.ROWS), ("gradients", C.GRADIENTS), ("sync", C.SYNC)):
            found[name] += float(over[direction])
        found["lookup"] += local[0] / machine.memory_rate
        found["update"] += local[1] / machine.memory_rate
    hidden = found["ids"] + early
    uses = Routes(row_index.parts, machine.nodes, machine.gpus_per_node, row_index.id_bytes).uses
    coming = list(exchange_phases(uses, machine.nodes, machine.gpus_per_node))
    for turn in coming:
        found[turn.part] += exchange_latency(machine, turn.scope)
    return CollectionCost(found, hidden + phase_latency(machine, coming).hidden, prefetch_latency(machine, uses))


def _rows_of(row_index: RowIndex, k: int, known: LookupShares) -> tuple[Floats, Floats]:
    """Shares of the rows of a part, and how many rows have each: rows with lookups, then one entry for all others."""
    part = row_index.parts[k]
    map, first = row_index.maps[part.table], row_index.first[part.table]
    part_H = row_index.locate((torch.from_numpy(known.rows_H) + first).to(row_index.device)).part_N.cpu().numpy()
    share = known.share_H[part_H == k]
    unseen = max(map.count(part.tier) - len(share), 0)
    each = known.rest / max(map.rows - len(known.rows_H), 1)
    return np.append(share, each), np.append(np.ones(len(share)), unseen)


PartCost = tuple[Floats, tuple[float, float], float]


def _rows_cost(
    plan: Plan, machine: Cluster, part: TablePart, share: Floats, rows: Floats, known: LookupShares
) -> PartCost:  # fmt: skip
    """Bytes [link, direction] that a rank sends for a part in a step, bytes of its memory in lookup and update, and seconds of
    rows that the previous step does not update."""
    asked = request_probability(share, known.lookups, machine, known.fresh)
    wire, gradient = np.full(len(share), float(part.row_bytes)), float(part.gradient_bytes)
    sent = C.bytes_sent(asked, machine, part.tier, part.exchange, wire, gradient)
    deferred = (sent[:, C.ROWS] * (1 - asked.any) * rows).sum(axis=-1)
    early = float(machine.even_seconds(deferred, C.at_once(part.tier, part.exchange)))
    update = 2.0 * (part.row_bytes + state_bytes(part.dim, plan.optimizer)) + 4 * part.dim
    looked, updated = C.memory_traffic(asked, machine, part.tier, part.exchange, wire, gradient, update)
    read = known.lookups * float((share * rows).sum()) * part.row_bytes
    return (sent * rows).sum(axis=-1), (float((looked * rows).sum()) + read, float((updated * rows).sum())), early


def _sums_cost(
    plan: Plan, machine: Cluster, part: TablePart, share: Floats, rows: Floats, known: LookupShares
) -> PartCost:  # fmt: skip
    """`_rows_cost` of an owner-pooled part, as in `plan/cost/unsharded_cost.py`."""
    table = plan.table(part.name)
    lookups, bags = known.lookups * float((share * rows).sum()), float(plan.batch * len(table.features))
    sums = bags * C.expected_owners([(lookups / bags, 1.0)], 1 if table.placement == "card" else machine.world_size)
    asked = np.array([lookups * machine.id_bytes, sums * part.sum_bytes, sums * part.gradient_bytes, 0.0])
    peers_L1 = np.array([[machine.gpus_per_node - 1], [machine.world_size - machine.gpus_per_node]])
    sent = asked * peers_L1 / machine.world_size
    update = 2.0 * (part.row_bytes + state_bytes(part.dim, plan.optimizer)) + 4 * part.dim
    any_row = request_probability(share, known.lookups, machine, known.fresh).any
    updated = C.TOUCHES * asked[C.GRADIENTS] + float((any_row * rows).sum()) * update / machine.world_size
    return sent, (C.TOUCHES * asked[C.ROWS] + lookups * part.row_bytes, updated), 0.0


def total_step(plan: Plan, found: Sequence[CollectionCost]) -> float:
    """Seconds of a step of all collections, as the planner computes them."""
    hidden, extra = sum(one.hidden for one in found), sum(one.extra for one in found)
    exposed = sum(sum(one.parts.values()) for one in found) - hidden
    return float(Workload(Cluster.of(plan.topology), (), 0, plan.dense, plan.gradients).step(exposed, hidden, extra))


class MigrationVolume(NamedTuple):
    """The volume of a migration of one collection: rows [table, old tier, new tier], bytes by link [node, cluster]."""

    rows_T33: Counts
    bytes_L: Counts


def migration_volume(
    old: RowIndex, new: RowIndex, nodes: int, local_size: int, state: Sequence[int], turn: tuple[int, int]
) -> MigrationVolume:
    """The volume of every `turn[1]`-th block of rows from block `turn[0]` on. `state`: optimizer bytes per row, by table."""
    rows_T33, bytes_L = np.zeros((len(old.maps), 4, 4), np.int64), np.zeros(2, np.int64)
    size_K = np.array([part.migrated_bytes + state[part.table] for part in old.parts])
    blocks = [(table, first) for table, map in enumerate(old.maps) for first in range(0, map.rows, BLOCK)]
    for table, first in blocks[turn[0] :: turn[1]]:
        rows_N = torch.arange(first, min(first + BLOCK, old.maps[table].rows), device=old.device)
        was, will = old.locate(rows_N + old.first[table]), new.locate(rows_N + new.first[table])
        was_N, will_N = (each.tier_K[where.part_N].cpu().numpy() for each, where in ((old, was), (new, will)))
        np.add.at(rows_T33[table], (was_N, will_N), 1)
        from_N, to_N = (where.home_N.cpu().numpy() for where in (was, will))
        bytes_L += _sends(was_N, will_N, from_N, to_N, nodes, local_size) @ size_K[was.part_N.cpu().numpy()]
    return MigrationVolume(rows_T33[:, 1:, 1:], bytes_L)


def _sends(was_N: Counts, will_N: Counts, from_N: Counts, to_N: Counts, nodes: int, local_size: int) -> Counts:
    """How often each row is sent inside nodes and across [2, rows], by the rule of `migrate.py`, given old and new tiers and
    homes."""
    other_local_rank, other_node = from_N % local_size != to_N % local_size, from_N // local_size != to_N // local_size
    inside: dict[tuple[int, int], Any] = {
        (2, 1): nodes * (local_size - 1),
        (3, 1): local_size - 1,
        (2, 2): nodes * other_local_rank,
        (3, 2): other_local_rank,
        (2, 3): other_local_rank,
        (3, 3): ~other_node & other_local_rank,
    }
    across: dict[tuple[int, int], Any] = {(3, 1): (nodes - 1) * local_size, (3, 2): nodes - 1, (3, 3): other_node}
    sends = np.zeros((2, len(from_N)), np.int64)
    for way, counts in enumerate((inside, across)):
        for (old, new), count_N in counts.items():
            sends[way] += count_N * ((was_N == old) & (will_N == new))
    return sends


LINKS = tuple(link for link in LINK_CLASSES if link in ("node", "cluster"))
assert (C.NODE, C.CLUSTER) == (0, 1)
