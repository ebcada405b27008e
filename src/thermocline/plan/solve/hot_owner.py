"""The excess of an exchange over its mean, caused by the single owner of a hot row.

An exchange ends with its busiest rank: its mean where no row stands out, else the hottest row and the rows beside it, which
are those that block rotations cannot keep away (all but the hottest `MOST_ROWS` of a block). All tables share one exchange,
so the excess is no price of a row or table; `score` adds it to the cost of a whole solution. Considered are rows requested
from owners, rows requested once per node, and the sync of replicas between nodes. Tables pooled by owners receive every
lookup, so a hot row counts once per lookup there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from thermocline.plan.balance import MOST_ROWS
from thermocline.plan.cost.step_cost import GRADIENTS, IDS, ROWS, SYNC, Floats
from thermocline.plan.cost.step_work import Grid, Workload
from thermocline.plan.cost.unsharded_cost import share_of_bags
from thermocline.plan.model import DIRECTIONS

from .tiers import OPTIONS, OWNER_POOLED, Ints

LOOKUP = len(DIRECTIONS)  # after the directions: seconds in GPU memory
PARTS = LOOKUP + 1


class ExchangeLoad(NamedTuple):
    """Seconds of each table in the exchanges [exchange, part, T]: of its hottest row, and of its rows beside the overall
    hottest row, less the mean of all its rows. `pooled` [part, T]: of a table pooled by its owners."""

    hottest: Floats
    rest: Floats
    pooled: Floats

    def excess(self) -> Floats:
        """Seconds beyond the mean [part]."""
        shared = np.maximum(self.hottest.max(axis=-1) + self.rest.sum(axis=-1), 0.0).sum(axis=0)
        return np.asarray(np.maximum(shared, self.pooled.max(axis=-1)), np.float64)

    def excess_with(self, other: ExchangeLoad) -> Floats:
        """The same [part, T], if one table at a time had its load in `other`."""
        others_rest = self.rest.sum(axis=-1, keepdims=True) - self.rest
        shared = np.maximum(_others_max(self.hottest), other.hottest) + others_rest + other.rest
        pooled = np.maximum(_others_max(self.pooled), other.pooled)
        return np.asarray(np.maximum(np.maximum(shared, 0.0).sum(axis=0), pooled), np.float64)


def _others_max(each: Floats) -> Floats:
    """The maximum over all other tables [..., T]; 0 if there is only one."""
    if each.shape[-1] == 1:
        return np.zeros_like(each)
    two = np.partition(each, -2, axis=-1)[..., -2:]
    return np.where(each == two[..., 1:], two[..., :1], two[..., 1:])


@dataclass(frozen=True)
class HotOwnerCost:
    """For every table and end of its replicated rows [exchange, part, T, K + 1]; for tables pooled by owners [part, T]."""

    hottest: Floats
    rest: Floats
    pooled: Floats

    @classmethod
    def of(cls, workload: Workload, grid: Grid) -> HotOwnerCost:
        cluster, trains, ranks = workload.cluster, workload.gradient is not None, workload.cluster.world_size
        shape = (3, PARTS, *grid.maps.shape)
        hottest, rest = np.zeros(shape), np.zeros(shape)
        if ranks > 1:
            everyone = float((cluster.peak_seconds_L * [cluster.gpus_per_node - 1, ranks - cluster.gpus_per_node]).max())
            across = float(cluster.peak_seconds_L[1]) * (cluster.nodes - 1)
            gradient = np.broadcast_to(grid.gradient[:, None], grid.wire.shape)
            sizes = {IDS: np.full_like(grid.wire, cluster.id_bytes), ROWS: grid.wire, GRADIENTS: gradient}
            for n, (requested, seconds) in enumerate(((grid.requested.rank, everyone), (grid.requested.node, across))):
                for part, size in sizes.items():
                    each = requested * size * seconds
                    hottest[n, part, :, :-1] = each
                    rest[n, part] = _beside(each * grid.rows, grid.rows, ranks) - _suffix(each * grid.rows) / ranks
            if trains:
                copied = (grid.requested.node + grid.requested.any) * (cluster.id_bytes + gradient) * across
                hottest[2, SYNC, :, 1:] = copied[:, :1]
                rest[2, SYNC, :, 1:] = -np.cumsum(copied * grid.rows, axis=1) / ranks
        return cls(hottest, rest, _owner_pooled(workload, grid))

    def loads(self, choice: Ints, second: Ints) -> ExchangeLoad:
        """The loads of the tables of a solution."""
        tables = np.arange(len(choice))
        at = np.stack([np.isin(choice, _FLAT), np.isin(choice, _PER_NODE), choice < OWNER_POOLED])[:, None]
        hottest, rest = (np.where(at, each[:, :, tables, second], 0.0) for each in (self.hottest, self.rest))
        return ExchangeLoad(hottest, rest, np.where(choice == OWNER_POOLED, self.pooled, 0.0))


_FLAT, _PER_NODE = ([n for n, option in enumerate(OPTIONS) if option.exchange == kind] for kind in ("flat", "node"))


def _suffix(each: Floats) -> Floats:
    """Sums from each step of a curve to its end [T, K + 1]."""
    return np.concatenate([np.cumsum(each[:, ::-1], axis=1)[:, ::-1], np.zeros((len(each), 1))], axis=1)


def _beside(each: Floats, rows: Floats, ranks: int) -> Floats:
    """The load beside the hottest row on its owner, by the step from which on rows have one owner [T, K + 1]."""
    kept_off = min(MOST_ROWS, ranks - 1)  # rows of a block that avoid the loaded rank
    reach = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)
    suffix, found = _suffix(each), np.zeros(reach.shape)
    left = reach[:, -1:] - reach
    blocks = np.maximum(np.ceil(left / ranks), 1.0)
    for t in range(len(rows)):
        colder = np.interp(np.minimum(reach[t] + kept_off * blocks[t], reach[t, -1]), reach[t], suffix[t])
        found[t] = colder / (ranks - kept_off) * (blocks[t] - 1) / blocks[t]
    return found


def _owner_pooled(workload: Workload, grid: Grid) -> Floats:
    """The excess work of the owner of the hottest row, for a table pooled by its owners [part, T]."""
    cluster, ranks = workload.cluster, workload.cluster.world_size
    found = np.zeros((PARTS, len(grid.dim)))
    if ranks == 1:
        return found
    everyone = float((cluster.peak_seconds_L * [cluster.gpus_per_node - 1, ranks - cluster.gpus_per_node]).max())
    hot = grid.share[:, 0]
    taken = hot + (1 - hot) / ranks  # share of the lookups that the owner serves
    excess = grid.lookups * (taken - 1 / ranks)
    lengths = grid.lookups / np.maximum(grid.bags, 1e-9)
    sums = grid.bags * np.maximum(share_of_bags(lengths, taken) - share_of_bags(lengths, np.full_like(taken, 1 / ranks)), 0.0)
    found[IDS] = excess * cluster.id_bytes * everyone
    found[ROWS], found[GRADIENTS] = sums * grid.sum * everyone, sums * grid.gradient * everyone
    found[LOOKUP] = excess * ranks * grid.row / cluster.memory_rate
    return found
