"""`make_plan`: from tables, heat and topology to a plan, or to an error with the missing bytes and remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile

from .cost.heat_input import AccessStats, HeatInput, id_stats_of
from .cost.memory import RowPrecision, code_bytes, id_bytes, state_bytes
from .cost.step_cost import Cluster
from .cost.step_work import FINE_TABLES, TableWork, Workload, rotation_bytes
from .model import Goal, Lever, Plan, Sensitivity, Suggestion
from .report.assemble import assemble
from .solve.candidates import SPLIT, baseline_plans, solve
from .solve.infeasibility import infeasible_error
from .solve.precisions import choose_precisions, precisions_of, stored_bytes
from .solve.row_levers import SMALL
from .solve.row_reduction import ReducedTables, ReductionOptions, RowReducer
from .solve.solver import Problem, Score, Search, score
from .solve.tiers import OWNER_POOLED
from .solve.torchrec import NAME, score_of
from .tables import TableConfig, TablesConfig
from .topology import BACKENDS, Backend, Topology
from .units import read_bytes, read_share, show_bytes

GOALS, GRADIENTS = ("train", "serve"), ("fp32", "bf16", "int8")
GIB = 1 << 30
NO_LEVERS = ReductionOptions()
# Levers whose effect a plan reports if they were not requested.
SUGGESTED = (
    ("no rows for ids never seen", ReductionOptions(prune=0)),
    ("no rows for ids seen at most once", ReductionOptions(prune=1)),
    ("half of the bytes, rows by heat", ReductionOptions(hash=0.5)),
    ("an eighth of the bytes, rows by heat", ReductionOptions(hash=0.125)),
    ("small tables joined", ReductionOptions(unify=SMALL)),
)


def make_plan(
    tables: TablesConfig | str | Path,
    heat: HeatInput | str | Path,
    topology: Topology | str | Path,
    budget: int | str | None = None,
    goal: Goal = "train",
    gradients: str = "fp32",
    shuffled: bool = False,
    prune: int | None = None,
    hash: float | str | None = None,
    unify: int | None = None,
    backend: Backend | None = None,
    sums: str = "fp32",
    torchrec: Any = None,
) -> Plan:
    """Decide precision, replicas and placement of every row.

    Levers (`prune`, `hash`, `unify`) change what a model learns, so they are applied only on request; the plan reports what
    each would save.

    Args:
        tables: The tables of the model, or a tables file.
        heat: A heat profile, a heat file, or a heat curve for each table.
        topology: The cluster, a topology file, or the name of a preset.
        budget: Bytes per GPU that tables may fill, as a number or as "40GiB", or a share of the memory of the largest GPU as
            "1/2"; smaller GPUs hold what they can. Default: all GPU memory of the topology.
        goal: "train" plans training steps. "serve" plans requests: rows are not updated, so replicas need no sync.
        gradients: Precision of gradients on the wire, "fp32", "bf16" or "int8".
        shuffled: Samples are trained in random order, so that batches repeat ids less often than the log does.
        prune: No rows for ids seen at most this often.
        hash: Rows by heat within a share of the bytes of all rows (0.125) or within bytes ("20GiB").
        unify: Tables of at most this many rows with equal dimension, pooling and precision become one.
        backend: Backend of torch.distributed, "gloo" or "nccl", in place of that of the topology.
        sums: Precision of pooled sums on the wire, "fp32", "bf16" or "int8". Sums in less than fp32 are rounded, so results
            depend on the plan.

        torchrec: A plan of TorchRec's `EmbeddingShardingPlanner` for these tables and ranks, as one of the candidates.

    Returns:
        The fastest plan that fits, with its predictions and reasons.

    Raises:
        BadInput: The tables do not fit (fields `needed`, `available`, `remedies`), or an argument is wrong.
        FormatError: A file has wrong fields.

    Example::

        plan = make_plan("tables.yaml", "heat.tc", Topology.load("hgx-h200", nodes=4), budget="40GiB")
        print(explain(plan))
    """
    options = ReductionOptions(prune, hash, unify)
    request = read_request(tables, heat, read_topology(topology, backend), budget, goal, gradients, options, shuffled, sums)
    problem = Problem.of(request.workload())
    scores, search = solve(problem, [] if torchrec is None else [(NAME, score_of(problem, torchrec))])
    best = scores[0][1]
    if search is None or best.peak_bytes > request.budget:
        raise infeasible_error(request, problem)
    copies = copies_of_coldest_row(problem, best)
    sensitivities, suggestions = request.sensitivities(best, search), request.suggestions(best, search, copies)
    return assemble(request, problem, scores, search, request.levers(copies), sensitivities, suggestions)


def read_topology(given: Topology | str | Path, backend: str | None = None) -> Topology:
    """A topology, a file or a preset, for another backend if one is given."""
    found = given if isinstance(given, Topology) else Topology.load(given)
    if backend not in (None, *BACKENDS):
        raise BadInput(f"backend is {backend!r}; use one of {', '.join(BACKENDS)}", parameter="backend", value=backend)
    return found if backend is None else found.model_copy(update={"backend": backend})


@dataclass(frozen=True)
class PlanRequest:
    """The checked inputs of a plan."""

    reducer: RowReducer
    options: ReductionOptions
    reduced: ReducedTables
    topology: Topology
    budget: int
    gradient: str | None
    precisions: tuple[RowPrecision, ...]
    on_host: frozenset[str] = frozenset()  # tables with codes in host memory
    notes: tuple[str, ...] = ()
    sums: str = "fp32"  # precision of pooled sums on the wire
    cap: int = 0  # bytes that tables may fill on any GPU; `budget` is what they may fill on the smallest

    @property
    def tables(self) -> TablesConfig:
        """The tables after the levers."""
        return self.reducer.tables.model_copy(update={"tables": self.reduced.tables})

    @property
    def heat_sha256(self) -> str:
        return self.reducer.heat.sha256 if isinstance(self.reducer.heat, HeatProfile) else ""

    @property
    def stats(self) -> tuple[AccessStats, ...]:
        return self.reduced.stats

    def workload(self) -> Workload:
        each = zip(self.reduced.tables, self.stats, self.precisions, strict=True)
        works = tuple(self._work(table, stats, precision) for table, stats, precision in each)
        tables = self.reducer.tables
        cluster = Cluster.of(self.topology, id_bytes(sum(work.rows for work in works)))
        room_N = np.array(self.topology.room_of_nodes(self.cap), np.float64)
        spare_R = np.repeat(room_N - room_N.min(), self.topology.gpus_per_node)
        dense = tables.dense - tables.below
        return Workload(cluster, works, self.budget, dense, self.gradient, tables.below, self.sums, spare_R)

    def _work(self, table: TableConfig, stats: AccessStats, precision: RowPrecision) -> TableWork:
        batch, topology = self.reducer.tables.batch, self.topology
        return TableWork(
            name=table.name,
            dim=table.dim,
            pooled=table.pooling in ("sum", "mean"),
            lookups=stats.per_sample * batch,
            bags=float(batch * len(table.feature_names)),
            curve=stats.curve,
            precision=precision,
            state=state_bytes(table.dim, self.optimizer),
            effective=stats.effective_share(batch, topology.gpus_per_node, topology.nodes),
            host=table.name in self.on_host,
            id_map_bytes=float(stats.id_map_bytes),
            lengths=stats.lengths,
        )

    @property
    def optimizer(self) -> str | None:
        return self.reducer.tables.optimizer if self.gradient else None

    def row_bytes(self) -> list[float]:
        """Bytes of a row of each table in the chosen precision, with optimizer state."""
        each = zip(self.reduced.tables, self.precisions, strict=True)
        return [stored_bytes(1, table.dim, precision, state_bytes(table.dim, self.optimizer)) for table, precision in each]

    def bytes_after(self, reduced: ReducedTables, copies: Sequence[int]) -> float:
        """Bytes of the cluster after some levers: `copies` of the rows of each present table, and the id maps of all ranks."""
        row, given = self.row_bytes(), self.reducer.tables.tables
        rows = [cut.rows if cut else table.rows for cut, table in zip(reduced.cuts, given, strict=True)]
        held = sum(rows[n] * row[t] * copies[t] for t, members in enumerate(self.reduced.members) for n in members)
        return held + self.topology.world_size * sum(stats.id_map_bytes for stats in reduced.stats)

    def levers(self, copies: Sequence[int]) -> dict[str, tuple[Lever, ...]]:
        """The levers of each table, with the bytes that they save: `copies` of each removed row."""
        found = {}
        rows = [row * times for row, times in zip(self.row_bytes(), copies, strict=True)]
        for table, levers, each in zip(self.reduced.tables, self.reduced.levers, rows, strict=True):
            sized = []
            for lever, before in zip(levers, (None, *levers), strict=False):
                # A second map of the same ids replaces the first.
                replaced = before.map if before is not None and before.features == lever.features else 0
                saved = (lever.rows - lever.kept - lever.shared) * each - (lever.map - replaced) * self.topology.world_size
                sized.append(lever.model_copy(update={"saved": 0 if lever.kind == "unify" else round(saved)}))
            found[table.name] = tuple(sized)
        return found

    def with_options(self, options: ReductionOptions) -> tuple[PlanRequest, list[int]]:
        """The same request with other levers and the same precisions; and the present table of each table then."""
        reduced = self.reducer.reduce(options)
        now = {given: n for n, members in enumerate(self.reduced.members) for given in members}
        present = [now[members[0]] for members in reduced.members]
        precisions = tuple(self.precisions[n] for n in present)
        return replace(self, options=options, reduced=reduced, precisions=precisions), present

    def hash_outcome(self, share: float) -> tuple[float, float]:
        """Bytes of the cluster and loss by collisions, with rows by heat in a share of their bytes."""
        reduced = self.reducer.reduce(replace(self.options, hash=share))
        return self.bytes_after(reduced, [1] * len(self.stats)), self.reducer.loss(reduced)

    def suggestions(self, found: Score, search: Search, copies: Sequence[int]) -> tuple[Suggestion, ...]:
        """The effect of each lever that was not requested on bytes and step. Steps are compared by the same search."""
        suggestions, brief = [], len(self.stats) > FINE_TABLES
        now = _replanned_time(self, search, range(len(self.stats)), brief)
        for what, one in SUGGESTED:
            option, value = next((name, value) for name, value in vars(one).items() if value is not None)
            counted = isinstance(self.reducer.heat, HeatProfile)
            if getattr(self.options, option) is not None or (option == "prune" and not counted):
                continue
            try:
                other, present = self.with_options(replace(self.options, **{option: value}))
            except BadInput:  # the lever does not apply, such as half of a table of one row
                continue
            if other.reduced.levers == self.reduced.levers:
                continue
            then = _replanned_time(other, search, present, brief)
            saves = None if then is None or now is None else now - then
            fewer = len(self.reduced.tables) - len(present)
            loss = f"{self.reducer.loss(other.reduced):.2%} of the information of ids lost to collisions"
            detail = f"{fewer:,} fewer tables, and fewer kernel launches if each is its own module" if fewer > 0 else loss
            suggestions.append(
                Suggestion(
                    what=what, option=f"--{option} {value:g}", time=None if saves is None else found.time - saves, saves=saves,
                    bytes=round(self.bytes_after(self.reduced, copies) - self.bytes_after(other.reduced, copies)),
                    detail=detail,
                )
            )  # fmt: skip
        return tuple(suggestions)

    def sensitivities(self, found: Score, search: Search) -> tuple[Sensitivity, ...]:
        """The effect of a little more memory and of more GPUs, by planning again."""
        more = replace(self, budget=self.budget + GIB, cap=self.cap + GIB)
        no_copies = not search.allowed[:, :OWNER_POOLED, 1:].any()  # more memory may make replicas possible
        tried = [search, Search(search.problem, search.problem.allowed() & SPLIT)] if no_copies else [search]
        time = min((step for each in tried if (step := _replanned_time(more, each)) is not None), default=None)
        saves = None if time is None else max(found.time - time, 0.0)
        memory = Sensitivity(what="1 GiB more per GPU", time=time, saves=saves)
        topology = self.topology
        if topology.links.cluster is not None:
            larger, what = topology.model_copy(update={"nodes": topology.nodes + 1}), "one more node"
        else:
            larger, what = topology.model_copy(update={"gpus_per_node": topology.gpus_per_node + 1}), "one more GPU"
        time = _replanned_time(replace(self, topology=larger), search)
        if time is None:
            return memory, Sensitivity(what=what, time=None, saves=None)
        same_work = time * topology.world_size / larger.world_size
        batch = self.reducer.tables.batch
        rate, before = batch * larger.world_size / time, batch * topology.world_size / found.time
        detail = f"{rate:,.0f} samples per second instead of {before:,.0f}"
        return memory, Sensitivity(what=what, time=time, saves=max(found.time - same_work, 0.0), detail=detail)


def copies_of_coldest_row(problem: Problem, found: Score) -> list[int]:
    """The number of copies of the coldest rows of each table."""
    solution, cluster = found.solution, problem.workload.cluster
    split_T = solution.choice < OWNER_POOLED
    everywhere_T = split_T & (solution.first == problem.grid.steps)
    once_T = ~split_T | (solution.second < problem.grid.steps)
    return [int(n) for n in np.where(everywhere_T, cluster.world_size, np.where(once_T, 1, cluster.nodes))]


def _replanned_time(
    request: PlanRequest, search: Search, present: Sequence[int] | None = None, brief: bool = False
) -> float | None:
    """The step of a changed request, by the search that was best before; None if it does not fit.

    `present` is the present table of each changed table. `brief` evaluates at the same prices only.
    """
    problem = Problem.of(request.workload())
    allowed = search.allowed if present is None else search.allowed[list(present)]
    again = Search(problem, allowed & problem.allowed())
    if brief:
        again.evaluate(search.mu, search.lam)
    else:
        again.run()
    fitting = [found.time for _, found in baseline_plans(problem) if found.peak_bytes <= request.budget]
    return min([*fitting, again.found.time] if again.found is not None else fitting, default=None)


def read_request(
    tables: TablesConfig | str | Path, heat: HeatInput | str | Path, topology: Topology | str | Path,
    budget: int | str | None = None, goal: str = "train", gradients: str = "fp32",
    options: ReductionOptions = NO_LEVERS, shuffled: bool = False, sums: str = "fp32",
) -> PlanRequest:  # fmt: skip
    """Loads files, and settles rows and precision of every table."""
    for name, given, known in (("goal", goal, GOALS), ("gradients", gradients, GRADIENTS), ("sums", sums, GRADIENTS)):
        if given not in known:
            raise BadInput(f"{name} is {given!r}; use one of {', '.join(known)}", parameter=name, value=given)
    tables = tables if isinstance(tables, TablesConfig) else TablesConfig.load(tables)
    heat = HeatProfile.load(heat) if isinstance(heat, (str, Path)) else heat
    topology = read_topology(topology)
    memory = max(gpu.memory for gpu in topology.gpus)
    share = 1.0 if budget is None else read_share(budget)
    if topology.links.host is None and (named := [table.name for table in tables.tables if table.residency == "host"]):
        message = f"table {named[0]!r} is to lie in host memory, but the topology has no link to it; add links: host"
        raise BadInput(message, parameter="residency", table=named[0])
    cap = read_bytes(budget) if share is None else int(share * memory)
    if not 0 < cap <= memory:
        message = (
            f"the budget is {show_bytes(cap)} per GPU, and a GPU of the topology has {show_bytes(memory)}: lower the "
            "budget, or use another topology"
        )
        raise BadInput(message, parameter="budget", value=cap, available=memory)
    room = min(topology.room_of_nodes(cap))
    id_stats = tuple(id_stats_of(heat, table, shuffled) for table in tables.tables)
    reducer = RowReducer(tables, heat, id_stats, topology.world_size, room, trains=goal == "train")
    reduced = reducer.reduce(options)
    notes = [
        f"table {table.name!r} has {table.rows:,} rows for {stats.folded:,} ids: the plan assumes hashing"
        for table, stats in zip(reduced.tables, reduced.stats, strict=True)
        if stats.folded
    ]
    best = tuple(precisions_of(table)[0] for table in reduced.tables)
    gradient = gradients if goal == "train" else None
    request = _choose_precisions(PlanRequest(reducer, options, reduced, topology, room, gradient, best, sums=sums, cap=cap))
    moved = request.on_host - {table.name for table in tables.tables if table.residency == "host"}
    if moved:
        some = ", ".join(sorted(moved)[:5]) + (", ..." if len(moved) > 5 else "")
        notes.append(f"GPU memory is too small: the codes of {len(moved)} tables lie in host memory: {some}")
    return replace(request, notes=tuple(notes))


def _choose_precisions(request: PlanRequest) -> PlanRequest:
    """The best precisions at which all tables fit, split row-wise over all ranks."""
    tables, ranks = request.tables.tables, request.topology.world_size
    possible = [precisions_of(table) for table in tables]
    request = replace(request, on_host=frozenset(table.name for table in tables if table.residency == "host"))
    sizes = []
    for table, precisions, stats in zip(tables, possible, request.stats, strict=True):
        state = state_bytes(table.dim, request.optimizer) + rotation_bytes(ranks)
        rows, host = stats.curve.rows, table.name in request.on_host
        each = [(stored_bytes(rows, table.dim, p, state), code_bytes(rows, table.dim, p) * host) for p in precisions]
        sizes.append([(size - codes) / ranks for size, codes in each])
    lookups = [stats.per_sample for stats in request.stats]
    problem = Problem.of(request.workload())
    zero = np.zeros(len(tables), np.int64)
    row_wise = score(problem, zero, zero, zero).peak_bytes
    buffers = row_wise - sum(size[0] for size in sizes)  # of the best precisions; others need no more
    chosen = choose_precisions(sizes, lookups, request.budget - buffers)
    precisions = tuple(each[n] for each, n in zip(possible, chosen, strict=True))
    missing = buffers + sum(size[n] for size, n in zip(sizes, chosen, strict=True)) - request.budget
    return replace(request, precisions=precisions, on_host=_tables_on_host(request, precisions, missing))


def _tables_on_host(request: PlanRequest, precisions: Sequence[RowPrecision], missing: float) -> frozenset[str]:
    """Tables whose codes go to host memory to free `missing` bytes per GPU: most bytes per lookup first. None if host memory
    is too small as well."""
    topology, found = request.topology, set(request.on_host)
    if missing <= 0 or topology.links.host is None:
        return request.on_host
    tables = request.tables.tables
    codes = [
        code_bytes(stats.curve.rows, table.dim, precision)
        for table, precision, stats in zip(tables, precisions, request.stats, strict=True)
    ]
    left = float(topology.host.memory * topology.nodes) - sum(codes[n] for n in range(len(tables)) if tables[n].name in found)
    for n in sorted(range(len(tables)), key=lambda n: -codes[n] / max(request.stats[n].per_sample, 1e-9)):
        if missing <= 0:
            break
        if codes[n] <= left and tables[n].residency is None:
            found.add(tables[n].name)
            left -= codes[n]
            missing -= codes[n] / topology.world_size
    return frozenset(found) if missing <= 0 else request.on_host


# -- planning again --


def tables_of_plan(plan: Plan) -> TablesConfig:
    """The tables of a plan as a tables file, with all choices settled; lookups are left to the heat."""
    same = ("name", "rows", "dim", "pooling", "features", "precision", "cache", "residency")
    tables = tuple(TableConfig(**{field: getattr(table, field) for field in same}) for table in plan.tables)
    return TablesConfig(batch=plan.batch, dense=plan.dense, optimizer=plan.optimizer, tables=tables)


def plan_with_heat(plan: Plan, heat: HeatProfile, topology: Topology | None = None) -> Plan:
    """Plan the tables of a plan again for other heat, whose ids are rows: with the same precisions, budget and levers, because
    another id map would assign rows to other ids."""
    cluster = plan.topology if topology is None else topology
    made = make_plan(tables_of_plan(plan), heat, cluster, plan.budget, plan.goal, plan.gradients, sums=plan.sums)
    levers = {table.name: table.levers for table in plan.tables}
    return made.model_copy(
        update={"tables": tuple(t.model_copy(update={"levers": levers[t.name]}) for t in made.tables), "suggestions": ()}
    )
