"""The candidate plans: baselines that need no search, and searches over different sets of choices. The best one wins.

Latency makes mixed exchanges more expensive than the sum of their parts, and the first replicated row costs as many waits as a
million; no price of a row expresses either, so whole plans over different sets of choices are compared. Table-wise tables are
packed after they were chosen, and a few large ones would leave most ranks idle: searches limit the share of the step of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .local_search import local_search
from .solver import Problem, Score, Search, same_exchanges, score
from .tiers import CHOICES, OPTIONS, OWNER_POOLED, TABLE_WISE, TIER_SETS

FLAT = np.array([option.exchange == "flat" for option in OPTIONS] + [True, True])[:, None]
PER_NODE = np.array([option.exchange == "node" for option in OPTIONS] + [False, False])[:, None]
SPLIT = np.arange(CHOICES)[:, None] < OWNER_POOLED
NO_TIER_1 = ~SPLIT | np.array([1 not in tiers for tiers in TIER_SETS])
PLAIN = np.array([option.plain for option in OPTIONS] + [False, False])[:, None]  # equal to another option without replicas
NO_COPIES = ~SPLIT | (~PLAIN & np.array([tiers == (3,) for tiers in TIER_SETS]))
NO_TIER_3 = SPLIT & np.array([3 not in tiers for tiers in TIER_SETS])
REFINED, FEW_TABLES = 3, 16  # local search improves this many of the best candidates with few tables, else one
PARTS = (0.02, 0.1, 0.5)  # shares of the step that one table-wise table may take on its rank


def baseline_plans(problem: Problem) -> Iterator[tuple[str, Score]]:
    """The plans that need no search."""
    count, steps = len(problem.workload.tables), problem.grid.steps
    zero, allowed = np.zeros(count, np.int64), problem.allowed()
    yield "row-wise", score(problem, zero, zero, zero)
    if allowed[:, 1, 0].any():
        yield "row-wise, per node", score(problem, zero + 1, zero, zero)
        yield "one copy a node", score(problem, zero, zero, steps)
    if problem.workload.cluster.world_size > 1:
        if allowed[:, OWNER_POOLED, 0].any():
            pooled = np.where(allowed[:, OWNER_POOLED, 0], OWNER_POOLED, 0)
            yield "row-wise, summed by owners", score(problem, pooled, zero, zero)
        yield "table-wise", score(problem, zero + TABLE_WISE, zero, zero)
        yield "full replication", score(problem, zero, steps, steps)
        plain_bytes, slot_bytes = (problem.options[n].bytes[0, :, -1] for n in (2, 0))
        smaller = allowed[:, 2, 0] & (plain_bytes < slot_bytes)
        if smaller.any():
            yield "full replication in fp32", score(problem, np.where(smaller, 2, 0), steps, steps)


def searches(problem: Problem, step: float) -> Iterator[tuple[str, Search]]:
    """The searches; `step` is an estimate of the step time."""
    all_allowed, cluster = problem.allowed(), problem.workload.cluster
    split = all_allowed & (np.arange(CHOICES) != TABLE_WISE)[:, None]
    allowed = {"tiers, flat": split & FLAT}
    if cluster.nodes > 1 and cluster.gpus_per_node > 1:
        allowed |= {"tiers, per node": split & PER_NODE, "tiers": split, "tiers 1 and 2": split & FLAT & NO_TIER_3}
        allowed |= {f"{name} without tier 1": allowed[name] & NO_TIER_1 for name in ("tiers, flat", "tiers, per node")}
        allowed |= {"without copies": split & NO_COPIES}
    allowed |= {"without copies, flat": split & FLAT & NO_COPIES}
    for part in PARTS:
        light = all_allowed[:, TABLE_WISE, 0] & (problem.table_wise.exposed <= part * step)
        mask = all_allowed.copy()
        mask[:, TABLE_WISE] = light[:, None]
        name = f"whole tables to {part:.0%}"  # of a step, beside tiers
        allowed |= {name: mask, f"{name}, without copies": mask & NO_COPIES}
        allowed |= {f"{name}, without copies, flat": mask & NO_COPIES & FLAT}
    tried: set[bytes] = set()
    for name, mask in allowed.items():
        choices_T = mask.sum(axis=(1, 2))
        # A single choice for each table is a baseline; and where no table is light, several masks are equal.
        if choices_T.all() and choices_T.max() > 1 and mask.tobytes() not in tried:
            tried.add(mask.tobytes())
            yield name, Search(problem, mask)


def _rank(found: Score, budget: float) -> tuple[bool, float, float]:
    """Plans that fit first, then by time; of equal times (to nine digits) the smaller plan first."""
    return found.peak_bytes > budget, float(f"{found.time:.9g}"), found.peak_bytes


def unique_solutions(scores: list[tuple[str, Score]]) -> list[tuple[str, Score]]:
    """The first of each group of equal solutions: several searches often find the same."""
    first: dict[bytes, tuple[str, Score]] = {}
    for name, found in scores:
        solution = found.solution
        first.setdefault(np.stack([solution.choice, solution.first, solution.second]).tobytes(), (name, found))
    return list(first.values())


def solve(problem: Problem, rivals: Sequence[tuple[str, Score]] = ()) -> tuple[list[tuple[str, Score]], Search | None]:
    """All candidates, `rivals` among them, the best that fits first; and the search that found the best, for its prices (None
    if nothing fits)."""
    scores = [*baseline_plans(problem), *rivals]
    budget = problem.workload.budget
    fitting = [found.time for _, found in scores if found.peak_bytes <= budget]
    step = min(fitting, default=min(found.time for _, found in scores))
    done: list[Search] = []
    for name, search in searches(problem, step):
        found = search.run()
        if found is not None:
            scores.append((name, found))
            done.append(search)
    scores.sort(key=lambda named: _rank(named[1], budget))
    if scores[0][1].peak_bytes > budget:
        return scores, None
    most = REFINED if len(problem.workload.tables) <= FEW_TABLES else 1
    for name, start in [named for named in unique_solutions(scores)[:most] if named[1].peak_bytes <= budget]:
        found = start
        for allowed in (same_exchanges(problem, found.solution), problem.allowed()):
            found = local_search(problem, found, allowed)
        if found is not start:
            scores.append((f"{name}, refined", found))
    scores.sort(key=lambda named: _rank(named[1], budget))
    found_by = min(done, key=lambda search: search.found.time if search.found else np.inf, default=None)
    return scores, found_by or Search(problem, problem.allowed(), scores[0][1])
