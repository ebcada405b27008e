"""The predicted cost of each table of a solution: bytes by part, traffic by link and direction, seconds by part.

The solver works with prefix sums; this module applies the same formulas to each table as decided. Tests compare both, so that
the parts of a plan add up to the total for which it was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thermocline.plan.cost import step_cost as C
from thermocline.plan.cost.memory import SLOT_MAPS
from thermocline.plan.cost.step_cost import Floats
from thermocline.plan.cost.step_work import rotation_bytes
from thermocline.plan.model import DIRECTIONS, MEMORY_PARTS
from thermocline.plan.solve.solver import Problem, Score, phases, tier_map_bytes_of
from thermocline.plan.solve.tiers import OPTIONS, OWNER_POOLED, TABLE_WISE

TABLES, STATE, CACHE, MAPS, BUFFERS = range(len(MEMORY_PARTS))
LOOKUP, UPDATE, SEND_ROWS, SEND_GRADIENTS, SEND_IDS, SEND_SYNC = range(6)  # parts of `TableCost.seconds`


@dataclass(frozen=True)
class TableCost:
    """The cost of one table."""

    bytes: Floats  # [MEMORY_PARTS] on a rank; on its own rank if table-wise
    sent: Floats  # [link, direction] bytes that a rank sends, mean over ranks
    kept: Floats  # [direction] bytes of an exchange that stay on the rank
    seconds: Floats  # [LOOKUP, UPDATE, SEND_ROWS, ...]
    rows: Floats  # [tier - 1]
    fp32: Floats  # [tier - 1] rows with an fp32 slot
    int8: Floats  # [tier - 1] rows with an int8 slot
    lookups: Floats  # [tier - 1] share of the lookups
    early: float  # seconds of rows that the step before does not update, and that may be prefetched
    host: Floats  # [direction] bytes over the host link: rows read, and rows moved for their gradients


def table_cost(problem: Problem, score: Score, table: int) -> TableCost:
    """The cost of one table of a solution."""
    choice = int(score.solution.choice[table])
    if choice in (TABLE_WISE, OWNER_POOLED):
        return _unsplit_cost(problem, table, choice)
    return _split_cost(problem, score, table, choice)


def _split_cost(problem: Problem, score: Score, table: int, choice: int) -> TableCost:
    workload, grid, cluster, option = problem.workload, problem.grid, problem.workload.cluster, OPTIONS[choice]
    steps = int(grid.steps[table])
    ends = (0, int(score.solution.first[table]), int(score.solution.second[table]), steps)
    dim, row, state, gradient = (float(each[table]) for each in (grid.dim, grid.row, grid.state, grid.gradient))
    update = 2 * (row + state) + 4 * dim if workload.gradient else 0.0
    held, sent, local = np.zeros(len(MEMORY_PARTS)), np.zeros((2, 4)), np.zeros(2)
    kept, inside = np.zeros(4), np.zeros(4)
    counts, early, over = np.zeros((4, 3)), 0.0, np.zeros(len(DIRECTIONS))
    for tier in (1, 2, 3):
        part = slice(ends[tier - 1], ends[tier])
        rows, wire = grid.rows[table, part], grid.wire[table, part]
        requested = C.RequestProbability(*(each[table, part] for each in grid.requested))
        plain = tier == 1 and option.plain
        fp32, int8 = (grid.fp32[table, part] * rows).sum(), (grid.int8[table, part] * rows).sum()
        counts[:, tier - 1] = rows.sum(), fp32, int8, (grid.share[table, part] * rows).sum()
        copies = cluster.copies(tier)
        slots = np.zeros(2) if plain else np.array([fp32, int8])
        held[TABLES] += rows.sum() * ((4 * dim if plain else row) - grid.host[table] * (tier == 3)) * copies
        held[STATE] += rows.sum() * state * copies
        held[CACHE] += slots @ np.array([grid.fp32_slot[table] - SLOT_MAPS, grid.int8_slot[table] - SLOT_MAPS]) * copies
        held[MAPS] += slots.sum() * SLOT_MAPS * copies + (tier == 3) * rows.sum() * rotation_bytes(cluster.world_size) * copies
        sends = C.bytes_sent(requested, cluster, tier, option.exchange, wire, gradient) * rows
        sent += sends.sum(axis=-1)
        seconds = cluster.even_seconds(sends, C.at_once(tier, option.exchange))
        over += seconds.sum(axis=-1)
        if workload.gradient:
            early += float((seconds[C.ROWS] * (1 - requested.any)).sum())
        kept += (C.bytes_kept(requested, cluster, tier, option.exchange, wire, gradient) * rows).sum(axis=-1)
        inside += (C.bytes_local(requested, cluster, tier, option.exchange, wire, gradient) * rows).sum(axis=-1)
        looked_up, updated = C.memory_traffic(requested, cluster, tier, option.exchange, wire, gradient, update)
        local += (looked_up * rows).sum() + grid.read[table, part].sum(), (updated * rows).sum()
    solution = score.solution
    held[MAPS] += float(tier_map_bytes_of(problem, solution.choice, solution.first, solution.second)[table])
    held[BUFFERS] = float(C.buffer_bytes(sent, inside))
    local /= cluster.memory_rate
    host = np.zeros(4)
    if grid.host[table]:
        reads, writes = (float((each[table] * grid.rows[table]).sum()) for each in grid.over_host(cluster, option.exchange))
        host[[C.ROWS, C.GRADIENTS]] = reads, writes * (workload.gradient is not None)
        local += host[[C.ROWS, C.GRADIENTS]] / cluster.host_rate
    rows_by_tier, fp32_by_tier, int8_by_tier, lookups = counts
    parts = _seconds(problem, table, over, local)
    return TableCost(held, sent, kept, parts, rows_by_tier, fp32_by_tier, int8_by_tier, lookups, early, host)


def _unsplit_cost(problem: Problem, table: int, choice: int) -> TableCost:
    """A table-wise table, or a row-wise table pooled by its owners."""
    grid, ranks = problem.grid, problem.workload.cluster.world_size
    cost, copies = (problem.table_wise, 1.0) if choice == TABLE_WISE else (problem.owner_pooled, 1 / ranks)
    rows = grid.rows[table]
    fp32, int8 = float((grid.fp32[table] * rows).sum()), float((grid.int8[table] * rows).sum())
    held = np.zeros(len(MEMORY_PARTS))
    held[TABLES], held[STATE] = rows.sum() * grid.row[table], rows.sum() * grid.state[table]
    held[CACHE] = fp32 * (grid.fp32_slot[table] - SLOT_MAPS) + int8 * (grid.int8_slot[table] - SLOT_MAPS)
    held[MAPS] = (fp32 + int8) * SLOT_MAPS + (choice == OWNER_POOLED) * rows.sum() * rotation_bytes(ranks)
    held *= copies
    held[BUFFERS] = cost.bytes[table] - held.sum()
    sent = cost.sent[:, :, table]
    cluster = problem.workload.cluster
    alone = np.array([1.0, *[0.0] * (cluster.gpus_per_node - 1)])  # a table-wise table keeps its owner busy
    over = (
        cluster.uneven_seconds(cost.served[:, :, table, None] * alone) if choice == TABLE_WISE else cluster.even_seconds(sent)
    )
    seconds = _seconds(problem, table, over, cost.local[:, table])
    counts = np.zeros((4, 3))
    counts[:, 2] = rows.sum(), fp32, int8, 1.0
    kept = sent.sum(axis=0) / max(ranks - 1, 1)
    return TableCost(held, sent, kept, seconds, counts[0], counts[1], counts[2], counts[3], 0.0, np.zeros(4))


def _seconds(problem: Problem, table: int, over: Floats, local: Floats) -> Floats:
    """The parts of a table, from seconds of its exchanges [direction] and in GPU memory [lookup and update]."""
    found = np.zeros(6)
    found[[LOOKUP, UPDATE]] = local + problem.fixed[:, table]
    found[[SEND_ROWS, SEND_GRADIENTS, SEND_IDS, SEND_SYNC]] = over[[C.ROWS, C.GRADIENTS, C.IDS, C.SYNC]]
    return found


def messages(problem: Problem, score: Score) -> Floats:
    """[link, direction] messages that a rank sends in a step: one to every other member of each exchange."""
    cluster, found = problem.workload.cluster, np.zeros((2, 4))
    others = {
        "everyone": (cluster.gpus_per_node - 1, cluster.world_size - cluster.gpus_per_node),
        "node": (cluster.gpus_per_node - 1, 0),
        "across": (0, cluster.nodes - 1),
    }
    for phase in phases(problem, score):
        found[[C.NODE, C.CLUSTER], DIRECTIONS.index(phase.part)] += others[phase.scope]
    return found
