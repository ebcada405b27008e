"""The exchange of one batch: rows to the rank that looks them up, and gradients back to the ranks that hold the rows.

A rank requests distinct rows only. By part:

    tier 1           the row is local
    tier 3, flat     requester -> owner
    tier 2           requester -> the rank of its own node that holds the row
    tier 3, node     requester -> the rank of its node with the owner's local rank -> owner, so that a node requests a row once

This takes two all-to-alls: the first among all ranks, with all parts in one message, the second across nodes. Gradients take
the same routes; those of tier 1 go to the rank of the node with the local rank of the row's home. Gradients are summed in rank
order, so sums are the same in every run. The homes of replicated rows then broadcast the sums to all holders, and each holder
takes the same optimizer step.

Lookups whose bags the owners pool have their own exchange (`owner_pooling.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thermocline.distributed.placement.local_shard import STORED, SummedGradients
from thermocline.distributed.placement.row_index import RowLocations
from thermocline.distributed.placement.table_map import Counts
from thermocline.kernels.exchange.fields import NOWHERE

from .all_to_all import AllToAll, UpdateSizes, broadcast_updates, reduce_in_pieces
from .context import AnnouncedCounts, ExchangeContext, sum_counts
from .handshake import StepAgreement
from .host_numbers import positions
from .owner_pooling import OwnerPooledLookups, PartialSums


class RowDestination(NamedTuple):
    """The memory for dequantized rows: row u of part k at byte `base_K[k] + step_K[k] * u`."""

    memory: Tensor
    base_K: Tensor
    step_K: Tensor


class BatchGradients(NamedTuple):
    """Gradients of the distinct rows of a batch, and of bags that owners pool."""

    rows_UW: Tensor
    bags_XW: Tensor | None = None


class BatchExchange:
    """The exchange of one batch with the distinct global rows `rows_U`, ascending.

    With `trains`, gradients will follow, and caches count `lookups_U`. The owners pool `owner_pooled`. With `later`, rows may
    be padded, and the host does not know their number before `settle`.
    """

    def __init__(
        self, context: ExchangeContext, rows_U: Tensor, trains: bool = True, lookups_U: Tensor | None = None,
        owner_pooled: OwnerPooledLookups | None = None, later: bool = False,
    ) -> None:  # fmt: skip
        self.context, self.rows_U, self.trains = context, rows_U, trains
        self.dense = False  # whether it reads all rows, and gradients of zero update none
        self.where = context.row_index.locate(rows_U)
        if context.counts and trains:
            lookups_U = torch.ones_like(rows_U) if lookups_U is None else lookups_U
        self.first = AllToAll(context, True, rows_U, self.where, trains, lookups_U if trains else None, later)
        self.is_settled = not later
        self.second: AllToAll | None = None
        self._deferred: tuple[Tensor, Tensor] | None = None  # as `AllToAll.answered`
        self._deferred_relayed: tuple[Tensor, Tensor] | None = None
        self.sums: PartialSums | None = None
        if context.routes.owner_pooled:
            self.sums = PartialSums(context, owner_pooled or OwnerPooledLookups(rows_U[:0], rows_U[:0]))

    def settle(self, counts_PK: Counts) -> None:
        """Take the sizes of messages, which the host has read."""
        self.first.settle(counts_PK)
        self.where = self.where.at(slice(int(counts_PK.sum())))
        self.is_settled = True

    @property
    def sent_PJ(self) -> Counts:
        """Requests to each rank: of rows, and of lookups to pool."""
        return np.stack([self.first.sent_P] + ([] if self.sums is None else [self.sums.sent_P]), axis=1)

    @property
    def total_J(self) -> Counts:
        """Requested rows, and requested sums."""
        return np.array([self.first.sent_P.sum()] + ([] if self.sums is None else [self.sums.total]))

    def request(self, agreed: StepAgreement | None = None) -> None:
        """Request the rows; without a handshake before, exchange the counts too."""
        counts: list[AnnouncedCounts | None] = [None, None]
        if agreed is not None:
            counts = [AnnouncedCounts(*each) for each in zip(agreed.received_PJ.T, agreed.most_J.tolist(), strict=True)]
            counts[0] = counts[0] and counts[0]._replace(received_PK=agreed.received_PK)
        self.first.request(counts[0])
        if self.context.routes.relayed and self.context.groups.nodes > 1:
            self._cross_nodes()
        if self.sums is not None:
            self.sums.request(counts[1])

    def _cross_nodes(self) -> AllToAll:
        """Request rows of other nodes that ranks of this node requested here, each row once."""
        context, where = self.context, self.first.where
        relayed_M = (context.second_routes_K[self.trains] != NOWHERE)[where.part_N].nonzero()[:, 0]
        rows_V, inverse_M = context.kernels.distinct_rows(self.first.rows_M[relayed_M], context.row_index.rows)
        self.relayed_M = torch.zeros_like(self.first.rows_M)  # positions of relayed rows among the rows of `second`
        self.relayed_M[relayed_M] = inverse_M
        lookups_M = self.first.lookups_M
        lookups_V = None if lookups_M is None else sum_counts(rows_V, self.first.rows_M[relayed_M], lookups_M[relayed_M])
        self.second = AllToAll(context, False, rows_V, context.row_index.locate(rows_V), self.trains, lookups_V)
        self.second.request()
        return self.second

    # -- forward ------------------------------------------------------------------------------------------------------------

    def fetch(self, target: RowDestination) -> None:
        """Fetch all rows."""
        self.fetch_local(target)
        self.fetch_remote(target)

    def fetch_remote(self, target: RowDestination) -> None:
        """Fetch the rows of other ranks; after `fetch_unchanged`, those that it left out."""
        if self.context.requests_rows:
            if self.second is not None:
                self._fetch_relayed(*(self._deferred_relayed or self.second.answered()))
            self._exchange_rows(target, *(self._deferred or self.first.answered()))
        if self.sums is not None:
            self.sums.fetch()

    def fetch_local(self, target: RowDestination) -> None:
        """Fetch the rows of tier 1."""
        if self.context.routes.tier1:
            context, tier1_K = self.context, self.context.routes.tier_K == 1
            here_K = self.first.here_K * tier1_K
            here_H = positions(~context.answered_K[self.where.part_N], int(here_K.sum()) if context.device_side else None)
            where, shard = self.where.at(here_H), context.shard
            kind_H = shard.kind(where) if shard.cached else None
            wire_H = where.part_N if kind_H is None else where.part_N + len(self.context.row_index.parts) * kind_H
            size = None if shard.cached else int(here_K @ context.wire_bytes)
            self._unpack(self._packed(where, kind_H, wire_H, size), where.part_N, wire_H, here_H, target)

    def fetch_unchanged(self, target: RowDestination, previous: Sequence[BatchExchange]) -> None:
        """Fetch remote rows that no previous batch updates; `fetch_remote` fetches the rest after the updates."""
        if not self.context.requests_rows:
            return
        if not previous:  # no update is due
            self.fetch_remote(target)
            return
        first, parts_M = self.first, self.first.where.part_N
        deferred_M = self._changed(first, [each.first for each in previous])
        for each in previous:
            if each.sums is not None:
                deferred_M |= torch.isin(first.rows_M, each.sums.rows_M)
        deferred_M |= self.context.deferred_K[parts_M]
        if self.second is not None:
            deferred_V = self._fetch_unchanged_relayed(self.second, [each.second for each in previous if each.second])
            far_M = self.context.relayed_K[parts_M].nonzero()[:, 0]
            deferred_M[far_M] = deferred_V[self.relayed_M[far_M]]
        which_M, which_N = first.answered()
        deferred_N = first.exchange_deferred(deferred_M, which_M, which_N)
        self._exchange_rows(target, which_M[~deferred_M[which_M]], which_N[~deferred_N], slots=False)
        self._deferred = which_M[deferred_M[which_M]], which_N[deferred_N]

    def _fetch_unchanged_relayed(self, second: AllToAll, previous: Sequence[AllToAll]) -> Tensor:
        """`fetch_unchanged` across nodes. Returns which rows of `second` are deferred."""
        which_M, which_N = second.answered()
        deferred_M = self._changed(second, previous)
        deferred_N = second.exchange_deferred(deferred_M, which_M, which_N)
        self._fetch_relayed(which_M[~deferred_M[which_M]], which_N[~deferred_N], slots=False)
        self._deferred_relayed = which_M[deferred_M[which_M]], which_N[deferred_N]
        deferred_V = torch.zeros_like(second.rows_N, dtype=torch.bool)
        deferred_V[second.order_N[which_N]] = deferred_N
        return deferred_V

    def _changed(self, exchange: AllToAll, previous: Sequence[AllToAll]) -> Tensor:
        """Which rows requested here the previous batches may change: their own rows, and rows in slots, which they may evict.

        The owners decide for rows of other nodes.
        """
        if self.context.updated_elsewhere:
            return torch.ones_like(exchange.rows_M, dtype=torch.bool)
        found_M = torch.isin(exchange.rows_M, torch.cat([each.rows_M for each in previous]))
        if self.context.shard.cached:
            here_M = exchange.answered_K[exchange.where.part_N]
            if exchange.first:
                here_M &= ~self.context.relayed_K[exchange.where.part_N]
            here = here_M.nonzero()[:, 0]
            found_M[here] |= self.context.shard.kind(exchange.where.at(here)) != STORED
        return found_M

    def _exchange_rows(self, target: RowDestination, which_M: Tensor, which_N: Tensor, slots: bool = True) -> None:
        """Answer requests for some rows, and receive some. Without `slots`, none of the rows is cached."""
        first = self.first
        kind_M = self._kinds(which_M) if slots and self.context.shard.cached else None
        wire_M, wire_N = first.wire_parts(kind_M, which_M, which_N)
        sizes = first.row_bytes(which_M, wire_M, which_N, wire_N)
        message = self._packed(first.where.at(which_M), kind_M, wire_M, int(sizes.sent_PK.sum()), which_M)
        received = first.answer(message, sizes)
        self._unpack(received, first.part_N[which_N], wire_N, first.order_N[which_N], target)

    def _split_relayed(self, where: RowLocations) -> tuple[Tensor, Tensor]:
        """Positions of local rows, and of rows relayed from other nodes."""
        far_N = self.context.relayed_K[where.part_N]
        return (~far_N).nonzero()[:, 0], far_N.nonzero()[:, 0]

    def _kinds(self, which_M: Tensor) -> Tensor:
        """The kinds of rows requested here, as stored or as received from other nodes."""
        where = self.first.where.at(which_M)
        here, far = self._split_relayed(where)
        kind_N = torch.zeros_like(which_M)
        kind_N[here] = self.context.shard.kind(where.at(here))
        if far.numel():
            kind_N[far] = self.far_wire_V[self.relayed_M[which_M[far]]] // len(self.context.row_index.parts)
        return kind_N

    def _packed(
        self, where: RowLocations, kind_N: Tensor | None, wire_N: Tensor, size: int | None, which_M: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """A message of local rows, or of the rows `which_M` requested here, some of which came from other nodes."""
        context = self.context
        offset_N, end = context.kernels.offsets(wire_N, context.wire_bytes_K)
        message = torch.empty(int(end) if size is None else size, dtype=torch.uint8, device=where.part_N.device)
        if which_M is not None and self.second is not None:
            here, far = self._split_relayed(where)
            from_N = self.far_V[self.relayed_M[which_M[far]]]
            context.kernels.copy_rows(self.far, from_N, context.shard.wire_KF, wire_N[far], offset_N[far], message)
            where, kind_N, offset_N = where.at(here), None if kind_N is None else kind_N[here], offset_N[here]
        context.shard.pack(where, kind_N, offset_N, message)
        return message

    def _fetch_relayed(self, which_M: Tensor, which_N: Tensor, slots: bool = True) -> None:
        """Fetch rows from other nodes, and keep them as received."""
        context, second = self.context, self.second
        assert second is not None
        where = second.where.at(which_M)
        kind_M = context.shard.kind(where) if slots and context.shard.cached else None
        wire_M, wire_N = second.wire_parts(kind_M, which_M, which_N)
        sizes = second.row_bytes(which_M, wire_M, which_N, wire_N)
        self.far = second.answer(self._packed(where, kind_M, wire_M, int(sizes.sent_PK.sum())), sizes)
        offset_N, _ = context.kernels.offsets(wire_N, context.wire_bytes_K)
        self.far_V, self.far_wire_V = torch.zeros_like(second.rows_N), torch.zeros_like(second.rows_N)
        self.far_V[second.order_N[which_N]], self.far_wire_V[second.order_N[which_N]] = offset_N, wire_N

    def _unpack(self, message: Tensor, part_N: Tensor, wire_N: Tensor, at_N: Tensor, target: RowDestination) -> None:
        context = self.context
        offset_N, _ = context.kernels.offsets(wire_N, context.wire_bytes_K)
        to_N = target.base_K[part_N] + target.step_K[part_N] * at_N
        context.kernels.unpack_rows(message, offset_N, context.shard.wire_KF, wire_N, to_N, target.memory)

    # -- backward -----------------------------------------------------------------------------------------------------------

    def reduce_gradients(self, grads: BatchGradients) -> SummedGradients:
        """Sum gradients over all ranks: the distinct rows that this rank stores and updates."""
        rows = self._reduce_rows(grads.rows_UW)
        pooled = None if self.sums is None else self.sums.reduce_gradients(grads.bags_XW)
        return rows if pooled is None else rows.concat(pooled)

    def _reduce_rows(self, grads_UW: Tensor) -> SummedGradients:
        context, first = self.context, self.first
        if self.second is not None and context.groups.world.gloo and context.is_large(first.most, "gradients"):
            return self._synchronize_replicas(reduce_in_pieces(first, self.second, grads_UW))
        sizes = first.updates
        sums = context.sum_rows(first.rows_M, first.reduce_gradients(grads_UW), first.lookups_M, distinct=sizes.rows)
        if context.crosses_nodes:
            crosses_V = context.crosses_nodes_K[context.row_index.locate(sums.rows_V).part_N]
            second = self._cross_nodes() if self.second is None else self.second
            grads_MW = second.reduce_gradients(sums.grads_VW[crosses_V])
            sums = sums.at(~crosses_V).concat(context.sum_rows(second.rows_M, grads_MW, second.lookups_M))
        return self._synchronize_replicas(sums, sizes)

    def _synchronize_replicas(self, sums: SummedGradients, sizes: UpdateSizes | None = None) -> SummedGradients:
        """Broadcast the sums of replicated rows from their homes to all holders."""
        context, groups, routes = self.context, self.context.groups, self.context.routes
        if routes.syncs_nodes:
            replicated_V = context.replicated_K[context.row_index.locate(sums.rows_V).part_N]
            sums = sums.at(~replicated_V).concat(broadcast_updates(context, groups.cross_node, sums.at(replicated_V)))
        if routes.tier1:
            others_V, rows = context.answered_K[context.row_index.locate(sums.rows_V).part_N], sums.rows_V.numel()
            known = None if sizes is None or sizes.first_K is None else int(sizes.first_K.sum())
            others = sums.at(positions(others_V, None if known is None else rows - known))
            first = sums.at(positions(~others_V, known))
            sums = others.concat(broadcast_updates(context, groups.intra_node, first, sizes))
        return sums
