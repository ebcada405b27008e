"""Small planning problems, and their optimum by looking at everything."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from thermocline.heat.curve import Curve
from thermocline.plan.cost import step_work as work_module
from thermocline.plan.cost.memory import Store
from thermocline.plan.cost.step_cost import Machine
from thermocline.plan.cost.step_work import Job, Work
from thermocline.plan.solve.solver import Problem, score
from thermocline.plan.solve.tiers import CARD, OPTIONS, OWNER


def random_job(rng: np.random.Generator, tables: int, steps: int, latency: bool = True) -> Job:
    """A job with every kind of table, on one of several clusters, with room for some replicas but not for all."""
    nodes, cards = [(1, 2), (1, 4), (2, 2), (2, 4), (4, 8), (3, 1)][rng.integers(6)]
    fast, slow = 10 ** rng.uniform(9, 11.5), 10 ** rng.uniform(8, 10.5)
    waits = (float(rng.choice([0, 1e-6, 1e-5])), float(rng.choice([0, 1e-6, 2e-5]))) if latency else (0.0, 0.0)
    machine = Machine(nodes, cards, 10 ** rng.uniform(11, 12.6), fast, min(fast, slow), *waits)
    works = tuple(random_work(rng, n, steps) for n in range(tables))
    return fitting(
        Job(machine, works, 1, float(rng.choice([0.0, 1e-5, 1e-4, 1e-3])), [None, "fp32", "bf16"][rng.integers(3)]), rng
    )


def random_work(rng: np.random.Generator, number: int, steps: int) -> Work:
    rows_K = np.sort(np.round(10 ** rng.uniform(0, 4, steps))) + 1
    heat_K = np.sort(10 ** rng.uniform(-4, 1, steps))[::-1] * (rng.random() < 0.9) + 1e-9
    if rng.random() < 0.3:
        heat_K[-1] = 0.0
    bags = float(rng.choice([1, 16, 256]))
    store = [Store("fp32"), Store("int8", 0.05), Store("int8"), Store("int4", 0.02, 0.05)][rng.integers(4)]
    pooled = bool(rng.random() < 0.5)
    lookups = bags * float(rng.choice([1, 3, 20]))
    return Work(
        f"table{number}", int(rng.choice([7, 32, 128])), pooled, lookups, bags, Curve(rows_K, heat_K * rows_K), store, 4
    )


def fitting(job: Job, rng: np.random.Generator) -> Job:
    """With memory between what row-wise sharding takes and what full replication takes."""
    problem = Problem.of(job)
    zero = np.zeros(len(job.works), np.int64)
    least = score(problem, zero, zero, zero).fullest
    most = score(problem, zero, problem.grid.steps, problem.grid.steps).fullest
    return replace(job, budget=int(least + rng.random() ** 3 * max(most - least, 0)) + 1)


def coarse(job: Job) -> Problem:
    """The problem with the steps that the curves have, so that everything can be looked at."""
    kept, work_module.STEPS = work_module.STEPS, 1
    try:
        return Problem.of(job)
    finally:
        work_module.STEPS = kept


def choices_of(problem: Problem, table: int) -> list[tuple[int, int, int]]:
    """Every (choice, first, second) of one table."""
    steps, may = int(problem.grid.steps[table]), problem.may()[table].any(axis=1)
    splits = [(first, second) for first in range(steps + 1) for second in range(first, steps + 1)]
    found = [(n, first, second) for n in range(len(OPTIONS)) if may[n] for first, second in splits]
    return found + [(n, 0, 0) for n in (OWNER, CARD) if may[n]]


def optimum(problem: Problem) -> float:
    """The shortest step of all plans that fit, by looking at every one."""
    least = np.inf
    for picked in itertools.product(*(choices_of(problem, table) for table in range(len(problem.job.works)))):
        found = score(problem, *np.array(picked).T)
        if found.fullest <= problem.job.budget:
            least = min(least, found.time)
    return float(least)
