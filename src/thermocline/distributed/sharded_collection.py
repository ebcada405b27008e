"""`ShardedCollection`: one rank's shard of an `EmbeddingCollection`, with the same inputs and outputs.

Every lookup is collective: all ranks call forward for each batch, and backward if the others do, with any number of samples.
Ranks exchange step headers first. If their operations differ, or one rank failed, all of them raise instead of pending.

Gradients travel in the background where the backend allows it; methods that read or write rows call `wait_for_exchange` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline._lazy import uncompiled
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.kernels.exchange.fields import DIM
from thermocline.nn.backward_pass import SameTenants, UpdateOnce
from thermocline.nn.collection import Table
from thermocline.nn.config import RowConfig
from thermocline.nn.inputs import JaggedIds, Pooled, Unpooled, read_features
from thermocline.nn.many_ranks import refuse_ddp
from thermocline.nn.prefetch import AT_ONCE, PrefetchedInput, prefetch_window
from thermocline.nn.rows_module import RowsModule
from thermocline.nn.saved_rows import difference, maps_as_text
from thermocline.plan.model import Plan, TablePlan
from thermocline.rows.memory import MemoryUsage
from thermocline.rows.training import raise_pending, report_to

from .elastic_ids import RankMaps, adopt_ids, live_ids, needed_maps
from .exchange.batch_exchange import BatchExchange, BatchGradients, RowDestination
from .exchange.batch_table import BatchTable, ShardedLookup, feature_offsets
from .exchange.context import ExchangeContext
from .exchange.handshake import StepAgreement, announced, device_handshake, handshake
from .exchange.pipeline import ExchangePipeline, PrefetchedBatch
from .placement.init_rows import init_rows
from .placement.local_shard import LocalShard, check_replicas
from .placement.row_index import RowIndex
from .placement.table_map import TableMap
from .process_groups import ProcessGroups
from .replanning.frequency_counter import FrequencyCounter
from .saved_shard import load_pieces, saved_pieces
from .shard_source import ShardSource, row_config
from .shard_state import ShardState, arena_shapes, check_rows
from .sharded_trained import ShardedTrained

T = TypeVar("T")


class ShardedCollection(RowsModule):
    """One rank's shard of a collection, made by `shard_`, with its `mode`, `tables`, `features` and `id_maps`.

    Example::

        sharding = thermocline.shard_(model, "plan.json", heat="heat.tc")
        sharding.collections["tables"](batch)["user"]  # [batch, dim]
    """

    name: str
    mode: str
    tables: tuple[Table, ...]
    features: tuple[str, ...]
    id_maps: Mapping[str, IdMap]
    model_rows: RowConfig  # of the module before the plan
    padding_idx: int | None = None  # of an `Embedding`: a row of its table that is not updated

    def __init__(
        self, source: ShardSource | ShardedCollection, plans: Sequence[TablePlan], maps: Sequence[TableMap],
        groups: ProcessGroups, device: torch.device, heat: HeatProfile | None = None,
    ) -> None:  # fmt: skip
        row_index = RowIndex(plans, maps, groups.nodes, groups.local_size, device, groups.rank)
        rows = row_config(source.model_rows, plans, source.name)
        table_of = {feature: n for n, table in enumerate(source.tables) for feature in table.features}
        table_F = [table_of[feature] for feature in source.features]
        shapes = arena_shapes(row_index)
        super().__init__(shapes, table_F if row_index.unsharded else range(len(shapes)), rows, device, source.dtype)
        if row_index.unsharded:
            self.arena.rename([part.name for part in row_index.parts], source.features)
        self.name, self.mode, self.tables, self.features = source.name, source.mode, source.tables, source.features
        self._dims = tuple(table.dim for table in self.tables for _ in table.features)
        self.groups, self.id_maps, self.model_rows = groups, source.id_maps, source.model_rows
        self.state = ShardState(row_index, groups, self.arena, self.trainer, self.tables, table_F)
        self.maps = needed_maps(self, [self.id_maps[f] for f in self.features], [plans[t].rows for t in table_F], table_F)
        overlap = groups.world.gloo or groups.comm_stream is not None
        self.pipeline = ExchangePipeline(groups.comm_thread, overlap, groups.comm_stream)
        padding = None if self._elastic else self.padding_idx  # an id, not a row
        self.trained: ShardedTrained = ShardedTrained(self.trained, self.name, self.state, self.pipeline, padding)
        self.dedup = True  # False: exchange every lookup, as the baselines of benchmarks do
        self.plan: Plan | None = None  # of `shard_`, for checkpoints
        self.counter = FrequencyCounter(self.features, 0, 1, groups.local_size)
        if isinstance(source, ShardSource):
            init_rows(self.shard, source, heat)
            adopt_ids(self, source)
            self.trained.group.read_back()  # the rows of a migrated collection come from all ranks

    @property
    def row_index(self) -> RowIndex:
        return self.state.row_index

    @property
    def shard(self) -> LocalShard:
        return self.state.shard

    @property
    def _elastic(self) -> RankMaps | None:
        return self.maps if isinstance(self.maps, RankMaps) else None

    @property
    def live_maps(self) -> Mapping[str, IdMap]:
        return live_ids(self)

    # -- a batch ------------------------------------------------------------------------------------------------------------

    @uncompiled
    def forward(self, input: Any) -> Pooled | Unpooled:
        """Look up a batch, with the input and output of `EmbeddingCollection.forward`. Collective."""
        if isinstance(input, PrefetchedInput):
            (input,) = input.arguments
        out, bags = self.look_up_batch(input)
        if self.mode == "none":
            return Unpooled(out, bags.offsets, self.features, self._dims)
        return Pooled(out, self.features, self._dims)

    def look_up_batch(self, input: Any) -> tuple[Tensor, JaggedIds]:
        """Look up an input, or None for all rows of a table. Returns the output of all features, and the ids."""
        trains = torch.is_grad_enabled() and self.placeholder.requires_grad
        if self.row_index.unsharded:
            return self._look_up_unsharded(input, trains)
        pipeline, context = self.pipeline, self.state.context
        pipeline.wait(self.state.meter)
        factors: Tensor | None = None
        with self.trained.agreeing(trains):
            with announced(context, self.name, pipeline.drop_prefetched):
                given = bags = self._read(input, trains)
            if self._elastic is not None and input is not None:
                bags, factors = self._elastic.rows_of_batch(self, bags, trains)
            with announced(context, self.name, pipeline.drop_prefetched):
                prefetched = pipeline.take_prefetched(bags, trains)
                batch, exchange = self._start(bags, prefetched, trains)
            operation = f"{'training' if trains else 'looking'} with{'out' * (bags.weights_N is None)} weights, {self.dtype}"
            agreed = self._handshake(operation, exchange, prefetched is not None, len(pipeline.next_inputs), batch)
            if agreed.differ:  # some ranks look up another batch than they prefetched: all ranks fetch again
                prefetched, (batch, exchange) = None, self._start(bags, None, trains)
                pipeline.fetch_again()
                agreed = self._handshake(operation, exchange, False, len(pipeline.next_inputs), batch)
        exchange.dense = input is None
        if trains and self.training and input is not None:  # a validation batch without no_grad does not count
            self.counter.add(given)
        target = batch.destination(self.shard.fields_KF)
        if prefetched is not None:
            prefetched.receive()
            exchange.fetch_local(target)
            self.state.meter.prefetched += 1
        else:
            exchange.request(agreed)
            exchange.fetch(target)
        pipeline.start_prefetch(context, self._read_next, agreed.following, exchange)
        out = self._look_up(batch, exchange, trains)
        return out if factors is None else out * factors.to(out.dtype), bags

    def _handshake(
        self, operation: str, exchange: BatchExchange, prefetched: bool, following: int, batch: BatchTable | None = None
    ) -> StepAgreement:  # fmt: skip
        context, what = self.state.context, f"{self.name}: {operation}"
        if batch is None or exchange.is_settled:
            return handshake(context, what, exchange.sent_PJ, exchange.total_J, prefetched, following)
        with self.state.named_errors(self.maps):
            return device_handshake(context, what, exchange, following, batch)

    def prefetch(self, input: Any) -> None:
        """Exchange ids and rows of a later batch during the current one; call it before the forward of the current batch.

        Batches are prefetched in the order of the calls; each is the one after the batches prefetched before. Results do not
        depend on prefetching, whatever is looked up next. Ranks without a later batch do not call it. Does nothing with elastic
        ids: which of them come depends on the current batch.
        """
        if not self.row_index.unsharded and self._elastic is None:
            self.pipeline.next_inputs.append(input)

    def prefetched(
        self, loader: Iterable[T], ids: Callable[[T], Any] | None = None, at_once: int = AT_ONCE
    ) -> Iterator[tuple[T, PrefetchedInput]]:
        """Iterate over batches, and prefetch later ones.

        Args:
            loader: an iterable of batches.
            ids: returns the input of forward for a batch; by default the batch.
            at_once: batches that are ahead. More hide longer exchanges; each takes the memory of its ids and rows.

        Yields:
            Each batch and its input, which forward takes (see `nn.prefetch.prefetch_loop`).
        """
        return prefetch_window(loader, ids, self.prefetch, at_once)

    def _look_up_unsharded(self, input: Any, trains: bool) -> tuple[Tensor, JaggedIds]:
        bags = self._parse(input)
        self.state.meter.steps += trains
        out = self._look_up_locally(input, bags)
        if trains and self.training:
            self.counter.add(bags)
        if trains:
            out.grad_fn.register_prehook(partial(self._check_not_migrated, self.state.context))  # type: ignore[union-attr]
        return out, bags

    def _look_up_locally(self, input: Any, bags: JaggedIds) -> Tensor:
        offsets = feature_offsets(bags, len(self.features)) if self.mode == "none" else bags.offsets
        return self.look_up(bags.ids_N, offsets, bags.weights_N, self.mode)

    def _check_not_migrated(self, context: ExchangeContext, _: Any = None) -> None:
        if context is not self.state.context:
            raise BadInput(
                f"{self.name}: rows were migrated since this forward; call migrate between a backward and a forward",
                collection=self.name,
            )

    def _read(self, input: Any, trains: bool) -> JaggedIds:
        self.trained.raise_refused()
        refuse_ddp(trains)
        return self._parse(input)

    def _parse(self, input: Any) -> JaggedIds:
        """The ids of an input of forward."""
        bags = read_features(self.features, input)
        if bags.weights_N is not None and self.mode != "sum":
            raise BadInput(
                f"weights need mode='sum'; this collection has mode={self.mode!r}", parameter="mode", value=self.mode
            )
        return bags

    def _start(self, bags: JaggedIds, prefetched: PrefetchedBatch | None, trains: bool) -> tuple[BatchTable, BatchExchange]:
        """The table of a batch and its exchange, prefetched or new."""
        if prefetched is not None and prefetched.batch is not None:
            prefetched.batch.weights_N = bags.weights_N
            return prefetched.batch, prefetched.exchange
        batch = self._table_of(bags, later=prefetched is None and self.state.context.device_side)
        return batch, batch.exchange(self.state.context, trains) if prefetched is None else prefetched.exchange

    def _table_of(self, bags: JaggedIds, later: bool = False) -> BatchTable:
        layout, mode = self.state.batch_layout, F.MODES.index(self.mode)
        maps = None if self._elastic else self.maps  # elastic ids are rows already
        with self.state.named_errors(self.maps), report_to(self.shard.errors if later else None):
            rows_N = bags.ids_N.long() if maps is None else maps(bags.ids_N, bags.offsets)
            try:
                return BatchTable(layout, bags, rows_N, mode, self.dedup, later)
            except BadInput:
                raise_pending(self.arena)  # an error of the id map, which a GPU reports later and with the raw id
                raise

    def _read_next(self, input: Any) -> tuple[JaggedIds, BatchTable]:
        given = self._parse(input)
        bags = given._replace(ids_N=given.ids_N.clone(), offsets=given.offsets.clone())  # the caller may reuse its tensors
        return bags, self._table_of(bags)

    def _look_up(self, batch: BatchTable, exchange: BatchExchange, trains: bool) -> Tensor:
        wide = self.dtype == torch.float64  # kernels support fp32 at most
        dtype = torch.float32 if wide else self.dtype
        placeholder = self.placeholder if trains else self.arena.untrained_placeholder
        call = (placeholder, batch.weights_N, batch, exchange.sums, partial(self._reduce_gradients, exchange), dtype)
        out: Tensor = ShardedLookup.apply(*call)  # type: ignore[no-untyped-call]
        if trains:
            self.pipeline.lookups += 1
            if self.rows.update == "backward":
                out.grad_fn.opened = UpdateOnce(self.trained)  # type: ignore[union-attr]
            elif self._elastic is not None:
                out.grad_fn.opened = SameTenants(self.trained)  # type: ignore[union-attr]
        return out.double() if wide else out

    def _reduce_gradients(self, exchange: BatchExchange, grads: BatchGradients) -> None:
        """Reduce the gradients of a batch over all ranks, in the background where possible."""
        self._check_not_migrated(exchange.context)
        self.pipeline.add_gradients((exchange, grads), self.trained.reduce_gradients)

    def wait_for_exchange(self) -> None:
        """Wait until rows include the update of the last backward, in host memory too."""
        self.pipeline.wait(self.state.meter)
        self.arena.settle()

    def invalidate_prefetched(self) -> None:
        """Wait for the exchange, and fetch prefetched rows again: the caller may change rows."""
        self.wait_for_exchange()
        if not self.pipeline.comm_thread.is_current:
            self.pipeline.invalidate_prefetched()

    def get_rows(self, table: str, ids: Tensor | None = None) -> Tensor:
        """Rows of a table, dequantized to fp32; all rows by default. Collective."""
        context = self.state.context
        self.invalidate_prefetched()
        with announced(context, self.name):
            number, rows_N = check_rows(self.tables, table, ids, self.arena.device)
        rows_U, inverse_N = torch.unique(rows_N + self.row_index.first[number], return_inverse=True)
        values_UD = torch.empty(rows_U.numel(), self.tables[number].dim, dtype=torch.float32, device=self.arena.device)
        exchange = BatchExchange(context, rows_U, trains=False)
        exchange.request(self._handshake("reading rows", exchange, False, 0))
        step_K = 4 * self.shard.fields_KF[:, DIM]
        exchange.fetch(RowDestination(values_UD.view(-1).view(torch.uint8), torch.zeros_like(step_K), step_K))
        return values_UD[inverse_N]

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> None:
        """Set rows of a table, rounded to nearest. Every rank calls this with the same rows."""
        self.invalidate_prefetched()
        number, rows_N = check_rows(self.tables, table, ids, self.arena.device)
        if self.maps is not None:
            self.maps.check_zeros(number, rows_N, values)
        for k, at_K, index_K in self.shard.local(self.row_index.locate(rows_N + self.row_index.first[number])):
            self.arena.write(k, index_K, values.to(self.arena.device, torch.float32)[at_K])

    def take_over(self, other: ShardedCollection) -> None:
        """Adopt the rows and state of a collection built by `migrate`; this module, its trainer and optimizer stay valid."""
        self.wait_for_exchange()
        self.trainer.states = other.trainer.states
        other.shard.trainer = self.trainer
        self.trained.arena, self.trained.state = other.arena, other.state
        self.arena = other.arena
        self.rows, self.tiers, self.state = other.rows, other.tiers, other.state
        self.pipeline.drop_prefetched()  # fetched again from its new ranks

    def check_replicas(self) -> None:
        """Raise if replicas of a row differ in a bit of codes, scale, optimizer state or slot. Collective."""
        self.wait_for_exchange()
        check_replicas(self.groups, self.name, self.shard)

    def stats(self) -> dict[str, int]:
        self.wait_for_exchange()
        return super().stats()

    def heat(self) -> HeatProfile:
        self.wait_for_exchange()
        return super().heat()

    def memory(self) -> MemoryUsage:
        """Bytes of this rank's shard."""
        memory = super().memory()
        memory.parts["maps"] += self.row_index.bytes
        return memory

    def flush(self) -> None:
        self.invalidate_prefetched()
        super().flush()

    def read_table(self, table: int, ids: Tensor | None = None) -> Tensor:
        self.wait_for_exchange()
        return super().read_table(table, ids)

    def write_table(self, table: int, values_RD: Tensor, ids_N: Tensor | None = None) -> None:
        self.invalidate_prefetched()
        super().write_table(table, values_RD, ids_N)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowsModule:
        self.invalidate_prefetched()
        super()._apply(fn, recurse)
        if (device := self.row_index.device) != self.arena.device:
            raise BadInput(f"sharded rows stay on {device}; move the model before shard_", parameter="device")
        return self

    def extra_repr(self) -> str:
        held = [
            f"{part.name}, tier {part.tier}: {part.local_rows} x {part.dim} {part.precision}"
            + (f", {part.fp32_slots} + {part.int8_slots} slots" if part.slots else "")
            for part in self.row_index.parts
            if part.is_local
        ]
        return "\n".join([*held, f"rank {self.groups.rank} of {self.groups.nodes} x {self.groups.local_size} ranks"])

    def weight_keys(self) -> Mapping[str, int]:
        return {}

    @property
    def _state(self) -> SimpleNamespace:
        self.invalidate_prefetched()  # load_state_dict writes to it
        text = maps_as_text(self.maps)
        found = {"hyper": self.trainer.hyper, "clock": self.trainer.clock} | ({} if text is None else {"ids": text})
        return SimpleNamespace(**found, **saved_pieces(self))

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Collective."""
        self.invalidate_prefetched()
        given = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        if not given:
            missing_keys += [prefix + name for name in vars(self._state)]
            return
        if why := difference(self.maps, given.get("ids")):
            given = {}  # nothing is loaded on any rank
        if wrong := load_pieces(self, given, ("hyper", "clock")):
            error_msgs.append(f"{prefix}: {why or wrong}")
            return
        self.trainer.hyper.copy_(given["hyper"])
        self.trainer.clock.copy_(given["clock"])
        self.trained.group.read_back()
