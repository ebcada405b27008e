"""`make_plan`: tables, heat and topology in, a plan out, or an error that says what is missing and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile

from .cost.heat_input import HeatOfTables, Seen, read_ids
from .cost.memory import Store, id_bytes, state_bytes
from .cost.step_cost import Machine
from .cost.step_work import FINE_TABLES, Job, Work, turn_bytes
from .model import Goal, Lever, Marginal, Offer, Plan
from .solve.assemble import Context, assemble
from .solve.candidates import SPLIT, copied, everything, plain
from .solve.infeasibility import infeasible
from .solve.precisions import choose, ladder_of, stored_bytes
from .solve.row_levers import SMALL
from .solve.row_reduction import Asked, Pulled, Puller
from .solve.solver import Problem, Score, Search, score
from .solve.tiers import OWNER
from .tables import TableFile, Tables
from .topology import Topology
from .units import read_bytes, show_bytes

GOALS, GRADIENTS = ("train", "serve"), ("fp32", "bf16")
GIB = 1 << 30
# Levers that a plan says something of where they were not asked for.
OFFERS = (
    ("no rows for ids never seen", Asked(prune=0)),
    ("no rows for ids seen at most once", Asked(prune=1)),
    ("half of the bytes, rows by heat", Asked(hash=0.5)),
    ("an eighth of the bytes, rows by heat", Asked(hash=0.125)),
    ("small tables as one", Asked(unify=SMALL)),
)


def make_plan(
    tables: Tables | str | Path,
    heat: HeatOfTables | str | Path,
    topology: Topology | str | Path,
    budget: int | str | None = None,
    goal: Goal = "train",
    gradients: str = "fp32",
    shuffled: bool = False,
    prune: int | None = None,
    hash: float | str | None = None,
    unify: int | None = None,
) -> Plan:
    """Decide precision, copies and place of every row.

    `heat` is a profile, its file, or a curve for each table. `budget` is what tables may fill of every card (all of it if left
    away). `goal="serve"` plans for requests instead of training steps: nothing is updated, so replicas need no sync.
    `gradients` is their precision on the wire. `shuffled`: samples come in random order, so that batches repeat ids less than
    the log does.

    Levers change what a model learns, and none is pulled unasked. `prune`: no rows for ids seen at most so often. `hash`: rows
    by heat within this share of the bytes of all rows, as 0.125, or within so many bytes, as "20GiB". `unify`: tables of at
    most so many rows that are alike share one.
    """
    asked = Asked(prune, hash, unify)
    request = _read(tables, heat, topology, budget, goal, gradients, asked, shuffled)
    problem, scores, search = request.solve()
    if search is None or scores[0][1].fullest > request.budget:
        raise infeasible(request.tables, request.topology, problem, request.rungs, request.seen, request.hashed)
    known = request.puller.heat
    context = Context(
        tables=request.tables,
        topology=request.topology,
        goal=goal,
        heat=known.sha256 if isinstance(known, HeatProfile) else "",
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        levers=request.levers(copies(problem, scores[0][1])),
        marginals=request.marginals(scores[0][1], search),
        offers=request.offers(scores[0][1], search, copies(problem, scores[0][1])),
        notes=request.notes,
    )
    return assemble(problem, scores, search, context)


def make_plain(
    name: str,
    tables: Tables | str | Path,
    heat: HeatOfTables | str | Path,
    topology: Topology | str | Path,
    gradients: str = "fp32",
) -> Plan:
    """One of the plans that anyone would try first (`candidates.plain`), or one with replicas (`candidates.copied`), whatever
    it costs: what others are compared with."""
    request = _read(tables, heat, topology, None, "train", gradients, Asked(), False)
    problem = Problem.of(request.job())
    known = dict([*plain(problem), *copied(problem)])
    if name not in known:
        raise BadInput(f"there is no plain plan {name!r} for this cluster; there are {', '.join(known)}")
    context = Context(
        tables=request.tables,
        topology=request.topology,
        goal="train",
        heat=heat.sha256 if isinstance(heat := request.puller.heat, HeatProfile) else "",
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        levers={},
        marginals=(),
        offers=(),
        notes=request.notes,
    )
    return assemble(problem, [(name, known[name])], Search(problem, problem.may(), known[name]), context)


@dataclass(frozen=True)
class Request:
    """All that a plan is made from, read and checked."""

    puller: Puller
    asked: Asked
    pulled: Pulled
    topology: Topology
    budget: int
    gradient: str | None
    rungs: tuple[Store, ...]
    hosted: frozenset[str] = frozenset()  # tables whose codes lie in host memory
    notes: tuple[str, ...] = ()

    @property
    def tables(self) -> Tables:
        """Those that the levers left."""
        return self.puller.tables.model_copy(update={"tables": self.pulled.tables})

    @property
    def seen(self) -> tuple[Seen, ...]:
        return self.pulled.seen

    def job(self) -> Job:
        works = tuple(
            _work(table, seen, store, self)
            for table, seen, store in zip(self.pulled.tables, self.seen, self.rungs, strict=True)
        )
        tables = self.puller.tables
        above = tables.dense - tables.below
        machine = Machine.of(self.topology, id_bytes(sum(work.rows for work in works)))
        return Job(machine, works, self.budget, above, self.gradient, tables.below)

    def solve(self) -> tuple[Problem, list[tuple[str, Score]], Search | None]:
        problem = Problem.of(self.job())
        return problem, *everything(problem)

    def row_bytes(self) -> list[float]:
        """What a row of each table takes, with optimizer state, at the precision that was chosen."""
        optimizer = self.puller.tables.optimizer if self.gradient else None
        each = zip(self.pulled.tables, self.rungs, strict=True)
        return [stored_bytes(1, table.dim, store, state_bytes(table.dim, optimizer)) for table, store in each]

    def held(self, pulled: Pulled, copies: Sequence[int]) -> float:
        """Bytes that some levers would leave: `copies` of the rows of each table of now, and the id maps of all cards."""
        row, given = self.row_bytes(), self.puller.tables.tables
        rows = [cut.rows if cut else table.rows for cut, table in zip(pulled.cuts, given, strict=True)]
        held = sum(rows[n] * row[t] * copies[t] for t, members in enumerate(self.pulled.members) for n in members)
        return held + self.topology.cards * sum(seen.map for seen in pulled.seen)

    def levers(self, copies: Sequence[int]) -> dict[str, tuple[Lever, ...]]:
        """What was done to each table, with the bytes that saves: `copies` of each row that is gone."""
        found = {}
        rows = [row * times for row, times in zip(self.row_bytes(), copies, strict=True)]
        for table, levers, each in zip(self.pulled.tables, self.pulled.levers, rows, strict=True):
            sized = []
            for lever, before in zip(levers, (None, *levers), strict=False):
                # A second map of the same ids replaces the first.
                map = before.map if before is not None and before.features == lever.features else 0
                saved = (lever.rows - lever.kept - lever.shared) * each - (lever.map - map) * self.topology.cards
                sized.append(lever.model_copy(update={"saved": 0 if lever.kind == "unify" else round(saved)}))
            found[table.name] = tuple(sized)
        return found

    def other(self, asked: Asked) -> tuple[Request, list[int]]:
        """The same with other levers, precisions kept; and which of the tables now stands for each of those then."""
        pulled = self.puller.pull(asked)
        now = {given: n for n, members in enumerate(self.pulled.members) for given in members}
        stands = [now[members[0]] for members in pulled.members]
        return replace(self, asked=asked, pulled=pulled, rungs=tuple(self.rungs[n] for n in stands)), stands

    def hashed(self, share: float) -> tuple[float, float]:
        """Bytes of the cluster with rows by heat in this share of their bytes, and the harm of that."""
        pulled = self.puller.pull(replace(self.asked, hash=share))
        return self.held(pulled, [1] * len(self.seen)), self.puller.harm(pulled)

    def offers(self, found: Score, search: Search, copies: Sequence[int]) -> tuple[Offer, ...]:
        """What each lever that was not asked for would do to bytes and step; steps now and then by the same search."""
        offers, brief = [], len(self.seen) > FINE_TABLES
        now = _again(self, search, range(len(self.seen)), brief)
        for what, one in OFFERS:
            option, value = next((name, value) for name, value in vars(one).items() if value is not None)
            counted = isinstance(self.puller.heat, HeatProfile)
            if getattr(self.asked, option) is not None or (option == "prune" and not counted):
                continue
            try:
                other, stands = self.other(replace(self.asked, **{option: value}))
            except BadInput:  # it cannot be pulled so far: half of a table of one row
                continue
            if other.pulled.levers == self.pulled.levers:
                continue
            then = _again(other, search, stands, brief)
            saves = None if then is None or now is None else now - then
            fewer = len(self.pulled.tables) - len(stands)
            harm = f"{self.puller.harm(other.pulled):.2%} of what ids say lost to collisions"
            said = f"{fewer:,} fewer tables, and launches where each is a module of its own" if fewer > 0 else harm
            offers.append(
                Offer(
                    what=what, option=f"--{option} {value:g}", time=None if saves is None else found.time - saves, saves=saves,
                    bytes=round(self.held(self.pulled, copies) - self.held(other.pulled, copies)), detail=said,
                )
            )  # fmt: skip
        return tuple(offers)

    def marginals(self, found: Score, search: Search) -> tuple[Marginal, ...]:
        """What a little more memory and a few more cards would buy, by planning again."""
        more = replace(self, budget=self.budget + GIB)
        once = not search.allowed[:, :OWNER, 1:].any()  # no copies are allowed, which more memory might be for
        searches = [search, Search(search.problem, search.problem.may() & SPLIT)] if once else [search]
        one = min((step for each in searches if (step := _again(more, each)) is not None), default=None)
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
        rate, before = (self.puller.tables.batch * c / t for c, t in ((larger.cards, two), (cluster.cards, found.time)))
        said = f"{rate:,.0f} samples a second instead of {before:,.0f}"
        return memory, Marginal(what=what, time=two, saves=max(found.time - same_work, 0.0), detail=said)


def copies(problem: Problem, found: Score) -> list[int]:
    """How often the coldest rows of each table are in the cluster."""
    solution, machine = found.solution, problem.job.machine
    split_T = solution.choice < OWNER
    everywhere_T = split_T & (solution.first == problem.grid.steps)
    once_T = ~split_T | (solution.second < problem.grid.steps)
    return [int(n) for n in np.where(everywhere_T, machine.all, np.where(once_T, 1, machine.nodes))]


def _again(request: Request, search: Search, stands: Sequence[int] | None = None, brief: bool = False) -> float | None:
    """The step of a changed request, by the search that was best before, without choices that it has not; `brief`: at the same
    prices. `stands`: which table of before each is. None if it does not fit."""
    problem = Problem.of(request.job())
    allowed = search.allowed if stands is None else search.allowed[list(stands)]
    again = Search(problem, allowed & problem.may())
    if brief:
        again.look(search.mu, search.lam)
    else:
        again.run()
    fitting = [found.time for _, found in plain(problem) if found.fullest <= request.budget]
    return min([*fitting, again.found.time] if again.found is not None else fitting, default=None)


def _work(table: TableFile, seen: Seen, store: Store, request: Request) -> Work:
    tables, cluster = request.puller.tables, request.topology
    lookups = seen.per_sample * tables.batch
    state = state_bytes(table.dim, tables.optimizer if request.gradient else None)
    fresh = seen.fresh(tables.batch, cluster.cards_per_node, cluster.nodes)
    pooled = table.pooling in ("sum", "mean")
    bags = float(tables.batch * len(table.looked_up_by))
    host = table.name in request.hosted
    return Work(table.name, table.dim, pooled, lookups, bags, seen.curve, store, state, fresh, host, float(seen.map))


def _read(
    tables: Tables | str | Path, heat: HeatOfTables | str | Path, topology: Topology | str | Path, budget: int | str | None,
    goal: str, gradients: str, asked: Asked, shuffled: bool,
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
    ids = tuple(read_ids(heat, table, shuffled) for table in tables.tables)
    puller = Puller(tables, heat, ids, topology.cards, room, trains=goal == "train")
    pulled = puller.pull(asked)
    notes = [
        f"table {table.name!r} has {table.rows:,} rows for {seen.folded:,} ids: they are taken to be hashed"
        for table, seen in zip(pulled.tables, pulled.seen, strict=True)
        if seen.folded
    ]
    rungs = tuple(ladder_of(table)[0] for table in pulled.tables)
    request = _settle(Request(puller, asked, pulled, topology, room, gradients if goal == "train" else None, rungs))
    if request.hosted:
        named = ", ".join(sorted(request.hosted)[:5]) + (", ..." if len(request.hosted) > 5 else "")
        notes.append(f"the codes of {len(request.hosted)} tables lie in host memory, for the cards are too small: {named}")
    return replace(request, notes=tuple(notes))


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
    stores = tuple(ladder[rung] for ladder, rung in zip(ladders, rungs, strict=True))
    missing = buffers + sum(size[rung] for size, rung in zip(sizes, rungs, strict=True)) - request.budget
    return replace(request, rungs=stores, hosted=_hosted(request, stores, missing))


def _hosted(request: Request, stores: Sequence[Store], missing: float) -> frozenset[str]:
    """Tables whose codes go to host memory so that `missing` bytes a card are freed: those with most bytes for their lookups
    first. None if host memory is too small for that too."""
    cluster, found = request.topology, set()
    if missing <= 0 or cluster.links.host is None:
        return frozenset()
    tables = request.tables.tables
    codes = [
        F.row_bytes(F.NAMES.index(store.base), table.dim) * seen.curve.rows
        for table, store, seen in zip(tables, stores, request.seen, strict=True)
    ]
    left = float(cluster.host.memory * cluster.nodes)
    for n in sorted(range(len(tables)), key=lambda n: -codes[n] / max(request.seen[n].per_sample, 1e-9)):
        if missing <= 0:
            break
        if codes[n] <= left:
            found.add(tables[n].name)
            left -= codes[n]
            missing -= codes[n] / cluster.cards
    return frozenset(found) if missing <= 0 else frozenset()
