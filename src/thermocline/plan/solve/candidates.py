"""The plans that are always considered, and the searches among which the best is taken.

Plain ones, which anyone would try first: every table row-wise, row-wise per node, whole on one card each, on every card, once a
node. Then searches, each with another set of choices allowed, because latency makes mixing ways to exchange dearer than the
sum of its parts: everything flat, everything per node, both; with and without copies; with and without tables on one card. The
first copied row costs as many waits as a million of them (`phases.py`), which no price of a row says: only whole plans with and
without copies can be compared. The result is the best of all, so it is never worse than a plain one.

Whole tables on cards are packed after they were chosen, and few large ones leave most cards idle. So a search allows only
tables whose work is at most a given part of the step, and several parts are tried.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .local_search import polish
from .solver import Problem, Score, Search, alike, score
from .tiers import CARD, CHOICES, OPTIONS, OWNER, SETS

FLAT = np.array([option.exchange == "flat" for option in OPTIONS] + [True, True])[:, None]
PER_NODE = np.array([option.exchange == "node" for option in OPTIONS] + [False, False])[:, None]
SPLIT = np.arange(CHOICES)[:, None] < OWNER
NO_TIER_1 = ~SPLIT | np.array([1 not in tiers for tiers in SETS])
PLAIN = np.array([option.plain for option in OPTIONS] + [False, False])[:, None]  # where there are no copies, as another
NO_COPIES = ~SPLIT | (~PLAIN & np.array([tiers == (3,) for tiers in SETS]))
NO_TIER_3 = SPLIT & np.array([3 not in tiers for tiers in SETS])
POLISHED = 3  # so many of the best candidates are polished where tables are few, one elsewhere
FEW_TABLES, WEIGHTS = 16, (0.02, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)  # and for few tables, with these weights of what may hide
OFTEN = 0.5  # chance that a node asks for a row in a step from which on `copied` has it copied
PARTS = (0.02, 0.1, 0.5)  # of the step that the work of one whole table may take on its card


def plain(problem: Problem) -> Iterator[tuple[str, Score]]:
    """The plans that need no search."""
    count, steps = len(problem.job.works), problem.grid.steps
    zero, may = np.zeros(count, np.int64), problem.may()
    yield "row-wise", score(problem, zero, zero, zero)
    if may[:, 1, 0].any():
        yield "row-wise, per node", score(problem, zero + 1, zero, zero)
        yield "one copy a node", score(problem, zero, zero, steps)
    if problem.job.machine.all > 1:
        if may[:, OWNER, 0].any():
            yield "row-wise, summed by owners", score(problem, np.where(may[:, OWNER, 0], OWNER, 0), zero, zero)
        yield "table-wise", score(problem, zero + CARD, zero, zero)
        yield "full replication", score(problem, zero, steps, steps)
        plain_bytes, slot_bytes = (problem.options[n].bytes[0, :, -1] for n in (2, 0))
        smaller = may[:, 2, 0] & (plain_bytes < slot_bytes)
        if smaller.any():
            yield "full replication in fp32", score(problem, np.where(smaller, 2, 0), steps, steps)


def copied(problem: Problem) -> Iterator[tuple[str, Score]]:
    """Plans with replicas whether they pay or not, to be measured beside what pays: rows that a node asks for in at least every
    other step are copied, and the others asked for once a node."""
    if problem.may()[:, 1, SETS.index((2, 3))].all():
        hot = (problem.grid.asked.node >= OFTEN).sum(axis=1)
        zero = np.zeros_like(hot)
        yield "hot rows once a node", score(problem, zero + 1, zero, hot)
        yield "hot rows on every card", score(problem, zero + 1, hot, hot)


def searched(problem: Problem, step: float) -> Iterator[tuple[str, Search]]:
    """The searches; `step` is about how long a step takes."""
    may, machine = problem.may(), problem.job.machine
    split = may & (np.arange(CHOICES) != CARD)[:, None]
    allowed = {"tiers, flat": split & FLAT}
    if machine.nodes > 1 and machine.cards > 1:
        allowed |= {"tiers, per node": split & PER_NODE, "tiers": split, "tiers 1 and 2": split & FLAT & NO_TIER_3}
        allowed |= {f"{name} without tier 1": allowed[name] & NO_TIER_1 for name in ("tiers, flat", "tiers, per node")}
        allowed |= {"without copies": split & NO_COPIES}
    allowed |= {"without copies, flat": split & FLAT & NO_COPIES}
    for part in PARTS:
        light = may[:, CARD, 0] & (problem.card.exposed <= part * step)
        mask = may.copy()
        mask[:, CARD] = light[:, None]
        name = f"whole tables to {part:.0%}"  # of a step, beside tiers
        allowed |= {name: mask, f"{name}, without copies": mask & NO_COPIES}
        allowed |= {f"{name}, without copies, flat": mask & NO_COPIES & FLAT}
    tried: set[bytes] = set()
    for name, mask in allowed.items():
        ways_T = mask.sum(axis=(1, 2))
        # One way for each table is a plain plan; and where no table is light, others have the same mask.
        if ways_T.all() and ways_T.max() > 1 and mask.tobytes() not in tried:
            tried.add(mask.tobytes())
            yield name, Search(problem, mask)


def _rank(found: Score, budget: float) -> tuple[bool, float, float]:
    """What fits first, then by time; of equals (to nine digits) the smaller first."""
    return found.fullest > budget, float(f"{found.time:.9g}"), found.fullest


def different(scores: list[tuple[str, Score]]) -> list[tuple[str, Score]]:
    """Without those whose solution is that of one before: several searches often find the same."""
    first: dict[bytes, tuple[str, Score]] = {}
    for name, found in scores:
        solution = found.solution
        first.setdefault(np.stack([solution.choice, solution.first, solution.second]).tobytes(), (name, found))
    return list(first.values())


def everything(problem: Problem) -> tuple[list[tuple[str, Score]], Search | None]:
    """All candidates with their scores, the best that fits first; and the search that found the best, for its prices."""
    scores = list(plain(problem))
    budget = problem.job.budget
    fitting = [found.time for _, found in scores if found.fullest <= budget]
    step = min(fitting, default=min(found.time for _, found in scores))
    searches: dict[str, Search] = {}
    for name, search in searched(problem, step):
        found = search.run()
        if found is not None:
            scores.append((name, found))
            searches[name] = search
    scores.sort(key=lambda named: _rank(named[1], budget))
    name, found = scores[0]
    if found.fullest > budget:
        return scores, None
    few = len(problem.job.works) <= FEW_TABLES
    for name, kept in [named for named in different(scores)[: POLISHED if few else 1] if named[1].fullest <= budget]:
        found = kept
        weights = {0.0, 1.0} | ({searches[name].mu} if name in searches else set())
        if few and problem.job.gradient:
            weights |= set(WEIGHTS)
        for allowed in (alike(problem, found.solution), problem.may()):
            better = polish(problem, found, allowed, sorted(weights))
            found = better if better.time < found.time else found
        if found is not kept:
            scores.append((f"{name}, polished", found))
    scores.sort(key=lambda named: _rank(named[1], budget))
    found_by = min(searches.values(), key=lambda search: search.found.time if search.found else np.inf, default=None)
    return scores, found_by or Search(problem, problem.may(), scores[0][1])
