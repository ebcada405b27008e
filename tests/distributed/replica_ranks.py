"""Functions that ranks run in the tests of replicas. Arguments: rank, number of ranks, and those of the test."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import torch
from cases import TABLES, Model, batches, exact_loss, sizes_of
from ranks import look_ahead
from torch.distributed.device_mesh import DeviceMesh

import thermocline as tc

Arrays = list[np.ndarray[Any, Any]]


def mesh_of(size: int, replicas: int, turned: bool = False) -> DeviceMesh:
    """A mesh of replicas; `turned`: the ranks of a replica are not consecutive."""
    ranks = torch.arange(size)
    return DeviceMesh("cpu", ranks.view(-1, replicas).t() if turned else ranks.view(replicas, -1))


def read(tables: Any) -> dict[str, Any]:
    """All rows as the ranks of a replica read them, and all state that this rank has."""
    rows = [tables.get_rows(name).numpy() for name in TABLES]
    tables.wait_for_exchange()
    held = [tables.arena.codes, tables.arena.meta, *tables.trainer.states, *tables.arena.cache[:7]]
    return {"rows": rows, "held": [each.clone().numpy() for each in held], "clock": tables.trainer.clock.tolist()}


def train(
    rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], replicas: int, every: int, steps: int
) -> list[dict[str, Any]]:
    """Train; what a rank reads after each step, or with "ahead" after the last."""
    given = dict(settings)
    ahead, turned, values = given.pop("ahead", ""), given.pop("turned", False), given.pop("values", None)
    model: Any = Model(**given)
    mesh = mesh_of(size, replicas, turned)
    sharding = tc.shard_(model, plan, heat, reduce="sum", mesh=mesh, sync_every=every)
    for name, each in (values or {}).items():
        model.tables.set_rows(name, torch.arange(len(each)), torch.from_numpy(each))
    found = []
    for step in range(steps):
        sizes = sizes_of(step, size)
        if ahead:
            look_ahead(model.tables, rank, size, step, ahead)
        out = model.tables(batches(step, sizes)[rank]).values()
        exact_loss(out, step, sum(sizes[:rank])).backward()
        if not ahead or step == steps - 1:
            found.append(read(model.tables))
    if ahead:
        assert model.tables.state.meter.prefetched >= steps // 2, model.tables.state.meter.prefetched
    sharding.check_replicas()
    return found


def fail(rank: int, size: int, plan: tc.Plan, heat: Any, what: str) -> str:
    """Rank 1 fails; the error of each rank, and then a step of all."""
    model: Any = Model()
    tc.shard_(model, plan, heat, mesh=mesh_of(size, 2))
    told = ""
    for step in range(3):
        batch = dict(batches(step, [3] * size)[rank])
        if rank == 1 and step == 1 and what == "id":
            batch["item"] = (torch.full_like(batch["item"][0], 61), batch["item"][1])
        try:
            out = model.tables(batch).values()
            (out.sum() * (float("nan") if rank == 1 and step == 0 and what == "gradient" else 1.0)).backward()
        except tc.BadInput as error:
            told += f"{step}: {type(error).__name__}: {error}"
    model.tables.wait_for_exchange()
    return told


def refuse(rank: int, size: int, plan: tc.Plan, heat: Any, what: str) -> str:
    """The parameter of the error of `shard_`."""
    settings: dict[str, Any] = {"mesh": mesh_of(size, 2), "sync_every": 1}
    settings |= {
        "shape": {"mesh": mesh_of(size, size // 2)}, "every": {"sync_every": 0}, "differs": {"sync_every": 1 + (rank == 1)},
        "no mesh": {"mesh": None, "sync_every": 3}, "cache": {"sync_every": 2},
    }[what]  # fmt: skip
    try:
        tc.shard_(Model(policy="lfu"), plan, heat, **settings)
    except tc.BadInput as error:
        return f"{error.parameter}"
    return "no error"


def save(rank: int, size: int, plan: tc.Plan, heat: Any, folder: str, every: int) -> tuple[Arrays, Arrays, bool]:
    """Train, save between two syncs, and load into one replica of as many ranks: rows before and after."""
    model: Any = Model()
    tc.shard_(model, plan, heat, reduce="sum", mesh=mesh_of(size, 2), sync_every=every)
    for step in range(every + 1):
        sizes = sizes_of(step, size)
        exact_loss(model.tables(batches(step, sizes)[rank]).values(), step, sum(sizes[:rank])).backward()
    apart = read(model.tables)["rows"]
    tc.save(model, folder)
    rows = read(model.tables)["rows"]
    other: Any = Model()
    tc.shard_(other, plan, heat, reduce="sum", mesh=mesh_of(size, 2), sync_every=every)
    tc.load_into(other, folder)
    changed = any(not np.array_equal(one, two) for one, two in zip(apart, rows, strict=True))
    return rows, read(other.tables)["rows"], changed


def end(rank: int, size: int, plan: tc.Plan, heat: Any) -> str:
    """Rank 3 leaves the job after a step; the error of each other rank."""
    model: Any = Model()
    tc.shard_(model, plan, heat, mesh=mesh_of(size, 2))
    with contextlib.suppress(AttributeError):
        threading.current_thread().name = f"rank {rank}"
    for step in range(3):
        if rank == 3 and step == 1:
            torch.distributed.destroy_process_group()
            return "left"
        try:
            model.tables(batches(step, sizes_of(step, size))[rank]).values().sum().backward()
            model.tables.wait_for_exchange()
        except tc.ThermoclineError as error:
            return type(error).__name__
    return "no error"
