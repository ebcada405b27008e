"""The planning problem as an integer program: every curve step in any tier, hotter steps in lower tiers."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from thermocline.plan.solve.solver import Problem
from thermocline.plan.solve.tiers import OPTIONS, OWNER_POOLED, TABLE_WISE


class Program:
    """Rows and columns of an integer program, added one by one."""

    def __init__(self) -> None:
        self.cost, self.upper, self.whole = [], [], []
        self.rows, self.least, self.most = [], [], []

    def variable(self, cost: float = 0.0, upper: float = 1.0, whole: bool = True) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], least: float = -np.inf, most: float = np.inf) -> None:
        self.rows.append(terms)
        self.least.append(least)
        self.most.append(most)

    def solve(self, seconds: float) -> float:
        matrix = lil_array((len(self.rows), len(self.cost)))
        for n, terms in enumerate(self.rows):
            for column, value in terms.items():
                matrix[n, column] = value
        limits = LinearConstraint(matrix.tocsr(), self.least, self.most)
        options = {"time_limit": seconds, "mip_rel_gap": 1e-4}
        found = milp(
            np.array(self.cost), constraints=limits, bounds=Bounds(0, self.upper), integrality=self.whole, options=options
        )
        assert found.status == 0, found.message
        return float(found.fun)


def milp_optimum(problem: Problem, seconds: float = 600.0) -> float:
    """The shortest step of a problem without latencies. Times are in microseconds and bytes in shares of the budget inside."""
    program, workload, cluster = Program(), problem.workload, problem.workload.cluster
    micro, part = 1e6, 1 / workload.budget
    hidden, held = {}, {}
    per_card = [({}, {}, {}) for _ in range(cluster.world_size)]  # bytes, load, wait
    may = problem.allowed().any(axis=2)
    for t in range(len(workload.tables)):
        ways = {}
        for n in np.flatnonzero(may[t]):
            if n < OWNER_POOLED:
                ways[program.variable()] = 1.0
                _split(program, problem, t, int(n), max(ways), hidden, held)
            elif n == OWNER_POOLED:
                cost = problem.owner_pooled
                column = program.variable(cost.exposed[t] * micro)
                ways[column], hidden[column], held[column] = 1.0, cost.hidden[t] * micro, cost.bytes[t] * part
            elif n == TABLE_WISE:
                for bytes_, load, wait in per_card:
                    column = program.variable()
                    ways[column] = 1.0
                    bytes_[column], load[column] = problem.table_wise.bytes[t] * part, problem.table_wise.exposed[t] * micro
                    wait[column] = problem.table_wise.hidden[t] * micro
        program.row(ways, 1, 1)
    busiest, waiting = program.variable(1.0, np.inf, False), program.variable(0.0, np.inf, False)
    for bytes_, load, wait in per_card:
        program.row(held | bytes_, most=1.0)
        program.row({**load, busiest: -1.0}, most=0.0)
        program.row({**wait, waiting: -1.0}, most=0.0)
    late = program.variable(1.0, np.inf, False)
    hides = workload.dense * micro if workload.gradient else 0.0
    program.row({**hidden, waiting: 1.0, late: -1.0}, most=hides)
    return program.solve(seconds) / micro + float(problem.fixed.sum()) + workload.dense


def _split(program: Program, problem: Problem, t: int, n: int, chosen: int, hidden: dict, held: dict) -> None:
    """Columns for every step and tier of one table and option; all are zero unless the option is chosen."""
    sums, steps = problem.options[n], int(problem.grid.steps[t])
    tiers = (1, 3) if problem.workload.cluster.nodes == 1 or problem.workload.cluster.gpus_per_node == 1 else (1, 2, 3)
    before = None
    for k in range(steps):
        columns = {}
        for tier in tiers:
            exposed, waits, bytes_ = (float(np.diff(p[tier - 1, t])[k]) for p in (sums.exposed, sums.hidden, sums.bytes))
            column = program.variable(exposed * 1e6)
            columns[column], hidden[column], held[column] = 1.0, waits * 1e6, bytes_ / problem.workload.budget
        program.row({**columns, chosen: -1.0}, 0, 0)
        ordered = list(columns)
        if before:
            maps = program.variable(whole=False)  # 1 if any tier ends before this step
            held[maps] = problem.grid.maps[t, k] / problem.workload.budget
        for n in range(1, len(ordered)):  # in tiers so low or lower: no step without the one before it
            if before:
                ends = {**{c: 1.0 for c in before[:n]}, **{c: -1.0 for c in ordered[:n]}}
                program.row(ends, least=0.0)
                program.row({**ends, maps: -1.0}, most=0.0)
        before = ordered


assert len(OPTIONS) == OWNER_POOLED
