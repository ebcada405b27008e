"""Plans without search, for comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from thermocline.errors import BadInput
from thermocline.plan.cost.heat_input import HeatInput
from thermocline.plan.make import read_request
from thermocline.plan.model import Plan
from thermocline.plan.report.assemble import assemble
from thermocline.plan.solve.candidates import baseline_plans
from thermocline.plan.solve.solver import Problem, Score, Search, score
from thermocline.plan.solve.tiers import TIER_SETS
from thermocline.plan.tables import TablesConfig
from thermocline.plan.topology import Topology

OFTEN = 0.5  # `replicated_plans` copies rows that a node requests in a step with at least this probability


def make_baseline_plan(
    name: str,
    tables: TablesConfig | str | Path,
    heat: HeatInput | str | Path,
    topology: Topology | str | Path,
    gradients: str = "fp32",
) -> Plan:
    """A plan without search, for comparisons: one of `baseline_plans` or `replicated_plans` by name, at any cost."""
    request = read_request(tables, heat, topology, gradients=gradients)
    problem = Problem.of(request.workload())
    known = dict([*baseline_plans(problem), *replicated_plans(problem)])
    if name not in known:
        message = f"there is no baseline plan {name!r} for this cluster; there are {', '.join(known)}"
        raise BadInput(message, parameter="name", value=name)
    search = Search(problem, problem.allowed(), known[name])
    return assemble(request, problem, [(name, known[name])], search, {}, (), ())


def replicated_plans(problem: Problem) -> Iterator[tuple[str, Score]]:
    """Plans with replicas, whether they pay or not, for measurements: rows that a node requests in at least every other step
    are replicated, the others are requested once per node."""
    if problem.allowed()[:, 1, TIER_SETS.index((2, 3))].all():
        hot = (problem.grid.requested.node >= OFTEN).sum(axis=1)
        zero = np.zeros_like(hot)
        yield "hot rows once a node", score(problem, zero + 1, zero, hot)
        yield "hot rows on every card", score(problem, zero + 1, hot, hot)
