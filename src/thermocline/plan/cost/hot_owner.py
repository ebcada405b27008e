"""How much longer exchanges take than their mean, because a row has one owner whom everyone asks.

Owners of rows are chosen so that all have the same work (`balance.py`), and an exchange takes as long as its mean while no
single row is more than a card's share of it. With W cards the owner of the hottest row hears W times of it, and a card's share
is the distinct rows of one batch: from some thousand cards on the former is more. An exchange ends when its busiest card does:

    mean                                  of what cards send each other; where nothing stands out
    hottest row + what comes beside it    on its owner

Beside it comes what turning blocks of rows cannot keep away: of each block the hottest `MOST_ROWS` are kept off a card that has
enough, the others come to every card alike. What several tables ask for goes in one exchange, and their hottest rows lie on
different cards: one maximum of all tables, one mean. So this is no price of a row, nor of a table: `score` adds it to what a
whole solution costs. Three exchanges are looked at, with the hottest row of each: that of rows asked of their owners, that of
rows asked for once a node, and the sync of copies between nodes (whose homes go by their order). Inside a node there are too
few cards for any of this to matter. Sums that owners make of bags are asked for with every lookup, so there a hot row counts
as often as it is looked up, and other tables are taken to be even.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from thermocline.plan.balance import MOST_ROWS
from thermocline.plan.model import DIRECTIONS
from thermocline.plan.solve.tiers import OPTIONS, OWNER, Whole

from .step_cost import GRADIENTS, IDS, ROWS, SYNC, Floats
from .step_work import Grid, Job
from .unsharded_cost import share_of_bags

LOOKUP = len(DIRECTIONS)  # beside the directions: seconds in card memory
PARTS = LOOKUP + 1


class Standing(NamedTuple):
    """What each table has in the exchanges [exchange, part, T], seconds: its hottest row, and of its other rows what comes
    beside the hottest one of all, less the mean of all its rows. `alone` [part, T]: a table whose owners make sums."""

    hottest: Floats
    rest: Floats
    alone: Floats

    def more(self) -> Floats:
        """Seconds beyond the mean [part]."""
        shared = np.maximum(self.hottest.max(axis=-1) + self.rest.sum(axis=-1), 0.0).sum(axis=0)
        return np.asarray(np.maximum(shared, self.alone.max(axis=-1)), np.float64)

    def instead(self, other: Standing) -> Floats:
        """The same [part, T], if one table at a time stood as in `other`."""
        shared = np.maximum(_others_most(self.hottest), other.hottest) + _others_sum(self.rest) + other.rest
        alone = np.maximum(_others_most(self.alone), other.alone)
        return np.asarray(np.maximum(np.maximum(shared, 0.0).sum(axis=0), alone), np.float64)


def _others_most(each: Floats) -> Floats:
    """The maximum over all others [..., T]; 0 where there are none."""
    if each.shape[-1] == 1:
        return np.zeros_like(each)
    two = np.partition(each, -2, axis=-1)[..., -2:]
    return np.where(each == two[..., 1:], two[..., :1], two[..., 1:])


def _others_sum(each: Floats) -> Floats:
    return np.asarray(each.sum(axis=-1, keepdims=True) - each, np.float64)


@dataclass(frozen=True)
class Owners:
    """Of every table and place where its copies end [exchange, part, T, K + 1]; of sums by owners [part, T]."""

    hottest: Floats
    rest: Floats
    summed: Floats

    @classmethod
    def of(cls, job: Job, grid: Grid) -> Owners:
        machine, trains = job.machine, job.gradient is not None
        shape = (3, PARTS, *grid.maps.shape)
        hottest, rest = np.zeros(shape), np.zeros(shape)
        if machine.all > 1:
            everyone = float(machine.seconds_L @ [machine.cards - 1, machine.all - machine.cards])
            across = float(machine.seconds_L[1]) * (machine.nodes - 1)
            gradient = np.broadcast_to(grid.gradient[:, None], grid.wire.shape)
            sizes = {IDS: np.full_like(grid.wire, machine.id_bytes), ROWS: grid.wire, GRADIENTS: gradient}
            for n, (asked, seconds) in enumerate(((grid.asked.card, everyone), (grid.asked.node, across))):
                for part, size in sizes.items():
                    each = asked * size * seconds
                    hottest[n, part, :, :-1] = each
                    rest[n, part] = _beside(each * grid.rows, grid.rows, machine.all) - _behind(each * grid.rows) / machine.all
            if trains:
                copied = (grid.asked.node + grid.asked.any) * (machine.id_bytes + gradient) * across
                hottest[2, SYNC, :, 1:] = copied[:, :1]
                rest[2, SYNC, :, 1:] = -np.cumsum(copied * grid.rows, axis=1) / machine.all
        return cls(hottest, rest, _summed(job, grid))

    def standing(self, choice: Whole, second: Whole) -> Standing:
        """How the tables of a solution stand."""
        tables = np.arange(len(choice))
        at = np.stack([np.isin(choice, _FLAT), np.isin(choice, _PER_NODE), choice < OWNER])[:, None]
        hottest, rest = (np.where(at, each[:, :, tables, second], 0.0) for each in (self.hottest, self.rest))
        return Standing(hottest, rest, np.where(choice == OWNER, self.summed, 0.0))


_FLAT, _PER_NODE = ([n for n, option in enumerate(OPTIONS) if option.exchange == way] for way in ("flat", "node"))


def _behind(each: Floats) -> Floats:
    """What there is from each place of a curve on [T, K + 1]."""
    return np.concatenate([np.cumsum(each[:, ::-1], axis=1)[:, ::-1], np.zeros((len(each), 1))], axis=1)


def _beside(each: Floats, rows: Floats, cards: int) -> Floats:
    """What comes to the owner of the hottest row with it, by the place from which on rows have one owner [T, K + 1]."""
    kept = min(MOST_ROWS, cards - 1)  # rows of a block that are kept off
    reach = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)
    behind, found = _behind(each), np.zeros(reach.shape)
    left = reach[:, -1:] - reach
    blocks = np.maximum(np.ceil(left / cards), 1.0)
    for t in range(len(rows)):
        colder = np.interp(np.minimum(reach[t] + kept * blocks[t], reach[t, -1]), reach[t], behind[t])
        found[t] = colder / (cards - kept) * (blocks[t] - 1) / blocks[t]
    return found


def _summed(job: Job, grid: Grid) -> Floats:
    """What the owner of the hottest row does more than others for a table whose owners make sums [part, T]."""
    machine, cards = job.machine, job.machine.all
    found = np.zeros((PARTS, len(grid.dim)))
    if cards == 1:
        return found
    everyone = float(machine.seconds_L @ [machine.cards - 1, machine.all - machine.cards])
    hot = grid.share[:, 0]
    taken = hot + (1 - hot) / cards  # of the lookups, by its owner
    more = grid.lookups * (taken - 1 / cards)
    lengths = grid.lookups / np.maximum(grid.bags, 1e-9)
    sums = grid.bags * np.maximum(share_of_bags(lengths, taken) - share_of_bags(lengths, np.full_like(taken, 1 / cards)), 0.0)
    found[IDS] = more * machine.id_bytes * everyone
    found[ROWS], found[GRADIENTS] = sums * 4 * grid.dim * everyone, sums * grid.gradient * everyone
    found[LOOKUP] = more * cards * grid.row / machine.memory_rate
    return found
