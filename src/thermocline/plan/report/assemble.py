"""From a solution to a plan: every number that `plan show` and `plan check` need, and the reasons for every table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING, cast

import numpy as np

from thermocline.plan import model as M
from thermocline.plan.cost.phases import exchange_latency, phase_latency
from thermocline.plan.cost.step_cost import CLUSTER, NODE, Floats
from thermocline.plan.solve.solver import Problem, Score, Search, pack_on, phases, prefetches
from thermocline.plan.solve.tiers import OPTIONS, OWNER_POOLED, TABLE_WISE
from thermocline.plan.tables import TableConfig

from . import table_cost as T
from .reasons import Reasons, balance, plan_binding, table_reasons
from .table_cost import TableCost, messages, table_cost

if TYPE_CHECKING:
    from thermocline.plan.make import PlanRequest

CURVE_POINTS = 40  # of a heat curve, for charts
_SECONDS_PARTS = ("lookup", "update", "rows", "gradients", "ids", "sync")  # in the order of `TableCost.seconds`
_OBJECTIVE = {
    "train": "shortest training step: lookup, exchange and update, and ids and rows that the dense part does not hide",
    "serve": "shortest request: lookup and exchange in sequence",
}


def assemble(
    request: PlanRequest, problem: Problem, scores: Sequence[tuple[str, Score]], search: Search,
    levers: Mapping[str, tuple[M.Lever, ...]], sensitivities: tuple[M.Sensitivity, ...], suggestions: tuple[M.Suggestion, ...],
) -> M.Plan:  # fmt: skip
    """The first of some solutions as a plan; the others are its candidates."""
    best, workload, given = scores[0][1], problem.workload, request.tables
    costs = [table_cost(problem, best, table) for table in range(len(workload.tables))]
    saves = sensitivities[0].saves or 0.0 if sensitivities else 0.0  # with more memory
    why = table_reasons(problem, best, search, saves)
    sent, kept, host = (sum(each) for each in zip(*((cost.sent, cost.kept, cost.host) for cost in costs), strict=True))
    goal: M.Goal = "train" if workload.gradient else "serve"
    return M.Plan(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        goal=goal,
        objective=_OBJECTIVE[goal],
        heat=request.heat_sha256,
        topology=request.topology,
        budget=request.cap,
        batch=given.batch,
        dense=given.dense,
        optimizer=given.optimizer,
        gradients=cast(M.WirePrecision, workload.gradient or "fp32"),
        sums=cast(M.WirePrecision, workload.sums),
        tables=tuple(_table(problem, best, n, costs[n], t, why, levers.get(t.name, ())) for n, t in enumerate(given.tables)),
        ranks=_ranks(problem, best, costs),
        traffic=_traffic(sent, kept, messages(problem, best), host),
        step=_step(problem, best, costs, given.batch),
        balance=balance(problem, best),
        binding=plan_binding(problem, best, search, saves),
        sensitivities=sensitivities,
        suggestions=suggestions,
        candidates=tuple(_candidate(name, found, workload.budget) for name, found in scores),
        notes=request.notes,
    )


def _candidate(name: str, found: Score, budget: int) -> M.Alternative:
    fits = found.peak_bytes <= budget
    detail = "" if fits else f"would take {found.time * 1e3:.3g} ms"
    return M.Alternative(
        name=name, feasible=fits, time=found.time if fits else None, bytes=ceil(found.peak_bytes), detail=detail
    )


def _table(
    problem: Problem, best: Score, n: int, cost: TableCost, given: TableConfig, why: Reasons, levers: tuple[M.Lever, ...]
) -> M.TablePlan:  # fmt: skip
    work, choice, ranks = problem.workload.tables[n], int(best.solution.choice[n]), problem.workload.cluster.world_size
    table_wise = choice == TABLE_WISE
    replicated = choice < OWNER_POOLED and cost.rows[0] == cost.rows.sum() and ranks > 1
    pooled = choice == OWNER_POOLED or (table_wise and bool(problem.table_wise.pooled[n]))
    travels = ranks > 1 and not replicated
    held = cost.bytes * (1 if table_wise else ranks)
    held[T.MAPS] += work.id_map_bytes * ranks
    held[T.BUFFERS] += problem.table_wise.requested[n] * ranks * table_wise
    return M.TablePlan(
        name=given.name,
        rows=work.rows,
        dim=given.dim,
        pooling=given.pooling,
        features=given.feature_names,
        lookups=work.lookups,
        precision=work.precision.base,
        cache=work.precision.fp32,
        near=work.precision.int8,
        residency="host" if work.host else "card",
        placement="card" if table_wise else "replicated" if replicated else "tiers",
        rank=int(best.solution.rank[n]) if table_wise else None,
        tiers=_tiers(problem, best, n, cost),
        exchange="none" if not travels else OPTIONS[choice].exchange if choice < OWNER_POOLED else "flat",
        pooled_by="owner" if pooled else "asker",
        wire_rows=problem.workload.sums if pooled else work.precision.base,
        wire_gradients=problem.workload.gradient or "none",
        levers=levers,
        bytes={part: round(size) for part, size in zip(M.MEMORY_PARTS, held, strict=True)},
        traffic=_traffic(cost.sent, cost.kept, np.zeros((2, 4)), cost.host),
        time={name: float(second) for name, second in zip(_SECONDS_PARTS, cost.seconds, strict=True)},
        runner_up=why.runner_up[n],
        binding=why.binding[n],
        curve=_curve_points(problem, n),
    )


def _tiers(problem: Problem, best: Score, n: int, cost: TableCost) -> tuple[M.Tier, ...]:
    work, grid, choice = problem.workload.tables[n], problem.grid, int(best.solution.choice[n])
    ends = np.cumsum(cost.rows)
    heat_K = grid.share[n, : grid.steps[n]] * work.curve.lookups  # lookups of a row in the heat file
    reach_K = np.cumsum(grid.rows[n, : grid.steps[n]])
    tiers = []
    for tier in (1, 2, 3):
        rows = round(float(cost.rows[tier - 1]))
        if not rows:
            continue
        last = min(int(np.searchsorted(reach_K, ends[tier - 1] - 0.5)), len(heat_K) - 1)
        plain = tier == 1 and choice < OWNER_POOLED and OPTIONS[choice].plain
        fp32, int8 = (0, 0) if plain else (round(float(cost.fp32[tier - 1])), round(float(cost.int8[tier - 1])))
        tiers.append(
            M.Tier(
                tier=tier, rows=rows, threshold=float(heat_K[last]), lookups=min(float(cost.lookups[tier - 1]), 1.0),
                precision="fp32" if plain else work.precision.base, cached=fp32, near=int8,
            )
        )  # fmt: skip
    return tuple(tiers)


def _curve_points(problem: Problem, n: int) -> tuple[tuple[float, float], ...]:
    curve = problem.workload.tables[n].curve
    reach_K, taken_K = np.cumsum(curve.rows_K), np.cumsum(curve.lookups_K) / max(curve.lookups, 1e-300)
    seen = np.flatnonzero(curve.lookups_K)[-1:]  # the curve is flat after the last row ever looked up
    at = np.unique(np.concatenate([np.linspace(0, len(reach_K) - 1, CURVE_POINTS).astype(np.int64), seen]))
    return tuple((round(float(reach_K[k]), 3), round(min(float(taken_K[k]), 1.0), 6)) for k in at)


def _traffic(sent: Floats, kept: Floats, sends: Floats, host: Floats) -> tuple[M.Traffic, ...]:
    """The non-zero entries of bytes and messages by link and direction."""
    lines = []
    classes: tuple[tuple[M.LinkClass, Floats, Floats], ...] = (
        ("card", kept, np.zeros(4)),
        ("host", host, np.zeros(4)),
        ("node", sent[NODE], sends[NODE]),
        ("cluster", sent[CLUSTER], sends[CLUSTER]),
    )
    for link, bytes_, count in classes:
        for direction, size, messages_ in zip(M.DIRECTIONS, bytes_, count, strict=True):
            if size > 0:
                lines.append(M.Traffic(link=link, direction=direction, bytes=float(size), messages=float(messages_)))
    return tuple(lines)


def _ranks(problem: Problem, best: Score, costs: Sequence[TableCost]) -> tuple[M.RankPlan, ...]:
    """Runs of consecutive ranks with equal content."""
    rank_T, ranks = best.solution.rank, problem.workload.cluster.world_size
    everywhere = sum((c.bytes for c, rank in zip(costs, rank_T, strict=True) if rank < 0), np.zeros(len(M.MEMORY_PARTS)))
    everywhere[T.MAPS] += problem.grid.id_maps.sum()
    everywhere[T.BUFFERS] += problem.table_wise.requested[rank_T >= 0].sum()
    table_wise: dict[int, list[int]] = {}
    for table in np.flatnonzero(rank_T >= 0):
        table_wise.setdefault(int(rank_T[table]), []).append(int(table))
    groups, grid, spare_R = [], problem.grid, np.broadcast_to(problem.workload.spare_R, ranks)
    for (held, _), run in groupby(range(ranks), key=lambda rank: (tuple(table_wise.get(rank, ())), spare_R[rank])):
        numbers = list(run)
        each = everywhere + sum((costs[table].bytes for table in held), np.zeros(len(M.MEMORY_PARTS)))
        others = [table for table in np.flatnonzero(rank_T >= 0) if table not in held]
        each[[T.TABLES, T.STATE]] += grid.row[others].sum(), grid.state[others].sum()  # one row that is never looked up
        groups.append(
            M.RankPlan(
                first=numbers[0],
                count=len(numbers),
                bytes=dict(zip(M.MEMORY_PARTS, _whole_bytes(each), strict=True)),
                host=round(float((grid.host * grid.rows.sum(axis=1)).sum()) / ranks),
                tables=tuple(problem.workload.tables[table].name for table in held),
            )
        )
    return tuple(groups)


def _whole_bytes(parts: Floats) -> list[int]:
    """Parts rounded to whole bytes, with a sum that is not below the exact one."""
    ends = np.ceil(np.round(np.cumsum(parts), 3))
    return [int(size) for size in np.diff(ends, prepend=0.0)]


def _step(problem: Problem, best: Score, costs: Sequence[TableCost], batch: int) -> M.StepPlan:
    """The step by part: the work of all ranks, of the busiest rank with table-wise tables, and latencies."""
    workload, solution = problem.workload, best.solution
    total = sum((c.seconds for c, rank in zip(costs, solution.rank, strict=True) if rank < 0), np.zeros(6))
    at = np.flatnonzero(solution.rank >= 0)
    packed = pack_on(problem, at, solution.rank[at])
    fixed = problem.fixed.sum(axis=1)
    memory_R = (fixed[:, None] + packed.local_R) / workload.cluster.speed_R
    busiest = memory_R[:, int(np.argmax(memory_R.sum(axis=0)))] - fixed
    total[[T.LOOKUP, T.UPDATE]] += busiest + problem.fixed[:, at].sum(axis=1)
    total[[T.SEND_IDS, T.SEND_ROWS, T.SEND_GRADIENTS, T.SEND_SYNC]] += packed.seconds
    excess = problem.hot_owner.loads(solution.choice, solution.second).excess()
    total[[T.SEND_IDS, T.SEND_ROWS, T.SEND_GRADIENTS, T.SEND_SYNC, T.LOOKUP]] += excess  # in the order of `hot_owner.PARTS`
    seconds = {name: float(second) for name, second in zip(_SECONDS_PARTS, total, strict=True)}
    seconds["dense"] = workload.dense + workload.below
    parts = {name: seconds[name] for name in M.STEP_PARTS}
    exchanges, prefetch = phases(problem, best), prefetches(workload, best)
    for phase in exchanges:
        parts[phase.part] += exchange_latency(workload.cluster, phase.scope)
    hidden = min(best.hidden, workload.dense) + min(best.exposed, workload.below) if prefetch else 0.0
    step = sum(parts.values()) - hidden
    samples = batch * workload.cluster.world_size
    # Requests follow each other: the slowest of memory, links and dense part limits their rate.
    links = parts["rows"] + parts["ids"] - sum(phase_latency(workload.cluster, exchanges))
    slowest = step if workload.gradient is not None else max(parts["lookup"], links, parts["dense"])
    return M.StepPlan(
        parts=parts,
        overlaps=("ids", "rows", *(("gradients", "sync") if workload.below else ())) if prefetch else (),
        hidden=hidden,
        total=step,
        throughput=samples / max(slowest, 1e-12),
    )
