"""Functions that ranks run in the tests on a shared GPU. Arguments: rank, number of ranks, and those of the test."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import train_ranks
from cases import TABLES, Model, batches, dense_part, exact_loss, heat_of, sizes_of, smooth_loss

import thermocline as tc
from thermocline.distributed import process_groups as groups
from thermocline.distributed.comm_thread import CommThread
from thermocline.distributed.exchange import context
from thermocline.distributed.replanning import migrate
from thermocline.distributed.replanning.frequency_counter import merge_profiles

Arrays = dict[str, np.ndarray[Any, Any]]


def work(rank: int, tasks: Any, results: Any) -> None:
    """A process that runs tasks until it is killed. Task names begin with the backend."""
    while True:
        name, store, size, arguments = tasks.get()
        try:
            results.put((rank, True, _run(name, rank, size, store, arguments)))
        except Exception as error:
            results.put((rank, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _run(name: str, rank: int, size: int, store: str, arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    backend, function = name.split()
    module, _, function = function.rpartition(".")
    known = vars(importlib.import_module(module)) if module else globals()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    try:
        return known[function](rank, size, *arguments)
    finally:
        dist.destroy_process_group()


def train(
    rank: int, size: int, device: str, plan: tc.Plan, heat: Any, settings: dict[str, Any], steps: int
) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """A model trained on a device, and its outputs."""
    given = dict(settings)
    loss = exact_loss if given.pop("exact", True) else smooth_loss
    ahead, overlap, large = given.pop("ahead", False), given.pop("overlap", None), given.pop("large", False)
    model = Model(**given).to(device)
    with mock.patch.object(context, "LARGE_MESSAGE", -1 if large else context.LARGE_MESSAGE):
        sharding = tc.shard_(model, plan, heat, reduce="sum", check_every=7)
        tables: Any = model.tables
        assert sharding.mesh is None or tuple(sharding.mesh.shape) == (sharding.groups.nodes, sharding.groups.local_size)
        assert tables.row_index.device.type == tables.arena.device.type == device
        tables.pipeline.overlap = tables.pipeline.overlap if overlap is None else overlap
        outs = go_on(tables, rank, size, device, loss, 0, steps, ahead)
        sharding.check_replicas()
    assert tables.state.meter.prefetched >= (steps - 2 if ahead else 0)
    return sharding, outs


def go_on(
    tables: Any, rank: int, size: int, device: str, loss: Callable[..., Any], first: int, last: int, ahead: bool = False
) -> list[np.ndarray[Any, Any]]:
    outs = []
    for step in range(first, last):
        if ahead and step + 1 < last:
            tables.prefetch(batch_of(step + 1, rank, size, device))
        out = tables(batch_of(step, rank, size, device)).values().cpu()
        outs.append(out.detach().numpy().copy())
        loss(out, step, sum(sizes_of(step, size)[:rank])).backward()
    return outs


def batch_of(step: int, rank: int, size: int, device: str) -> Any:
    batch = batches(step, sizes_of(step, size))[rank]
    return {name: tuple(each.to(device) for each in bags) for name, bags in batch.items()}


def kept(sharding: Any, outs: list[np.ndarray[Any, Any]]) -> Arrays:
    """All local arrays, the outputs, and all rows as ranks read them together."""
    tables = sharding.collections["tables"]
    tables.wait_for_exchange()
    arena, trainer = tables.arena, tables.trainer
    here = {"codes": arena.codes, "meta": arena.meta, "clock": trainer.clock, "hyper": trainer.hyper}
    here |= {f"state {n}": state for n, state in enumerate(trainer.states)}
    here |= {f"cache {n}": array for n, array in enumerate(arena.cache[:7])}
    here |= {f"rows of {name}": tables.get_rows(name) for name in TABLES}
    return {name: tensor.cpu().clone().numpy() for name, tensor in here.items()} | {"outs": np.concatenate(outs)}


def both(rank: int, size: int, *given: Any) -> tuple[list[Arrays], list[Any]]:
    """The same training on CPU and GPU: local arrays, and traffic."""
    found = [train(rank, size, device, *given) for device in ("cpu", "cuda")]
    return [kept(*each) for each in found], [sharding.sent() for sharding, _ in found]


def both_alone(rank: int, size: int, *given: Any) -> tuple[list[Arrays], list[Any]]:
    """`both` for one rank that exchanges with itself on the GPU."""
    found = [kept(*train(rank, size, "cpu", *given))]
    with _sent_to_itself():
        sharding, outs = train(rank, size, "cuda", *given)
        assert not sharding.groups.world.gloo
        found.append(kept(sharding, outs))
    return found, []


@contextlib.contextmanager
def _sent_to_itself() -> Iterator[None]:
    def made(nodes: int, cards: int, device: torch.device) -> groups.ProcessGroups:
        comm_thread = CommThread(device)
        return groups.ProcessGroups(0, 1, 1, *groups._make_groups(1, 1, device, comm_thread), device, comm_thread)

    with mock.patch.object(groups.ProcessGroups, "make", made), mock.patch.object(groups.RankGroup, "is_single", False):
        yield


def alone(rank: int, size: int, name: str, *given: Any) -> Any:
    """Another function of this file, of one rank that exchanges with itself wherever its rows lie."""
    with _sent_to_itself():
        return globals()[name](rank, size, *given)


def collectives(rank: int, size: int, device: str) -> int:
    """All collectives of a group, from the caller and in the background, while the GPU computes; the number of comparisons."""
    with _sent_to_itself():
        here = groups.ProcessGroups.make(1, 1, torch.device(device, 0) if device == "cuda" else torch.device(device))
        group, found = here.world, []
        assert group.gloo == (device == "cpu") and not group.is_single
        for send in (_send_everything, _send_and_forget):
            found.append(send(group))
            here.comm_thread.submit(lambda send=send: found.append(send(group)))  # type: ignore[misc]
            busy = torch.ones(512, 512, device=device)
            for _ in range(50):
                busy = busy @ busy / 512
            here.comm_thread.wait()
        assert here.all_gather({"one": 1}) == [{"one": 1}]
        migrate.raise_if_any_failed(here, None)
        told = np.array([[7, 2**31 - 1]])
        assert np.array_equal(group.exchange_counts(told), told)
        assert merge_profiles(here, heat_of()).sha256 == heat_of().sha256
        return sum(found)


def _send_everything(group: groups.RankGroup) -> int:
    """Every dtype, from GPU and host, in every shape, strided and empty."""
    compared = 0
    for kind in (torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32):
        for shape in ((0,), (1,), (63,), (0, 3), (7, 5), (100_003,)):
            for device in {torch.device("cpu"), group.device}:
                each = torch.arange(2 * int(np.prod(shape)), device=device).remainder(251).to(kind).view(-1, *shape[1:])[::2]
                came = group.all_to_all(each, [len(each)], [len(each)])
                assert came.device == each.device and came.dtype == kind and torch.equal(came, each), (kind, shape, device)
                compared += 1
        assert [part.numel() for part in group.broadcast(torch.ones(9, dtype=kind, device=group.device), [0], large=False)] == [
            0
        ]
    return compared


def _send_and_forget(group: groups.RankGroup) -> int:
    """Sent tensors are dropped at once, and their memory is reused and overwritten."""
    came = []
    for n in range(40):
        came.append(group.all_to_all(torch.full((1 << 18,), n, device=group.device), [1 << 18], [1 << 18]))
        torch.full((1 << 18,), -1, device=group.device)
    return sum(bool((each == n).all()) for n, each in enumerate(came))


def with_ddp(rank: int, size: int, plan: tc.Plan, heat: Any) -> list[list[np.ndarray[Any, Any]]]:
    """The dense part in DDP, with collectives beside those of rows: rows and dense part on CPU and GPU."""
    found = []
    for device in ("cpu", "cuda"):
        model: Any = Model(precision="fp32", optimizer=tc.SGD(lr=0.5)).to(device)
        tc.shard_(model, plan, heat)
        dense = torch.nn.parallel.DistributedDataParallel(dense_part().to(device))
        optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
        for step in range(10):
            batch = {name: tuple(each.to(device) for each in bags) for name, bags in batches(step, [6])[0].items()}
            dense(model.tables(batch).values()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = [model.tables.get_rows(name) for name in TABLES]
        found.append([each.detach().cpu().numpy() for each in [*rows, *dense.parameters()]])
    return found


def saved(
    rank: int, size: int, devices: tuple[str, str], folder: str, plans: list[tc.Plan], heat: Any, settings: dict[str, Any]
) -> list[Arrays]:
    """Train, save, load where the rows lie elsewhere, and train on: both, before and after."""
    sharding, outs = train(rank, size, devices[0], plans[0], heat, settings, 6)
    tables = sharding.collections["tables"]
    holder = torch.nn.ModuleDict({"tables": tables})
    tc.save(holder, folder)
    found = [kept(sharding, outs)]
    model = Model(**settings).to(devices[1])
    other = tc.shard_(model, plans[1], heat, reduce="sum")
    tc.load_into(model, folder)
    found.append(kept(other, outs))
    for each, device in ((sharding, devices[0]), (other, devices[1])):
        more = go_on(each.collections["tables"], rank, size, device, exact_loss, 6, 12)
        each.check_replicas()
        found.append(kept(each, more))
    return found


def moved(rank: int, size: int, plans: list[tc.Plan], heat: Any, settings: dict[str, Any]) -> list[Arrays]:
    """Train, migrate and continue, on CPU and GPU."""
    found = []
    for device in ("cpu", "cuda"):
        sharding, outs = train(rank, size, device, plans[0], heat, settings, 5)
        sharding.migrate(plans[1], heat)
        outs += go_on(sharding.collections["tables"], rank, size, device, exact_loss, 5, 10)
        sharding.check_replicas()
        found.append(kept(sharding, outs))
    return found


def refused(rank: int, size: int, plan: tc.Plan, heat: Any) -> str:
    """Bad offsets on rank 1, then a NaN gradient; the error of each rank for the gradient."""
    model = Model().to("cuda")
    tc.shard_(model, plan, heat)
    tables: Any = model.tables
    batch = {name: tuple(each.cuda() for each in bags) for name, bags in batches(1, [3] * size)[rank].items()}
    with contextlib.suppress(tc.BadInput):
        tables(batch | {"shop": (batch["shop"][0][rank:], batch["shop"][1])})
        raise AssertionError("nobody was told")
    out = tables(batch).values()
    (out.sum() * (float("nan") if rank == 1 else 1.0)).backward()
    told = ""
    try:
        tables(batch_of(4, rank, size, "cuda"))
    except tc.BadInput as error:
        told = str(error)
    tables(batch_of(5, rank, size, "cuda")).values().sum().backward()
    tables.wait_for_exchange()
    return told


def refused_of_two(rank: int, size: int, plan: tc.Plan) -> list[str]:
    """Two collections, whose exchanges go on behind the caller: a gradient of the first is no number, and ids of the second,
    which are mapped, are none, both on rank 1. What is told by the lookups after it, of the second first."""
    pooled = [tc.Table(name, rows, dim, features) for name, (rows, dim, features) in TABLES.items() if name != "shop"]
    shop = [tc.Table("shop", 23, 5, ids=tc.IdMap.identity(20).offset(3))]
    first, second = (
        tc.EmbeddingCollection(pooled, rows=tc.RowConfig(cache=0.0)),
        tc.EmbeddingCollection(shop, rows=tc.RowConfig(cache=0.0)),
    )
    model: Any = torch.nn.ModuleDict({"first": first, "second": second}).to("cuda")
    tc.shard_(model, plan)
    told = []

    def batch_of_both(step: int) -> list[Any]:
        batch = {name: tuple(each.cuda() for each in bags) for name, bags in batches(step, [5] * size)[rank].items()}
        shop = batch.pop("shop")
        ids = torch.full_like(shop[0], 21) if rank == 1 and step == 2 else shop[0] % 20
        return [batch, {"shop": (ids, shop[1])}]

    def look_up(name: str, batch: Any) -> torch.Tensor:
        try:
            told.append("")
            return model[name](batch).values()  # type: ignore[no-any-return]
        except tc.BadInput as error:
            told[-1] = str(error)
            return torch.zeros(1, requires_grad=True)

    for step in range(4):
        one, two = batch_of_both(step)
        if step == 1:
            model["second"].prefetch(batch_of_both(2)[1])
        seconds = look_up("second", two)
        firsts = look_up("first", one)
        factor = float("nan") if rank == 1 and step == 0 else 1.0
        (firsts.sum() * factor).backward()
        seconds.sum().backward()
    for name in ("first", "second"):
        model[name].wait_for_exchange()
    return told


def without_values(rank: int, size: int, plan: tc.Plan) -> list[Any]:
    """Tables on "meta" move to the device of the dense part, with the initial rows of a CPU."""
    found = []
    for device in ("cpu", "cuda"):
        with torch.device("meta"):
            model = torch.nn.ModuleDict({"tables": Model().tables})
        model["dense"] = torch.nn.Linear(3, 1, device=device)
        tc.shard_(model, plan)
        tables: Any = model["tables"]
        found.append((tables.arena.device.type, tables.get_rows("item").cpu().numpy()))
    return found


def train_sequences(rank: int, size: int, folder: str) -> Any:
    """A sequence model trained by a plan on CPUs, and on the GPU with a stop and a resume."""
    settings = replace(train_ranks.HISTORIES, users=31, epochs=1)
    runs = (("cpu", "", []), ("cuda", folder, [2]))
    return [train_ranks.train_sequence(rank, size, replace(settings, device=device), True, *run) for device, *run in runs]


def train_on_cpus(rank: int, size: int, plan: tc.Plan, heat: Any) -> Arrays:
    return kept(*train(rank, size, "cpu", plan, heat, {}, 5))
