"""`Sharding`: the sharded collections of a model, with their traffic, memory and migration."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, Direction, Plan
from thermocline.plan.run_file import MeasuredRank, MeasuredRun, MeasuredTraffic, fingerprint

from .exchange.traffic_meter import TrafficMeter, TrafficRecord
from .placement.init_rows import hot_rows
from .planned_tables import Collection, map_collections, map_digests
from .process_groups import CPU, ProcessGroups, check_same, current_device, world_size
from .replanning.frequency_counter import merge_profiles
from .replanning.migrate import RowMigration, deferred_interrupt, raise_if_any_failed
from .sharded_collection import ShardedCollection
from .validate import check_heat

BATCHES = 2  # batches whose ids and rows are in memory at once


@dataclass
class Sharding:
    """A model whose tables are sharded, as `shard_` returns it.

    Attributes:
        plan: the plan of the tables.
        groups: the process groups that exchange rows.
        collections: the sharded collections, by module name.

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

    def migrate(self, plan: Plan | str | Path, heat: HeatProfile | str | Path | None = None) -> None:
        """Move rows to where another plan has them, between two steps. Collective.

        Rows, optimizer state, clock and seed keep their bits. Modules and optimizers stay valid, and traffic meters restart.
        Needs memory for the new shard beside the old one. An error on any rank is raised on all, and changes nothing.

        Args:
            plan: a plan for the same ranks.
            heat: the heat profile of the plan. Cache slots go to its hottest rows; by default to the rows looked up lately.

        Raises:
            BadInput: the plan does not fit the job, or another rank failed.
        """
        self.wait_for_exchange()
        reduce = next(iter(self.collections.values())).reduce
        plan, heat = read_inputs(plan, heat, self.collections, reduce)
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
                new = ShardedCollection(name, collection, tables[name], maps[name], collection.groups, device)
                built[name] = new
                if new.arena.pools and recent is not None:
                    new.arena.warm(hot_rows(new.shard, new.tables, new.id_maps, recent))
        except BaseException as error:
            failed = error
        raise_if_any_failed(self.groups, failed)
        check_same(self.groups.all_gather(map_digests(tables, maps)), "maps of rows, made from plan and heat")
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

        Buffers are the messages of a step, sent and received, with ids and rows of two batches, as with prefetching.

        Args:
            batch: samples per rank and step.
            seconds: of one step.
        """
        meters = self.meters()
        memory: dict[str, int] = {}
        for collection, meter in zip(self.collections.values(), meters, strict=True):
            for name, size in collection.memory().parts.items():
                part = {"codes": "tables", "metadata": "tables"}.get(name, name)
                memory[part] = memory.get(part, 0) + size
            memory["buffers"] = memory.get("buffers", 0) + meter.buffers(BATCHES)
        steps = max((meter.steps for meter in meters), default=0)
        everyone = self.groups.all_gather((memory, _totals(meters)))
        ranks = tuple(MeasuredRank(rank=rank, bytes=parts) for rank, (parts, _) in enumerate(everyone))
        each = max(1, steps) * self.groups.size
        traffic = tuple(
            MeasuredTraffic(
                link=link, direction=direction,
                bytes=sum(totals[link, direction][0] for _, totals in everyone) / each,
                messages=sum(totals[link, direction][1] for _, totals in everyone) / each,
            )
            for link in LINK_CLASSES for direction in DIRECTIONS
            if any(totals[link, direction][0] for _, totals in everyone)
        )  # fmt: skip
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        return MeasuredRun(
            plan=fingerprint(self.plan), created=now, steps=max(1, steps), batch=batch, ranks=ranks, traffic=traffic,
            step=seconds,
        )  # fmt: skip


def _totals(meters: list[TrafficMeter]) -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes and messages by link class and direction."""
    return {
        (link, direction): (
            sum(int(meter.bytes_DLK[d, at].sum()) for meter in meters),
            sum(int(meter.messages_DL[d, at]) for meter in meters),
        )
        for at, link in enumerate(LINK_CLASSES)
        for d, direction in enumerate(DIRECTIONS)
    }


def read_inputs(
    given: Plan | str | Path, heat: HeatProfile | str | Path | None, found: Mapping[str, Collection], reduce: str
) -> tuple[Plan, HeatProfile | None]:
    """Read plan and heat, and raise on all ranks unless all ranks were given the same. Collective."""
    failed: Exception | None = None
    inputs = {"reduce": reduce}
    try:
        plan = given if isinstance(given, Plan) else Plan.load(given)
        profile = heat if heat is None or isinstance(heat, HeatProfile) else HeatProfile.load(heat)
        inputs |= {
            "the number of ranks of the plan": f"{plan.topology.nodes} x {plan.topology.gpus_per_node}",
            "the plan": f"sha256 {fingerprint(plan.model_copy(update={'created': ''}))[:12]}",  # of the decisions
            "the heat": "none" if profile is None else f"sha256 {profile.sha256[:12]}",
            "collections": "; ".join(f"{name}: {_describe(collection)}" for name, collection in found.items()),
        }
    except (BadInput, OSError) as error:
        failed = error
    everyone: list[tuple[str, dict[str, str]]] = [(f"{failed}" if failed else "", inputs)] * world_size()
    if len(everyone) > 1:
        with current_device(next((each.arena.device for each in found.values() if each.arena.device.type != "meta"), CPU)):
            dist.all_gather_object(everyone, everyone[0])
    if failed is not None:
        raise failed
    for rank, (error_there, _) in enumerate(everyone):
        if error_there:
            raise BadInput(f"rank {rank} stopped: {error_there}", rank=rank)
    check_same([each for _, each in everyone], "shard_")
    return plan, profile


def _describe(collection: Collection) -> str:
    tables = ", ".join(f"{t.name} {t.rows} x {t.dim} for {' '.join(t.features)}" for t in collection.tables)
    return f"{tables}, mode {collection.mode}, {collection.rows.optimizer}, seed {collection.rows.seed}"
