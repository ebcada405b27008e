"""`make_plan`: tables, heat and topology in, a plan out, or an error that says what is missing and what would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import numpy as np

from ..errors import BadInput
from ..heat.curve import Curve
from ..heat.profile import HeatProfile
from .assemble import Context, assemble
from .candidates import everything
from .cost import Machine
from .levers import FeatureRows, Fewer
from .memory import Store, state_bytes
from .model import Goal, Lever, Marginal, Plan
from .read_heat import HeatOfTables, Seen, read_heat
from .solve import Problem, Score, Search, score
from .stores import choose, ladder_of, stored_bytes
from .tables import TableFile, Tables
from .topology import Topology
from .units import read_bytes, show_bytes
from .ways_out import infeasible
from .work import Job, Work, turn_bytes

GOALS, GRADIENTS = ("train", "serve"), ("fp32", "bf16")
GIB = 1 << 30


def make_plan(
    tables: Tables | str | Path,
    heat: HeatOfTables | str | Path,
    topology: Topology | str | Path,
    budget: int | str | None = None,
    goal: Goal = "train",
    gradients: str = "fp32",
    levers: Fewer | None = None,
    shuffled: bool = False,
) -> Plan:
    """Decide precision, copies and place of every row.

    `heat` is a profile, its file, or a curve for each table. `budget` is what tables may fill of every card (all of it if left
    away). `goal="serve"` plans for requests instead of training steps: nothing is updated, so replicas need no sync.
    `gradients` is their precision on the wire. `levers` are rows that were taken away before (`hash_sizes`, `prune`).
    `shuffled`: samples come in random order, so that batches repeat ids less than the log does.
    """
    request = _read(tables, heat, topology, budget, goal, gradients, levers, shuffled)
    problem, scores, search = request.solve()
    if search is None or scores[0][1].fullest > request.budget:
        raise infeasible(request.tables, request.topology, problem, request.rungs, request.seen)
    context = Context(
        tables=request.tables,
        topology=request.topology,
        goal=goal,
        heat=heat.sha256 if isinstance(heat := request.heat, HeatProfile) else "",
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        levers=request.levers,
        marginals=request.marginals(scores[0][1], search),
        notes=request.notes,
    )
    return assemble(problem, scores, search, context)


@dataclass(frozen=True)
class Request:
    """All that a plan is made from, read and checked."""

    tables: Tables
    heat: HeatOfTables
    topology: Topology
    budget: int
    gradient: str | None
    seen: tuple[Seen, ...]
    levers: Mapping[str, tuple[Lever, ...]]
    rungs: tuple[Store, ...]
    notes: tuple[str, ...] = ()

    def job(self) -> Job:
        works = tuple(
            _work(table, seen, store, self)
            for table, seen, store in zip(self.tables.tables, self.seen, self.rungs, strict=True)
        )
        return Job(Machine.of(self.topology), works, self.budget, self.tables.dense, self.gradient)

    def solve(self) -> tuple[Problem, list[tuple[str, Score]], Search | None]:
        problem = Problem.of(self.job())
        return problem, *everything(problem)

    def marginals(self, found: Score, search: Search) -> tuple[Marginal, ...]:
        """What a little more memory and a few more cards would buy, by planning again."""
        more = replace(self, budget=self.budget + GIB)
        one = _again(more, search)
        memory = Marginal(what="1 GiB more a card", time=one, saves=None if one is None else max(found.time - one, 0.0))
        cluster = self.topology
        if cluster.links.cluster is not None:
            larger, what = cluster.model_copy(update={"nodes": cluster.nodes + 1}), "one node more"
        else:
            larger, what = cluster.model_copy(update={"cards_per_node": cluster.cards_per_node + 1}), "one card more"
        two = _again(replace(self, topology=larger), search)
        if two is None:
            return memory, Marginal(what=what, time=None, saves=None)
        same_work = two * cluster.cards / larger.cards
        rate, before = (self.tables.batch * c / t for c, t in ((larger.cards, two), (cluster.cards, found.time)))
        said = f"{rate:,.0f} samples a second instead of {before:,.0f}"
        return memory, Marginal(what=what, time=two, saves=max(found.time - same_work, 0.0), detail=said)


def _again(request: Request, search: Search) -> float | None:
    """The step of a changed request, by the search that was best before, without choices that it has not."""
    problem = Problem.of(request.job())
    found = Search(problem, search.allowed & problem.may()).run()
    return None if found is None else found.time


def _work(table: TableFile, seen: Seen, store: Store, request: Request) -> Work:
    tables, cluster = request.tables, request.topology
    lookups = seen.per_sample * tables.batch
    state = state_bytes(table.dim, tables.optimizer if request.gradient else None)
    fresh = seen.fresh(tables.batch, cluster.cards_per_node, cluster.nodes)
    pooled = table.pooling in ("sum", "mean")
    bags = float(tables.batch * len(table.looked_up_by))
    return Work(table.name, table.dim, pooled, lookups, bags, seen.curve, store, state, fresh)


def _read(
    tables: Tables | str | Path, heat: HeatOfTables | str | Path, topology: Topology | str | Path, budget: int | str | None,
    goal: str, gradients: str, levers: Fewer | None, shuffled: bool,
) -> Request:  # fmt: skip
    """Load what is given as files, and settle rows and precision of every table."""
    if goal not in GOALS or gradients not in GRADIENTS:
        raise BadInput(
            f"goal is {goal!r} and gradients {gradients!r}; use one of {', '.join(GOALS)} and of {', '.join(GRADIENTS)}"
        )
    tables = tables if isinstance(tables, Tables) else Tables.load(tables)
    heat = HeatProfile.load(heat) if isinstance(heat, (str, Path)) else heat
    topology = topology if isinstance(topology, Topology) else Topology.load(topology)
    room = topology.card.memory if budget is None else read_bytes(budget)
    if not 0 < room <= topology.card.memory:
        raise BadInput(
            f"the budget is {show_bytes(room)} a card, and a card has {show_bytes(topology.card.memory)}: "
            "give no more than it has, or another topology"
        )
    seen, done, notes = [], {}, []
    for table in tables.tables:
        found = read_heat(heat, table, shuffled)
        found, lever = _pulled(table, found, levers)
        if found.folded and not lever:
            lever = (Lever(kind="hash", rows=found.folded, saved=0, detail=f"{found.folded:,} ids share {table.rows:,} rows"),)
            notes.append(f"table {table.name!r} has {table.rows:,} rows for {found.folded:,} ids: they are taken to be hashed")
        seen.append(found)
        done[table.name] = lever
    trains = goal == "train"
    request = Request(
        tables, heat, topology, room, gradients if trains else None, tuple(seen), done,
        tuple(ladder_of(table)[0] for table in tables.tables),
    )  # fmt: skip
    request = _settle(request)
    request = replace(request, notes=tuple(notes))
    return replace(request, levers={name: _sized(request, name, each) for name, each in done.items()})


def _pulled(table: TableFile, found: Seen, levers: Fewer | None) -> tuple[Seen, tuple[Lever, ...]]:
    """A table after its lever: the kept ids have rows of their own, all others share the rest."""
    by_name = {feature.name: feature for feature in levers.features} if levers else {}
    rows: FeatureRows | None = by_name.get(table.looked_up_by[0]) if len(table.looked_up_by) == 1 else None
    if rows is None or rows.rows >= table.rows:
        return found, ()
    curve = found.curve
    before_K = np.cumsum(curve.rows_K) - curve.rows_K
    kept_K = np.clip(rows.kept - before_K, 0.0, curve.rows_K)
    some = kept_K > 0
    taken_K = (curve.lookups_K * kept_K / curve.rows_K)[some]
    rest = max(curve.lookups - float(taken_K.sum()), 0.0)
    curve = Curve(np.append(kept_K[some], float(rows.shared)), np.append(taken_K, rest))
    kind: Literal["hash", "prune"] = "prune" if rows.kept else "hash"
    said = f"{rows.kept:,} ids have rows of their own, the others share {rows.shared:,}"
    return Seen(curve, found.per_sample, repeats=found.repeats), (Lever(kind=kind, rows=table.rows, saved=0, detail=said),)


def _sized(request: Request, name: str, levers: tuple[Lever, ...]) -> tuple[Lever, ...]:
    """Levers with the bytes they save, at the precision that was chosen."""
    at = next(n for n, table in enumerate(request.tables.tables) if table.name == name)
    dim, state = request.tables.tables[at].dim, state_bytes(request.tables.tables[at].dim, request.tables.optimizer)
    each = stored_bytes(1, dim, request.rungs[at], state if request.gradient else 0)
    left = request.seen[at].curve.rows
    return tuple(lever.model_copy(update={"saved": round(max(lever.rows - left, 0) * each)}) for lever in levers)


def _settle(request: Request) -> Request:
    """Every table on the highest rung of its ladder at which all of them fit, split row by row over all cards."""
    tables = request.tables.tables
    ladders = [ladder_of(table) for table in tables]
    trains, cards = request.gradient is not None, request.topology.cards
    turn = turn_bytes(cards)
    sizes = []
    for table, ladder, seen in zip(tables, ladders, request.seen, strict=True):
        state = state_bytes(table.dim, request.tables.optimizer if trains else None) + turn
        sizes.append([stored_bytes(seen.curve.rows, table.dim, store, state) / cards for store in ladder])
    lookups = [seen.per_sample for seen in request.seen]
    problem = Problem.of(request.job())
    zero = np.zeros(len(tables), np.int64)
    plain = score(problem, zero, zero, zero).fullest
    buffers = plain - sum(size[0] for size in sizes)  # those of the first rung, which lower ones do not exceed
    rungs = choose(ladders, sizes, lookups, request.budget - buffers)
    return replace(request, rungs=tuple(ladder[rung] for ladder, rung in zip(ladders, rungs, strict=True)))
