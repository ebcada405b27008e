"""Chooses a split for every table so that the step is shortest and every rank has room.

With a price lambda of memory and a weight mu of hidden time, tables are independent and each is solved exactly
(`tiers.best_splits`). Bisection finds both prices in turn: at the right lambda memory is full, at the right mu hidden time
equals the dense time. Every solution on the way is scored exactly, with table-wise tables packed onto ranks and latencies
added, and the best that fits is kept: an inexact price costs a little time and never feasibility.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.plan.cost.phases import ExchangePhase, RowKinds, exchange_phases, phase_latency, prefetch_latency
from thermocline.plan.cost.step_cost import GRADIENTS, IDS, ROWS, Floats
from thermocline.plan.cost.step_work import Grid, Workload
from thermocline.plan.cost.unsharded_cost import UnsplitCosts, fixed_seconds, owner_pooled_costs, table_wise_costs
from thermocline.plan.model import DIRECTIONS

from .hot_owner import HotOwnerCost
from .tiers import CHOICES, OPTIONS, OWNER_POOLED, TABLE_WISE, TIER_SETS, Ints, PrefixCosts, best_splits, prefix_costs

FLOOR = 1e-3  # share of the step that the whole budget must save at least: memory is never quite free
ROUNDS = 3  # of the search for both prices
FIRST_STEPS, LATER_STEPS = 20, 8  # of bisection for one price

Mask = NDArray[np.bool_]

_PER_NODE = [n for n, option in enumerate(OPTIONS) if option.exchange == "node"]
_PLAIN = [n for n, option in enumerate(OPTIONS) if option.plain]


@dataclass(frozen=True)
class Problem:
    """A workload with all costs that do not depend on the prices."""

    workload: Workload
    grid: Grid
    options: tuple[PrefixCosts, ...]
    fixed: Floats
    owner_pooled: UnsplitCosts
    table_wise: UnsplitCosts
    hot_owner: HotOwnerCost

    @classmethod
    def of(cls, workload: Workload) -> Problem:
        grid = Grid.of(workload)
        options = tuple(prefix_costs(workload, grid, option) for option in OPTIONS)
        unsplit = owner_pooled_costs(workload, grid), table_wise_costs(workload, grid)
        return cls(workload, grid, options, fixed_seconds(workload, grid), *unsplit, HotOwnerCost.of(workload, grid))

    @cached_property
    def latency_U(self) -> Floats:
        """Seconds of latency [exposed, hidden, prefetch only] for every set of row kinds, a bit of the index for each kind."""
        cluster, trains, found = self.workload.cluster, self.workload.gradient is not None, []
        for number in range(1 << len(RowKinds._fields)):
            kinds = RowKinds(*(bool(number >> bit & 1) for bit in range(len(RowKinds._fields))))
            latency = phase_latency(cluster, exchange_phases(kinds, cluster.nodes, cluster.gpus_per_node, trains))
            found.append((*latency, prefetch_latency(cluster, kinds, trains)))
        return np.array(list(zip(*found, strict=True)), np.float64)

    @cached_property
    def slots(self) -> Mask:
        """Which tables have cache slots [T]."""
        return np.array([work.precision.fp32 > 0 or work.precision.int8 > 0 for work in self.workload.tables])

    def allowed(self) -> Mask:
        """Which choices and sets of tiers [T, choice, set] make sense."""
        cluster, works = self.workload.cluster, self.workload.tables
        allowed = np.ones((len(works), CHOICES), bool)
        slots = np.array([work.precision.fp32 > 0 for work in works])
        for n, option in enumerate(OPTIONS):
            if option.exchange == "node" and (cluster.nodes == 1 or cluster.gpus_per_node == 1):
                allowed[:, n] = False
            if option.plain:
                allowed[:, n] &= slots
        allowed[:, OWNER_POOLED] &= self.owner_pooled.pooled & (cluster.world_size > 1)
        allowed[:, TABLE_WISE] &= cluster.world_size > 1
        middle = cluster.nodes > 1 and cluster.gpus_per_node > 1  # else tier 2 is tier 3 or tier 1
        on_host = [work.host for work in works]  # codes in host memory: row-wise, flat or per node
        allowed[on_host, 2:] = False
        sets: Mask = np.array([middle or 2 not in tiers for tiers in TIER_SETS])
        found = np.asarray(allowed[:, :, None] & sets, bool)
        found[on_host, :, 1:] = False
        return found


@dataclass(frozen=True)
class Solution:
    """[T]: the choice, the curve steps where tiers 1 and 2 end, and the rank of table-wise tables (-1 for others)."""

    choice: Ints
    first: Ints
    second: Ints
    rank: Ints


@dataclass(frozen=True)
class Score:
    """The cost of a solution: seconds, and bytes on every rank."""

    time: float
    exposed: float  # of a step with prefetch
    hidden: float  # of a step with prefetch
    bytes_R: Floats
    solution: Solution
    spare_R: Floats

    @property
    def fullest(self) -> int:
        """The rank with least room left."""
        return int(np.argmax(self.bytes_R - self.spare_R))

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest rank, less what it may hold beyond the budget, without floating-point noise."""
        return round(float((self.bytes_R - self.spare_R).max()), 3)


def choice_costs(problem: Problem, allowed: Mask, mu: float, lam: float) -> tuple[Floats, Ints, Ints]:
    """The cost of every choice and set of tiers [T, choice, set] at these prices, and the two positions of each split."""
    ranks = problem.workload.cluster.world_size
    shape = (len(problem.workload.tables), CHOICES, len(TIER_SETS))
    costs, first, second = np.full(shape, np.inf), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for n, option in enumerate(problem.options):
        if allowed[:, n, 1:].any():
            for s, split in enumerate(best_splits(option, problem.grid, mu, lam)):
                costs[:, n, s], first[:, n, s], second[:, n, s] = split
        else:  # row-wise only: no positions to search
            costs[:, n, 0] = (option.exposed[2] + mu * option.hidden[2] + lam * option.bytes[2])[:, -1]
    for n, cost, share in ((OWNER_POOLED, problem.owner_pooled, 1), (TABLE_WISE, problem.table_wise, ranks)):
        costs[:, n, 0] = cost.mean + (mu * cost.hidden + lam * cost.bytes) / share + lam * cost.requested
    costs[~allowed] = np.inf
    return costs, first, second


def cheapest(problem: Problem, allowed: Mask, mu: float, lam: float) -> Score:
    """The cheapest choice of every table at these prices, with its exact score."""
    costs, first, second = choice_costs(problem, allowed, mu, lam)
    flat = costs.reshape(len(costs), -1).argmin(axis=1)
    choice, kind = np.divmod(flat, len(TIER_SETS))
    tables = np.arange(len(costs))
    return score(problem, choice, first[tables, choice, kind], second[tables, choice, kind])


def split_sums(problem: Problem, choice: Ints, first: Ints, second: Ints) -> tuple[Floats, Floats, Floats]:
    """Exposed seconds, hidden seconds and bytes per rank [T] of split tables; zero for table-wise tables."""
    found = np.zeros((3, len(choice)))
    for n, option in enumerate(problem.options):
        at = np.flatnonzero(choice == n)
        if len(at):
            found[:, at] = option.of_splits(at, first[at], second[at])
    at = np.flatnonzero(choice == OWNER_POOLED)
    for part, cost in zip(found, problem.owner_pooled[:3], strict=True):
        part[at] = cost[at]
    found[2] += tier_map_bytes_of(problem, choice, first, second)
    return found[0], found[1], found[2]


def tier_map_bytes_of(problem: Problem, choice: Ints, first: Ints, second: Ints) -> Floats:
    """Bytes [T] of the maps between tiers: one for each tier that ends inside a table."""
    tables = np.arange(len(choice))
    return np.where(choice < OWNER_POOLED, split_map_bytes(problem.grid, tables, first, second), 0.0)


def split_map_bytes(grid: Grid, table: int | Ints, first: Ints, second: Ints) -> Floats:
    """The same for several splits of one table, or one split of each of several tables."""
    steps = grid.steps[table]
    one = np.where((first > 0) & (first < steps), grid.maps[table, first], 0.0)
    two = np.where((second > first) & (second < steps), grid.maps[table, second], 0.0)
    return np.asarray(one + two, np.float64)


def score(problem: Problem, choice: Ints, first: Ints, second: Ints, owners: Ints | None = None) -> Score:
    """The exact cost of a choice for every table, with table-wise tables on their `owners`, or packed onto ranks."""
    exposed_T, hidden_T, bytes_T = split_sums(problem, choice, first, second)
    at = np.flatnonzero(choice == TABLE_WISE)
    taken = float(bytes_T.sum() + problem.grid.id_maps.sum() + problem.table_wise.requested[at].sum())
    packed = pack(problem, at, taken) if owners is None else pack_on(problem, at, owners[at])
    rank = np.full(len(choice), -1)
    rank[at] = packed.rank
    kinds = np.logical_or.reduce(row_kind_masks(problem, choice, first, second), axis=1, keepdims=True)
    exposed_wait, hidden_wait, prefetch_wait = latency(problem, kinds)[:, 0]
    excess_ids, excess = split_off_ids(problem.hot_owner.loads(choice, second).excess())
    memory_R = (problem.fixed.sum() + packed.local_R.sum(axis=0)) / problem.workload.cluster.speed_R
    exposed = float(memory_R.max() + exposed_T.sum() + packed.exposed + exposed_wait + excess)
    hidden = float(hidden_T.sum() + packed.hidden + hidden_wait + excess_ids)
    time = float(problem.workload.step(exposed, hidden, float(prefetch_wait)))
    solution = Solution(choice, first, second, rank)
    return Score(time, exposed, hidden, taken + packed.bytes_R, solution, problem.workload.spare_R)


def split_off_ids(excess: Floats) -> tuple[Floats, Floats]:
    """The excess of the busiest rank [part, ...] as ids, which may be hidden, and all other parts (hot rows are late rows)."""
    return excess[IDS], excess.sum(axis=0) - excess[IDS]


class Packed(NamedTuple):
    """Table-wise tables on ranks: the rank of each, bytes of every rank, and the work of the busiest ranks."""

    rank: Ints
    bytes_R: Floats
    local_R: Floats  # [lookup and update, rank] seconds in GPU memory
    seconds: Floats  # [direction] in exchanges

    @property
    def exposed(self) -> float:
        """Seconds in exchanges that nothing hides."""
        return float(self.seconds[ROWS] + self.seconds[GRADIENTS])

    @property
    def hidden(self) -> float:
        return float(self.seconds[IDS])


def pack(problem: Problem, at: Ints, taken: float) -> Packed:
    """A rank for each of the tables `at`: longest first, each to the least loaded rank with room."""
    cost, cluster = problem.table_wise, problem.workload.cluster
    ranks, gpus = cluster.world_size, cluster.gpus_per_node
    load_R, node_R, bytes_R = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)  # `node_R`: of its node, the mean of its ranks
    placed = np.zeros(len(at), np.int64)
    room_R = problem.workload.budget + problem.workload.spare_R - taken
    slower_R = 1 / cluster.speed_R
    by_load, by_bytes = cost.exposed[at], cost.bytes[at]
    weight = by_load / max(by_load.sum(), 1e-30) + by_bytes / max(by_bytes.sum(), 1.0)
    for n in np.argsort(-weight, kind="stable"):
        table = at[n]
        fits = bytes_R + cost.bytes[table] <= room_R
        busy_R = (np.maximum(load_R, node_R) + 1e-3 * load_R + 1e-6 * cost.exposed[table]) * slower_R
        to = int(np.argmin(np.where(fits, busy_R, np.inf)) if fits.any() else np.argmax(room_R - bytes_R))
        placed[n] = to
        load_R[to] += cost.exposed[table]
        node_R[to // gpus * gpus : to // gpus * gpus + gpus] += cost.mean[table] * cluster.nodes
        bytes_R[to] += cost.bytes[table]
    return pack_on(problem, at, placed)


def pack_on(problem: Problem, at: Ints, placed: Ints) -> Packed:
    """The tables `at` on these ranks."""
    cost, ranks = problem.table_wise, problem.workload.cluster.world_size
    served_LDR, local_R = np.zeros((2, len(DIRECTIONS), ranks)), np.zeros((2, ranks))
    np.add.at(served_LDR.transpose(2, 0, 1), placed, cost.served[:, :, at].transpose(2, 0, 1))
    np.add.at(local_R.T, placed, cost.local[:, at].T)
    bytes_R = np.zeros(ranks)
    np.add.at(bytes_R, placed, cost.bytes[at])
    return Packed(placed, bytes_R, local_R, problem.workload.cluster.uneven_seconds(served_LDR))


def row_kind_masks(problem: Problem, choice: Ints, first: Ints, second: Ints) -> Mask:
    """The row kinds of each table [kind, T], in the order of `RowKinds`."""
    split, steps = choice < OWNER_POOLED, problem.grid.steps
    per_node, plain, table_wise = np.isin(choice, _PER_NODE), np.isin(choice, _PLAIN), choice == TABLE_WISE
    requests = split & (second < steps)
    has: dict[str, Mask] = {
        "flat": (requests & ~per_node) | (table_wise & ~problem.table_wise.pooled),
        "relayed": requests & per_node,
        "second": split & (second > first),
        "first": split & (first > 0),
        "summed": (choice == OWNER_POOLED) | (table_wise & problem.table_wise.pooled),
        "slots": problem.slots & ~(plain & (first == steps)),
    }
    return np.stack([has[kind] for kind in RowKinds._fields])


def row_kinds_of(problem: Problem, found: Solution) -> RowKinds:
    """The row kinds of all tables of a solution together."""
    return RowKinds(*(bool(has.any()) for has in row_kind_masks(problem, found.choice, found.first, found.second)))


def same_exchanges(problem: Problem, found: Solution) -> Mask:
    """Choices [T, choice, set] that need no exchange beyond those of a solution, so that the latency does not grow."""
    has, allowed = row_kinds_of(problem, found), problem.allowed()
    for s, tiers in enumerate(TIER_SETS):
        allowed[:, :OWNER_POOLED, s] &= (has.first or 1 not in tiers) and (has.second or 2 not in tiers)
        for n in range(len(OPTIONS)):
            allowed[:, n, s] &= 3 not in tiers or (has.relayed if n in _PER_NODE else has.flat)
    allowed[:, OWNER_POOLED] &= has.summed
    allowed[:, TABLE_WISE] &= np.where(problem.table_wise.pooled, has.summed, has.flat)[:, None]
    return allowed


def latency(problem: Problem, kinds: Mask) -> Floats:
    """Seconds of latency [exposed, hidden, prefetch only; N] of N sets of row kinds [kind, N]."""
    return problem.latency_U[:, (1 << np.arange(len(kinds))) @ kinds]


def phases(problem: Problem, score: Score) -> list[ExchangePhase]:
    """The exchanges of a step or request."""
    workload, cluster = problem.workload, problem.workload.cluster
    kinds, trains = row_kinds_of(problem, score.solution), workload.gradient is not None
    return list(exchange_phases(kinds, cluster.nodes, cluster.gpus_per_node, trains, prefetches(workload, score)))


def prefetches(workload: Workload, score: Score) -> bool:
    """Whether the step prefetches the next batch: not where that makes it longer."""
    return workload.overlaps and bool(workload.overlapped(score.exposed, score.hidden) <= score.time)


@dataclass
class Search:
    """The search for both prices; keeps the best solution that fits, and its prices."""

    problem: Problem
    allowed: Mask
    found: Score | None = None
    mu: float = 1.0
    lam: float = 0.0
    memory_bound: bool = False

    def evaluate(self, mu: float, lam: float) -> Score:
        score = cheapest(self.problem, self.allowed, mu, lam)
        if score.peak_bytes <= self.problem.workload.budget and (self.found is None or self._better(score)):
            self.found, self.mu, self.lam = score, mu, lam
        return score

    def _better(self, score: Score) -> bool:
        """Shorter by more than the floor price of its memory."""
        assert self.found is not None
        worth = FLOOR * self.found.time / self.problem.workload.budget
        return score.time + worth * score.peak_bytes < self.found.time + worth * self.found.peak_bytes

    def run(self) -> Score | None:
        workload = self.problem.workload
        hides = workload.overlaps and workload.dense > 0
        mu, lam = (0.5 if hides else 1.0), 0.0
        width = 1.0
        for round in range(ROUNDS):
            steps = FIRST_STEPS if round == 0 else LATER_STEPS
            lam = self.price_of_memory(mu, lam, steps)
            if hides:
                mu = self.weight_of_hidden(lam, mu, width, steps // 2)
                width /= 4
            elif round:
                break
        return self.found

    def price_of_memory(self, mu: float, lam: float, steps: int) -> float:
        """The least price at which every rank has room, to within the last bisection step."""
        budget = self.problem.workload.budget
        scale = self.evaluate(mu, 0.0).time / budget
        self.memory_bound = self.evaluate(mu, FLOOR * scale).peak_bytes > budget
        if not self.memory_bound:
            return FLOOR * scale
        low, high = (lam / 2, lam * 2) if lam > FLOOR * scale else (FLOOR * scale, scale * 1e3)
        return _bisect(lambda price: self.evaluate(mu, price).peak_bytes <= budget, low, high, steps)

    def weight_of_hidden(self, lam: float, mu: float, width: float, steps: int) -> float:
        """The least weight at which the dense part hides all hidden time; 1 if it never does, 0 if it always does."""
        dense = self.problem.workload.dense
        if self.evaluate(0.0, lam).hidden <= dense:
            return 0.0
        if self.evaluate(1.0, lam).hidden >= dense:
            return 1.0
        low, high = max(mu - width, 0.0), min(mu + width, 1.0)
        for _ in range(steps):
            middle = (low + high) / 2
            low, high = (low, middle) if self.evaluate(middle, lam).hidden <= dense else (middle, high)
        return high


def _bisect(holds: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """The least price between two at which a condition holds, by bisection of the logarithm."""
    for _ in range(steps):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
