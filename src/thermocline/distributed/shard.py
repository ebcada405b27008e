"""`shard_`: carry a plan out. Every collection of a model becomes its part on this card, in place.

    torchrun --nproc-per-node 4 train.py

    model = Model()                                            # the same on every rank; or under torch.device("meta")
    sharding = thermocline.shard_(model, "plan.json", heat="heat.tc")
    ...                                                        # train as before, each rank its own samples
    sharding.check_replicas()

Before anything is made, ranks compare what they were given: plan, heat and collections, and, once they are made, the maps of
rows. What differs is named on all of them.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.nn.collection import EmbeddingCollection
from thermocline.plan.model import DIRECTIONS, LINK_CLASSES, Direction, Plan, TablePlan, Tier
from thermocline.plan.run_file import MeasuredRank, MeasuredRun, MeasuredTraffic, fingerprint

from .exchange.traffic_meter import Meter, Sent
from .placement.row_index import Atlas
from .placement.table_map import TableMap, make_maps
from .process_groups import CPU, World, check_alike, on_card, world_size
from .replan.frequency_counter import Lookups, merged
from .sharded_collection import Reduce, ShardedCollection
from .validate import check_heat, check_possible, check_table

AHEAD = 2  # batches whose ids and rows are in memory at once

Collection = EmbeddingCollection | ShardedCollection


@dataclass
class Sharding:
    """A model whose tables are sharded: what was done, and what it costs."""

    plan: Plan = field(repr=False)  # pages of it; print(sharding.plan) has them
    world: World
    collections: dict[str, ShardedCollection]

    @property
    def mesh(self) -> DeviceMesh | None:
        """Nodes x cards, for the dense part; None for one process."""
        return self.world.mesh

    def check_replicas(self) -> None:
        """Raise if copies of any row differ in a bit on any two cards. All ranks call this together."""
        for collection in self.collections.values():
            collection.check_replicas()

    def wait(self) -> None:
        """Wait for exchanges that go on behind the caller."""
        for collection in self.collections.values():
            collection.wait()

    def heat(self) -> HeatProfile:
        """What all ranks looked up in training since the last call, by feature and raw id: of the batches that were counted.

        All ranks call this together and get the same. `save` makes a heat file of it, to plan by.
        """
        self.wait()
        taken = [collection.lookups.take() for collection in self.collections.values()]
        mine = {name: table for each in taken for name, table in each.tables.items()}
        return merged(self.world, HeatProfile(mine, "live training"))

    def migrate(self, plan: Plan | str | Path, heat: HeatProfile | str | Path | None = None) -> None:
        """Move rows to where another plan has them, while the job runs. All ranks call this together, between two steps.

        Rows, optimizer state, clock and seed go on as they were; modules and optimizers that you hold stay valid, meters begin
        anew. Slots of caches go to the hottest rows, by `heat` or, without it, by what was looked up of late. Needs room for
        the new part of a card beside the old one. An error on any rank is one on all, and changes nothing.
        """
        from .replan.migrate import asked_to_stop

        self.wait()
        reduce = next(iter(self.collections.values())).reduce
        plan, heat = _read_alike(plan, heat, self.collections, reduce)
        here, there = self.plan.topology, plan.topology
        if (here.nodes, here.gpus_per_node) != (there.nodes, there.gpus_per_node):
            raise BadInput(
                f"the plan is for {there.nodes} x {there.gpus_per_node} cards, and the job runs on {here.nodes} x "
                f"{here.gpus_per_node}; plan for these"
            )
        check_heat(plan, heat)
        with asked_to_stop() as check:
            self._move(plan, heat, check)

    def _move(self, plan: Plan, heat: HeatProfile | None, check: Callable[[], None]) -> None:
        """Build every collection beside the old one, and let them change places when all are complete."""
        from .placement.init_rows import hot_rows
        from .replan.migrate import Move, agree

        hot = self.heat() if heat is None and _slots(plan) else heat
        beside: dict[str, ShardedCollection] = {}
        failed: BaseException | None = None
        device = next(iter(self.collections.values())).atlas.device
        try:
            tables, maps = mapped(plan, heat, self.collections, self.world, device)
            for name, collection in self.collections.items():
                beside[name] = ShardedCollection(name, collection, tables[name], maps[name], collection.world, device)
                if beside[name].arena.pools and hot is not None:
                    beside[name].arena.warm(hot_rows(beside[name], hot))
        except BaseException as error:
            failed = error
        agree(self.world, failed)
        check_alike(self.world.gather(_digests(tables, maps)), "maps of rows, made from plan and heat")
        same = all(_alike(each.atlas, beside[name].atlas) for name, each in self.collections.items())
        if self.world.size > 1 or not same:  # one process has rows of one precision in one place, whatever the tiers
            for name, collection in self.collections.items():
                Move(collection, beside[name]).run(check)
                beside[name].check_replicas()
            for name, collection in self.collections.items():
                collection.become(beside[name])
        for collection in self.collections.values():
            collection.plan = plan
        self.plan = plan

    def sent(self) -> list[Sent]:
        """Bytes that this card has sent, by table, tier, direction and link class."""
        return [line for collection in self.collections.values() for line in collection.meter.lines()]

    def waited(self) -> dict[Direction, float]:
        """Seconds that this card has waited for exchanges, by direction; what went on behind the caller is not in them."""
        meters = [collection.meter for collection in self.collections.values()]
        return {direction: sum(meter.waited[direction] for meter in meters) for direction in DIRECTIONS}

    def reset_meters(self) -> None:
        """Count from here on."""
        for collection in self.collections.values():
            collection.meter.reset()

    def run(self, batch: int, seconds: float) -> MeasuredRun:
        """What was measured since the meters were reset, for `run.json`; `seconds` of one step. All ranks call this together.

        Buffers are the messages of a step, sent and received, ids and rows of two batches, as they are with the next one under
        way.
        """
        meters = [collection.meter for collection in self.collections.values()]
        memory: dict[str, int] = {}
        for collection in self.collections.values():
            for name, size in collection.memory().parts.items():
                part = {"codes": "tables", "metadata": "tables"}.get(name, name)
                memory[part] = memory.get(part, 0) + size
            memory["buffers"] = memory.get("buffers", 0) + collection.meter.buffers(AHEAD)
        steps = max((meter.steps for meter in meters), default=0)
        everyone = self.world.gather((memory, _totals(meters)))
        ranks = tuple(MeasuredRank(rank=rank, bytes=parts) for rank, (parts, _) in enumerate(everyone))
        each = max(1, steps) * self.world.size
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


def _alike(one: Atlas, other: Atlas) -> bool:
    """Whether all rows lie in the same places."""
    digests = [[map.digest() for map in each.maps] for each in (one, other)]
    return one.parts == other.parts and digests[0] == digests[1]


def _totals(meters: list[Meter]) -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes and messages by link class and direction."""
    return {
        (link, direction): (
            sum(int(meter.bytes_DLK[d, at].sum()) for meter in meters),
            sum(int(meter.messages_DL[d, at]) for meter in meters),
        )
        for at, link in enumerate(LINK_CLASSES)
        for d, direction in enumerate(DIRECTIONS)
    }


def shard_(
    model: nn.Module,
    plan: Plan | str | Path,
    heat: HeatProfile | str | Path | None = None,
    *,
    reduce: Reduce = "mean",
    check_every: int = 0,
    count_every: int = 16,
    device: torch.device | str | None = None,
) -> Sharding:
    """Replace every `EmbeddingCollection` of a model by this rank's part of it. All ranks call this together.

    Rows come from the model, which must be the same on every rank (seed it before it is built); a collection that was built on
    the device "meta" begins with fresh rows, so that no rank ever holds it whole. `heat` is what the plan was made with: it
    says which rows are hot. `reduce`: what becomes of the gradients of the ranks: "mean", as DDP does with those of the dense
    part, or "sum", where losses are sums over samples. `check_every`: so many steps apart replicas are compared; 0 for never.
    `count_every`: so many training steps apart lookups are counted, for `heat()` and `replan`; 0 for never. `device`: where
    collections without values come to; by default where the rest of the model lies, or else, under NCCL, the current card.
    Make a `fused_optimizer` afterwards.
    """
    if reduce not in ("mean", "sum"):
        raise BadInput(f"reduce is {reduce!r}; use 'mean' or 'sum'")
    found = {name: module for name, module in model.named_modules() if isinstance(module, EmbeddingCollection)}
    plan, heat = _read_alike(plan, heat, found, reduce)
    check_possible(model, plan, heat, found)
    here = _device(model, found, device)
    world = World.of(plan.topology, here)
    tables, maps = mapped(plan, heat, found, world, here)
    check_alike(world.gather(_digests(tables, maps)), "maps of rows, made from plan and heat")
    made: dict[str, ShardedCollection] = {}
    for name, collection in found.items():
        beside = world.beside() if made else world
        made[name] = ShardedCollection(name, collection, tables[name], maps[name], beside, here, heat)
        made[name].train(collection.training)
        made[name].reduce, made[name].check_every, made[name].plan = reduce, check_every, plan
        made[name].lookups = Lookups(collection.features, count_every, plan.batch, world.cards)
        made[name].anchor.requires_grad_(collection.anchor.requires_grad)
        _replace(model, collection, made[name])
    sharding = Sharding(plan, world, made)
    sharding.check_replicas()
    return sharding


def mapped(
    plan: Plan, heat: HeatProfile | None, found: Mapping[str, Collection], world: World, device: torch.device
) -> tuple[dict[str, list[TablePlan]], dict[str, list[TableMap]]]:
    """The plans of the tables of every collection, and their maps."""
    tables = {name: planned_tables(plan, each) for name, each in found.items()}
    maps = {name: make_maps(tables[name], heat, each.id_maps, world.nodes, world.cards, device) for name, each in found.items()}
    if world.size == 1:
        tables = {name: [_whole(table) for table in each] for name, each in tables.items()}
        maps = {name: make_maps(tables[name], heat, each.id_maps, 1, 1, device) for name, each in found.items()}
    return tables, maps


def _digests(tables: Mapping[str, list[TablePlan]], maps: Mapping[str, list[TableMap]]) -> dict[str, str]:
    return {f"the map of {t.name!r}": m.digest() for name in tables for t, m in zip(tables[name], maps[name], strict=True)}


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)


def _read_alike(
    given: Plan | str | Path, heat: HeatProfile | str | Path | None, found: Mapping[str, Collection], reduce: str
) -> tuple[Plan, HeatProfile | None]:
    """Plan and heat, and the certainty that all ranks were given the same, before any of it is used."""
    failed: Exception | None = None
    says = {"reduce": reduce}
    try:
        plan = given if isinstance(given, Plan) else Plan.load(given)
        profile = heat if heat is None or isinstance(heat, HeatProfile) else HeatProfile.load(heat)
        says |= {
            "the number of cards of the plan": f"{plan.topology.nodes} x {plan.topology.gpus_per_node}",
            "the plan": f"sha256 {fingerprint(plan.model_copy(update={'created': ''}))[:12]}",  # the same decisions
            "the heat": "none" if profile is None else f"sha256 {profile.sha256[:12]}",
            "collections": "; ".join(f"{name}: {_described(collection)}" for name, collection in found.items()),
        }
    except (BadInput, OSError) as error:
        failed = error
    everyone: list[tuple[str, dict[str, str]]] = [(f"{failed}" if failed else "", says)] * world_size()
    if len(everyone) > 1:
        with on_card(next((each.arena.device for each in found.values() if each.arena.device.type != "meta"), CPU)):
            dist.all_gather_object(everyone, everyone[0])
    if failed is not None:
        raise failed
    for rank, (error_there, _) in enumerate(everyone):
        if error_there:
            raise BadInput(f"rank {rank} stopped: {error_there}")
    check_alike([each for _, each in everyone], "shard_")
    return plan, profile


def _described(collection: Collection) -> str:
    tables = ", ".join(f"{t.name} {t.rows} x {t.dim} for {' '.join(t.features)}" for t in collection.tables)
    return f"{tables}, mode {collection.mode}, {collection.rows.optimizer}, seed {collection.rows.seed}"


def planned_tables(plan: Plan, collection: Collection) -> list[TablePlan]:
    """The plans of a collection's tables."""
    return [_planned(plan, collection, n) for n in range(len(collection.tables))]


def _planned(plan: Plan, collection: Collection, index: int) -> TablePlan:
    """The plan of a table of a collection."""
    table, names = collection.tables[index], [each.name for each in plan.tables]
    if table.name not in names:
        raise BadInput(f"table {table.name!r} is not in the plan, which has {', '.join(names)}; plan for the model's tables")
    planned = plan.table(table.name)
    if (planned.rows, planned.dim) != (table.rows, table.dim):
        raise BadInput(
            f"table {table.name!r} is {table.rows} x {table.dim} in the model and {planned.rows} x {planned.dim} in the plan; "
            "build it as planned, or plan again"
        )
    check_table(planned)
    if planned.pooled_by == "owner" and collection.mode not in ("sum", "mean"):
        raise BadInput(
            f"table {table.name!r} is planned to be pooled by the owners of its rows, by sum or mean, and the collection has "
            f"mode={collection.mode!r}; plan again with pooling: {collection.mode}"
        )
    return planned


def _whole(planned: TablePlan) -> TablePlan:
    """For one card: all tiers of a table are one, if they share a precision."""
    precisions = {tier.precision for tier in planned.tiers} or {planned.precision}
    if len(precisions) > 1:
        return planned
    slots = {kind: sum(getattr(tier, kind) for tier in planned.tiers) for kind in ("cached", "near")}
    whole = Tier(tier=3, rows=planned.rows, threshold=0.0, lookups=1.0, precision=precisions.pop(), **slots)
    return planned.model_copy(update={"placement": "card", "rank": 0, "tiers": (whole,), "precision": whole.precision})


def _slots(plan: Plan) -> int:
    return sum(tier.cached + tier.near for table in plan.tables for tier in table.tiers)


def _device(
    model: nn.Module, found: Mapping[str, EmbeddingCollection], given: torch.device | str | None
) -> torch.device:  # fmt: skip
    """Where the collections lie, or those without values come to."""
    here: Any = {collection.arena.device for collection in found.values() if collection.arena.device.type != "meta"}
    if len(here) > 1:
        raise BadInput(f"collections lie on {', '.join(map(str, sorted(here, key=str)))}; move the model to one device first")
    if here:
        return next(iter(here))  # type: ignore[no-any-return]
    held = {id(tensor) for each in found.values() for tensor in (*each.parameters(), *each.buffers())}
    dense = {t.device for t in (*model.parameters(), *model.buffers()) if id(t) not in held and t.device.type != "meta"}
    nccl = dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend()
    chosen = torch.device(given) if given is not None else dense.pop() if len(dense) == 1 else None
    chosen = chosen or torch.device("cuda" if nccl else "cpu")
    return torch.device("cuda", torch.cuda.current_device()) if chosen == torch.device("cuda") else chosen
