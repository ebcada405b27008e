"""The best split of every table into tiers, at given prices of memory and of hidden time.

A split is two positions on the heat curve. Its cost is additive over rows: with prefix sums over the curve of the cost C =
exposed + mu hidden + lambda bytes of the first i steps in each tier, the split (i1, i2) costs

    C1[i1] + C2[i2] - C2[i1] + C3[K] - C3[i2]

and the best of all splits takes one pass from the back. Where a tier ends inside the table, a bitmap of its rows is needed,
so every set of tiers is solved apart. An option is a way to exchange, and whether tier 1 is plain fp32, which is smaller
where nearly all rows would have slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.plan.cost import step_cost as C
from thermocline.plan.cost.step_cost import Floats
from thermocline.plan.cost.step_work import Grid, Workload, rotation_bytes
from thermocline.plan.model import Exchange

Ints = NDArray[np.int64]


class Option(NamedTuple):
    """A way to split a table: the exchange, and whether tier 1 is plain fp32."""

    exchange: Exchange
    plain: bool


OPTIONS = (Option("flat", False), Option("node", False), Option("flat", True), Option("node", True))
OWNER_POOLED, TABLE_WISE = len(OPTIONS), len(OPTIONS) + 1  # row-wise with sums from the owners; on one rank
CHOICES = len(OPTIONS) + 2

# The sets of tiers that a table may use.
TIER_SETS: tuple[tuple[int, ...], ...] = ((3,), (1,), (2,), (1, 3), (2, 3), (1, 2), (1, 2, 3))


@dataclass(frozen=True)
class PrefixCosts:
    """Prefix sums over the curve of the costs of a row in each tier, for one option: [tier - 1, T, K + 1]."""

    exposed: Floats
    hidden: Floats
    bytes: Floats

    def of_splits(self, tables: Ints | int, first: Ints, second: Ints) -> tuple[Floats, Floats, Floats]:
        """Exposed seconds, hidden seconds and bytes of splits of these tables."""
        exposed, hidden, held = (
            p[0, tables, first] + p[1, tables, second] - p[1, tables, first] + p[2, tables, -1] - p[2, tables, second]
            for p in (self.exposed, self.hidden, self.bytes)
        )
        return exposed, hidden, held


def prefix_costs(workload: Workload, grid: Grid, option: Option) -> PrefixCosts:
    """The costs of every curve step in every tier."""
    cluster, trains = workload.cluster, workload.gradient is not None
    gradient, wire = grid.gradient[:, None], grid.wire
    parts: list[list[Floats]] = [[], [], []]
    for tier in (1, 2, 3):
        stored = np.broadcast_to(grid.row[:, None], wire.shape) + grid.slots
        if tier == 1 and option.plain:
            stored = np.broadcast_to(4 * grid.dim[:, None], wire.shape)
        update = (2 * (grid.row + grid.state) + 4 * grid.dim)[:, None] if trains else 0.0
        sent = C.bytes_sent(grid.requested, cluster, tier, option.exchange, wire, gradient)
        lookup, updating = C.memory_traffic(grid.requested, cluster, tier, option.exchange, wire, gradient, update)
        seconds = cluster.even_seconds(sent, C.at_once(tier, option.exchange))
        late = seconds[C.ROWS] * (grid.requested.any if trains else 1.0)  # rows that the step before updates
        exposed = (lookup + updating) / cluster.memory_rate + late + seconds[C.GRADIENTS] + seconds[C.SYNC]
        hidden = seconds[C.IDS] + seconds[C.ROWS] - late
        rotation = rotation_bytes(cluster.world_size) if tier == 3 else 0
        buffers = C.buffer_bytes(sent, C.bytes_local(grid.requested, cluster, tier, option.exchange, wire, gradient))
        if tier == 3 and cluster.host_rate:
            looked_up, updated = grid.over_host(cluster, option.exchange)
            exposed = exposed + (looked_up + updated * trains) / cluster.host_rate
            stored = stored - grid.host[:, None]
        held = (stored + grid.state[:, None] + rotation) * cluster.copies(tier) + buffers
        for part, each in zip(parts, (exposed, hidden, held), strict=True):
            part.append(_prefix(each * grid.rows))
        parts[0][-1] += _prefix(grid.read / cluster.memory_rate)
    return PrefixCosts(*(np.stack(part) for part in parts))


def _prefix(each_TK: Floats) -> Floats:
    return np.concatenate([np.zeros((each_TK.shape[0], 1)), np.cumsum(each_TK, axis=1)], axis=1)


class TierSplit(NamedTuple):
    """The cheapest split of every table: its cost, and the steps where tiers 1 and 2 end."""

    cost: Floats
    first: Ints
    second: Ints


def best_splits(option: PrefixCosts, grid: Grid, mu: float, lam: float) -> list[TierSplit]:
    """The best split of every table for each of TIER_SETS, at the prices `mu` (hidden time) and `lam` (memory)."""
    one, two, three = option.exposed + mu * option.hidden + lam * option.bytes
    tables = np.arange(len(one))
    ends, zero = grid.steps, np.zeros(len(one), np.int64)
    map_cost = lam * grid.maps
    single = [TierSplit(three[:, -1], zero, zero), TierSplit(one[:, -1], ends, ends), TierSplit(two[:, -1], zero, ends)]
    upper, lower = one - two + map_cost, two - three + map_cost
    both = [(one - three + map_cost, three), (lower, three), (upper, two)]
    pairs = []
    for (gain, rest), tiers in zip(both, TIER_SETS[3:6], strict=True):
        at = np.argmin(gain, axis=1)
        first = zero if tiers == (2, 3) else at
        second = ends if tiers == (1, 2) else at
        pairs.append(TierSplit(gain[tables, at] + rest[:, -1], np.minimum(first, ends), np.minimum(second, ends)))
    behind = np.minimum.accumulate(lower[:, ::-1], axis=1)[:, ::-1]  # the least of lower[i2] over i2 >= i1
    first = np.argmin(upper + behind, axis=1)
    least = behind[tables, first]
    later = np.where(np.arange(lower.shape[1]) >= first[:, None], lower, np.inf)
    second = np.argmin(later, axis=1)
    all_three = TierSplit(upper[tables, first] + least + three[:, -1], np.minimum(first, ends), np.minimum(second, ends))
    return [*single, *pairs, all_three]
