"""Better one table: with all other tables as they are, every split of one is tried in one sweep over its curve.

The search for prices settles what memory is worth; it leaves room on the cards that no single move along the curves fits into,
and it does not see that one table alone may change whether everything hides. Here the true step time decides: for each
table the best split, whatever the prices say, in O(K²) array operations. For thousands of tables nothing is left to gain, and
it is not run.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .cost import Floats
from .knapsack import fill
from .solve import Mask, Problem, Score, Solution, score, split_sums
from .tiers import CARD, OWNER, Sums

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
    packed = found.fullest - float(parts[2].sum())  # whole tables on the fullest card: kept free wherever this one goes
    room = problem.job.budget - packed - (float(parts[2].sum()) - of_table[2])
    hides = problem.job.dense if problem.job.gradient else 0.0
    slack = hides - (found.hidden - of_table[1])
    for choice in np.flatnonzero(allowed[table].any(axis=1)):
        if choice >= OWNER:
            tried = [(0, 0)]
        else:
            tried = _splits(problem.options[choice], problem, table, room, slack)
        for first, second in tried:
            other = score(problem, *_changed(found.solution, table, int(choice), first, second))
            if other.fullest <= problem.job.budget and other.time < found.time * (1 - 1e-9):
                found = other
    return found


def _changed(solution: Solution, table: int, choice: int, first: int, second: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    arrays = solution.choice.copy(), solution.first.copy(), solution.second.copy()
    for array, value in zip(arrays, (choice, first, second), strict=True):
        array[table] = value
    return arrays


def _splits(option: Sums, problem: Problem, table: int, room: float, slack: float) -> list[tuple[int, int]]:
    """The best split of a table that fits into `room`, with one tier, with two and with three."""
    steps = int(problem.grid.steps[table])
    exposed, hidden, held = (_grid(prefix[:, table, : steps + 1]) for prefix in (option.exposed, option.hidden, option.bytes))
    places = np.arange(steps + 1)
    used = (places[:, None] > 0).astype(float) + (places[None, :] > places[:, None]) + (places[None, :] < steps)
    held = held + np.maximum(used - 1, 0) * problem.grid.map[table]
    time = exposed + np.maximum(hidden - slack, 0.0)
    time[(held > room) | (places[:, None] > places[None, :])] = np.inf
    found = []
    for tiers in (1, 2, 3):
        kind = np.where(used == tiers, time, np.inf)
        first, second = np.unravel_index(int(np.argmin(kind)), kind.shape)
        if np.isfinite(kind[first, second]):
            found.append((int(first), int(second)))
    return found


def _grid(prefix: Floats) -> Floats:
    """What every split [first, second] costs, from prefix sums [tier, K + 1]."""
    one, two, three = prefix
    return np.asarray((one - two)[:, None] + (two - three)[None, :] + three[-1], np.float64)
