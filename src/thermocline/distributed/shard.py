"""`shard_` turns every module of rows of a model into this rank's shard of it, as a plan says; `Sharding` is its result.

    torchrun --nproc-per-node 4 train.py

    model = Model()                                            # the same on every rank; or under torch.device("meta")
    sharding = thermocline.shard_(model, "plan.json", heat="heat.tc")
    ...                                                        # train as before, each rank on its own samples
    sharding.check_replicas()

Ranks use plan and heat of rank 0. A rank may give None; a rank that gives others raises, since a stale file on one node would
otherwise stay unnoticed. Ranks then compare collections and the maps of rows. Every rank reports a difference.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.nn.collection import EmbeddingCollection
from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, Direction, Plan
from thermocline.plan.run_file import MeasuredRank, MeasuredRun, MeasuredTraffic, fingerprint

from .elastic_ids import check_migration
from .exchange.traffic_meter import TrafficMeter, TrafficRecord
from .placement.init_rows import hot_rows
from .planned_tables import check_heat, check_maps, map_collections
from .process_groups import (
    ProcessGroups,
    gather_objects,
    raise_if_any_failed,
    world_size,
)
from .replanning.frequency_counter import FrequencyCounter, merge_profiles
from .replanning.migrate import RowMigration, deferred_interrupt
from .replicas import Replicas, replica_layout
from .shard_inputs import device_of_rows, raise_on_all_ranks, read_inputs
from .shard_source import Shardable, ShardSource, device_of, shardable_modules
from .sharded_collection import ShardedCollection
from .sharded_table import SHARDED
from .sharded_trained import Reduce


@dataclass
class Sharding:
    """A model whose tables are sharded, as `shard_` returns it.

    Attributes:
        plan: the plan of the tables.
        groups: the process groups that exchange rows.
        collections: the sharded modules, by module name.

    Example::

        sharding = thermocline.shard_(model, "plan.json", heat="heat.tc")
        sharding.heat().save("recent.tc")
    """

    plan: Plan = field(repr=False)  # print(sharding.plan) shows it
    groups: ProcessGroups
    collections: dict[str, ShardedCollection]

    @property
    def mesh(self) -> DeviceMesh | None:
        """A mesh of nodes x ranks per node, for the dense part; None for one process."""
        return self.groups.mesh

    def check_replicas(self) -> None:
        """Raise if replicas of a row differ in a bit on any two ranks. Collective."""
        for collection in self.collections.values():
            collection.check_replicas()
            if (replicas := collection.trained.replicas) is not None and replicas.every == 1:
                replicas.check(collection.shard)

    def sync_replicas(self) -> None:
        """Average the rows of replicas now, where `sync_every` is more than 1, as `save` does. Collective over all replicas."""
        for collection in self.collections.values():
            collection.trained.sync_replicas()

    def wait_for_exchange(self) -> None:
        """Wait for exchanges in the background."""
        for collection in self.collections.values():
            collection.wait_for_exchange()

    def heat(self) -> HeatProfile:
        """Lookups of all ranks in training since the last call, by feature and raw id, from the counted batches. Collective.

        Returns:
            The same profile on every rank; its `save` writes a heat file.
        """
        self.wait_for_exchange()
        taken = [collection.counter.take() for collection in self.collections.values()]
        mine = {name: table for each in taken for name, table in each.tables.items()}
        return merge_profiles(self.groups, HeatProfile(mine, "live training"))

    def migrate(self, plan: Plan | str | Path | None, heat: HeatProfile | str | Path | None = None) -> None:
        """Move rows to where another plan has them, between two steps. Collective.

        Rows, optimizer state, clock and seed keep their bits. Modules and optimizers stay valid, and traffic meters restart.
        Needs memory for the new shard beside the old one. An error on any rank is raised on all, and changes nothing.

        Args:
            plan: a plan for the same ranks. As in `shard_`, ranks use plan and heat of rank 0, and others may give None.
            heat: the heat profile of the plan. Cache slots go to its hottest rows; by default to the rows looked up lately.

        Raises:
            BadInput: the plan does not fit the job, or another rank failed.
        """
        self.wait_for_exchange()
        if self.groups.replicas is not None:
            raise BadInput("replicas do not migrate; save, and load by the new plan", parameter="mesh")
        if any(each.placeholder.pending is not None for each in self.collections.values()):
            raise BadInput(
                "gradients wait for fused_optimizer.step(); migrate after it, or after zero_grad()", parameter="step"
            )
        reduce = next(iter(self.collections.values())).trained.reduce
        plan, heat = read_inputs(plan, heat, self.collections, {"reduce": reduce})
        here, there = self.plan.topology, plan.topology
        if (here.nodes, here.gpus_per_node) != (there.nodes, there.gpus_per_node):
            raise BadInput(
                f"the plan is for {there.nodes} x {there.gpus_per_node} ranks, but the job runs on {here.nodes} x "
                f"{here.gpus_per_node}; plan for these",
                parameter="plan", needed=there.world_size, available=here.world_size,
            )  # fmt: skip
        check_heat(plan, heat)
        with deferred_interrupt() as check:
            self._migrate(plan, heat, check)

    def _migrate(self, plan: Plan, heat: HeatProfile | None, check: Callable[[], None]) -> None:
        """Build every collection by the new plan, move the rows, and take over when all are complete."""
        slots = sum(tier.cached + tier.near for table in plan.tables for tier in table.tiers)
        recent = self.heat() if heat is None and slots else heat
        built: dict[str, ShardedCollection] = {}
        failed: BaseException | None = None
        device = next(iter(self.collections.values())).row_index.device
        try:
            tables, maps = map_collections(plan, heat, self.collections, self.groups, device)
            for name, collection in self.collections.items():
                new = ShardedCollection(collection, tables[name], maps[name], collection.groups, device)
                built[name] = new
                check_migration(collection, new)
                if new.arena.pools and recent is not None:
                    new.arena.warm(hot_rows(new.shard, new.tables, collection.live_maps, recent))
        except BaseException as error:
            failed = error
        raise_if_any_failed(self.groups, failed)
        check_maps(self.groups, tables, maps)
        same = all(each.row_index.same_as(built[name].row_index) for name, each in self.collections.items())
        if self.groups.size > 1 or not same:  # one process keeps rows of one precision in place, whatever the tiers
            for name, collection in self.collections.items():
                RowMigration(collection, built[name]).run(check)
                built[name].check_replicas()
            for name, collection in self.collections.items():
                collection.take_over(built[name])
        for collection in self.collections.values():
            collection.plan = plan
        self.plan = plan

    # -- traffic ------------------------------------------------------------------------------------------------------------

    def meters(self) -> list[TrafficMeter]:
        """The traffic meters of this rank, after all exchanges."""
        self.wait_for_exchange()
        for collection in self.collections.values():
            collection.state.meter.add_host(*collection.shard.take_host_bytes())
        return [collection.state.meter for collection in self.collections.values()]

    def sent(self) -> list[TrafficRecord]:
        """Bytes that this rank sent, by table, tier, direction and link class."""
        return [record for meter in self.meters() for record in meter.records()]

    def waited(self) -> dict[Direction, float]:
        """Seconds that this rank waited for exchanges, by direction, without exchanges in the background."""
        meters = self.meters()
        return {direction: sum(meter.waited[direction] for meter in meters) for direction in DIRECTIONS}

    def reset_meters(self) -> None:
        """Restart the traffic meters."""
        for meter in self.meters():
            meter.reset()

    def run(self, batch: int, seconds: float) -> MeasuredRun:
        """Measurements since the meters were reset, for `run.json`. Collective.

        Buffers are the messages of a step, sent and received, with ids and rows of the batches in memory at once: two, or as
        many as were prefetched and one.

        Args:
            batch: samples per rank and step.
            seconds: of one step.
        """
        meters = self.meters()
        memory: dict[str, int] = {}
        host = 0
        for collection, meter in zip(self.collections.values(), meters, strict=True):
            parts = collection.memory().parts
            if collection.rows.residency == "host":
                host += parts.pop("codes")
            for name, size in parts.items():
                part = {"codes": "tables", "metadata": "tables"}.get(name, name)
                memory[part] = memory.get(part, 0) + size
            memory["buffers"] = memory.get("buffers", 0) + meter.buffers(1 + collection.pipeline.depth)
        steps = max((meter.steps for meter in meters), default=0)
        sent = np.sum([[meter.bytes_DLK.sum(axis=2), meter.messages_DL] for meter in meters], axis=0)  # bytes and messages
        everyone = self.groups.all_gather((memory, host, sent))
        ranks = tuple(MeasuredRank(rank=rank, bytes=parts, host=host) for rank, (parts, host, _) in enumerate(everyone))
        bytes_DL, messages_DL = sum(sent for *_, sent in everyone) / (max(1, steps) * self.groups.size)
        traffic = tuple(
            MeasuredTraffic(link=LINK_CLASSES[at], direction=DIRECTIONS[d], bytes=bytes_DL[d, at], messages=messages_DL[d, at])
            for at, d in np.argwhere(bytes_DL.T).tolist()
        )
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        return MeasuredRun(
            plan=fingerprint(self.plan), created=now, steps=max(1, steps), batch=batch, ranks=ranks, traffic=traffic,
            step=seconds,
        )  # fmt: skip


def shard_(
    model: nn.Module,
    plan: Plan | str | Path | None,
    heat: HeatProfile | str | Path | None = None,
    *,
    reduce: Reduce = "mean",
    check_every: int = 0,
    count_every: int = 16,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    sync_every: int = 1,
) -> Sharding:
    """Turn every `EmbeddingCollection`, `EmbeddingBag` and `Embedding` of a model into this rank's shard of it. Collective.

    Rows come from the model, which must be the same on every rank: seed it before it is built. A module on the device
    "meta" gets fresh rows, so that no rank ever holds the whole table. Make a `fused_optimizer` afterwards. Modules change in
    place; the table of a plain module has the name of the module in the plan.

    Args:
        model: contains the modules, or is one.
        plan: a plan or its path; its number of ranks must be that of the job. All ranks use the plan of rank 0: other ranks
            give None, or the same plan.
        heat: the heat profile of the plan, which says which rows are hot; that of rank 0, as the plan.
        reduce: "mean" averages gradients over ranks, as DDP does for the dense part; "sum" adds them.
        check_every: steps between comparisons of replicas; 0 for never.
        count_every: training steps between counted batches, for `Sharding.heat` and `replan`; 0 for never.
        device: of modules on "meta"; by default that of the rest of the model, or under NCCL the current GPU.
        mesh: replicas x ranks of the plan: each replica has all rows. By default one replica.
        sync_every: steps between syncs of replicas: 1 sums the gradients of all, as one process; more average rows.

    Returns:
        The sharding, with traffic meters, memory and `migrate`.

    Raises:
        BadInput: plan, model, heat and ranks do not fit together, or ranks were given different inputs.

    Example::

        sharding = thermocline.shard_(model, "plan.json", heat="heat.tc")
        optimizer = thermocline.fused_optimizer(model)
    """
    settings = _settings(reduce, check_every, sync_every, mesh)
    modules = shardable_modules(model)
    sources = {name: ShardSource.of(name, module) for name, module in modules.items()}
    plan, heat = read_inputs(plan, heat, sources, settings)
    here, layout = _check(model, modules, sources, plan, heat, device, mesh, sync_every)
    sources = {name: ShardSource.of(name, module, plan) for name, module in modules.items()}
    groups = ProcessGroups.make(plan.topology.nodes, plan.topology.gpus_per_node, here, *([layout] if layout else []))
    tables, maps = map_collections(plan, heat, sources, groups, here)
    check_maps(groups, tables, maps)
    made: dict[str, ShardedCollection] = {}
    for (name, module), own_groups in zip(modules.items(), _own_groups(modules, groups), strict=True):
        made[name] = _into_shard(module, sources.pop(name), tables[name], maps[name], own_groups, here, heat)
        made[name].trained.reduce, made[name].trained.check_every, made[name].plan = reduce, check_every, plan
        made[name].counter = FrequencyCounter(made[name].features, count_every, plan.batch, groups.local_size)
        _join_replicas(name, made[name], own_groups, sync_every)
    sharding = Sharding(plan, groups, made)
    sharding.check_replicas()
    return sharding


def _settings(reduce: str, check_every: int, sync_every: int, mesh: DeviceMesh | None) -> dict[str, str]:
    """Arguments that must be the same on all ranks, in words."""
    if reduce not in ("mean", "sum"):
        raise BadInput(f"reduce is {reduce!r}; use 'mean' or 'sum'", parameter="reduce", value=reduce)
    given = {"reduce": reduce, "check_every": check_every, "sync_every": sync_every, "mesh": mesh and mesh.mesh.tolist()}
    return {name: f"{value}" for name, value in given.items()}


def _own_groups(modules: Mapping[str, Shardable], groups: ProcessGroups) -> Iterator[ProcessGroups]:
    """Process groups for each collection, and one set for all plain modules."""
    plain: ProcessGroups | None = None
    for number, module in enumerate(modules.values()):
        own = groups.duplicate() if number else groups
        if not isinstance(module, EmbeddingCollection):
            own = plain = plain or own
        yield own


def _join_replicas(name: str, shard: ShardedCollection, groups: ProcessGroups, sync_every: int) -> None:
    if groups.replicas is not None:
        shard.trained.replicas = Replicas(name, groups.replicas, sync_every)
        shard.state.context.updated_elsewhere = sync_every == 1


def _into_shard(module: Shardable, source: ShardSource, *given: Any) -> ShardedCollection:
    """Turn a module into its shard in place, so that the model and others may hold it anywhere."""
    before, kind, trains = dict(vars(module)), type(module), module.placeholder.requires_grad
    made: Any = module
    try:
        made.__class__ = next((sharded for plain, sharded in SHARDED.items() if isinstance(module, plain)), ShardedCollection)
        made.__init__(source, *given)
    except BaseException:
        made.__class__ = kind
        vars(module).clear()
        vars(module).update(before)
        raise
    hooks = {name: value for name, value in before.items() if name.endswith("_hooks") or name == "training"}
    vars(module).update(hooks)
    made.placeholder.requires_grad_(trains)
    return cast(ShardedCollection, made)


def _check(
    model: nn.Module, modules: Mapping[str, Shardable], found: Mapping[str, ShardSource], plan: Plan,
    heat: HeatProfile | None, device: torch.device | str | None, mesh: DeviceMesh | None, sync_every: int,
) -> tuple[torch.device, list[list[int]] | None]:  # fmt: skip
    """Device and replicas of the shards. Raises on all ranks if one of them cannot carry out the plan. Collective."""
    failed: Exception | None = None
    try:
        layout = replica_layout(mesh, plan, list(found.values()), sync_every)
        _validate(model, plan, heat, found, len(layout or [0]))
        here = device_of(model, modules, device)
    except BadInput as error:
        failed = error
    with device_of_rows(found):
        raise_on_all_ranks(failed, gather_objects(f"{failed or ''}"))
    return here, layout


def _validate(model: nn.Module, plan: Plan, heat: HeatProfile | None, found: Mapping[str, ShardSource], replicas: int) -> None:
    """Raise if `shard_` cannot carry out a plan on a model with these collections."""
    topology, ranks = plan.topology, world_size() // replicas
    if topology.world_size != ranks:
        raise BadInput(
            f"the plan is for {topology.world_size} ranks ({topology.nodes} x {topology.gpus_per_node}), but {ranks} run; "
            f"start {topology.world_size} processes, or plan for {ranks}",
            parameter="plan", needed=topology.world_size, available=ranks,
        )  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, ShardedCollection):
            raise BadInput(
                f"{name!r} is already sharded; move it to another plan with `migrate` of the Sharding that `shard_` returned",
                parameter="model", module=name,
            )  # fmt: skip
    if not found:
        raise BadInput(
            "the model has no EmbeddingCollection, EmbeddingBag or Embedding of thermocline to shard; convert_ makes them from "
            "those of torch",
            parameter="model",
        )  # fmt: skip
    check_heat(plan, heat)
