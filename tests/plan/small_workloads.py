"""Small planning problems, and their optimum by enumeration."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from thermocline.heat.curve import Curve
from thermocline.plan.cost import step_work as work_module
from thermocline.plan.cost.memory import RowPrecision
from thermocline.plan.cost.step_cost import Cluster
from thermocline.plan.cost.step_work import TableWork, Workload
from thermocline.plan.solve.solver import Problem, score
from thermocline.plan.solve.tiers import OPTIONS, OWNER_POOLED, TABLE_WISE


def random_workload(rng: np.random.Generator, tables: int, steps: int, latency: bool = True) -> Workload:
    """A workload with every kind of table, on one of several clusters, with room for some replicas but not for all."""
    nodes, cards = [(1, 2), (1, 4), (2, 2), (2, 4), (4, 8), (3, 1)][rng.integers(6)]
    fast, slow = 10 ** rng.uniform(9, 11.5), 10 ** rng.uniform(8, 10.5)
    waits = (float(rng.choice([0, 1e-6, 1e-5])), float(rng.choice([0, 1e-6, 2e-5]))) if latency else (0.0, 0.0)
    cluster = Cluster(nodes, cards, 10 ** rng.uniform(11, 12.6), fast, min(fast, slow), *waits)
    works = tuple(random_work(rng, n, steps) for n in range(tables))
    return fitting(
        Workload(cluster, works, 1, float(rng.choice([0.0, 1e-5, 1e-4, 1e-3])), [None, "fp32", "bf16"][rng.integers(3)]), rng
    )


def random_work(rng: np.random.Generator, number: int, steps: int) -> TableWork:
    rows_K = np.sort(np.round(10 ** rng.uniform(0, 4, steps))) + 1
    heat_K = np.sort(10 ** rng.uniform(-4, 1, steps))[::-1] * (rng.random() < 0.9) + 1e-9
    if rng.random() < 0.3:
        heat_K[-1] = 0.0
    bags = float(rng.choice([1, 16, 256]))
    store = [RowPrecision("fp32"), RowPrecision("int8", 0.05), RowPrecision("int8"), RowPrecision("int4", 0.02, 0.05)][
        rng.integers(4)
    ]
    pooled = bool(rng.random() < 0.5)
    lookups = bags * float(rng.choice([1, 3, 20]))
    return TableWork(
        f"table{number}", int(rng.choice([7, 32, 128])), pooled, lookups, bags, Curve(rows_K, heat_K * rows_K), store, 4
    )


def fitting(workload: Workload, rng: np.random.Generator) -> Workload:
    """With a budget between row-wise sharding and full replication."""
    problem = Problem.of(workload)
    zero = np.zeros(len(workload.tables), np.int64)
    least = score(problem, zero, zero, zero).peak_bytes
    most = score(problem, zero, problem.grid.steps, problem.grid.steps).peak_bytes
    return replace(workload, budget=int(least + rng.random() ** 3 * max(most - least, 0)) + 1)


def coarse(workload: Workload) -> Problem:
    """The problem with undivided curve steps, small enough to enumerate."""
    kept, work_module.STEPS = work_module.STEPS, 1
    try:
        return Problem.of(workload)
    finally:
        work_module.STEPS = kept


def choices_of(problem: Problem, table: int) -> list[tuple[int, int, int]]:
    """Every (choice, first, second) of one table."""
    steps, may = int(problem.grid.steps[table]), problem.allowed()[table].any(axis=1)
    splits = [(first, second) for first in range(steps + 1) for second in range(first, steps + 1)]
    found = [(n, first, second) for n in range(len(OPTIONS)) if may[n] for first, second in splits]
    return found + [(n, 0, 0) for n in (OWNER_POOLED, TABLE_WISE) if may[n]]


def optimum(problem: Problem) -> float:
    """The shortest step of all plans that fit."""
    least = np.inf
    for picked in itertools.product(*(choices_of(problem, table) for table in range(len(problem.workload.tables)))):
        found = score(problem, *np.array(picked).T)
        if found.peak_bytes <= problem.workload.budget:
            least = min(least, found.time)
    return float(least)
