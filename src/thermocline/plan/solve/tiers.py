"""For every table: the best split of its rows into tiers, at given prices of memory and of time that may hide.

The hottest rows are tier 1, the next tier 2, the rest tier 3, so a split is two places on the curve. What a split costs is
additive over the rows: with the sums A (exposed seconds), H (seconds that may hide behind the dense part) and M (bytes on a
card) over the first i steps in tier j kept as prefix sums, the split (i1, i2) costs

    C1[i1] + C2[i2] - C2[i1] + C3[K] - C3[i2],      C = A + mu H + lambda M

and the best of all K²/2 splits is found in one pass from the back. Where a tier ends inside the table, a map has to know the
rows before that place (a bit for every row), which is why every set of tiers is looked at apart. Nothing is decided step by
step: a plan is two thresholds a table, which is all that plan.json has to hold.

An option is a way to exchange (flat, per node), and the precision of tier 1: that of the other tiers with slots, or plain fp32,
which is smaller where nearly all of it would have slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.plan.cost.step_cost import GRADIENTS, IDS, ROWS, SYNC, Floats, held_buffers, moved, passing, touched
from thermocline.plan.cost.step_work import Grid, Job, turn_bytes
from thermocline.plan.model import Exchange

Whole = NDArray[np.int64]


class Option(NamedTuple):
    """A way to split a table: who asks, and whether tier 1 is plain fp32."""

    exchange: Exchange
    plain: bool


OPTIONS = (Option("flat", False), Option("node", False), Option("flat", True), Option("node", True))
OWNER, CARD = len(OPTIONS), len(OPTIONS) + 1  # row-wise with sums from the owners; whole on one card
CHOICES = len(OPTIONS) + 2

# Sets of tiers that a table may use.
SETS: tuple[tuple[int, ...], ...] = ((3,), (1,), (2,), (1, 3), (2, 3), (1, 2), (1, 2, 3))


@dataclass(frozen=True)
class Sums:
    """Prefix sums over the steps of what a row costs in each tier, for one option: [tier - 1, T, K + 1]."""

    exposed: Floats
    hidden: Floats
    bytes: Floats


def sums(job: Job, grid: Grid, option: Option) -> Sums:
    """Price every step in every tier."""
    machine, trains = job.machine, job.gradient is not None
    gradient, wire = grid.gradient[:, None], grid.wire
    slots = grid.full * grid.slot[:, None] + grid.near * grid.near_slot[:, None]
    parts: list[list[Floats]] = [[], [], []]
    for tier in (1, 2, 3):
        stored = np.broadcast_to(grid.row[:, None], wire.shape) + slots
        if tier == 1 and option.plain:
            stored = np.broadcast_to(4 * grid.dim[:, None], wire.shape)
        update = (2 * (grid.row + grid.state) + 4 * grid.dim)[:, None] if trains else 0.0
        sent = moved(grid.asked, machine, tier, option.exchange, wire, gradient)
        lookup, updating = touched(grid.asked, machine, tier, option.exchange, wire, gradient, update)
        seconds = np.tensordot(machine.seconds_L, sent, axes=1)
        late = seconds[ROWS] * (grid.asked.any if trains else 1.0)  # rows that the step before updates
        exposed = (lookup + updating) / machine.memory_rate + late + seconds[GRADIENTS] + seconds[SYNC]
        hidden = seconds[IDS] + seconds[ROWS] - late
        copies = {1: 1.0, 2: 1 / machine.cards, 3: 1 / machine.all}[tier]
        turn = turn_bytes(machine.all) if tier == 3 else 0
        buffers = held_buffers(sent, passing(grid.asked, machine, tier, option.exchange, wire, gradient))
        if tier == 3 and machine.host_rate:
            looked, updated = grid.over_host(machine)
            exposed = exposed + (looked + updated * trains) / machine.host_rate
            stored = stored - grid.host[:, None]
        held = (stored + grid.state[:, None] + turn) * copies + buffers
        for part, each in zip(parts, (exposed, hidden, held), strict=True):
            part.append(_prefix(each * grid.rows))
        parts[0][-1] += _prefix(grid.read / machine.memory_rate)
    return Sums(*(np.stack(part) for part in parts))


def _prefix(each_TK: Floats) -> Floats:
    return np.concatenate([np.zeros((each_TK.shape[0], 1)), np.cumsum(each_TK, axis=1)], axis=1)


class Split(NamedTuple):
    """The cheapest split of every table at some prices: what it costs, and the two places."""

    cost: Floats
    first: Whole
    second: Whole


def splits(option: Sums, grid: Grid, mu: float, lam: float) -> list[Split]:
    """The best split of every table for each of SETS."""
    one, two, three = option.exposed + mu * option.hidden + lam * option.bytes
    tables = np.arange(len(one))
    ends, zero = grid.steps, np.zeros(len(one), np.int64)
    map_cost = lam * grid.maps
    only = [Split(three[:, -1], zero, zero), Split(one[:, -1], ends, ends), Split(two[:, -1], zero, ends)]
    upper, lower = one - two + map_cost, two - three + map_cost
    both = [(one - three + map_cost, three), (lower, three), (upper, two)]
    pairs = []
    for (gain, rest), kind in zip(both, SETS[3:6], strict=True):
        at = np.argmin(gain, axis=1)
        first = zero if kind == (2, 3) else at
        second = ends if kind == (1, 2) else at
        pairs.append(Split(gain[tables, at] + rest[:, -1], np.minimum(first, ends), np.minimum(second, ends)))
    behind = np.minimum.accumulate(lower[:, ::-1], axis=1)[:, ::-1]  # the least of lower[i2] over i2 >= i1
    first = np.argmin(upper + behind, axis=1)
    least = behind[tables, first]
    later = np.where(np.arange(lower.shape[1]) >= first[:, None], lower, np.inf)
    second = np.argmin(later, axis=1)
    all_three = Split(upper[tables, first] + least + three[:, -1], np.minimum(first, ends), np.minimum(second, ends))
    return [*only, *pairs, all_three]
