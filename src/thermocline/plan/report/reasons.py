"""Why each table is as it is: the next best choice and what it would cost, and the constraint that kept it from a better one.

At the prices that the search ended with, every kind of choice (a set of tiers, a way to exchange, whole on a card) has its best
split. The runner-up is the one of another kind with which the step would be shortest, the other tables as they are; latency of
an exchange that no other table needs counts. A table is
bound by memory if it would choose otherwise were memory free and the step were shorter so, by the dense part if it would choose
otherwise were everything hidden. Prices of rows know no latency: a search may pay for memory though the plan that it finds, or
a plain one, is the best with any memory. So what counts is whether a plan with more memory is faster (`saves`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thermocline.plan.balance import Heat, place, uneven
from thermocline.plan.cost.step_cost import Floats
from thermocline.plan.model import Alternative
from thermocline.plan.solve.solver import Mask, Problem, Score, Search, apart, latency, needs, priced, score, split_sums
from thermocline.plan.solve.tiers import CARD, CHOICES, OPTIONS, OWNER, SETS, Whole
from thermocline.plan.units import show_bytes

EXPANDED = 4096  # rows whose balance is worked out one by one, the hottest of all tables
FULL = 0.97  # of a budget: what is left is less than a step of a curve
LITTLE = 1e-6  # of a step: what saves no more saves nothing
FREE = "nothing: more memory or more time to hide in would not change it"
MEMORY = "the memory of the cards"
HIDING = "the dense part, which hides no more sync"
_SET_NAMES = {
    (3,): "row-wise", (1,): "on every card", (2,): "one copy a node", (1, 3): "tiers 1 and 3", (2, 3): "tiers 2 and 3",
    (1, 2): "tiers 1 and 2", (1, 2, 3): "tiers 1, 2 and 3",
}  # fmt: skip


@dataclass(frozen=True)
class Reasons:
    """[T]"""

    runner_up: list[Alternative | None]
    binding: list[str]


def names() -> list[list[str]]:
    """What each choice and set of tiers is called [choice][set]; those of one name do not count as different."""
    found = []
    for option in OPTIONS:
        way = ", per node" if option.exchange == "node" else ""
        found.append([_SET_NAMES[tiers] + (way if 3 in tiers else "") for tiers in SETS])
    return [*found, ["row-wise, summed by owners"] * len(SETS), ["whole on one card"] * len(SETS)]


def chosen_names(problem: Problem, best: Score) -> list[str]:
    """What was chosen for each table."""
    solution, label = best.solution, names()
    found = []
    for choice, first, second, steps in zip(solution.choice, solution.first, solution.second, problem.grid.steps, strict=True):
        tiers = tuple(t for t, used in ((1, first > 0), (2, second > first), (3, second < steps)) if used)
        kind = SETS.index(tiers) if choice < OWNER else 0
        found.append(label[int(choice)][kind])
    return found


def reasons(problem: Problem, best: Score, search: Search, saves: float) -> Reasons:
    """For every table of a solution; `saves`: what the step would lose with more memory."""
    mine, label = chosen_names(problem, best), names()
    costs, _, first, second = priced(problem, problem.may(), search.mu, search.lam)
    same = np.array([[[label[c][s] == name for s in range(len(SETS))] for c in range(CHOICES)] for name in mine])
    out = same | _empty(problem, first, second) | ~np.isfinite(costs)
    times, sizes = np.full(costs.shape, np.inf), np.zeros(costs.shape)
    for c in range(CHOICES):
        for s in range(len(SETS)):
            if not out[:, c, s].all():
                times[:, c, s], sizes[:, c, s] = _instead(problem, best, np.full(len(mine), c), first[:, c, s], second[:, c, s])
    budget = problem.job.budget
    rank = np.where(out, np.inf, times + (sizes > budget) * 1e6)  # what does not fit comes last
    at = rank.reshape(len(mine), -1).argmin(axis=1)
    runner_up = [
        Alternative(
            name=label[c][s], feasible=bool(sizes[t, c, s] <= budget), bytes=round(float(sizes[t, c, s])),
            time=float(times[t, c, s]) if sizes[t, c, s] <= budget else None,
        ) if np.isfinite(rank[t, c, s]) else None
        for t, (c, s) in enumerate(divmod(int(n), len(SETS)) for n in at)
    ]  # fmt: skip
    return Reasons(runner_up, _bindings(problem, best, search, saves, mine))


def _empty(problem: Problem, first: Whole, second: Whole) -> Mask:
    """Where a split leaves a tier of its set without rows [T, choice, set]: it is another set in truth."""
    steps = problem.grid.steps[:, None, None]
    used = np.stack([first > 0, second > first, second < steps])
    sets = np.array([[tier in tiers for tiers in SETS] for tier in (1, 2, 3)])[:, None, None, :]
    empty: Mask = (used != sets).any(axis=0)
    empty[:, OWNER:] = False
    return empty


def _instead(problem: Problem, best: Score, choice: Whole, first: Whole, second: Whole) -> tuple[Floats, Floats]:
    """The step and the fullest card, if one table at a time were decided otherwise; packing as it is."""
    solution, job = best.solution, problem.job
    before = split_sums(problem, solution.choice, solution.first, solution.second)
    after = split_sums(problem, choice, first, second)
    exposed, hidden, held = (new - old for new, old in zip(after, before, strict=True))
    on_card = choice == CARD
    card = problem.card
    exposed, hidden = exposed + on_card * card.exposed, hidden + on_card * card.hidden
    held = held + on_card * card.bytes
    leaving = solution.choice == CARD
    exposed, hidden = exposed - leaving * card.exposed / job.machine.all, hidden - leaving * card.hidden / job.machine.all
    now_T, then_T = needs(problem, solution.choice, solution.first, solution.second), needs(problem, choice, first, second)
    others = now_T.sum(axis=1, keepdims=True) - now_T > 0
    waited, waiting = latency(problem, others | now_T), latency(problem, others | then_T)
    exposed, hidden = exposed + waiting[0] - waited[0], hidden + waiting[1] - waited[1]
    stands = problem.owners.standing(solution.choice, solution.second)
    ids, others_more = apart(stands.instead(problem.owners.standing(choice, second)) - stands.more()[:, None])
    exposed, hidden = exposed + others_more, hidden + ids
    return job.step(best.exposed + exposed, best.hidden + hidden, waiting[2]), best.fullest + held


def _full(problem: Problem, best: Score, search: Search, saves: float) -> bool:
    """Whether memory bounds a plan: more of it is worth something, or copies have filled it and not all rows have them."""
    solution, filled = best.solution, best.fullest > FULL * problem.job.budget
    some_T = (solution.choice < OWNER) & (solution.second > 0) & (solution.first < problem.grid.steps)
    return (filled and bool(some_T.any())) or ((filled or search.full) and saves > LITTLE * best.time)


def _bindings(problem: Problem, best: Score, search: Search, saves: float, mine: list[str]) -> list[str]:
    """What keeps every table from another choice."""
    full = _full(problem, best, search, saves)
    free_memory = _with_more(problem, best, search, mine) if full else mine
    free_time = (
        _kinds(problem, search.allowed, 0.0, search.lam)
        if search.mu > 0 and problem.job.dense > 0 and problem.job.gradient
        else mine
    )
    found = []
    for name, memory, time in zip(mine, free_memory, free_time, strict=True):
        if memory != name:
            found.append(f"{MEMORY}: with more it would be {memory}")
        elif full and name.startswith(("tiers", "one copy")):
            found.append(f"{MEMORY}: with more, more of its rows would have copies")
        elif time != name:
            found.append(f"{HIDING}: with more of it it would be {time}")
        else:
            found.append(FREE)
    return found


def _with_more(problem: Problem, best: Score, search: Search, mine: list[str]) -> list[str]:
    """What every table would be were memory free: another only where the step is shorter with it, alone or with all others."""
    costs, _, first, second = priced(problem, search.allowed, search.mu, 0.0)
    choice, kind = _cheapest(costs)
    tables, label = np.arange(len(mine)), names()
    split = first[tables, choice, kind], second[tables, choice, kind]
    shorter = (1 - LITTLE) * best.time
    alone_T, together = _instead(problem, best, choice, *split)[0] < shorter, score(problem, choice, *split).time < shorter
    return [label[choice[t]][kind[t]] if together or alone_T[t] else name for t, name in enumerate(mine)]


def _kinds(problem: Problem, may: Mask, mu: float, lam: float) -> list[str]:
    choice, kind = _cheapest(priced(problem, may, mu, lam)[0])
    label = names()
    return [label[int(c)][int(k)] for c, k in zip(choice, kind, strict=True)]


def _cheapest(costs: Floats) -> tuple[Whole, Whole]:
    """Choice and set of tiers of every table."""
    return np.divmod(costs.reshape(len(costs), -1).argmin(axis=1), len(SETS))


def binding(problem: Problem, best: Score, search: Search, saves: float) -> str:
    """What the whole plan is bound by; `saves`: what the step would lose with more memory."""
    budget, dense = problem.job.budget, problem.job.dense
    if _full(problem, best, search, saves):
        return f"{MEMORY} ({show_bytes(best.fullest)} of {show_bytes(budget)} on card {int(np.argmax(best.bytes_C))})"
    if problem.job.gradient and best.hidden >= 0.98 * dense > 0:
        return f"{HIDING} ({best.hidden * 1e3:.3g} ms of ids and rows, {dense * 1e3:.3g} ms to hide in)"
    if problem.job.machine.all == 1 or bool(
        ((best.solution.choice < OWNER) & (best.solution.first >= problem.grid.steps)).all()
    ):
        return "the rate of card memory: no row is exchanged"
    return "the links: more memory for more copies would save next to nothing"


def balance(problem: Problem, best: Score) -> float:
    """Predicted maximum over mean of the lookups that cards serve: the hottest cold rows placed one by one, whole tables where
    they are, everything else even."""
    grid, solution, cards = problem.grid, best.solution, problem.job.machine.all
    if cards == 1:
        return 1.0
    cold: Mask = (np.arange(grid.rows.shape[1]) >= solution.second[:, None]) & (solution.choice != CARD)[:, None]
    weight = np.where(cold & (grid.rows > 0), grid.asked.card, 0.0) * cards  # requests a step for one row
    order = np.argsort(-weight, axis=None, kind="stable")
    alone = order[np.cumsum(grid.rows.ravel()[order]) <= EXPANDED]
    chosen = np.zeros(weight.shape, bool)
    chosen.flat[alone] = weight.ravel()[alone] > 0
    heats = []
    for t in np.flatnonzero(chosen.any(axis=1)):
        counts = grid.rows[t, chosen[t]].astype(np.int64)
        weights = np.repeat(weight[t, chosen[t]], counts)
        rows = max(int((grid.rows[t] * cold[t]).sum()), len(weights))
        heats.append(Heat(rows, np.arange(len(weights)), weights, 0))
    load_C = place(heats, cards)[1] if heats else np.zeros(cards)
    whole = np.flatnonzero(solution.choice == CARD)
    np.add.at(load_C, solution.card[whole], grid.lookups[whole] * cards)
    rest = float(grid.lookups.sum()) * cards - float(load_C.sum())
    return uneven(load_C + max(rest, 0.0) / cards)
