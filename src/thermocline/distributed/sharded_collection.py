"""A collection of which this card holds a part. Inputs and outputs are those of `EmbeddingCollection`.

Every lookup is a meeting of all cards: each calls forward for each batch, and backward if the others do, with as many samples
as it has, or none. So that a card with something else in mind does not leave the others waiting, they first tell each other
what they are about to do; where that differs, or one of them has failed, all of them raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel.distributed import DistributedDataParallel

from thermocline import formats as F
from thermocline.errors import BadGradient, BadInput, IdOutOfRange
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.kernels.exchange.fields import DIM
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import TableRequest
from thermocline.nn.id_maps import FeatureMaps
from thermocline.nn.inputs import JaggedIds, Pooled, Unpooled, read_features
from thermocline.nn.optimizer import UpdateOnce
from thermocline.nn.prefetch import PrefetchedInput
from thermocline.nn.rows_module import RowsModule, refuse_ddp
from thermocline.plan.model import Plan, TablePlan
from thermocline.rows.arena import Arena
from thermocline.rows.memory import MemoryUsage
from thermocline.rows.training import Trainer, raise_pending, synchronize

from .exchange.batch import Batch, Exchanged, Shelf
from .exchange.batch_exchange import Gradients, Journey, Target, Ways
from .exchange.handshake import Says, Told, meet, stop
from .exchange.prefetch import Ahead, one_ahead
from .exchange.traffic_meter import Meter
from .placement.init_rows import take
from .placement.local_shard import Held
from .placement.replicas import compare_copies
from .placement.row_index import Atlas, Where
from .placement.table_map import TableMap
from .process_groups import World
from .replan.frequency_counter import Lookups

Reduce = Literal["mean", "sum"]


class ShardedCollection(RowsModule):
    """One card's part of a collection. `shard_` makes it."""

    mode: str
    tables: tuple[Table, ...]
    features: tuple[str, ...]
    id_maps: Mapping[str, IdMap]

    def __init__(
        self, name: str, source: EmbeddingCollection | ShardedCollection, plans: Sequence[TablePlan],
        maps: Sequence[TableMap], world: World, device: torch.device, heat: HeatProfile | None = None,
    ) -> None:  # fmt: skip
        atlas = Atlas(plans, maps, world.nodes, world.cards, device, world.rank)
        shapes = [
            TableRequest(
                spec.rows, spec.dim, spec.precision, spec.name, (part.full, part.near) if part.here else (0, 0), spec.group
            )
            for spec, part in zip(atlas.specs(), atlas.parts, strict=True)
        ]
        share = sum(sum(tier.cached for tier in plan.tiers) for plan in plans) / sum(plan.rows for plan in plans)
        rows = replace(source.rows, precision="int8", cache=min(share, 1.0), budget=None)  # as one process would have it
        named = {feature: n for n, table in enumerate(source.tables) for feature in table.features}
        of_feature = [named[feature] for feature in source.features]
        self._alone = world.size == 1 and all(part.tier == 3 and part.held == plans[part.table].rows for part in atlas.parts)
        super().__init__(shapes, of_feature if self._alone else range(len(shapes)), rows, device, source.dtype)
        if self._alone:
            self.arena.rename([part.name for part in atlas.parts], source.features)
        self.name, self.mode, self.tables, self.features = name, source.mode, source.tables, source.features
        self._dims = tuple(table.dim for table in self.tables for _ in table.features)
        self.world, self.atlas, self.id_maps = world, atlas, source.id_maps
        self.maps = FeatureMaps.needed(
            self.features, [self.id_maps[f] for f in self.features], [plans[t].rows for t in of_feature], device
        )
        kinds = [(plans[t].rows, atlas.first[t], plans[t].dim) for t in of_feature]
        self._meter = Meter([(part.name, part.tier) for part in atlas.parts])
        self.held = Held(self.arena, self.trainer, atlas)
        self.ways = Ways(world, atlas, self.held, self._meter)
        names = [(table.name, feature) for table in self.tables for feature in table.features]
        self.shelf = Shelf(names, kinds, device, self.ways.summed if self.ways.routes.sums else None)
        self._coming: Ahead | None = None
        self._lane = world.lane
        self._following: Any = None  # what was given to `prefetch`
        self.overlap = world.everyone.gloo  # whether exchanges go on behind the caller
        self.reduce: Reduce = "mean"
        self.check_every = 0
        self.dedup = True  # False: every lookup travels, as baselines do that benchmarks compare with
        self.plan: Plan | None = None  # that `shard_` carried out, for checkpoints
        self.lookups = Lookups(self.features, 0, 1, world.cards)
        self._refused: BadGradient | None = None
        if isinstance(source, EmbeddingCollection):
            take(self, source, heat)  # else rows come from all cards: see `migrate.py`

    # -- a batch ------------------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Any) -> Pooled | Unpooled:
        """`input`: as `EmbeddingCollection` takes it. All cards call this together."""
        if isinstance(input, PrefetchedInput):
            (input,) = input.arguments
        trains = self.training and torch.is_grad_enabled() and self.anchor.requires_grad
        if self._alone:
            return self._forward_alone(input, trains)
        self.wait()
        following, self._following = self._following, None
        try:
            bags = self._read(input, trains)
            ahead = self._coming if self._coming is not None and self._coming.matches(bags, trains) else None
            batch, journey = self._batch_of(bags, ahead, trains)
        except Exception as error:
            self._coming = None
            stop(self.world, self._meter, self.name, error, self.ways.routes.exchanges)
            raise
        weighted = "with weights" if bags.weights_N is not None else "without weights"
        intent = f"{'training' if trains else 'looking'} {weighted}, {self.dtype}"
        told = self._meet(Says(intent, journey.asked_PJ, journey.total_J, ahead is not None, following is not None))
        if told.differ:  # some cards have another batch than they were told to expect: all fetch anew
            ahead, (batch, journey) = None, self._batch_of(bags, None, trains)
            told = self._meet(Says(intent, journey.asked_PJ, journey.total_J, False, told.following))
        if trains:
            self.lookups.add(bags)
        self._fetch(batch, journey, ahead, told)
        self._coming = None
        if told.following and self.overlap:
            self._coming = Ahead(self.ways, self._read_ahead, following, journey, self.held.fields_KF)
            self._submit(self._coming.start)
        out = self._look_up(batch, journey, trains)
        return Unpooled(out, bags, self.features, self._dims) if self.mode == "none" else Pooled(out, self.features, self._dims)

    def _meet(self, says: Says) -> Told:
        return meet(self.world, self._meter, self.name, says)

    def _fetch(self, batch: Batch, journey: Journey, ahead: Ahead | None, told: Told) -> None:
        target = batch.target(self.held.fields_KF)
        if ahead is not None:
            ahead.arrive()
            journey.fetch_here(target)
            self._meter.ahead += 1
        else:
            journey.ask(told.got_PJ, told.most_J)
            journey.fetch(target)

    def prefetch(self, input: Any) -> None:
        """Let the ids and rows of the next batch travel while this one is worked on; call it before this one's forward.

        Results are the same without, whatever is looked up next. Cards without a next batch leave it out.
        """
        self._following = input

    prefetched = one_ahead

    def _forward_alone(self, input: Any, trains: bool) -> Pooled | Unpooled:
        """One process that holds all tables whole: a lookup as any."""
        bags = read_features(self.features, input)
        if bags.weights_N is not None and self.mode != "sum":
            raise BadInput(f"weights need pooling by sum; this collection has mode={self.mode!r}")
        self._meter.steps += trains
        offsets = bags.offsets
        if self.mode == "none":
            offsets = offsets[:: bags.batch] if bags.batch else offsets.new_zeros(len(self.features) + 1)
        out = self.look_up(bags.ids_N, offsets, bags.weights_N, self.mode)
        if trains:
            self.lookups.add(bags)
            out.grad_fn.register_prehook(partial(self._check_place, self.ways))  # type: ignore[union-attr]
        return Unpooled(out, bags, self.features, self._dims) if self.mode == "none" else Pooled(out, self.features, self._dims)

    def _check_place(self, ways: Ways, _: Any = None) -> None:
        """Rows that backward updates must lie where forward found them."""
        if ways is not self.ways:
            raise BadInput(f"{self.name}: rows were migrated since this forward; call migrate between a backward and a forward")

    def _by_table(self, error: BadGradient) -> BadGradient:
        """The same, of a row of its table."""
        table = int(self.atlas.tables_of(torch.tensor([error.row], device=self.atlas.device)))
        return BadGradient(error.row, error.step, self.tables[table].name, self.atlas.first[table])

    def _read(self, input: Any, trains: bool) -> JaggedIds:
        if self._refused is not None:  # in the last backward: raised here, where all cards meet
            refused, self._refused = self._refused, None
            raise refused
        try:
            synchronize(self._arena)  # a GPU tells later
        except BadGradient as error:
            raise self._by_table(error) from None
        if trains and DistributedDataParallel._active_ddp_module is not None:
            refuse_ddp()
        bags = read_features(self.features, input)
        if bags.weights_N is not None and self.mode != "sum":
            raise BadInput(f"weights need pooling by sum; this collection has mode={self.mode!r}")
        return bags

    def _batch_of(self, bags: JaggedIds, ahead: Ahead | None, trains: bool) -> tuple[Batch, Journey]:
        """A batch and its journey, which may have come ahead of it."""
        if ahead is not None and ahead.batch is not None:
            ahead.batch.weights_N = bags.weights_N
            return ahead.batch, ahead.journey
        batch = self._mapped(bags)
        if ahead is not None:
            return batch, ahead.journey
        lookups_U = batch.lookups() if self.ways.counts else None
        return batch, Journey(self.ways, batch.rows_U, trains, lookups_U, batch.apart)

    def _mapped(self, bags: JaggedIds) -> Batch:
        """A batch of what ids are mapped to."""
        try:
            rows_N = bags.ids_N.long() if self.maps is None else self.maps(bags.ids_N, bags.offsets)
            try:
                return Batch(self.shelf, bags, rows_N, F.MODES.index(self.mode), self.dedup)
            except BadInput:
                raise_pending(self._arena)  # what a map has refused, a card tells later, and knows its id
                raise
        except IdOutOfRange as error:
            raise error if self.maps is None else self.maps.name(error, [name for name, _ in self.shelf.names]) from None

    def _read_ahead(self, input: Any) -> tuple[JaggedIds, Batch]:
        given = read_features(self.features, input)
        bags = given._replace(ids_N=given.ids_N.clone(), offsets=given.offsets.clone())  # the caller's may change
        return bags, self._batch_of(bags, None, False)[0]

    def _look_up(self, batch: Batch, journey: Journey, trains: bool) -> Tensor:
        wide = self.dtype == torch.float64  # kernels stop at fp32
        dtype = torch.float32 if wide else self.dtype
        tie = self._trainer.anchor if trains else self._arena.no_anchor
        call = (tie, batch.weights_N, batch, journey.shares, partial(self.bring, journey), dtype)
        out: Tensor = Exchanged.apply(*call)  # type: ignore[no-untyped-call]
        if trains:
            out.grad_fn.register_prehook(UpdateOnce(self.trained))  # type: ignore[union-attr]
        return out.double() if wide else out

    def bring(self, journey: Journey, grads: Gradients) -> None:
        """The gradients of a batch: one step of every row that any card has looked up."""
        self._check_place(journey.ways)
        clock, hyper = self.held.tick()
        step = partial(self._bring, journey, grads, clock, hyper)
        if self.overlap:
            self._submit(step)
        else:
            self.wait()
            step()

    def _bring(self, journey: Journey, grads: Gradients, clock: Tensor, hyper: Tensor) -> None:
        sums = journey.bring(grads)
        if self.reduce == "mean":
            sums = sums._replace(grads_VW=sums.grads_VW / self.world.size)
        refused = self.held.update(sums, clock, hyper)
        if refused is not None:
            if self.world.size == 1:
                raise self._by_table(refused)
            self._refused = self._by_table(refused)
        self._meter.steps += 1
        if self._coming is not None:
            if self._coming.before is journey:
                self._coming.finish()
            else:
                self._coming.spoiled = True
        if self.check_every and int(clock[F.STEP]) % self.check_every == 0:
            self.check_replicas()

    # -- behind the caller --------------------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], None]) -> None:
        self._meter.go_behind()
        self._lane.submit(job)

    def wait(self) -> None:
        """Wait until rows are what the last backward made of them. Whatever looks at rows does so by itself."""
        if not self._lane.is_own:
            begin = time.perf_counter()
            self._lane.wait()
            self._meter.waited_since(begin)

    @property
    def arena(self) -> Arena:
        """The rows that this card holds, up to date. Who takes it may change them."""
        if (lane := self.__dict__.get("_lane")) is not None and not lane.is_own:
            self.wait()
            self.spoil()
        return self._arena

    @arena.setter
    def arena(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def trainer(self) -> Trainer:
        """Optimizer state of these rows, up to date."""
        if "_lane" in self.__dict__:
            self.wait()
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def meter(self) -> Meter:
        """What this card has sent so far."""
        self.wait()
        return self._meter

    def spoil(self) -> None:
        """Rows may have changed: what was prefetched is fetched anew."""
        if self._coming is not None:
            self._coming.spoiled = True

    # -- rows ---------------------------------------------------------------------------------------------------------------

    def get_rows(self, table: str, ids: Tensor | None = None) -> Tensor:
        """Rows of a table by their numbers, dequantized to fp32; all of them without any. All cards call this together."""
        try:
            index, rows_N = self._named(table, ids)
        except BadInput as error:
            stop(self.world, self._meter, self.name, error, self.ways.routes.exchanges)
            raise
        rows_U, inverse_N = torch.unique(rows_N + self.atlas.first[index], return_inverse=True)
        values_UD = torch.empty(rows_U.numel(), self.tables[index].dim, device=self.arena.device)
        journey = Journey(self.ways, rows_U, trains=False)
        told = self._meet(Says("reading rows", journey.asked_PJ, journey.total_J))
        journey.ask(told.got_PJ, told.most_J)
        step_K = 4 * self.held.fields_KF[:, DIM]
        journey.fetch(Target(values_UD.view(-1).view(torch.uint8), torch.zeros_like(step_K), step_K))
        return values_UD[inverse_N]

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> None:
        """Set rows by their numbers; rounds to nearest. All cards call this with the same rows."""
        index, rows_N = self._named(table, ids)
        for k, at_K, place_K in self._mine(self.atlas(rows_N + self.atlas.first[index])):
            self.arena.write(k, place_K, values.to(self.arena.device, torch.float32)[at_K])

    def _mine(self, where: Where) -> list[tuple[int, Tensor, Tensor]]:
        """Of some rows those that lie here: (part, which, their places)."""
        return self.atlas.held_by(self.world.rank, where)

    def become(self, other: ShardedCollection) -> None:
        """Take over the rows of a collection that was built beside this one; the module, its trainer and optimizer stay."""
        self.trainer.states = other.trainer.states
        other.held.trainer = self.trainer
        self.trained.arena = other.arena
        for name in ("arena", "rows", "tiers", "atlas", "shelf", "_meter", "held", "ways", "_alone"):
            setattr(self, name, getattr(other, name))
        self._coming = None  # is fetched anew, from where its rows are

    # -- looking at it ------------------------------------------------------------------------------------------------------

    def check_replicas(self) -> None:
        """Raise if copies of a row differ in a bit, of codes, scale, optimizer state or slot, on any two cards."""
        compare_copies(self)

    def memory(self) -> MemoryUsage:
        """Bytes of this card's part."""
        memory = super().memory()
        memory.parts["maps"] += self.atlas.bytes
        return memory

    def extra_repr(self) -> str:
        held = [
            f"{part.name}, tier {part.tier}: {part.held} x {part.dim} {part.precision}"
            + (f", {part.full} + {part.near} slots" if part.slots else "")
            for part in self.atlas.parts
            if part.here
        ]
        return "\n".join([*held, f"rank {self.world.rank} of {self.world.nodes} x {self.world.cards} cards"])

    def _named(self, table: str, ids: Tensor | None) -> tuple[int, Tensor]:
        """The number of a table, and rows of it; all without any."""
        names = [t.name for t in self.tables]
        if table not in names:
            raise BadInput(f"table {table!r} is not in this collection; it has {', '.join(names)}")
        index = names.index(table)
        rows = self.tables[index].rows
        rows_N = (torch.arange(rows) if ids is None else ids.reshape(-1).long()).to(self.arena.device)
        if rows_N.numel() and not (int(rows_N.min()) >= 0 and int(rows_N.max()) < rows):
            raise BadInput(f"table {table!r} has rows 0 to {rows - 1}; ids run from {int(rows_N.min())} to {int(rows_N.max())}")
        return index, rows_N

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowsModule:
        super()._apply(fn, recurse)
        if self.arena.device != self.atlas.device:
            raise BadInput(f"sharded rows lie on {self.atlas.device} and stay there; move the model before shard_")
        return self

    def _weight_keys(self) -> Mapping[str, int]:
        return {}

    def _text(self) -> Tensor:
        """The same on every rank, as what it is compared with is."""
        atlas = self.atlas
        parts = [
            f"{p.name} tier {p.tier}: {atlas.maps[p.table].held(p.tier)} x {p.dim} {p.precision}, {p.full} + {p.near} slots"
            for p in atlas.parts
        ]
        return torch.tensor(list("; ".join([*parts, self.rows.policy]).encode()), dtype=torch.uint8, device="cpu")

    def _arrays(self) -> dict[str, Tensor]:
        """Arrays that differ between ranks have their rank's name, so that torch.distributed.checkpoint keeps all of them."""
        own = f"@{self.world.rank}of{self.world.size}" if self.world.size > 1 else ""
        return {name + ("" if name in ("hyper", "clock") else own): array for name, array in super()._arrays().items()}
