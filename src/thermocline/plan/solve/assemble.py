"""A solution as a plan: every number that `plan show` and `plan check` need, and the reasons for every table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

import numpy as np

from thermocline.plan.cost.phases import latency, waits
from thermocline.plan.cost.step_cost import CLUSTER, NODE, Floats
from thermocline.plan.model import (
    DIRECTIONS,
    MEMORY_PARTS,
    Alternative,
    CardPlan,
    Goal,
    Lever,
    LinkClass,
    Marginal,
    Offer,
    Plan,
    StepPlan,
    TablePlan,
    Tier,
    Traffic,
)
from thermocline.plan.report.details import ASK, BACK, EQUAL, FORTH, LOOKUP, MAPS, UPDATE, Detail, detail, messages
from thermocline.plan.report.reasons import Reasons, balance, binding, reasons
from thermocline.plan.tables import TableFile, Tables
from thermocline.plan.topology import Topology

from .solver import Problem, Score, Search, ahead, phases
from .tiers import CARD, OPTIONS, OWNER

POINTS = 40  # of a heat curve are kept for pictures
_OBJECTIVE = {
    "train": "the shortest training step: lookup, exchange and update, and what of ids and rows the dense part does not hide",
    "serve": "the shortest request: lookup and exchange, one after the other",
}


@dataclass(frozen=True)
class Context:
    """What a plan says that the solver does not know."""

    tables: Tables
    topology: Topology
    goal: Goal
    heat: str
    created: str
    levers: Mapping[str, tuple[Lever, ...]]
    marginals: tuple[Marginal, ...]
    offers: tuple[Offer, ...]
    notes: tuple[str, ...]


def assemble(problem: Problem, scores: Sequence[tuple[str, Score]], search: Search, context: Context) -> Plan:
    """The best of some solutions as a plan."""
    best, job = scores[0][1], problem.job
    details = [detail(problem, best, table) for table in range(len(job.works))]
    saves = context.marginals[0].saves or 0.0 if context.marginals else 0.0  # of more memory
    why = reasons(problem, best, search, saves)
    tables = tuple(
        _table(problem, best, n, details[n], given, why, context.levers.get(given.name, ()))
        for n, given in enumerate(context.tables.tables)
    )
    step = _step(problem, best, details, context)
    return Plan(
        created=context.created,
        goal=context.goal,
        objective=_OBJECTIVE[context.goal],
        heat=context.heat,
        topology=context.topology,
        budget=job.budget,
        batch=context.tables.batch,
        dense=context.tables.dense,
        optimizer=context.tables.optimizer,
        gradients="bf16" if job.gradient == "bf16" else "fp32",
        tables=tables,
        cards=_cards(problem, best, details),
        traffic=_traffic(
            sum(d.sent for d in details), sum(d.kept for d in details), messages(problem, best), sum(d.host for d in details)
        ),
        step=step,
        balance=balance(problem, best),
        binding=binding(problem, best, search, saves),
        marginals=context.marginals,
        offers=context.offers,
        candidates=tuple(_candidate(name, found, job.budget) for name, found in scores),
        notes=context.notes,
    )


def _candidate(name: str, found: Score, budget: int) -> Alternative:
    fits = found.fullest <= budget
    detail = "" if fits else f"would take {found.time * 1e3:.3g} ms"
    return Alternative(name=name, feasible=fits, time=found.time if fits else None, bytes=ceil(found.fullest), detail=detail)


def _table(
    problem: Problem, best: Score, n: int, found: Detail, given: TableFile, why: Reasons, levers: tuple[Lever, ...]
) -> TablePlan:  # fmt: skip
    work, choice, machine = problem.job.works[n], int(best.solution.choice[n]), problem.job.machine
    one_card = choice == CARD
    replicated = choice < OWNER and found.rows[0] == found.rows.sum() and machine.all > 1
    pooled = {CARD: problem.card.pooled, OWNER: problem.owner.pooled}.get(choice, np.zeros(len(problem.job.works), bool))[n]
    travels = machine.all > 1 and not replicated
    exchange = "none" if not travels else OPTIONS[choice].exchange if choice < OWNER else "flat"
    held = found.bytes * (1 if one_card else machine.all)
    held[MAPS] += work.ids * machine.all
    names = ("lookup", "update", "rows", "gradients", "ids", "sync")
    return TablePlan(
        name=given.name,
        rows=work.rows,
        dim=given.dim,
        pooling=given.pooling,
        features=given.looked_up_by,
        lookups=work.lookups,
        precision=work.store.base,
        cache=work.store.full,
        near=work.store.near,
        residency="host" if work.host else "card",
        placement="card" if one_card else "replicated" if replicated else "tiers",
        card=int(best.solution.card[n]) if one_card else None,
        tiers=_tiers(problem, best, n, found),
        exchange=exchange,
        pooled_by="owner" if pooled else "asker",
        wire_rows="fp32" if pooled else work.store.base,
        wire_gradients=problem.job.gradient or "none",
        levers=levers,
        bytes={part: round(size) for part, size in zip(MEMORY_PARTS, held, strict=True)},
        traffic=_traffic(found.sent, found.kept, np.zeros((2, 4)), found.host),
        time={name: float(second) for name, second in zip(names, found.seconds, strict=True)},
        runner_up=why.runner_up[n],
        binding=why.binding[n],
        curve=_points(problem, n),
    )


def _tiers(problem: Problem, best: Score, n: int, found: Detail) -> tuple[Tier, ...]:
    work, grid, choice = problem.job.works[n], problem.grid, int(best.solution.choice[n])
    ends = np.cumsum(found.rows)
    heat_K = grid.share[n, : grid.steps[n]] * work.curve.lookups  # lookups of a row, as the heat file counts them
    reach_K = np.cumsum(grid.rows[n, : grid.steps[n]])
    tiers = []
    for tier in (1, 2, 3):
        rows = round(float(found.rows[tier - 1]))
        if not rows:
            continue
        last = min(int(np.searchsorted(reach_K, ends[tier - 1] - 0.5)), len(heat_K) - 1)
        plain = tier == 1 and choice < OWNER and OPTIONS[choice].plain
        full, near = (0, 0) if plain else (round(float(found.full[tier - 1])), round(float(found.near[tier - 1])))
        tiers.append(
            Tier(
                tier=tier, rows=rows, threshold=float(heat_K[last]), lookups=min(float(found.lookups[tier - 1]), 1.0),
                precision="fp32" if plain else work.store.base, cached=full, near=near,
            )
        )  # fmt: skip
    return tuple(tiers)


def _points(problem: Problem, n: int) -> tuple[tuple[float, float], ...]:
    curve = problem.job.works[n].curve
    reach_K, taken_K = np.cumsum(curve.rows_K), np.cumsum(curve.lookups_K) / max(curve.lookups, 1e-300)
    seen = np.flatnonzero(curve.lookups_K)[-1:]  # from the last row that was ever looked up the curve is flat
    at = np.unique(np.concatenate([np.linspace(0, len(reach_K) - 1, POINTS).astype(np.int64), seen]))
    return tuple((round(float(reach_K[k]), 3), round(min(float(taken_K[k]), 1.0), 6)) for k in at)


def _traffic(sent: Floats | float, kept: Floats | float, sends: Floats, host: Floats | float) -> tuple[Traffic, ...]:
    """What is not zero of [link, direction] bytes and messages."""
    lines = []
    classes: tuple[tuple[LinkClass, Floats, Floats], ...] = (
        ("card", np.asarray(kept), np.zeros(4)),
        ("host", np.asarray(host), np.zeros(4)),
        ("node", np.asarray(sent)[NODE], sends[NODE]),
        ("cluster", np.asarray(sent)[CLUSTER], sends[CLUSTER]),
    )
    for link, bytes_, count in classes:
        for direction, size, messages_ in zip(DIRECTIONS, bytes_, count, strict=True):
            if size > 0:
                lines.append(Traffic(link=link, direction=direction, bytes=float(size), messages=float(messages_)))
    return tuple(lines)


def _cards(problem: Problem, best: Score, details: Sequence[Detail]) -> tuple[CardPlan, ...]:
    """Runs of cards that hold the same."""
    card_T, cards = best.solution.card, problem.job.machine.all
    everywhere = sum((d.bytes for d, card in zip(details, card_T, strict=True) if card < 0), np.zeros(len(MEMORY_PARTS)))
    everywhere[MAPS] += problem.grid.ids.sum()
    whole: dict[int, list[int]] = {}
    for table in np.flatnonzero(card_T >= 0):
        whole.setdefault(int(card_T[table]), []).append(int(table))
    groups = []
    for held, run in groupby(range(cards), key=lambda card: tuple(whole.get(card, ()))):
        numbers = list(run)
        each = everywhere + sum((details[table].bytes for table in held), np.zeros(len(MEMORY_PARTS)))
        groups.append(
            CardPlan(
                first=numbers[0],
                count=len(numbers),
                bytes=dict(zip(MEMORY_PARTS, _whole(each), strict=True)),
                host=round(float((problem.grid.host * problem.grid.rows.sum(axis=1)).sum()) / cards),
                tables=tuple(problem.job.works[table].name for table in held),
            )
        )
    return tuple(groups)


def _whole(parts: Floats) -> list[int]:
    """Parts of a card in whole bytes. They add up to no less than it takes: a budget of so many bytes has room for it."""
    ends = np.ceil(np.round(np.cumsum(parts), 3))
    return [int(size) for size in np.diff(ends, prepend=0.0)]


def _step(problem: Problem, best: Score, details: Sequence[Detail], context: Context) -> StepPlan:
    """The step by part: what all cards do, what the busiest of those with whole tables does, and latencies."""
    job, solution = problem.job, best.solution
    total = sum((d.seconds for d, card in zip(details, solution.card, strict=True) if card < 0), np.zeros(6))
    at = np.flatnonzero(solution.card >= 0)
    if len(at):
        own_C = np.zeros((job.machine.all, 6))
        for table in at:
            own = details[table].seconds.copy()
            own[[LOOKUP, UPDATE]] -= problem.always[:, table]
            own_C[solution.card[table]] += own
            total[[LOOKUP, UPDATE]] += problem.always[:, table]
        busiest = own_C[int(np.argmax(own_C[:, [LOOKUP, UPDATE, FORTH, BACK]].sum(axis=1)))].copy()
        busiest[ASK] = own_C[:, ASK].max()
        total += busiest
    more = problem.owners.standing(solution.choice, solution.second).more()
    total[[ASK, FORTH, BACK, EQUAL, LOOKUP]] += more  # in the order of `busiest.PARTS`
    names = ("lookup", "update", "rows", "gradients", "ids", "sync")
    parts = {name: float(second) for name, second in zip(names, total, strict=True)} | {"dense": job.dense + job.below}
    parts = {name: parts[name] for name in ("lookup", "rows", "gradients", "update", "ids", "sync", "dense")}
    found, overlaps = phases(problem, best), ahead(job, best)
    for turn in found:
        parts[turn.part] += latency(job.machine, turn.reach)
    hidden = min(best.hidden, job.dense) + min(best.exposed, job.below) if overlaps else 0.0
    whole = sum(parts.values()) - hidden
    samples = context.tables.batch * job.machine.all
    # Requests follow each other: what bounds their rate is the busiest of memory, links and the dense part.
    links = parts["rows"] + parts["ids"] - sum(waits(job.machine, found))
    busiest_part = whole if job.gradient is not None else max(parts["lookup"], links, parts["dense"])
    return StepPlan(
        parts=parts,
        overlaps=("ids", "rows", *(("gradients", "sync") if job.below else ())) if overlaps else (),
        hidden=hidden,
        total=whole,
        throughput=samples / max(busiest_part, 1e-12),
    )
