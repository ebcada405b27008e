"""The rows that one rank stores: packed into messages as stored, and updated from summed gradients.

Rounding bits are drawn for the global row, not for its local index, so a row is rounded the same on every rank.

A cached row travels as its slot stores it, in fp32 or int8. Its *kind* is `STORED`, `FP32_SLOT` or `INT8_SLOT`. Kind and part
form a *wire part*: part k of K in an fp32 slot is wire part K + k, in an int8 slot 2 K + k.

**The cache of replicated rows** must do the same on all ranks that hold them. It is refreshed tier by tier from the updated
rows of the tier: all holders of replicas have the same rows with the same lookup counts. Time is the step of the optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.process_groups import ProcessGroups
from thermocline.errors import BadGradient, ThermoclineError
from thermocline.kernels import gather_pool, update_rows
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.exchange.fields import CODES, COLUMN_BYTES, DIM, FORMAT, GRADIENT, META, ROW, ROW_BYTES, WORDS
from thermocline.kernels.layout import Cache, Layout, write_spec
from thermocline.kernels.update.reference import advance
from thermocline.rows.arena import Arena
from thermocline.rows.training import Trainer, raise_pending, report_to

from .row_index import RowIndex, RowLocations
from .table_map import Counts

STORED, FP32_SLOT, INT8_SLOT = range(3)  # kinds of rows


class SummedGradients(NamedTuple):
    """Distinct rows to update, their gradients summed over all ranks, and their lookup counts where a cache needs them."""

    rows_V: Tensor
    grads_VW: Tensor
    lookups_V: Tensor | None = None

    def at(self, at: Tensor | slice) -> SummedGradients:
        """A subset of the rows."""
        return SummedGradients(self.rows_V[at], self.grads_VW[at], None if self.lookups_V is None else self.lookups_V[at])

    def concat(self, other: SummedGradients) -> SummedGradients:
        both = zip(self, other, strict=True)
        joined = (torch.cat([one, two]) if one is not None and two is not None else None for one, two in both)
        return SummedGradients(*joined)  # type: ignore[arg-type]


def run_offsets(begins_M: Tensor) -> Tensor:
    """The offsets of runs, from flags of their first elements."""
    return torch.cat([begins_M.nonzero()[:, 0], torch.tensor([begins_M.numel()], dtype=torch.int64, device=begins_M.device)])


class LocalShard:
    """The arena of one rank, with one table for each part."""

    def __init__(self, arena: Arena, trainer: Trainer, row_index: RowIndex, rank: int) -> None:
        self.arena, self.trainer, self.row_index, self.rank = arena, trainer, row_index, rank
        lines = []
        for k, part in enumerate(row_index.parts):
            codes_RB, meta_RW, row, format, dim = arena.views(k)
            at = [each.storage_offset() for each in (codes_RB, meta_RW)]
            lines.append([codes_RB.shape[1], meta_RW.shape[1], *at, row, dim, format, COLUMN_BYTES[part.gradient]])
        self.fields_KF = torch.tensor(lines, dtype=torch.int64, device=row_index.device)
        self.slotted_K = torch.tensor([part.slots > 0 for part in row_index.parts], dtype=torch.bool, device=row_index.device)
        self.cached = any(part.slots for part in row_index.parts)
        in_slots = [self._slot_fields(format) for format in (F.FP32, F.INT8) if self.cached]
        self.wire_KF = torch.cat([self.fields_KF, *in_slots])  # of wire parts
        self.moved_2K = torch.zeros(2, len(lines), dtype=torch.int64, device=row_index.device)  # rows read, and rows updated
        self.errors: Any = None  # the `ErrorBuffer` of updates, if their errors are read later
        self.kinds = 3 if any(part.int8_slots for part in row_index.parts) else 2  # on any rank
        self._slots_by_tier = {tier: self._slots_of(tier) for tier in (1, 2, 3)}
        self.sums_KF = self.fields_KF.clone()  # of pooled sums, which travel as gradients do
        self.sums_KF[:, GRADIENT] = torch.tensor([COLUMN_BYTES[part.sums] for part in row_index.parts], dtype=torch.int64)
        self._pooled = {k: self._part_layout(k) for k, part in enumerate(row_index.parts) if part.owner_pooled}

    def local(self, where: RowLocations) -> list[tuple[int, Tensor, Tensor]]:
        """The rows among some that this rank stores: (part, positions, indices in the part)."""
        return self.row_index.held_by(self.rank, where)

    def _slot_fields(self, format: int) -> Tensor:
        """Fields of rows in slots. Slots begin at the start of their array; rows of one dimension are a multiple apart."""
        fields_KF = self.fields_KF.clone()
        fields_KF[:, ROW_BYTES] = fields_KF[:, DIM] * (F.BITS[format] // 8)
        fields_KF[:, WORDS] = F.META_WORDS[format]
        fields_KF[:, CODES], fields_KF[:, META], fields_KF[:, FORMAT] = 0, 0, format
        return fields_KF

    def _slots_of(self, tier: int) -> tuple[Layout, slice]:
        """The layout with the slots of one tier only, and the range of its pools. Slots are in tier order."""
        layout, parts = self.arena.layout, self.row_index.parts
        tier_of_row = {self.arena.views(k)[2]: part.tier for k, part in enumerate(parts)}
        mine = [index for index, pool in enumerate(self.arena.pools) if tier_of_row[pool.row] == tier]
        pools = tuple(self.arena.pools[index] for index in mine)
        here = slice(mine[0], mine[-1] + 1) if mine else slice(0)
        return layout._replace(tables=replace(layout.tables, pools=pools)), here

    # -- messages -----------------------------------------------------------------------------------------------------------

    def kind(self, where: RowLocations) -> Tensor:
        """The kinds of local rows."""
        word_N = self._words(where)
        return torch.where(word_N < 0, torch.where(word_N & F.INT8_SLOT == 0, FP32_SLOT, INT8_SLOT), STORED)

    def _words(self, where: RowLocations) -> Tensor:
        """First meta words of rows in parts with slots; 0 for other rows."""
        fields_NF = self.fields_KF[where.part_N]
        slotted_N = self.slotted_K[where.part_N]
        at_N = torch.where(slotted_N, fields_NF[:, META] + where.index_N * fields_NF[:, WORDS], 0)
        return torch.where(slotted_N, self.arena.meta[at_N], 0)

    def pack(self, where: RowLocations, kind_N: Tensor | None, offset_N: Tensor, message: Tensor) -> None:
        """Write rows into a message as they are stored: codes, then meta words."""
        arena = self.arena
        pack = implementation_for("exchange", arena.meta).pack_rows
        if kind_N is not None and bool(kind_N.any()):
            cache, slot_N = Cache(*arena.cache), (self._words(where) & F.SLOT_BITS).long()
            fp32, int8, rest = ((kind_N == kind).nonzero()[:, 0] for kind in (FP32_SLOT, INT8_SLOT, STORED))
            values = cache.values.view(torch.uint8)
            wire_K = where.part_N[fp32] + FP32_SLOT * len(self.fields_KF)
            pack(values, arena.meta, self.wire_KF, wire_K, slot_N[fp32], offset_N[fp32], message)
            self._pack_int8_slots(cache, where.part_N[int8], slot_N[int8], offset_N[int8], message)
            where, offset_N = where.at(rest), offset_N[rest]
        self._count_moved(0, where.part_N)
        pack(arena.codes, arena.meta, self.wire_KF, where.part_N, where.index_N, offset_N, message)

    def _pack_int8_slots(self, cache: Cache, part_N: Tensor, slot_N: Tensor, offset_N: Tensor, message: Tensor) -> None:
        """Int8 slots store the scale first; messages have it last."""
        bytes_ = cache.near.view(torch.uint8)
        for dim in self.fields_KF[part_N, DIM].unique().tolist():
            at = (self.fields_KF[part_N, DIM] == dim).nonzero()[:, 0]
            column = torch.cat([torch.arange(4, 4 + dim), torch.arange(4)]).to(bytes_.device)
            record_KB = bytes_[slot_N[at, None] * 4 * F.int8_slot_words(dim) + column]
            message[offset_N[at, None] + torch.arange(4 + dim, device=bytes_.device)] = record_KB

    def _count_moved(self, how: int, part_N: Tensor) -> None:
        """Count rows that a GPU reads from host memory (0), or updates there (1)."""
        if self.arena.residency == "host":
            self.moved_2K[how].index_add_(0, part_N, torch.ones_like(part_N))

    def take_host_bytes(self) -> tuple[Counts, Counts]:
        """Bytes over the host link since the last call, by part: of rows read, and of rows read and written by updates."""
        read_K, updated_K = (self.moved_2K * self.fields_KF[:, ROW_BYTES]).cpu().numpy()
        self.moved_2K.zero_()
        return read_K, 2 * updated_K

    # -- pooling by owners --------------------------------------------------------------------------------------------------

    def _part_layout(self, k: int) -> Layout:
        """The layout of one part alone."""
        field = (*self.arena.layout.tables.features[k][: F.COLUMN], 0)
        spec = write_spec([field], self.arena.pools)  # tells GPU kernels that rows may be in slots
        return Layout.of(torch.tensor([field], dtype=torch.int64, device=self.row_index.device), spec)

    def pool(self, where: RowLocations, begins_M: Tensor, width: int) -> Tensor:
        """Sums of runs of local rows, each of one part: [runs, width]. `begins_M` flags the first row of each run."""
        arena, part_T = self.arena, where.part_N[begins_M]
        self._count_moved(0, where.part_N[self.kind(where) == STORED] if self.cached else where.part_N)
        sums_TW = torch.zeros(part_T.numel(), width, dtype=torch.float32, device=part_T.device)
        cache = Cache(*arena.cache) if arena.cache else None
        for k, layout in self._pooled.items():
            at_M, at_T = (where.part_N == k).nonzero()[:, 0], (part_T == k).nonzero()[:, 0]
            if at_M.numel():
                rows = RowArrays(arena.codes, arena.meta, layout, cache)
                call = LookupCall(where.index_N[at_M], run_offsets(begins_M[at_M]), None, F.SUM)
                sums_TW[at_T, : layout.tables.max_dim] = gather_pool(rows, call)[0]
        return sums_TW

    # -- updates ------------------------------------------------------------------------------------------------------------

    def tick(self) -> tuple[Tensor, Tensor]:
        """Advance the optimizer's clock. Returns copies of clock and learning rates for `update`: a learning rate set after
        backward must not change an update that still runs."""
        trainer = self.trainer
        clock, hyper = trainer.clock.clone(), trainer.hyper.clone()
        advance(trainer.clock, trainer.hyper)
        return clock, hyper

    def update(self, sums: SummedGradients, clock: Tensor, hyper: Tensor) -> BadGradient | None:
        """One optimizer step on local rows. Returns the error of the first refused gradient."""
        where = self.row_index.locate(sums.rows_V)
        at_V = self.fields_KF[:, ROW][where.part_N] + where.index_N
        self.arena.before_write(at_V)
        self._count_moved(1, where.part_N[self.kind(where) == STORED] if self.cached else where.part_N)
        if not self.cached:
            return self._update(sums, at_V, clock, hyper, 0)
        tier_V = torch.where(self.slotted_K[where.part_N], self.row_index.tier_K[where.part_N], 0)
        start, refused = (clock.clone(), hyper.clone()), []
        for tier in range(4):  # 0: rows of parts without slots
            mine = (tier_V == tier).nonzero()[:, 0]
            mine = mine[at_V[mine].argsort()]  # caches need one order on all ranks that hold the rows
            clock.copy_(start[0])
            hyper.copy_(start[1])
            refused.append(self._update(sums.at(mine), at_V[mine], clock, hyper, tier))
        return min((error for error in refused if error is not None), key=lambda error: error.row, default=None)

    def _update(self, sums: SummedGradients, at_V: Tensor, clock: Tensor, hyper: Tensor, tier: int) -> BadGradient | None:
        """One step on rows of parts without slots (tier 0), or with slots and of one tier."""
        arena, trainer, layout, cache, seen_N = self.arena, self.trainer, self.arena.layout, None, None
        if tier and arena.cache:
            assert sums.lookups_V is not None
            layout, pools = self._slots_by_tier[tier]
            cache, seen_N = Cache(*arena.cache), torch.repeat_interleave(at_V, sums.lookups_V)
            cache = cache._replace(ledger=cache.ledger[pools])
            cache.clock[F.STEP], cache.steps[0] = clock[F.STEP], clock[F.STEP]
        try:
            rows = RowArrays(arena.codes, arena.meta, layout, cache)
            optimizer = trainer.arrays._replace(hyper=hyper, clock=clock)
            with report_to(self.errors):
                update_rows(rows, optimizer, at_V, sums.grads_VW, seen_N, sums.rows_V)
            if self.errors is None:
                raise_pending(arena)
        except BadGradient as error:
            return error
        return None

    # -- access -------------------------------------------------------------------------------------------------------------

    def states(self, k: int) -> list[Tensor]:
        """Optimizer state of one part: a value or a vector for each local row."""
        return self.arena.state_views(k, self.trainer.states, self.trainer.optimizer.states_per_row > 0)

    def slots(self, k: int) -> list[Tensor]:
        """The cache of one part: slot values, and the admission state of cached and uncached rows."""
        _, _, row, _, dim = self.arena.views(k)
        for index, pool in enumerate(self.arena.pools):
            if pool.row == row:
                cache, here = Cache(*self.arena.cache), slice(pool.slot, pool.slot + pool.slots)
                values = cache.values[pool.base * dim : (pool.base + pool.fp32_slots) * dim]
                words = F.int8_slot_words(dim)
                near = cache.near[pool.int8_base * words : (pool.int8_base + pool.int8_slots) * words]
                sketch = cache.sketch.view(-1, cache.sketch.numel() // cache.rows.numel())[here]
                return [values, near, cache.rows[here], cache.scores[here], cache.words[here], sketch, cache.ledger[index]]
        return []

    def replica_digests(self, clocks: Sequence[Tensor] | None = None, every_tier: bool = False) -> dict[str, str]:
        """Sha256 of everything that replicas must have in common: rows, state and slots of tiers 1 and 2, clock and rates.

        An update in the background gives its own clock and rates: those of the trainer change while it runs.
        """
        self.arena.settle()
        found = {"clock and learning rate": _sha256(clocks or [self.trainer.clock, self.trainer.hyper])}
        for k, part in enumerate(self.row_index.parts):
            if part.tier < 3 or every_tier:
                tensors = [*self.arena.views(k)[:2], *self.states(k), *self.slots(k)]
                found[f"tier {part.tier} of table {part.name!r}"] = _sha256(tensors)
        return found


class ReplicaMismatch(ThermoclineError):
    """Replicas that differ: `what` of a collection, on rank `first` and on `ranks`."""

    def __init__(self, collection: str, what: str, first: int, ranks: list[int]) -> None:
        super().__init__(collection, what, first, ranks)
        self.collection, self.what, self.first, self.ranks = collection, what, first, ranks

    def __str__(self) -> str:
        return f"{self.collection}: {self.what} is not the same on rank {self.first} and on ranks {self.ranks}"


def check_replicas(groups: ProcessGroups, name: str, shard: LocalShard, clocks: Sequence[Tensor] | None = None) -> None:
    """Raise if ranks that hold replicas of the same rows differ in a bit. Collective."""
    everyone = groups.all_gather(shard.replica_digests(clocks))
    for what in everyone[0]:
        per_node = what.startswith("tier 2")
        for local_rank in range(groups.local_size if per_node else 1):
            ranks = range(local_rank, groups.size, groups.local_size) if per_node else range(groups.size)
            wrong = [rank for rank in ranks if everyone[rank][what] != everyone[ranks[0]][what]]
            if wrong:
                raise ReplicaMismatch(name, what, ranks[0], wrong)


def _sha256(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
