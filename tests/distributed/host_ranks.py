"""Functions that ranks run in the tests of rows in host memory. Arguments: rank, number of ranks, and those of the test."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cases import TABLES, Model, batches, exact_loss, sizes_of

import thermocline as tc

Arrays = list[np.ndarray[Any, Any]]


def go_on(tables: Any, rank: int, size: int, first: int, last: int) -> Arrays:
    """Train; all rows."""
    for step in range(first, last):
        sizes = sizes_of(step, size)
        exact_loss(tables(batches(step, sizes)[rank]).values(), step, sum(sizes[:rank])).backward()
    return [tables.get_rows(name).numpy() for name in TABLES]


def move(rank: int, size: int, plans: list[tc.Plan], heat: Any) -> tuple[list[str], Arrays, Arrays]:
    """Train, migrate to the other plan, train on: memories before and after, rows, and those without a migration."""
    found = []
    for last in (plans[1], plans[0]):
        model: Any = Model()
        sharding = tc.shard_(model, plans[0], heat, reduce="sum")
        places = [model.tables.arena.residency]
        go_on(model.tables, rank, size, 0, 5)
        sharding.migrate(last, heat)
        found.append(([*places, model.tables.arena.residency], go_on(model.tables, rank, size, 5, 10)))
    return found[0][0], found[0][1], found[1][1]


def save(rank: int, size: int, plans: list[tc.Plan], heat: Any, folder: str) -> list[Arrays]:
    """Train and save; load where the other plan has the rows, and train on in both: rows before and after."""
    models: list[Any] = [Model(), Model()]
    for model, plan in zip(models, plans, strict=True):
        tc.shard_(model, plan, heat, reduce="sum")
    before = go_on(models[0].tables, rank, size, 0, 5)
    tc.save(models[0], folder)
    torch.manual_seed(1)
    tc.load_into(models[1], folder)
    found = [before, [models[1].tables.get_rows(name).numpy() for name in TABLES]]
    return found + [go_on(model.tables, rank, size, 5, 10) for model in models]
