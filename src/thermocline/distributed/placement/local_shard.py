"""The rows that one card holds: read as they are stored, updated from summed gradients.

Rounding bits are drawn for the global row and not for the row's place here, so a row is rounded alike wherever it lies.

A row that is cached lies in a slot, and travels as it lies there: in fp32, or as an int8 row. Its *kind* says so (`STORED`,
`FULL` or `NEAR`), and a kind and a part make a *wire part*: part k in a full slot is wire part K + k, in a near one 2 K + k.
Messages know rows by these, so whoever packs or unpacks them need not know of slots.

**The cache of copied rows** must do the same on all cards that hold them. So it is refreshed tier by tier, from the rows of the
tier that were updated: all who hold copies of these have the same, with the same lookups (`tally.py`). Time is the step of the
optimizer, not the steps in which a card had anything to do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadGradient
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.exchange.fields import CODES, DIM, FORMAT, GRADIENT, META, ROW, ROW_BYTES, WORDS
from thermocline.kernels.gather import gather_pool
from thermocline.kernels.layout import Cache, Layout, write_spec
from thermocline.kernels.update import update_rows
from thermocline.kernels.update.reference import advance
from thermocline.rows.arena import Arena
from thermocline.rows.training import Trainer, raise_pending

from .row_index import Atlas, Where

STORED, FULL, NEAR = range(3)  # kinds of rows


class Sums(NamedTuple):
    """Rows that are to be updated, each once: their gradients, and how often they were looked up, where a cache counts."""

    rows_V: Tensor
    grads_VW: Tensor
    lookups_V: Tensor | None = None

    def at(self, at: Tensor) -> Sums:
        """Some of them."""
        return Sums(self.rows_V[at], self.grads_VW[at], None if self.lookups_V is None else self.lookups_V[at])

    def and_(self, other: Sums) -> Sums:
        """These and others."""
        both = zip(self, other, strict=True)
        return Sums(*(torch.cat([one, two]) if one is not None and two is not None else None for one, two in both))  # type: ignore[arg-type]


def ends_of(begins_M: Tensor) -> Tensor:
    """Where runs begin, and the last one ends."""
    return torch.cat([begins_M.nonzero()[:, 0], torch.tensor([begins_M.numel()], device=begins_M.device)])


class Held:
    """The arena of one card, a table for each part."""

    def __init__(self, arena: Arena, trainer: Trainer, atlas: Atlas) -> None:
        self.arena, self.trainer, self.atlas = arena, trainer, atlas
        lines = []
        for k, part in enumerate(atlas.parts):
            codes_RB, meta_RW, row, format, dim = arena.views(k)
            at = [each.storage_offset() for each in (codes_RB, meta_RW)]
            lines.append([codes_RB.shape[1], meta_RW.shape[1], *at, row, dim, format, part.gradient_bytes // dim])
        self.fields_KF = torch.tensor(lines, device=atlas.device)
        self.slotted_K = torch.tensor([part.slots > 0 for part in atlas.parts], device=atlas.device)
        self.wire_KF = torch.cat([self.fields_KF, self._in_slots(F.FP32), self._in_slots(F.INT8)])
        self.cached = any(part.slots for part in atlas.parts)
        self.kinds = 3 if any(part.near for part in atlas.parts) else 2  # that rows may have, on any card
        self._of_tier = {tier: self._slots_of(tier) for tier in (1, 2, 3)}
        self.sums_KF = self.fields_KF.clone()  # of sums of rows, which travel as gradients in fp32 would
        self.sums_KF[:, GRADIENT] = 4
        self._by_itself = {k: self._part_layout(k) for k, part in enumerate(atlas.parts) if part.summed}

    def _in_slots(self, format: int) -> Tensor:
        """Fields of rows in slots: these begin where their array begins, and rows of one dimension are a multiple apart."""
        fields_KF = self.fields_KF.clone()
        fields_KF[:, ROW_BYTES] = fields_KF[:, DIM] * (F.BITS[format] // 8)
        fields_KF[:, WORDS] = F.META_WORDS[format]
        fields_KF[:, CODES], fields_KF[:, META], fields_KF[:, FORMAT] = 0, 0, format
        return fields_KF

    def _slots_of(self, tier: int) -> tuple[Layout, slice]:
        """The layout with the slots of one tier alone, and which these are. Slots lie in the order of tiers."""
        layout, parts = self.arena.layout, self.atlas.parts
        first_R = {self.arena.views(k)[2]: part.tier for k, part in enumerate(parts)}
        mine = [index for index, pool in enumerate(self.arena.pools) if first_R[pool.row] == tier]
        pools = tuple(self.arena.pools[index] for index in mine)
        here = slice(mine[0], mine[-1] + 1) if mine else slice(0)
        return layout._replace(tables=replace(layout.tables, pools=pools)), here

    # -- rows on their way --------------------------------------------------------------------------------------------------

    def kind(self, where: Where) -> Tensor:
        """How rows that lie here are kept."""
        word_N = self._words(where)
        return torch.where(word_N < 0, torch.where(word_N & F.INT8_SLOT == 0, FULL, NEAR), STORED)

    def _words(self, where: Where) -> Tensor:
        """First meta words of rows in parts with slots; 0 of others."""
        fields_NF = self.fields_KF[where.part_N]
        slotted_N = self.slotted_K[where.part_N]
        at_N = torch.where(slotted_N, fields_NF[:, META] + where.place_N * fields_NF[:, WORDS], 0)
        return torch.where(slotted_N, self.arena.meta[at_N], 0)

    def pack(self, where: Where, kind_N: Tensor | None, offset_N: Tensor, message: Tensor) -> None:
        """Put rows into a message, as they are kept: codes and then meta words."""
        arena = self.arena
        pack = implementation_for("exchange", arena.meta).pack_rows
        if kind_N is not None and bool(kind_N.any()):
            cache, slot_N = Cache(*arena.cache), (self._words(where) & F.SLOT_BITS).long()
            full, near, rest = ((kind_N == kind).nonzero()[:, 0] for kind in (FULL, NEAR, STORED))
            values = cache.values.view(torch.uint8)
            parts_K = where.part_N[full] + FULL * len(self.fields_KF)
            pack(values, arena.meta, self.wire_KF, parts_K, slot_N[full], offset_N[full], message)
            self._pack_near(cache, where.part_N[near], slot_N[near], offset_N[near], message)
            where, offset_N = where.at(rest), offset_N[rest]
        pack(arena.codes, arena.meta, self.fields_KF, where.part_N, where.place_N, offset_N, message)

    def _pack_near(self, cache: Cache, part_N: Tensor, slot_N: Tensor, offset_N: Tensor, message: Tensor) -> None:
        """Near slots have the scale first."""
        bytes_ = cache.near.view(torch.uint8)
        for dim in self.fields_KF[part_N, DIM].unique().tolist():
            at = (self.fields_KF[part_N, DIM] == dim).nonzero()[:, 0]
            column = torch.cat([torch.arange(4, 4 + dim), torch.arange(4)]).to(bytes_.device)
            record_KB = bytes_[slot_N[at, None] * 4 * F.int8_slot_words(dim) + column]
            message[offset_N[at, None] + torch.arange(4 + dim, device=bytes_.device)] = record_KB

    # -- sums of rows -------------------------------------------------------------------------------------------------------

    def _part_layout(self, k: int) -> Layout:
        """Of one part, looked up by itself."""
        field = (*self.arena.layout.tables.features[k][: F.COLUMN], 0)
        spec = write_spec([field], self.arena.pools)  # by which kernels of a card know that rows may be in slots
        return Layout.of(torch.tensor([field], device=self.atlas.device), spec)

    def pool(self, where: Where, begins_M: Tensor, width: int) -> Tensor:
        """Sums of rows that lie here, of those from each beginning to the next; these have one part: [beginnings, width]."""
        arena, part_T = self.arena, where.part_N[begins_M]
        sums_TW = torch.zeros(part_T.numel(), width, device=part_T.device)
        cache = Cache(*arena.cache) if arena.cache else None
        for k, layout in self._by_itself.items():
            at_M, at_T = (where.part_N == k).nonzero()[:, 0], (part_T == k).nonzero()[:, 0]
            if at_M.numel():
                rows = RowArrays(arena.codes, arena.meta, layout, cache)
                call = LookupCall(where.place_N[at_M], ends_of(begins_M[at_M]), None, F.SUM)
                sums_TW[at_T, : layout.tables.max_dim] = gather_pool(rows, call)[0]
        return sums_TW

    # -- updates ------------------------------------------------------------------------------------------------------------

    def tick(self) -> tuple[Tensor, Tensor]:
        """One more step of the optimizer's clock. Returns clock and rates as `update` takes them: whoever sets a learning rate
        after backward does not mean an update that is still under way."""
        trainer = self.trainer
        clock, hyper = trainer.clock.clone(), trainer.hyper.clone()
        advance(trainer.clock, trainer.hyper)
        return clock, hyper

    def update(self, sums: Sums, clock: Tensor, hyper: Tensor) -> BadGradient | None:
        """One step on rows that lie here. Returns what it had to refuse."""
        where = self.atlas(sums.rows_V)
        at_V = self.fields_KF[:, ROW][where.part_N] + where.place_N
        self.arena.before_write(at_V)
        if not self.cached:
            return self._update(sums, at_V, clock, hyper, 0)
        tier_V = torch.where(self.slotted_K[where.part_N], self.atlas.tier_K[where.part_N], 0)
        begun, refused = (clock.clone(), hyper.clone()), []
        for tier in range(4):  # first the rows of parts without slots
            mine = (tier_V == tier).nonzero()[:, 0]
            mine = mine[at_V[mine].argsort()]  # as caches want them, in the same order on all who hold them
            clock.copy_(begun[0])
            hyper.copy_(begun[1])
            refused.append(self._update(sums.at(mine), at_V[mine], clock, hyper, tier))
        return min((error for error in refused if error is not None), key=lambda error: error.row, default=None)

    def _update(self, sums: Sums, at_V: Tensor, clock: Tensor, hyper: Tensor, tier: int) -> BadGradient | None:
        """A step on some rows, which are of parts without slots, or with slots and of one tier."""
        arena, trainer, layout, cache, seen_N = self.arena, self.trainer, self.arena.layout, None, None
        if tier and arena.cache:
            assert sums.lookups_V is not None
            layout, pools = self._of_tier[tier]
            cache, seen_N = Cache(*arena.cache), torch.repeat_interleave(at_V, sums.lookups_V)
            cache = cache._replace(ledger=cache.ledger[pools])
            cache.clock[F.STEP], cache.steps[0] = clock[F.STEP], clock[F.STEP]
        try:
            rows = RowArrays(arena.codes, arena.meta, layout, cache)
            optimizer = trainer.arrays._replace(hyper=hyper, clock=clock)
            update_rows(rows, optimizer, at_V, sums.grads_VW, seen_N, sums.rows_V)
            raise_pending(arena)
        except BadGradient as error:
            return error
        return None

    # -- looking at it ------------------------------------------------------------------------------------------------------

    def states(self, k: int) -> list[Tensor]:
        """Optimizer state of one part: a number or a line for each place."""
        return self.arena.state_views(k, self.trainer.states, self.trainer.optimizer.states_per_row > 0)

    def slots(self, k: int) -> list[Tensor]:
        """Slots of one part, and all that is known of their rows and of others that might take them."""
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
