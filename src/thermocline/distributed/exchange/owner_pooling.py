"""Bags pooled by the owners of their rows: partial sums travel instead of rows, and gradients of bags instead of rows.

A *partial sum* is the part of one bag whose rows one rank owns. For tables that a plan has `pooled_by: owner`, rows of tier 3:

    ids          requester -> owner     every lookup, bag after bag; ~id marks the first of a partial sum
    sums         owner -> requester     one per partial sum, in fp32; in bf16 or int8 if the plan says so
    gradients    requester -> owner     the gradient of the bag, one per partial sum

This takes fewer bytes than distinct rows where bags are long and rows seldom repeat. The requester still pools replicated rows,
and bags with weights: weights would travel with the ids, and their gradients need the rows.

**Order of summation.** A bag is the sum of its partial sums in rank order of the owners, then of the requester's own part. The
owner sums the gradient of a row over all lookups, in rank order of the requesters and in id order of each. For a table of one
feature that is the order of one process with the batches of all ranks, so equal gradients give equal bits.

Sums of a prefetched batch wait for the update of the batch before, which changes a row of nearly every long bag. Ids do not
wait.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thermocline.distributed.placement.local_shard import SummedGradients, run_offsets
from thermocline.distributed.placement.table_map import Counts
from thermocline.kernels.exchange.fields import STRAIGHT

from .context import AnnouncedCounts, ExchangeContext
from .routes import Phase


class OwnerPooledLookups(NamedTuple):
    """Lookups of a batch that owners pool: their global rows and bags, ascending by bag."""

    rows_N: Tensor
    bag_N: Tensor


class PartialSums:
    """The partial sums [S] that one batch requests, by rank, part and bag, and those [T] requested from this rank."""

    def __init__(self, context: ExchangeContext, lookups: OwnerPooledLookups) -> None:
        self.context, self._group = context, context.groups.world
        where, groups = context.row_index.locate(lookups.rows_N), context.groups
        straight_K = torch.full_like(context.row_index.tier_K, STRAIGHT)
        counts_PK, order_N = context.kernels.route(
            where.part_N, where.home_N, straight_K, groups.rank // groups.local_size, groups.local_size, groups.size
        )
        self._sent_PK: Counts = counts_PK[:-1].cpu().numpy()
        rows_N, bag_N, home_N = lookups.rows_N[order_N], lookups.bag_N[order_N], where.home_N[order_N]
        begins_N = torch.ones_like(rows_N, dtype=torch.bool)
        begins_N[1:] = (bag_N[1:] != bag_N[:-1]) | (home_N[1:] != home_N[:-1])
        self._ids_N = torch.where(begins_N, ~rows_N, rows_N).to(context.id_type)
        self._part_S, self._bag_S = where.part_N[order_N][begins_N], bag_N[begins_N]
        self._sums_PK = context.count_by_rank(self._group, home_N[begins_N], self._part_S)
        self._sums_SW: Tensor | None = None

    @property
    def sent_P(self) -> Counts:
        """Lookups of rows of each rank."""
        return np.asarray(self._sent_PK.sum(axis=1))

    @property
    def total(self) -> int:
        """Partial sums."""
        return self._bag_S.numel()

    def request(self, announced: AnnouncedCounts | None = None) -> None:
        """Exchange ids; first the counts, if no step header announced them."""
        context = self.context
        received_P, self._most, _ = announced or context.exchange_counts(self._group, "ids", self.sent_P, self.total)
        ids_M = self._exchange("ids", self._ids_N, self.sent_P, received_P, self._sent_PK).long()
        self._begins_M = ids_M < 0
        self.rows_M = torch.where(self._begins_M, ~ids_M, ids_M)
        self._where = context.row_index.locate(self.rows_M)
        sender_M = torch.repeat_interleave(torch.from_numpy(received_P).to(ids_M.device), output_size=ids_M.numel())
        self._part_T = self._where.part_N[self._begins_M]
        self._received_PK = context.count_by_rank(self._group, sender_M[self._begins_M], self._part_T)

    def _exchange(self, phase: Phase, send: Tensor, sent_P: Counts, received_P: Counts, sent_PK: Counts) -> Tensor:
        """An all-to-all; `sent_PK` counts ids or sums by rank and part."""
        if not self._most:
            return send
        context, meter = self.context, self.context.meter
        large = context.is_large(self._most, phase, sums=True)
        with meter.timed(phase):
            received = self._group.all_to_all(send, sent_P.tolist(), received_P.tolist(), large)
        meter.hold(phase, send.nbytes + received.nbytes)
        bytes_PK = sent_PK * context.routes.sum_bytes_K[phase]
        meter.add(phase, self._group.links, bytes_PK, np.zeros_like(context.routes.owner_pooled_K), own=True)
        return received

    def _exchange_sums(self, phase: Phase, values: Tensor, fields_KF: Tensor, back: bool) -> Tensor:
        """Exchange one vector per partial sum; `back` goes from owners to requesters."""
        kernels, bytes_K = self.context.kernels, self.context.routes.sum_bytes_K[phase]
        part_S, part_T = (self._part_T, self._part_S) if back else (self._part_S, self._part_T)
        out_PK, in_PK = (self._received_PK, self._sums_PK) if back else (self._sums_PK, self._received_PK)
        at_S = torch.arange(part_S.numel(), device=part_S.device) if back else self._bag_S
        message = kernels.pack_gradients(values, fields_KF, part_S, at_S)
        received = self._exchange(phase, message, (out_PK * bytes_K).sum(axis=1), (in_PK * bytes_K).sum(axis=1), out_PK)
        found: Tensor = kernels.unpack_gradients(received, fields_KF, part_T, self.context.width)
        return found

    def fetch(self) -> None:
        """Send and receive partial sums."""
        if self._most:
            shard = self.context.shard
            pooled_TW = shard.pool(self._where, self._begins_M, self.context.width)
            self._sums_SW = self._exchange_sums("rows", pooled_TW, shard.sums_KF, back=True)

    def pooled(self, bags: int) -> Tensor:
        """The sums of received partial sums: [bags, width]."""
        pooled_XW = torch.zeros(bags, self.context.width, dtype=torch.float32, device=self._bag_S.device)
        if self._sums_SW is not None:
            sizes = self._sums_PK.sum(axis=1).tolist()
            for bag_S, sums_SW in zip(self._bag_S.split(sizes), self._sums_SW.split(sizes), strict=True):
                pooled_XW[bag_S] += sums_SW  # each bag occurs once per rank
        return pooled_XW

    def reduce_gradients(self, grads_XW: Tensor | None) -> SummedGradients | None:
        """Send gradients of bags to the owners of their rows: sums for rows of this rank, if any were requested."""
        if not self._most:
            return None
        context = self.context
        if grads_XW is None:  # this rank requests no sums: its bags have weights, or it has none
            grads_XW = torch.zeros(0, context.width, dtype=torch.float32, device=self._bag_S.device)
        grads_TW = self._exchange_sums("gradients", grads_XW, context.shard.fields_KF, back=False)
        if not self.rows_M.numel():
            return None
        lookups_M = torch.ones_like(self.rows_M) if context.counts else None
        return context.sum_rows(self.rows_M, grads_TW, lookups_M, run_offsets(self._begins_M))
