"""Functions that ranks run in tests. Arguments: rank, number of ranks, and those of the test."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from cases import TABLES, Model, batches, dense_part, exact_loss, joined, sizes_of, smooth_loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from train_ranks import train_clicks, train_sequence, train_twice  # noqa: F401

import thermocline as tc
from thermocline.distributed import process_groups, shard, shard_inputs
from thermocline.distributed.exchange import batch_exchange, context


def work(rank: int, tasks: Any, results: Any) -> None:
    """A process that runs tasks until it is killed."""
    while True:
        name, store, size, arguments = tasks.get()
        try:
            module, _, function = name.rpartition(".")
            known = vars(importlib.import_module(module)) if module else globals()
            results.put((rank, True, run(known[function], rank, size, store, arguments)))
        except Exception as error:
            results.put((rank, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def run(function: Callable[..., Any], rank: int, size: int, store: str, arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=300)
        )
    try:
        return function(rank, size, *arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train_with_large_messages(rank: int, size: int, *given: Any) -> tuple[dict[str, Any], int]:
    """`train` with every message treated as large; also the number of gradient reductions in pieces."""
    with (
        mock.patch.object(context, "LARGE_MESSAGE", -1),
        mock.patch.object(batch_exchange, "reduce_in_pieces", side_effect=batch_exchange.reduce_in_pieces) as pieces,
    ):
        return train(rank, size, *given), pieces.call_count


def train(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train each rank on its batches; local rows and state, outputs, and all rows as ranks read them together."""
    given = dict(settings)
    loss = exact_loss if given.pop("exact") else smooth_loss
    dedup, ahead, replicas = given.pop("dedup", True), given.pop("ahead", ""), given.pop("replicas", 0)
    mesh = {"mesh": DeviceMesh("cpu", torch.arange(size).view(replicas, -1))} if replicas else {}
    model = Model(**given)
    sharding = tc.shard_(model, plan, heat, reduce="sum", check_every=20, **mesh)
    sharding.collections["tables"].dedup = dedup
    outs = []
    for step in range(steps):
        sizes = sizes_of(step, size)
        if ahead:
            look_ahead(model.tables, rank, size, step, ahead)
        out = model.tables(batches(step, sizes)[rank]).values()
        outs.append(out.detach().clone().numpy())
        loss(out, step, sum(sizes[:rank])).backward()
        if "interrupted" in ahead and step % 3 == 0:
            interrupt(model, step)
    sharding.check_replicas()
    came = sharding.collections["tables"].state.meter.prefetched
    expected = {"always": steps - 2, "three": steps - 1, "sometimes": 1, "interrupted": steps // 2}
    assert came >= expected.get(ahead, steps // 2 if ahead else 0), came
    sharded, held = sharding.collections["tables"], []
    for index, table in enumerate(sharded.tables):
        rows = torch.arange(table.rows)
        for k, at, place in sharded.shard.local(sharded.row_index.locate(rows + sharded.row_index.first[index])):
            parts = [*sharded.arena.views(k)[:2], *sharded.shard.states(k)]
            held.append((index, rows[at].numpy(), [part[place].numpy() for part in parts]))
    return {"held": held, "outs": outs, "read": {table.name: sharded.get_rows(table.name).numpy() for table in sharded.tables}}


def look_ahead(tables: Any, rank: int, size: int, step: int, how: str) -> None:
    """Prefetch the next batch or, with "three", the next three; or, at random on each rank, other batches or none."""
    chance = np.random.default_rng((step, rank, 3)).integers(4) if how == "sometimes" else 3
    if "three" in how:
        for after in range(1, 4) if step == 0 else [step + 3]:
            tables.prefetch(batches(after, sizes_of(after, size))[rank])
    elif chance:
        after = step + 1 + (chance == 1)
        batch = batches(after, sizes_of(after, size))[rank]
        tables.prefetch(batch)
        if chance == 2:  # the caller's buffer is used for something else meanwhile
            batch["user"][0].fill_(5)


def interrupt(model: Any, step: int) -> None:
    """Rows are looked at, or set, between two steps; and with the second, the batch after them is not waited for."""
    if step % 2:
        model.tables.get_rows("user")
        model.tables.set_rows("user", torch.arange(97), torch.linspace(-1, 1, 97 * 8).view(97, 8) * step)
    else:
        with torch.no_grad():
            model.eval()(batches(step, [2] * 4)[0])
        model.train()


def fail(rank: int, size: int, what: str, plans: list[tc.Plan], heat: Any) -> Exception | str:
    """Rank 1 differs from the others; the error of each rank."""
    odd = rank == 1
    settings: dict[str, Any] = {"check_every": 3} if what == "checks" and odd else {}
    try:
        model = Model()
        if what in ("residency", "update") and odd:
            object.__setattr__(model.tables.rows, what, {"residency": "host", "update": "step"}[what])
        if what == "other rows":
            model.tables.set_rows("user", torch.arange(97), torch.full((97, 8), float(rank)))
        given = "no such plan.json" if what == "no file" and odd else plans[min(rank, len(plans) - 1)]
        no_device = tc.BadInput("no device", parameter="device") if what == "device" and odd else None
        with (
            mock.patch.object(shard_inputs, "__version__", "0.0" if what == "version" and odd else tc.__version__),
            mock.patch.object(shard, "device_of", side_effect=no_device, wraps=shard.device_of),
        ):
            sharding = tc.shard_(model, given, heat, **settings)
        batch: Any = batches(1, [3] * size)[rank]
        if what == "leaves" and odd:
            dist.destroy_process_group()  # as its end would
            return "left"
        if what == "a feature less" and odd:
            batch.pop("shop")
        if what == "weights" and odd:
            batch = {name: (*bags, torch.ones(len(bags[0]))) for name, bags in batch.items()}
        if what == "a bad id" and odd:
            batch["shop"] = torch.tensor([1, 2, 23]), torch.tensor([0, 1, 2, 3])
        model.requires_grad_(not (what == "frozen" and odd))
        if what == "a flipped bit" and odd:
            sharding.wait_for_exchange()
            sharding.collections["tables"].arena.codes[5] ^= 1
        sharding.check_replicas()
        loss = model.tables(batch).values().sum()
        if what == "nan":
            (loss * (float("nan") if odd else 1.0)).backward()
            model.tables(batch)
        sharding.check_replicas()
    except (tc.ThermoclineError, OSError) as error:
        return error.with_traceback(None)
    return "no error"


def shard_by_rank_0(rank: int, size: int, plan: tc.Plan, heat: Any, given: str) -> Any:
    """Plan and heat as ranks make them at different times, or as only some ranks have them; the plan that each rank uses."""
    own: Any = plan.model_copy(update={"created": f"{2001 + rank}-01-01"}), replace(heat, created=f"{2001 + rank}-01-01")
    if given == "none" and rank:
        own = None, None
    if given == "only rank 1" and rank != 1:
        own = own[0], None
    if given == "not rank 0" and rank == 0:
        own = None, heat
    try:
        sharding = tc.shard_(Model(), *own)
    except tc.ThermoclineError as error:
        return error.with_traceback(None)
    return sharding.plan.created, sharding.plan.tables


def leave(rank: int, size: int, *given: Any) -> Exception | str:
    """`fail` with a rank that ends. The clock of the failure timeout stands still until both other ranks have failed."""
    ticks = count(0.0, 3600.0)

    def now() -> float:
        told = dist.distributed_c10d._get_default_store().check([f"{process_groups._FAILED_KEY}{2 - rank}"])
        return next(ticks) if told else 0.0

    with mock.patch.object(process_groups, "time", SimpleNamespace(monotonic=now, sleep=time.sleep)):
        return fail(rank, size, "leaves", *given)


def measure(rank: int, size: int, plan: tc.Plan, heat: Any, sizes: list[int], dedup: bool = True) -> Any:
    """One step; the traffic of this rank, and the run of all ranks."""
    model = Model()
    sharding = tc.shard_(model, plan, heat)
    sharding.collections["tables"].dedup = dedup
    model.tables(batches(0, sizes)[rank]).values().sum().backward()
    mesh = sharding.mesh
    assert mesh is not None and mesh.shape == (plan.topology.nodes, plan.topology.gpus_per_node)
    assert mesh.mesh_dim_names == ("node", "local_rank") and tuple(mesh.get_coordinate() or ()) == divmod(rank, mesh.shape[1])
    messages = sharding.collections["tables"].state.meter.messages_DL
    return sharding.sent(), messages, sharding.run(batch=4, seconds=0.5)


def measure_collectives(rank: int, size: int, *given: Any) -> list[list[int]]:
    """The sizes that collectives of all ranks sent to each of them in `measure`."""
    with mock.patch.object(dist, "all_to_all_single", side_effect=dist.all_to_all_single) as called:
        measure(rank, size, *given)
    return [call.args[3] for call in called.call_args_list if len(call.args[3]) == size]


def train_with_ddp(rank: int, size: int, plan: tc.Plan, heat: Any) -> Any:
    """The dense part in DistributedDataParallel beside it, losses that are means, equal batches, a schedule for the rows."""
    model = Model(precision="fp32", optimizer=tc.SGD(lr=0.5))
    sharding = tc.shard_(model, plan, heat)
    dense: nn.Module = dense_part()
    dense = nn.parallel.DistributedDataParallel(dense) if size > 1 else dense
    sparse = tc.fused_optimizer(model)
    optimizer, schedule = torch.optim.SGD(dense.parameters(), lr=0.1), torch.optim.lr_scheduler.ExponentialLR(sparse, 0.9)
    for step in range(10):
        parts = batches(step, [6] * (12 // 6))
        batch = parts[rank] if size > 1 else joined(parts)
        dense(model.tables(batch).values()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sparse.step()
        schedule.step()
    rows = [sharding.collections["tables"].get_rows(name).numpy() for name in TABLES]
    return rows, [parameter.detach().numpy() for parameter in dense.parameters()]


def train_pairs(rank: int, size: int, plan: tc.Plan, heat: Any) -> Any:
    """Two lookups of one collection in each pass; all rows, and the steps of the optimizer."""
    model = Model()
    if size > 1:
        tc.shard_(model, plan, heat, reduce="sum", check_every=5)
    for step in range(10):
        loss = torch.zeros(())
        for part in range(2):
            sizes = sizes_of(step + 20 * part, 3)
            given = batches(step + 20 * part, sizes)
            out = model.tables(given[rank] if size > 1 else joined(given)).values()
            loss = loss + exact_loss(out, step + part, sum(sizes[:rank]))
        loss.backward()
    return [model.tables.get_rows(name).numpy() for name in TABLES], model.tables.trainer.clock.tolist()[1]


def train_two(rank: int, size: int, plan: tc.Plan, heat: Any) -> Any:
    """Two collections of one model, one of them unpooled and with hashed ids; rows as all ranks read them."""
    torch.manual_seed(3)
    pooled = [tc.Table(name, rows, dim, features) for name, (rows, dim, features) in TABLES.items() if name != "shop"]
    shop = [tc.Table("shop", 23, 5, ids=tc.IdMap.hashed(23, salt=5))]
    rows = tc.RowConfig(cache=0.0, optimizer=tc.SGD(lr=0.125))
    sums, each = tc.EmbeddingCollection(pooled, rows=rows), tc.EmbeddingCollection(shop, mode="none", rows=rows)
    model = nn.ModuleDict({"sums": sums, "each": each})
    if size > 1:
        tc.shard_(model, plan, heat, reduce="sum")
    for step in range(20):
        parts = batches(step, sizes_of(step, 3))
        batch = parts[rank] if size > 1 else joined(parts)
        first = model["sums"]({name: bags for name, bags in batch.items() if name != "shop"})
        second = model["each"]({"shop": batch["shop"]})
        loss = first["user"].sum() - 3 * first["item"].sum() + 2 * first["history"].sum() - second["shop"].sum()
        loss.backward()
    rows = [model["sums"].get_rows(name) for name in ("user", "item")]
    return [each.numpy() for each in [*rows, model["each"].get_rows("shop")]]
