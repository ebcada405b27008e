"""Better one table: with all other tables as they are, every split of one is tried in one sweep over its curve.

The search for prices settles what memory is worth; it leaves room on the cards that no single move along the curves fits into,
and it does not see that one table alone may change whether everything hides. Here the true step time decides: for each
table the best split, whatever the prices say, in O(K²) array operations. For thousands of tables nothing is left to gain, and
it is not run.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from thermocline.plan.cost.step_cost import Floats

from .knapsack import Menu, fill, menu
from .solver import Mask, Problem, Score, Solution, score, split_sums
from .tiers import CARD, SETS

MOST_TABLES = 64
SWEEPS = 4
LEAST = 1e-4  # a sweep that gains less, as a share of the step, is the last


def polish(problem: Problem, found: Score, allowed: Mask, weights: Iterable[float]) -> Score:
    """The same solution or a better one. Memory is filled at several `weights` of what may hide: between two of them there may
    be plans that no weight finds, but that are one move away."""
    if len(problem.job.works) > MOST_TABLES:
        return found
    starts = [found]
    for mu in weights:
        filled = fill(problem, found, allowed, mu)
        if all(filled.time != start.time for start in starts):
            starts.append(filled)
    return min((_swept(problem, start, allowed) for start in starts), key=lambda score: score.time)


def _swept(problem: Problem, found: Score, allowed: Mask) -> Score:
    """Every table bettered in turn, until that gains nothing."""
    for _ in range(SWEEPS):
        before = found.time
        for table in range(len(problem.job.works)):
            found = _one(problem, found, allowed, table)
        if before - found.time < LEAST * before:
            break
    return found


def _one(problem: Problem, found: Score, allowed: Mask, table: int) -> Score:
    """The best choice for one table, the others kept."""
    parts = split_sums(problem, found.solution.choice, found.solution.first, found.solution.second)
    of_table = (0.0, 0.0, 0.0) if found.solution.choice[table] == CARD else tuple(float(part[table]) for part in parts)
    room = problem.job.budget - (found.fullest - of_table[2])
    slack = (problem.job.dense if problem.job.gradient else 0.0) - (found.hidden - of_table[1])
    offers = menu(problem, found, allowed, table)
    time = offers.exposed + np.maximum(offers.hidden - slack, 0.0)
    time[offers.bytes > room] = np.inf
    tried = [offers.split[n] for n in _best_of_each(time, offers)]
    if allowed[table, CARD].any():
        tried.append(np.array([CARD, 0, 0]))
    for choice, first, second in tried:
        other = score(problem, *_changed(found.solution, table, int(choice), int(first), int(second)))
        if other.fullest <= problem.job.budget and other.time < found.time * (1 - 1e-9):
            found = other
    return found


def _best_of_each(time: Floats, offers: Menu) -> list[int]:
    """The best offer of every choice and set of tiers: latency, which no offer knows of, differs between those."""
    kinds = offers.split[:, 0] * len(SETS) + offers.kind
    order = np.argsort(time, kind="stable")
    _, first = np.unique(kinds[order], return_index=True)
    return [int(order[n]) for n in first if np.isfinite(time[order[n]])]


def _changed(solution: Solution, table: int, choice: int, first: int, second: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    arrays = solution.choice.copy(), solution.first.copy(), solution.second.copy()
    for array, value in zip(arrays, (choice, first, second), strict=True):
        array[table] = value
    return arrays
