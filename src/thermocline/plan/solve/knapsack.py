"""Fill memory exactly: the tables as a knapsack in which each of them takes one of its splits.

At the right price of memory some tables are indifferent between two splits, and no single price fills the cards; with few
tables that gap is several per cent of a step. Here memory is cut into equal parts, each table's splits are reduced to the best
one for every number of parts, and the tables are combined one after the other: an exact solution, but for memory rounded up
to whole parts, at a given weight of what may hide. Tables on one card stay where they are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from thermocline.plan.cost.step_cost import Floats

from .solver import Mask, Problem, Score, between, score, split_sums
from .tiers import CARD, OWNER, SETS, Sums, Whole

PARTS = 1500  # that the memory above the least is cut into
PLACES = 96  # on a curve where a tier may end, evenly over its steps; and those around the present split


_KINDS = np.zeros(8, np.int64)  # by which of tiers 1, 2 and 3 have rows, as bits
for _n, _tiers in enumerate(SETS):
    _KINDS[sum(1 << (3 - tier) for tier in _tiers)] = _n


class Menu(NamedTuple):
    """Splits of one table: seconds and bytes of each, which of SETS it is, and (choice, first, second)."""

    exposed: Floats
    hidden: Floats
    bytes: Floats
    kind: Whole
    split: Whole


def fill(problem: Problem, found: Score, allowed: Mask, mu: float) -> Score:
    """The best splits of all tables that are split, together; `found` itself if they do not fit after all."""
    solution = found.solution
    split = np.flatnonzero(solution.choice != CARD)
    _, _, bytes_T = split_sums(problem, solution.choice, solution.first, solution.second)
    packed = found.fullest - float(bytes_T.sum())
    menus = [menu(problem, found, allowed, int(table)) for table in split]
    least = sum(float(menu.bytes.min()) for menu in menus)
    room = problem.job.budget - packed - least
    if room <= 0 or not menus:
        return found
    picked = _combine([(menu.exposed + mu * menu.hidden, menu.bytes) for menu in menus], room)
    choice, first, second = solution.choice.copy(), solution.first.copy(), solution.second.copy()
    for table, offers, n in zip(split, menus, picked, strict=True):
        choice[table], first[table], second[table] = offers.split[n]
    other = score(problem, choice, first, second)
    return other if other.fullest <= problem.job.budget else found


def menu(problem: Problem, found: Score, allowed: Mask, table: int) -> Menu:
    """All splits of a table between some places of its curve."""
    steps = int(problem.grid.steps[table])
    around = np.add.outer([found.solution.first[table], found.solution.second[table]], np.arange(-3, 4)).ravel()
    even = np.linspace(0, steps, PLACES + 1).astype(np.int64)
    turns = 1 + np.flatnonzero(np.diff(problem.grid.share[table, :steps]))  # where rows of another heat begin
    turns = turns if len(turns) <= PLACES else turns[:0]
    places = np.unique(np.clip(np.concatenate([even, turns, around]), 0, steps))
    i, j = (index.ravel() for index in np.meshgrid(places, places, indexing="ij"))
    i, j = i[i <= j], j[i <= j]
    kind = _KINDS[(i > 0) * 4 + (j > i) * 2 + (j < steps)]  # which of SETS a split uses
    offers: list[tuple[Floats, Floats, Floats, Whole, Whole]] = []
    for choice in np.flatnonzero(allowed[table].any(axis=1)):
        if choice < OWNER:
            may = allowed[table, choice, kind]
            exposed, hidden, held = _of(problem.options[choice], table, i[may], j[may])
            held = held + between(problem.grid, table, i[may], j[may])
            split = np.stack([np.full(int(may.sum()), choice), i[may], j[may]], axis=1)
            offers.append((exposed, hidden, held, kind[may], split))
        elif choice == OWNER:
            owner, at = problem.owner, [table]
            offers.append((owner.exposed[at], owner.hidden[at], owner.bytes[at], np.array([0]), np.array([[OWNER, 0, 0]])))
    return Menu(*(np.concatenate(column) for column in zip(*offers, strict=True)))


def _of(option: Sums, table: int, i: Whole, j: Whole) -> tuple[Floats, ...]:
    """Exposed and hidden seconds and bytes of some splits of a table."""
    prefixes = (option.exposed, option.hidden, option.bytes)
    return tuple(p[0, table, i] + p[1, table, j] - p[1, table, i] + p[2, table, -1] - p[2, table, j] for p in prefixes)


def _combine(menus: list[tuple[Floats, Floats]], room: float) -> list[int]:
    """Which offer (cost, bytes) each table takes, so that all cost least and take at most `room` bytes beyond the least."""
    part = room / PARTS
    total = np.zeros(PARTS + 1)
    chosen, taken = [], []
    for cost, held in menus:
        value, which = _by_parts(cost, held, part)
        offers = np.flatnonzero(which >= 0)
        together = np.full(PARTS + 1, np.inf)
        best = np.zeros(PARTS + 1, np.int64)
        for size in offers:
            sum_ = total[: PARTS + 1 - size] + value[size]
            better = sum_ < together[size:]
            together[size:][better] = sum_[better]
            best[size:][better] = size
        total = together
        chosen.append(which)
        taken.append(best)
    left, picked = int(np.argmin(total)), []
    for which, best in zip(reversed(chosen), reversed(taken), strict=True):
        size = int(best[left])
        picked.append(int(which[size]))
        left -= size
    return picked[::-1]


def _by_parts(cost: Floats, held: Floats, part: float) -> tuple[Floats, Whole]:
    """For every number of parts the cheapest offer that takes so many, if it is cheaper than all that take fewer."""
    size = np.ceil((held - held.min()) / part - 1e-9).astype(np.int64)
    fits = np.flatnonzero(size <= PARTS)
    order = fits[np.argsort(-cost[fits], kind="stable")]
    value, which = np.full(PARTS + 1, np.inf), np.full(PARTS + 1, -1, np.int64)
    value[size[order]], which[size[order]] = cost[order], order  # the last written is the cheapest
    before = np.concatenate([[np.inf], np.minimum.accumulate(value)[:-1]])
    which[value >= before] = -1
    return value, which
