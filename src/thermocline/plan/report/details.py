"""A solution told table by table and card by card: bytes by part, traffic by link and direction, seconds by part.

The solver adds up prefix sums; here the same formulas are applied to each table as it was decided. Tests hold the two against
each other, so that what a plan says of its parts adds up to what it was chosen for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thermocline.plan.cost.memory import SLOT_MAPS
from thermocline.plan.cost.step_cost import (
    CLUSTER,
    GRADIENTS,
    IDS,
    NODE,
    ROWS,
    SYNC,
    Askers,
    Floats,
    held_buffers,
    moved,
    passing,
    stays,
    touched,
)
from thermocline.plan.cost.step_work import turn_bytes
from thermocline.plan.model import DIRECTIONS, MEMORY_PARTS
from thermocline.plan.solve.solver import Problem, Score, maps, phases
from thermocline.plan.solve.tiers import CARD, OPTIONS, OWNER

TABLES, STATE, CACHE, MAPS, BUFFERS = range(len(MEMORY_PARTS))
LOOKUP, UPDATE, FORTH, BACK, ASK, EQUAL = range(6)  # seconds: in card memory twice, then rows, gradients, ids, sync


@dataclass(frozen=True)
class Detail:
    """One table: bytes by part on a card (on its own card where it lies on one), [link, direction] bytes that a card sends as a
    mean, [direction] bytes that an exchange leaves on the card, seconds by part, rows and slots of its tiers."""

    bytes: Floats
    sent: Floats
    kept: Floats
    seconds: Floats
    rows: Floats  # [tier - 1]
    full: Floats
    near: Floats
    lookups: Floats
    early: float  # seconds of rows that the step before leaves alone: they may come while it computes
    host: Floats  # [direction] bytes over the link to host memory: rows that are read, and moved for their gradients


def detail(problem: Problem, score: Score, table: int) -> Detail:
    """How one table was decided."""
    choice = int(score.solution.choice[table])
    if choice == CARD:
        return _whole(problem, table, CARD)
    if choice == OWNER:
        return _whole(problem, table, OWNER)
    return _split(problem, score, table, choice)


def _split(problem: Problem, score: Score, table: int, choice: int) -> Detail:
    job, grid, machine, option = problem.job, problem.grid, problem.job.machine, OPTIONS[choice]
    steps = int(grid.steps[table])
    ends = (0, int(score.solution.first[table]), int(score.solution.second[table]), steps)
    dim, row, state, gradient = (float(each[table]) for each in (grid.dim, grid.row, grid.state, grid.gradient))
    update = 2 * (row + state) + 4 * dim if job.gradient else 0.0
    held, sent, local = np.zeros(len(MEMORY_PARTS)), np.zeros((2, 4)), np.zeros(2)
    kept, inside = np.zeros(4), np.zeros(4)
    counts, early = np.zeros((4, 3)), 0.0
    for tier in (1, 2, 3):
        part = slice(ends[tier - 1], ends[tier])
        rows, wire = grid.rows[table, part], grid.wire[table, part]
        asked = Askers(*(each[table, part] for each in grid.asked))
        plain = tier == 1 and option.plain
        full, near = (grid.full[table, part] * rows).sum(), (grid.near[table, part] * rows).sum()
        counts[:, tier - 1] = rows.sum(), full, near, (grid.share[table, part] * rows).sum()
        copies = {1: 1.0, 2: 1 / machine.cards, 3: 1 / machine.all}[tier]
        slots = np.zeros(2) if plain else np.array([full, near])
        held[TABLES] += rows.sum() * ((4 * dim if plain else row) - grid.host[table] * (tier == 3)) * copies
        held[STATE] += rows.sum() * state * copies
        held[CACHE] += slots @ np.array([grid.slot[table] - SLOT_MAPS, grid.near_slot[table] - SLOT_MAPS]) * copies
        held[MAPS] += slots.sum() * SLOT_MAPS * copies + (tier == 3) * rows.sum() * turn_bytes(machine.all) * copies
        sends = moved(asked, machine, tier, option.exchange, wire, gradient) * rows
        sent += sends.sum(axis=-1)
        if job.gradient:
            early += float(machine.seconds_L @ (sends[:, ROWS] * (1 - asked.any)).sum(axis=-1))
        kept += (stays(asked, machine, tier, option.exchange, wire, gradient) * rows).sum(axis=-1)
        inside += (passing(asked, machine, tier, option.exchange, wire, gradient) * rows).sum(axis=-1)
        looked, updated = touched(asked, machine, tier, option.exchange, wire, gradient, update)
        local += (looked * rows).sum() + grid.read[table, part].sum(), (updated * rows).sum()
    solution = score.solution
    held[MAPS] += float(maps(problem, solution.choice, solution.first, solution.second)[table])
    held[BUFFERS] = float(held_buffers(sent, inside))
    local /= machine.memory_rate
    host = np.zeros(4)
    if grid.host[table]:
        reads, writes = (float((each[table] * grid.rows[table]).sum()) for each in grid.over_host(machine))
        host[[ROWS, GRADIENTS]] = reads, writes * (job.gradient is not None)
        local += host[[ROWS, GRADIENTS]] / machine.host_rate
    seconds = _seconds(problem, table, sent, local)
    return Detail(held, sent, kept, seconds, counts[0], counts[1], counts[2], counts[3], early, host)


def _whole(problem: Problem, table: int, choice: int) -> Detail:
    """A table on one card, or row-wise with sums from the owners."""
    grid, machine = problem.grid, problem.job.machine
    cost, copies = (problem.card, 1.0) if choice == CARD else (problem.owner, 1 / machine.all)
    rows = grid.rows[table]
    full, near = float((grid.full[table] * rows).sum()), float((grid.near[table] * rows).sum())
    held = np.zeros(len(MEMORY_PARTS))
    held[TABLES], held[STATE] = rows.sum() * grid.row[table], rows.sum() * grid.state[table]
    held[CACHE] = full * (grid.slot[table] - SLOT_MAPS) + near * (grid.near_slot[table] - SLOT_MAPS)
    held[MAPS] = (full + near) * SLOT_MAPS + (choice == OWNER) * rows.sum() * turn_bytes(machine.all)
    held *= copies
    held[BUFFERS] = cost.bytes[table] - held.sum()
    sent = cost.sent[:, :, table]
    seconds = _seconds(problem, table, sent * (machine.all if choice == CARD else 1), cost.local[:, table])
    each = np.zeros((4, 3))
    each[:, 2] = rows.sum(), full, near, 1.0
    kept = sent.sum(axis=0) / max(machine.all - 1, 1)
    return Detail(held, sent, kept, seconds, each[0], each[1], each[2], each[3], 0.0, np.zeros(4))


def _seconds(problem: Problem, table: int, sent: Floats, local: Floats) -> Floats:
    over = problem.job.machine.seconds_L @ sent
    found = np.zeros(6)
    found[[LOOKUP, UPDATE]] = local + problem.always[:, table]
    found[[FORTH, BACK, ASK, EQUAL]] = over[[ROWS, GRADIENTS, IDS, SYNC]]
    return found


def messages(problem: Problem, score: Score) -> Floats:
    """[link, direction] messages that a card sends in a step: one to every other member of each exchange."""
    machine, found = problem.job.machine, np.zeros((2, 4))
    others = {
        "everyone": (machine.cards - 1, machine.all - machine.cards),
        "node": (machine.cards - 1, 0),
        "across": (0, machine.nodes - 1),
    }
    for turn in phases(problem, score):
        found[[NODE, CLUSTER], DIRECTIONS.index(turn.part)] += others[turn.reach]
    return found
