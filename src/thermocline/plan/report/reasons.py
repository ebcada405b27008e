"""The reasons for every table: its runner-up with its cost, and the constraint that ruled out a faster choice.

At the final prices of the search, every kind of choice (a set of tiers, an exchange, table-wise) has its best split. The
runner-up is the split of another kind with the shortest step, all other tables fixed; the latency of an exchange that no other
table needs counts. A table is bound by memory if it would choose otherwise with free memory and the step would be shorter; it
is bound by the dense part if it would choose otherwise with everything hidden. Prices of rows know no latency: a search may
pay for memory although its plan is the best with any memory. The test for memory is therefore whether a plan with more memory
is faster (`saves`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thermocline.plan.balance import PlacementInput, imbalance, place
from thermocline.plan.cost.step_cost import Floats
from thermocline.plan.model import FREE, Alternative
from thermocline.plan.solve.solver import (
    Mask,
    Problem,
    Score,
    Search,
    choice_costs,
    latency,
    row_kind_masks,
    score,
    split_off_ids,
    split_sums,
)
from thermocline.plan.solve.tiers import CHOICES, OPTIONS, OWNER_POOLED, TABLE_WISE, TIER_SETS, Ints
from thermocline.plan.units import show_bytes

EXPANDED = 4096  # rows, the hottest of all tables, that are placed one by one to predict the balance
FULL = 0.97  # of a budget: the rest is less than a step of a curve
NEGLIGIBLE = 1e-6  # of a step
MEMORY = "GPU memory"
HIDING = "the dense part, which is too short to hide more"
_SET_NAMES = {
    (3,): "row-wise", (1,): "on every GPU", (2,): "one copy per node", (1, 3): "tiers 1 and 3", (2, 3): "tiers 2 and 3",
    (1, 2): "tiers 1 and 2", (1, 2, 3): "tiers 1, 2 and 3",
}  # fmt: skip


@dataclass(frozen=True)
class Reasons:
    """Runner-up and binding constraint of each table."""

    runner_up: list[Alternative | None]
    binding: list[str]


def _choice_names() -> list[list[str]]:
    """The names of all choices [choice][set]; choices of one name count as equal."""
    found = []
    for option in OPTIONS:
        exchange = ", per node" if option.exchange == "node" else ""
        found.append([_SET_NAMES[tiers] + (exchange if 3 in tiers else "") for tiers in TIER_SETS])
    return [*found, ["row-wise, pooled by owners"] * len(TIER_SETS), ["table-wise"] * len(TIER_SETS)]


NAMES = _choice_names()


def _chosen_names(problem: Problem, best: Score) -> list[str]:
    """The name of the choice of each table."""
    solution, found = best.solution, []
    for choice, first, second, steps in zip(solution.choice, solution.first, solution.second, problem.grid.steps, strict=True):
        tiers = tuple(t for t, used in ((1, first > 0), (2, second > first), (3, second < steps)) if used)
        found.append(NAMES[int(choice)][TIER_SETS.index(tiers) if choice < OWNER_POOLED else 0])
    return found


def table_reasons(problem: Problem, best: Score, search: Search, saves: float) -> Reasons:
    """The reasons for every table of a solution; `saves` are the seconds per step that more memory would save."""
    chosen = _chosen_names(problem, best)
    costs, first, second = choice_costs(problem, problem.allowed(), search.mu, search.lam)
    sets = range(len(TIER_SETS))
    same = np.array([[[NAMES[c][s] == name for s in sets] for c in range(CHOICES)] for name in chosen])
    excluded = same | _with_empty_tier(problem, first, second) | ~np.isfinite(costs)
    times, sizes = np.full(costs.shape, np.inf), np.zeros(costs.shape)
    for c in range(CHOICES):
        for s in sets:
            if not excluded[:, c, s].all():
                choice = np.full(len(chosen), c)
                times[:, c, s], sizes[:, c, s] = exchange_one(problem, best, choice, first[:, c, s], second[:, c, s])
    budget = problem.workload.budget
    order = np.where(excluded, np.inf, times + (sizes > budget) * 1e6)  # plans that do not fit come last
    at = order.reshape(len(chosen), -1).argmin(axis=1)
    runner_up = [
        Alternative(
            name=NAMES[c][s], feasible=bool(sizes[t, c, s] <= budget), bytes=round(float(sizes[t, c, s])),
            time=float(times[t, c, s]) if sizes[t, c, s] <= budget else None,
        ) if np.isfinite(order[t, c, s]) else None
        for t, (c, s) in enumerate(divmod(int(n), len(TIER_SETS)) for n in at)
    ]  # fmt: skip
    return Reasons(runner_up, _bindings(problem, best, search, saves, chosen))


def _with_empty_tier(problem: Problem, first: Ints, second: Ints) -> Mask:
    """Splits that leave a tier of their set without rows [T, choice, set], and so belong to another set."""
    steps = problem.grid.steps[:, None, None]
    used = np.stack([first > 0, second > first, second < steps])
    sets = np.array([[tier in tiers for tiers in TIER_SETS] for tier in (1, 2, 3)])[:, None, None, :]
    empty: Mask = (used != sets).any(axis=0)
    empty[:, OWNER_POOLED:] = False
    return empty


def exchange_one(problem: Problem, best: Score, choice: Ints, first: Ints, second: Ints) -> tuple[Floats, Floats]:
    """The step and the bytes of the fullest rank [T], if one table at a time had another split; packing is unchanged."""
    solution, workload, table_wise = best.solution, problem.workload, problem.table_wise
    before = split_sums(problem, solution.choice, solution.first, solution.second)
    after = split_sums(problem, choice, first, second)
    exposed, hidden, held = (new - old for new, old in zip(after, before, strict=True))
    joining, leaving = choice == TABLE_WISE, solution.choice == TABLE_WISE
    ranks = workload.cluster.world_size
    exposed = exposed + joining * table_wise.exposed - leaving * table_wise.mean
    hidden = hidden + joining * table_wise.hidden - leaving * table_wise.hidden / ranks
    held = held + joining * (table_wise.bytes + table_wise.requested) - leaving * table_wise.requested
    now_T = row_kind_masks(problem, solution.choice, solution.first, solution.second)
    then_T = row_kind_masks(problem, choice, first, second)
    others = now_T.sum(axis=1, keepdims=True) - now_T > 0
    waited, waiting = latency(problem, others | now_T), latency(problem, others | then_T)
    exposed, hidden = exposed + waiting[0] - waited[0], hidden + waiting[1] - waited[1]
    loads = problem.hot_owner.loads(solution.choice, solution.second)
    ids, rest = split_off_ids(loads.excess_with(problem.hot_owner.loads(choice, second)) - loads.excess()[:, None])
    exposed, hidden = exposed + rest, hidden + ids
    return workload.step(best.exposed + exposed, best.hidden + hidden, waiting[2]), best.peak_bytes + held


def _memory_bound(problem: Problem, best: Score, search: Search, saves: float) -> bool:
    """Whether more memory would shorten the step, or replicas have filled memory and not all rows have them."""
    solution, filled = best.solution, best.peak_bytes > FULL * problem.workload.budget
    some_T = (solution.choice < OWNER_POOLED) & (solution.second > 0) & (solution.first < problem.grid.steps)
    return (filled and bool(some_T.any())) or ((filled or search.memory_bound) and saves > NEGLIGIBLE * best.time)


def _bindings(problem: Problem, best: Score, search: Search, saves: float, chosen: list[str]) -> list[str]:
    """The constraint that keeps every table from another choice."""
    full = _memory_bound(problem, best, search, saves)
    free_memory = _with_free_memory(problem, best, search, chosen) if full else chosen
    free_time = chosen
    if search.mu > 0 and problem.workload.dense > 0 and problem.workload.overlaps:
        choice, kind = _cheapest(choice_costs(problem, search.allowed, 0.0, search.lam)[0])
        free_time = [NAMES[int(c)][int(k)] for c, k in zip(choice, kind, strict=True)]
    found = []
    for name, memory, time in zip(chosen, free_memory, free_time, strict=True):
        if memory != name:
            found.append(f"{MEMORY}: with more, the table would be {memory}")
        elif full and name.startswith(("tiers", "one copy")):
            found.append(f"{MEMORY}: with more, more rows would have copies")
        elif time != name:
            found.append(f"{HIDING}: with a longer one, the table would be {time}")
        else:
            found.append(FREE)
    return found


def _with_free_memory(problem: Problem, best: Score, search: Search, chosen: list[str]) -> list[str]:
    """The choice of every table with free memory, if it shortens the step alone or together with all others."""
    costs, first, second = choice_costs(problem, search.allowed, search.mu, 0.0)
    choice, kind = _cheapest(costs)
    tables = np.arange(len(chosen))
    split = first[tables, choice, kind], second[tables, choice, kind]
    shorter = (1 - NEGLIGIBLE) * best.time
    alone_T = exchange_one(problem, best, choice, *split)[0] < shorter
    together = score(problem, choice, *split).time < shorter
    return [NAMES[choice[t]][kind[t]] if together or alone_T[t] else name for t, name in enumerate(chosen)]


def _cheapest(costs: Floats) -> tuple[Ints, Ints]:
    """Choice and set of tiers of every table."""
    return np.divmod(costs.reshape(len(costs), -1).argmin(axis=1), len(TIER_SETS))


def plan_binding(problem: Problem, best: Score, search: Search, saves: float) -> str:
    """The constraint that binds the whole plan; `saves` are the seconds per step that more memory would save."""
    workload, solution = problem.workload, best.solution
    if _memory_bound(problem, best, search, saves):
        rank = best.fullest
        return f"{MEMORY} ({show_bytes(best.peak_bytes)} of {show_bytes(workload.budget)} on rank {rank})"
    if workload.overlaps and best.hidden >= 0.98 * workload.dense > 0:
        return f"{HIDING} ({best.hidden * 1e3:.3g} ms of ids and rows, {workload.dense * 1e3:.3g} ms of dense compute)"
    replicated = (solution.choice < OWNER_POOLED) & (solution.first >= problem.grid.steps)
    if workload.cluster.world_size == 1 or bool(replicated.all()):
        return "GPU memory bandwidth: no row is exchanged"
    return "the links: memory for more copies would save almost nothing"


def balance(problem: Problem, best: Score) -> float:
    """Predicted maximum over mean of the lookups that ranks serve: the hottest rows without replicas are placed one by one,
    table-wise tables are where they are, everything else is even."""
    grid, solution, ranks = problem.grid, best.solution, problem.workload.cluster.world_size
    if ranks == 1:
        return 1.0
    cold: Mask = (np.arange(grid.rows.shape[1]) >= solution.second[:, None]) & (solution.choice != TABLE_WISE)[:, None]
    weight = np.where(cold & (grid.rows > 0), grid.requested.rank, 0.0) * ranks  # requests per step for one row
    order = np.argsort(-weight, axis=None, kind="stable")
    alone = order[np.cumsum(grid.rows.ravel()[order]) <= EXPANDED]
    chosen = np.zeros(weight.shape, bool)
    chosen.flat[alone] = weight.ravel()[alone] > 0
    inputs = []
    for t in np.flatnonzero(chosen.any(axis=1)):
        counts = grid.rows[t, chosen[t]].astype(np.int64)
        weights = np.repeat(weight[t, chosen[t]], counts)
        rows = max(int((grid.rows[t] * cold[t]).sum()), len(weights))
        inputs.append(PlacementInput(rows, np.arange(len(weights)), weights, 0))
    load_R = place(inputs, ranks)[1] if inputs else np.zeros(ranks)
    at = np.flatnonzero(solution.choice == TABLE_WISE)
    np.add.at(load_R, solution.rank[at], grid.lookups[at] * ranks)
    rest = float(grid.lookups.sum()) * ranks - float(load_R.sum())
    return imbalance(load_R + max(rest, 0.0) / ranks)
