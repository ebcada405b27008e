"""Choose a split for every table so that the step is shortest and every card has room.

The step takes A + max(0, H - dense): what is exposed, and what does not hide (of ids, and of rows that the step before leaves
alone). With a price lambda of memory and a weight mu of hidden time, tables are independent of each other and each is solved
exactly (`tiers.splits`). The prices are searched one after the other by bisection: memory is full at the right lambda, H equals
the dense time at the right mu. Every solution met on the way is scored for what it is, with tables packed onto cards and
latencies added, and the best one that fits is kept; so prices that are a little off cost a little, and never feasibility. What
bisection leaves (memory that no whole step of a curve fits into, tables that are worth more than their price alone says)
`polish` then takes up table by table.

A MILP over the steps of all curves finds the same within 2% (tests/plan/test_solve.py) and takes minutes where this takes
seconds: 1,000 tables have 300,000 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from thermocline.plan.cost import unsharded_cost as whole
from thermocline.plan.cost.hot_owner import Owners
from thermocline.plan.cost.phases import Turn, Uses, only_ahead, turns, waits
from thermocline.plan.cost.step_cost import IDS, Floats
from thermocline.plan.cost.step_work import Grid, Job

from .tiers import CARD, CHOICES, OPTIONS, OWNER, SETS, Option, Sums, Whole, splits, sums

FLOOR = 1e-3  # of the step that a whole budget must at least save: memory is never quite free
ROUNDS = 3  # of the search for both prices
FIRST_STEPS, LATER_STEPS = 20, 8  # of bisection for one price

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """A job with everything priced that does not depend on the prices."""

    job: Job
    grid: Grid
    options: tuple[Sums, ...]
    always: Floats
    owner: whole.Costs
    card: whole.Costs
    owners: Owners

    @classmethod
    def of(cls, job: Job) -> Problem:
        grid = Grid.of(job)
        options = tuple(sums(job, grid, option) for option in OPTIONS)
        on_cards = whole.sums_by_owners(job, grid), whole.on_one_card(job, grid)
        return cls(job, grid, options, whole.always(job, grid), *on_cards, Owners.of(job, grid))

    @cached_property
    def waits_U(self) -> Floats:
        """Seconds of latency [exposed, hidden, more], for every set of uses, whose number has a bit for each of them."""
        machine, trains, found = self.job.machine, self.job.gradient is not None, []
        for number in range(1 << len(Uses._fields)):
            uses = Uses(*(bool(number >> bit & 1) for bit in range(len(Uses._fields))))
            coming = waits(machine, turns(uses, machine.nodes, machine.cards, trains))
            found.append((*coming, only_ahead(machine, uses, trains)))
        return np.array(list(zip(*found, strict=True)), np.float64)

    @cached_property
    def slots(self) -> Mask:
        """Which tables have slots [T]."""
        return np.array([work.store.full > 0 or work.store.near > 0 for work in self.job.works])

    def may(self) -> Mask:
        """Which choices and sets of tiers [T, choice, set] make sense at all."""
        machine, works = self.job.machine, self.job.works
        allowed = np.ones((len(works), CHOICES), bool)
        slots = np.array([work.store.full > 0 for work in works])
        for n, option in enumerate(OPTIONS):
            if option.exchange == "node" and (machine.nodes == 1 or machine.cards == 1):
                allowed[:, n] = False
            if option.plain:
                allowed[:, n] &= slots
        allowed[:, OWNER] &= self.owner.pooled & (machine.all > 1)
        allowed[:, CARD] &= machine.all > 1
        middle = machine.nodes > 1 and machine.cards > 1  # else tier 2 is tier 3, or tier 1
        allowed[[work.host for work in works], 2:] = False  # codes in host memory: row-wise, flat or per node
        sets: Mask = np.array([middle or 2 not in tiers for tiers in SETS])
        found = np.asarray(allowed[:, :, None] & sets, bool)
        found[[work.host for work in works], :, 1:] = False
        return found


@dataclass(frozen=True)
class Solution:
    """[T]: what is chosen, where tiers 1 and 2 end (in steps of the curve), and the card of tables that lie on one."""

    choice: Whole
    first: Whole
    second: Whole
    card: Whole


@dataclass(frozen=True)
class Score:
    """What a solution costs: seconds, and bytes on every card."""

    time: float
    exposed: float  # where the next batch comes ahead
    hidden: float  # likewise
    more: float  # of both, that a step without it has not
    bytes_C: Floats
    solution: Solution

    @property
    def fullest(self) -> float:
        return round(float(self.bytes_C.max()), 3)  # what adding floats up leaves is not too much


def priced(problem: Problem, allowed: Mask, mu: float, lam: float) -> tuple[Floats, Floats, Whole, Whole]:
    """Cost of every choice and set of tiers [T, choice, set] at these prices, and the two places of each split."""
    cards = problem.job.machine.all
    shape = (len(problem.job.works), CHOICES, len(SETS))
    costs, first, second = np.full(shape, np.inf), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for n, option in enumerate(problem.options):
        if allowed[:, n, 1:].any():
            for s, split in enumerate(splits(option, problem.grid, mu, lam)):
                costs[:, n, s], first[:, n, s], second[:, n, s] = split
        else:  # row-wise, without a search for places
            costs[:, n, 0] = (option.exposed[2] + mu * option.hidden[2] + lam * option.bytes[2])[:, -1]
    for n, cost, share in ((OWNER, problem.owner, 1), (CARD, problem.card, cards)):
        costs[:, n, 0] = (cost.exposed + mu * cost.hidden + lam * cost.bytes) / share
    costs[~allowed] = np.inf
    return costs, costs.min(axis=(1, 2)), first, second


def best(problem: Problem, allowed: Mask, mu: float, lam: float) -> Score:
    """The cheapest choice of every table at these prices, and what that costs in truth."""
    costs, _, first, second = priced(problem, allowed, mu, lam)
    flat = costs.reshape(len(costs), -1).argmin(axis=1)
    choice, kind = np.divmod(flat, len(SETS))
    tables = np.arange(len(costs))
    return score(problem, choice, first[tables, choice, kind], second[tables, choice, kind])


def split_sums(problem: Problem, choice: Whole, first: Whole, second: Whole) -> tuple[Floats, Floats, Floats]:
    """Exposed and hidden seconds and bytes of a card [T] of split tables; zero for those on one card."""
    found = np.zeros((3, len(choice)))
    for n, option in enumerate(problem.options):
        at = np.flatnonzero(choice == n)
        if not len(at):
            continue
        i, j = first[at], second[at]
        for part, prefix in zip(found, (option.exposed, option.hidden, option.bytes), strict=True):
            part[at] = prefix[0, at, i] + prefix[1, at, j] - prefix[1, at, i] + prefix[2, at, -1] - prefix[2, at, j]
    at = np.flatnonzero(choice == OWNER)
    for part, cost in zip(found, (problem.owner.exposed, problem.owner.hidden, problem.owner.bytes), strict=True):
        part[at] = cost[at]
    found[2] += maps(problem, choice, first, second)
    return found[0], found[1], found[2]


def maps(problem: Problem, choice: Whole, first: Whole, second: Whole) -> Floats:
    """Bytes [T] of the maps that tell tiers apart: one for each place inside a table where a tier ends."""
    tables = np.arange(len(choice))
    return np.where(choice < OWNER, between(problem.grid, tables, first, second), 0.0)


def between(grid: Grid, table: int | Whole, first: Whole, second: Whole) -> Floats:
    """`maps` of splits of a table, or of one split of each of several."""
    steps = grid.steps[table]
    one = np.where((first > 0) & (first < steps), grid.maps[table, first], 0.0)
    two = np.where((second > first) & (second < steps), grid.maps[table, second], 0.0)
    return np.asarray(one + two, np.float64)


def score(problem: Problem, choice: Whole, first: Whole, second: Whole) -> Score:
    """What a choice for every table costs, with whole tables packed onto cards."""
    exposed_T, hidden_T, bytes_T = split_sums(problem, choice, first, second)
    at = np.flatnonzero(choice == CARD)
    taken = float(bytes_T.sum() + problem.grid.ids.sum())
    placed, load_C, wait_C, extra_C = pack(problem, at, taken)
    card = np.full(len(choice), -1)
    card[at] = placed
    need = np.logical_or.reduce(needs(problem, choice, first, second), axis=1, keepdims=True)
    exposed_wait, hidden_wait, more = latency(problem, need)[:, 0]
    more_ids, more_exposed = apart(problem.owners.standing(choice, second).more())
    exposed = float(problem.always.sum() + exposed_T.sum() + load_C.max() + exposed_wait + more_exposed)
    hidden = float(hidden_T.sum() + wait_C.max() + hidden_wait + more_ids)
    time = float(problem.job.step(exposed, hidden, float(more)))
    return Score(time, exposed, hidden, float(more), taken + extra_C, Solution(choice, first, second, card))


def apart(more: Floats) -> tuple[Floats, Floats]:
    """Of what the busiest card does more [part, ...]: ids, which may hide, and the others. Rows that stand out come late."""
    return more[IDS], more.sum(axis=0) - more[IDS]


def pack(problem: Problem, at: Whole, taken: float) -> tuple[Whole, Floats, Floats, Floats]:
    """A card for each of the tables `at`: longest first, each to the card with least to do that has room. Also what every card
    then has to do, to wait for and to hold."""
    cost, cards = problem.card, problem.job.machine.all
    load_C, wait_C, bytes_C = np.zeros(cards), np.zeros(cards), np.zeros(cards)
    placed = np.zeros(len(at), np.int64)
    if not len(at):
        return placed, load_C, wait_C, bytes_C
    room = problem.job.budget - taken
    by_load, by_bytes = cost.exposed[at], cost.bytes[at]
    weight = by_load / max(by_load.sum(), 1e-30) + by_bytes / max(by_bytes.sum(), 1.0)
    for n in np.argsort(-weight, kind="stable"):
        table = at[n]
        fits = bytes_C + cost.bytes[table] <= room
        to = int(np.argmin(np.where(fits, load_C, np.inf)) if fits.any() else np.argmin(bytes_C))
        placed[n] = to
        load_C[to] += cost.exposed[table]
        wait_C[to] += cost.hidden[table]
        bytes_C[to] += cost.bytes[table]
    return placed, load_C, wait_C, bytes_C


def needs(problem: Problem, choice: Whole, first: Whole, second: Whole) -> Mask:
    """What each table has [use, T], as `Uses` lists it."""
    split, steps = choice < OWNER, problem.grid.steps
    per_node, plain = (np.isin(choice, [n for n, o in enumerate(OPTIONS) if holds(o)]) for holds in (_per_node, _plain))
    asks = split & (second < steps)
    has: dict[str, Mask] = {
        "flat": (asks & ~per_node) | ((choice == CARD) & ~problem.card.pooled),
        "relayed": asks & per_node,
        "second": split & (second > first),
        "first": split & (first > 0),
        "summed": (choice == OWNER) | ((choice == CARD) & problem.card.pooled),
        "slots": problem.slots & ~(plain & (first == steps)),
    }
    return np.stack([has[use] for use in Uses._fields])


def used(problem: Problem, found: Solution) -> Uses:
    """What a solution has, of all tables together."""
    return Uses(*(bool(has.any()) for has in needs(problem, found.choice, found.first, found.second)))


def alike(problem: Problem, found: Solution) -> Mask:
    """Choices [T, choice, set] that need no exchange which a solution does not make anyway: what latency says of all tables
    together it then says of each."""
    has, may = used(problem, found), problem.may()
    for s, tiers in enumerate(SETS):
        may[:, :OWNER, s] &= (has.first or 1 not in tiers) and (has.second or 2 not in tiers)
        for n, option in enumerate(OPTIONS):
            may[:, n, s] &= 3 not in tiers or (has.relayed if _per_node(option) else has.flat)
    may[:, OWNER] &= has.summed
    may[:, CARD] &= np.where(problem.card.pooled, has.summed, has.flat)[:, None]
    return may


def _per_node(option: Option) -> bool:
    return option.exchange == "node"


def _plain(option: Option) -> bool:
    return option.plain


def latency(problem: Problem, need: Mask) -> Floats:
    """Seconds of latency [exposed, hidden, more; T] of T sets of choices that need so much [use, T]: `Score` has the same."""
    return problem.waits_U[:, (1 << np.arange(len(need))) @ need]


def phases(problem: Problem, score: Score) -> list[Turn]:
    """The exchanges of a step, or of a request."""
    job, machine = problem.job, problem.job.machine
    uses = used(problem, score.solution)
    return list(turns(uses, machine.nodes, machine.cards, job.gradient is not None, ahead(job, score)))


def ahead(job: Job, score: Score) -> bool:
    """Whether the next batch is to come ahead: not where that makes the step longer."""
    return job.gradient is not None and bool(job.overlapped(score.exposed, score.hidden) <= score.time)


@dataclass
class Search:
    """The search for both prices; remembers the best solution that fits, and the prices it was found at."""

    problem: Problem
    allowed: Mask
    found: Score | None = None
    mu: float = 1.0
    lam: float = 0.0
    full: bool = False  # memory bounds the solution

    def look(self, mu: float, lam: float) -> Score:
        score = best(self.problem, self.allowed, mu, lam)
        if score.fullest <= self.problem.job.budget and (self.found is None or self._better(score)):
            self.found, self.mu, self.lam = score, mu, lam
        return score

    def _better(self, score: Score) -> bool:
        """Shorter by more than the floor of what its memory costs."""
        assert self.found is not None
        worth = FLOOR * self.found.time / self.problem.job.budget
        return score.time + worth * score.fullest < self.found.time + worth * self.found.fullest

    def run(self) -> Score | None:
        job = self.problem.job
        free = job.gradient is not None and job.dense > 0
        mu, lam = (0.5 if free else 1.0), 0.0
        width = 1.0
        for round in range(ROUNDS):
            steps = FIRST_STEPS if round == 0 else LATER_STEPS
            lam = self.price_of_memory(mu, lam, steps)
            if free:
                mu = self.price_of_hiding(lam, mu, width, steps // 2)
                width /= 4
            elif round:
                break
        return self.found

    def price_of_memory(self, mu: float, lam: float, steps: int) -> float:
        """The least price at which every card has room, to within the last step."""
        budget = self.problem.job.budget
        scale = self.look(mu, 0.0).time / budget
        self.full = self.look(mu, FLOOR * scale).fullest > budget
        if not self.full:
            return FLOOR * scale
        low, high = (lam / 2, lam * 2) if lam > FLOOR * scale else (FLOOR * scale, scale * 1e3)
        return _bisect(lambda price: self.look(mu, price).fullest <= budget, low, high, steps)

    def price_of_hiding(self, lam: float, mu: float, width: float, steps: int) -> float:
        """The least weight at which everything that may hide does; 1 if it never does, 0 if it does for nothing."""
        dense = self.problem.job.dense
        if self.look(0.0, lam).hidden <= dense:
            return 0.0
        if self.look(1.0, lam).hidden >= dense:
            return 1.0
        low, high = max(mu - width, 0.0), min(mu + width, 1.0)
        for _ in range(steps):
            middle = (low + high) / 2
            low, high = (low, middle) if self.look(middle, lam).hidden <= dense else (middle, high)
        return high


def _bisect(holds: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """The least price at which something holds, between two, on a scale of logarithms."""
    for _ in range(steps):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
