"""Functions that ranks run in the tests of sharded caches. Arguments: rank, number of ranks, and those of the test."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cases import TABLES, Model, batches, exact_loss, sizes_of
from ranks import look_ahead
from replan_ranks import big_model

import thermocline as tc
from thermocline.distributed.placement.init_rows import in_slots

Arrays = list[np.ndarray[Any, Any]]


def values(name: str) -> torch.Tensor:
    """Initial rows of a table."""
    rows, dim, _ = TABLES[name]
    return torch.linspace(-1, 1.5, rows * dim).view(rows, dim).sin()


def kept(sharded: Any) -> Arrays:
    """All that lies on a card: rows, optimizer state, cache (but for its clocks, which tick only where there is something to
    do)."""
    sharded.wait_for_exchange()
    arena = sharded.arena
    return [t.clone().numpy() for t in (arena.codes, arena.meta, *sharded.trainer.states, *arena.cache[:7])]


def cached_rows(sharded: Any) -> dict[str, list[int]]:
    """Rows that are in slots here, by table."""
    found = {}
    for index, table in enumerate(sharded.tables):
        rows = torch.arange(table.rows)
        mine = [
            rows[at][in_slots(sharded.arena, k, place)]
            for k, at, place in sharded.shard.local(sharded.row_index.locate(rows + sharded.row_index.first[index]))
        ]
        found[table.name] = sorted(torch.cat(mine).tolist()) if mine else []
    return found


def made(plan: tc.Plan, heat: Any, settings: dict[str, Any]) -> tuple[Model, Any]:
    """A sharded model whose rows have the values above."""
    model = Model(**settings)
    sharding = tc.shard_(model, plan, heat, reduce="sum", check_every=7)
    for name, (rows, _, _) in TABLES.items():
        model.tables.set_rows(name, torch.arange(rows), values(name))
    return model, sharding


def train(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train; local arrays at the start and at the end, outputs, and all rows."""
    given = dict(settings)
    ahead = given.pop("ahead", "")
    model, sharding = made(plan, heat, given)
    tables = model.tables
    found: dict[str, Any] = {"begin": kept(tables), "cached": cached_rows(tables), "outs": []}
    go_on(model, rank, size, 0, steps, ahead, found["outs"])
    sharding.check_replicas()
    found |= {"end": kept(tables), "then": cached_rows(tables), "stats": tables.stats(), "memory": tables.memory().parts}
    found["read"] = {name: tables.get_rows(name).numpy() for name in TABLES}
    found["state"] = [
        (index, rows.numpy(), [state[place].numpy() for state in tables.shard.states(k)])
        for index, table in enumerate(tables.tables)
        for k, rows, place in tables.shard.local(
            tables.row_index.locate(torch.arange(table.rows) + tables.row_index.first[index])
        )
    ]
    return found


def go_on(model: Any, rank: int, size: int, first: int, last: int, ahead: str, outs: list[Any]) -> None:
    for step in range(first, last):
        sizes = sizes_of(step, size)
        if ahead:
            look_ahead(model.tables, rank, size, step, ahead)
        out = model.tables(batches(step, sizes)[rank]).values()
        outs.append(out.detach().clone().numpy())
        exact_loss(out, step, sum(sizes[:rank])).backward()


def differ(rank: int, size: int, plan: tc.Plan, heat: Any, what: str) -> Exception | None:
    """A slot of tier 1 differs on rank 1; the error of each rank."""
    model, sharding = made(plan, heat, {})
    go_on(model, rank, size, 0, 3, "", [])
    sharding.wait_for_exchange()
    if rank == 1:
        slots = dict(zip(("values", "near", "rows", "scores"), model.tables.shard.slots(0), strict=False))
        slots[what].view(-1)[:1] += 1
    try:
        sharding.check_replicas()
    except tc.ThermoclineError as error:
        return error.with_traceback(None)
    return None


def moved(rank: int, size: int, plans: list[tc.Plan], heats: list[Any], settings: dict[str, Any], steps: int) -> Any:
    """Train, migrate, continue: rows before and after the migration, cached rows of this rank, memory and clock."""
    model, sharding = made(plans[0], heats[0], settings)
    go_on(model, rank, size, 0, steps, "", [])
    tables = model.tables
    before = {name: tables.get_rows(name).numpy() for name in TABLES}, cached_rows(tables)
    sharding.migrate(plans[1], heats[1])
    after = {name: tables.get_rows(name).numpy() for name in TABLES}, cached_rows(tables)
    go_on(model, rank, size, steps, 2 * steps, "", [])
    sharding.check_replicas()
    return before, after, tables.memory().parts, tables.trainer.clock.tolist()


def planned(rank: int, size: int, plan: tc.Plan, heat: Any, batches: list[dict[str, Any]]) -> Any:
    """Train by a plan with slots that the planner made; the run, and rows that are in slots here."""
    model = big_model("fixed")
    sharding = tc.shard_(model, plan, heat)
    for number, batch in enumerate(batches):
        each = len(batch["hour"]) // size
        here = slice(rank * each, (rank + 1) * each)
        given = {
            "item": (torch.from_numpy(batch["item"][here].reshape(-1)), torch.arange(each + 1) * batch["item"].shape[1]),
            "hour": (torch.from_numpy(batch["hour"][here]), torch.arange(each + 1)),
        }
        model["rows"](given).values().square().sum().backward()
        if number == 0:
            sharding.wait_for_exchange()
            sharding.reset_meters()
    sharding.check_replicas()
    return sharding.run(each, 1.0), cached_rows(model["rows"])
