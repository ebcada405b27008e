"""All-to-all of rows and gradients within a process group.

    request             every rank sends each member the ids of the rows it needs
    answer              rows come back as stored
    reduce_gradients    gradients go to the ranks that received the ids
    broadcast_updates   sums go from the rank that made them to all members

Messages between two ranks are ordered by part, then by row, so both sides know the layout from the rows alone; only counts are
announced. Rows of all parts share one message. Replicated parts exchange gradients only.

Cached rows travel as their slot stores them, and only the owner knows which rows are cached: for parts with slots, one or two
bits per row precede the answers.

`reduce_in_pieces` pipelines gradients over two all-to-alls with different links: while one piece crosses nodes, the next
travels inside them. A piece is a subset of the rows by hash of the row, which both sides know. All gradients of a row are in
one piece in rank order, so sums have the same bits as without pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thermocline.distributed.placement.local_shard import INT8_SLOT, SummedGradients
from thermocline.distributed.placement.row_index import RowLocations
from thermocline.distributed.placement.table_map import Counts
from thermocline.distributed.process_groups import RankGroup
from thermocline.plan.model import Direction

from . import context as shared
from .context import AnnouncedCounts, ExchangeContext, decode_counts, encode_counts
from .host_numbers import HostNumbers, positions, to_device
from .routes import Phase

PIECES = 4
_HASH, _SHIFT = 0x9E3779B1, 20  # spreads the rows of one owner over all pieces


class RowBytes(NamedTuple):
    """Bytes of a message of rows: sent to each member by wire part, and received from each member."""

    sent_PK: Counts
    received_P: Counts


class UpdateSizes(NamedTuple):
    """Distinct rows to sum gradients of; those in tier 1 by part; their number and bytes on each member. None: unknown."""

    rows: int | None = None
    first_K: Counts | None = None
    announced_PJ: Counts | None = None


class AllToAll:
    """Rows `rows_N`, ascending, requested from the members of a group; `rows_M` are the rows that members request here.

    The `first` all-to-all of a batch is among all ranks, the second across nodes. `lookups_N`: counts, if ids carry them.
    With `later`, the host does not know the sizes of messages before `settle`.
    """

    def __init__(
        self, context: ExchangeContext, first: bool, rows_N: Tensor, where: RowLocations, trains: bool,
        lookups_N: Tensor | None, later: bool = False,
    ) -> None:  # fmt: skip
        self.context, self.first, self.trains = context, first, trains
        groups, tier_K = context.groups, context.routes.tier_K
        self.group = groups.world if first else groups.cross_node
        self.answered_K = context.answered_K if first else context.relayed_K
        routes_K = (context.first_routes_K if first else context.second_routes_K)[trains]
        self.counts_PK, self.order_N = context.kernels.route(
            where.part_N, where.home_N, routes_K, groups.rank // groups.local_size, groups.local_size, len(self.group.ranks)
        )
        self.rows_N, self.part_N, self._lookups_N = rows_N, where.part_N, lookups_N
        self._sync_K = tier_K == 1 if first else tier_K < 3
        self._answered_K = context.routes.tier_K > 1 if first else context.relayed_on_host_K
        self._updates: HostNumbers | None = None
        if not later:
            self.settle(self.counts_PK.cpu().numpy())

    def settle(self, counts_PK: Counts) -> None:
        """Take the numbers of rows of each part for each member, and last for none, which the host has read."""
        self.sent_PK, self.here_K = counts_PK[:-1], counts_PK.sum(axis=0)
        self.order_N = self.order_N[: int(self.sent_PK.sum())]
        self.rows_N, self.part_N = self.rows_N[self.order_N], self.part_N[self.order_N]
        self._lookups_N = None if self._lookups_N is None else self._lookups_N[self.order_N]

    @cached_property
    def receiver_N(self) -> Tensor:
        """The member that gets each request."""
        sent_P = to_device(self.sent_P, self.rows_N.device)
        return torch.repeat_interleave(sent_P, output_size=self.rows_N.numel())

    @cached_property
    def sender_M(self) -> Tensor:
        """The member that each row is requested by."""
        received_P = to_device(self._received_P, self.rows_M.device)
        return torch.repeat_interleave(received_P, output_size=self.rows_M.numel())

    @property
    def sent_P(self) -> Counts:
        """Rows requested from each member."""
        return np.asarray(self.sent_PK.sum(axis=1))

    def request(self, announced: AnnouncedCounts | None = None) -> None:
        """Exchange ids; first the counts, if no step header announced them."""
        context, total = self.context, int(self.sent_P.sum())
        counts = announced or context.exchange_counts(self.group, self._direction("ids"), self.sent_P, total)
        self._received_P, self.most, received_PK = counts
        ids_N = encode_counts(self.rows_N, self._lookups_N, context.id_type)
        ids_M = self._exchange("ids", ids_N, self.sent_P, self._received_P)
        self.rows_M, self.lookups_M = decode_counts(ids_M, self._lookups_N is not None)
        self.where = context.row_index.locate(self.rows_M)
        self.received_PK = self.count(self.sender_M, self.where.part_N) if received_PK is None else received_PK
        if context.device_side and self.trains:
            self._updates = self._count_updates()
        self.meter("ids", self.sent_PK * context.routes.bytes_K["ids"])

    def _count_updates(self) -> HostNumbers:
        """The sizes of the gradients to sum here, and on one node of the broadcast of their sums; read in backward."""
        context = self.context
        rows_V, _, number = context.kernels.distinct_padded(self.rows_M, context.row_index.rows)
        if not context.routes.tier1 or context.groups.nodes > 1:
            return HostNumbers(number)
        part_V, first_K = context.row_index.locate(rows_V).part_N.sort()[0], context.row_index.tier_K == 1
        parts = torch.arange(context.parts + 1, device=part_V.device)
        counts_K = torch.searchsorted(part_V, parts).diff() * first_K
        mine_J = torch.stack([counts_K.sum(), (counts_K * context.update_bytes_K).sum()])
        return HostNumbers(number, counts_K, context.announce(context.groups.intra_node, "sync", mine_J))

    @property
    def updates(self) -> UpdateSizes:
        """What the host knows of the gradients to sum here."""
        return (
            UpdateSizes()
            if self._updates is None
            else UpdateSizes(int(self._updates.get()[0].item()), *self._updates.get()[1:])
        )

    def count(self, member_N: Tensor, part_N: Tensor, kinds: int = 1) -> Counts:
        """Counts [member, part]; with several kinds, [member, wire part]."""
        return self.context.count_by_rank(self.group, member_N, part_N, kinds)

    def _direction(self, phase: Phase) -> Direction:
        """The direction of a collective: "sync" across nodes, if no rank requests rows there."""
        return phase if self.first or self.context.routes.relayed else "sync"

    def _exchange(self, phase: Phase, send: Tensor, sent_P: Counts, received_P: Counts) -> Tensor:
        if not self.most:  # all messages are empty
            return send
        per_peer = self.context.is_large(self.most, phase) or (self.first and self.context.first_stays_in_node)
        with self.context.meter.timed(self._direction(phase)):
            received = self.group.all_to_all(send, sent_P.tolist(), received_P.tolist(), per_peer)
        self.context.meter.hold(phase, send.nbytes + received.nbytes)
        return received

    def meter(self, phase: Phase, bytes_PK: Counts) -> None:
        """Count bytes to each member, by part."""
        self.context.meter.add(phase, self.group.links, bytes_PK, self._sync_K, own=self.first)

    # -- rows ---------------------------------------------------------------------------------------------------------------

    def answered(self) -> tuple[Tensor, Tensor]:
        """The rows that come back: positions among the rows requested here, and among those that this rank requested."""
        flags = self.answered_K[self.where.part_N], self.answered_K[self.part_N]
        known = self.known_answers if self.context.device_side else (None, None)
        return positions(flags[0], known[0]), positions(flags[1], known[1])

    @property
    def known_answers(self) -> tuple[int, int]:
        """How many rows are answered here, and come back."""
        return int(self.received_PK[:, self._answered_K].sum()), int(self.sent_PK[:, self._answered_K].sum())

    def row_bytes(self, which_M: Tensor, wire_M: Tensor, which_N: Tensor, wire_N: Tensor) -> RowBytes:
        """The bytes of some of the rows requested here, and of some of the requested rows, both described by wire parts."""
        context, bytes_K = self.context, self.context.wire_bytes
        kinds = len(bytes_K) // context.parts
        if context.device_side and kinds == 1 and self.known_answers == (which_M.numel(), which_N.numel()):  # all rows
            sent_PK, received_PK = (np.where(self._answered_K, each, 0) for each in (self.received_PK, self.sent_PK))
        else:
            sent_PK = self.count(self.sender_M[which_M], wire_M, kinds)
            received_PK = self.count(self.receiver_N[which_N], wire_N, kinds)
        return RowBytes(sent_PK * bytes_K, (received_PK * bytes_K).sum(axis=1))

    def answer(self, message: Tensor, sizes: RowBytes) -> Tensor:
        """Send rows that were requested here, and receive requested rows."""
        ranks, parts = len(sizes.sent_PK), self.context.parts
        self.meter("rows", sizes.sent_PK.reshape(ranks, -1, parts).sum(axis=1))
        return self._exchange("rows", message, sizes.sent_PK.sum(axis=1), sizes.received_P)

    def wire_parts(self, kind_M: Tensor | None, which_M: Tensor, which_N: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange the kinds of answered rows: wire parts of the rows to send, and of the rows to receive."""
        shard, part_M, part_N = self.context.shard, self.where.part_N[which_M], self.part_N[which_N]
        if kind_M is None:
            return part_M, part_N
        parts = self.context.parts
        at_M, at_N = (shard.slotted_K[each].nonzero()[:, 0] for each in (part_M, part_N))
        kind_N = torch.zeros_like(part_N)
        bits = 1 if shard.kinds <= INT8_SLOT else 2
        kind_N[at_N] = self._exchange_flags(kind_M[at_M], bits, self.sender_M[which_M[at_M]], self.receiver_N[which_N[at_N]])
        return part_M + parts * kind_M, part_N + parts * kind_N

    def exchange_deferred(self, deferred_M: Tensor, which_M: Tensor, which_N: Tensor) -> Tensor:
        """Announce which of the rows to answer come later: the same flags of the requested rows."""
        return self._exchange_flags(deferred_M[which_M], 1, self.sender_M[which_M], self.receiver_N[which_N]).bool()

    def _exchange_flags(self, flag_M: Tensor, width: int, to_M: Tensor, from_N: Tensor) -> Tensor:
        """Exchange `width` bits per row."""
        ranks, shifts = len(self.group.ranks), np.arange(width)
        out_P, in_P = (width * torch.bincount(each, minlength=ranks).cpu().numpy() for each in (to_M, from_N))
        flags = np.split((flag_M.cpu().numpy()[:, None] >> shifts & 1).astype(np.uint8).reshape(-1), np.cumsum(out_P)[:-1])
        message = torch.from_numpy(np.concatenate([np.packbits(each) for each in flags]))
        sizes = [-(-each_P // 8) for each_P in (out_P, in_P)]
        self.context.meter.add_untabled("rows", self.group.links, sizes[0])
        received = np.split(self._exchange("rows", message, *sizes).numpy(), np.cumsum(sizes[1])[:-1])
        bits = [np.unpackbits(each, count=count) for each, count in zip(received, in_P.tolist(), strict=True)]
        found_N = (np.concatenate(bits).reshape(-1, width).astype(np.int64) << shifts).sum(axis=1)
        return torch.from_numpy(found_N).to(flag_M.device)

    # -- gradients ----------------------------------------------------------------------------------------------------------

    def reduce_gradients(self, grads_NW: Tensor) -> Tensor:
        """Send gradients of the requested rows, and receive those of the rows requested here."""
        context = self.context
        fields_KF, bytes_K = context.shard.fields_KF, context.routes.bytes_K["gradients"]
        size = int((self.sent_PK * bytes_K).sum())
        message = context.kernels.pack_gradients(grads_NW, fields_KF, self.part_N, self.order_N, size)
        self.meter("gradients", self.sent_PK * bytes_K)
        sent_P, received_P = ((counts_PK * bytes_K).sum(axis=1) for counts_PK in (self.sent_PK, self.received_PK))
        received = self._exchange("gradients", message, sent_P, received_P)
        found: Tensor = context.kernels.unpack_gradients(received, fields_KF, self.where.part_N, grads_NW.shape[1])
        return found

    def send_piece(self, piece: int, grads_VW: Tensor, rows_V: Tensor | None = None) -> Callable[[], SummedGradients]:
        """Start to send one piece of the gradients; returns a function that waits for the received piece and sums it.

        `rows_V` are the rows of the gradients, ascending; by default all requested rows.
        """
        context = self.context
        fields_KF, bytes_K = context.shard.fields_KF, context.routes.bytes_K["gradients"]
        which_N, which_M = ((_piece(rows) == piece).nonzero()[:, 0] for rows in (self.rows_N, self.rows_M))
        from_N = self.order_N[which_N] if rows_V is None else torch.searchsorted(rows_V, self.rows_N[which_N])
        message = context.kernels.pack_gradients(grads_VW, fields_KF, self.part_N[which_N], from_N)
        part_M = self.where.part_N[which_M]
        out_PK = self.count(self.receiver_N[which_N], self.part_N[which_N])
        in_PK = self.count(self.sender_M[which_M], part_M)
        received, wait = self.group.all_to_all_async(message, (out_PK @ bytes_K).tolist(), (in_PK @ bytes_K).tolist())
        context.meter.hold("gradients", message.nbytes + received.nbytes)

        def result() -> SummedGradients:
            wait()
            unpack = context.kernels.unpack_gradients
            grads_MW: Tensor = unpack(received.to(message.device), fields_KF, part_M, grads_VW.shape[1])
            lookups_M = None if self.lookups_M is None else self.lookups_M[which_M]
            return context.sum_rows(self.rows_M[which_M], grads_MW, lookups_M)

        return result


def _piece(rows_N: Tensor) -> Tensor:
    return (rows_N * _HASH >> _SHIFT) % PIECES


def reduce_in_pieces(first: AllToAll, second: AllToAll, grads_NW: Tensor) -> SummedGradients:
    """Reduce gradients over `first`, and the sums that cross nodes over `second`, in a pipeline of pieces."""
    context, found = first.context, []
    for each in (first, second):
        each.meter("gradients", each.sent_PK * context.routes.bytes_K["gradients"])
    with context.meter.timed("gradients"):
        inside, across = first.send_piece(0, grads_NW), None
        for piece in range(PIECES):
            sums = inside()
            if piece + 1 < PIECES:
                inside = first.send_piece(piece + 1, grads_NW)
            if across is not None:
                found.append(across())
            crosses_V = context.crosses_nodes_K[context.row_index.locate(sums.rows_V).part_N]
            found.append(sums.at(~crosses_V))
            across = second.send_piece(piece, sums.grads_VW[crosses_V], sums.rows_V[crosses_V])
        assert across is not None
        found.append(across())
    return reduce(SummedGradients.concat, found)


def broadcast_updates(
    context: ExchangeContext, group: RankGroup, sums: SummedGradients, sizes: UpdateSizes | None = None
) -> SummedGradients:
    """Send the sums of this rank to all members; every member gets the same sums, rounded as messages carry them."""
    return sums if group.is_single else reduce(SummedGradients.concat, gather_updates(context, group, sums, sizes))


def gather_updates(
    context: ExchangeContext, group: RankGroup, sums: SummedGradients, sizes: UpdateSizes | None = None
) -> list[SummedGradients]:
    """Send the sums of this rank to all members: the sums of every member, in their order, rounded as messages carry them."""
    rows_N, grads_NW, lookups_N = sums
    kernels, fields_KF, width, device = context.kernels, context.shard.fields_KF, grads_NW.shape[1], rows_N.device
    part_N = context.row_index.locate(rows_N).part_N
    ids_N = encode_counts(rows_N, lookups_N, context.id_type)
    counts_PJ, counts_K = (None, None) if sizes is None else (sizes.announced_PJ, sizes.first_K)
    size = None if counts_K is None else int(counts_K @ context.routes.bytes_K["gradients"])
    packed = kernels.pack_gradients(grads_NW, fields_KF, part_N, torch.arange(rows_N.numel(), device=device), size)
    message = torch.cat([ids_N.view(torch.uint8), packed])
    ranks = len(group.ranks)
    if counts_PJ is None or counts_K is None:
        counts_PJ = context.exchange_numbers(group, "sync", np.tile([rows_N.numel(), message.numel()], (ranks, 1)))
        counts_K = np.bincount(part_N.cpu().numpy(), minlength=context.parts)
    others_P = np.arange(ranks) != group.index
    each_K = context.routes.bytes_K["ids"] + context.routes.bytes_K["gradients"]
    context.meter.add("sync", group.links, others_P[:, None] * (counts_K * each_K), context.routes.tier_K < 3)
    rows_N, lookups_N = decode_counts(ids_N, context.counts)
    own = SummedGradients(rows_N, kernels.unpack_gradients(packed, fields_KF, part_N, width), lookups_N)
    found = [own.at(slice(0))] * ranks
    found[group.index] = own
    if int(counts_PJ[:, 1].max()):
        large = int(counts_PJ[:, 1].max()) * (ranks - 1) > shared.LARGE_MESSAGE
        with context.meter.timed("sync"):
            received = group.broadcast(message, (counts_PJ[:, 1] * others_P).tolist(), large)
        context.meter.hold("sync", message.nbytes * (ranks - 1) + sum(each.nbytes for each in received))
        for p, (count, each) in enumerate(zip(counts_PJ[:, 0].tolist(), received, strict=True)):
            if each.numel():
                ids, packed = each.tensor_split([count * context.id_type.itemsize])
                # messages may begin at any byte
                rows_N, lookups_N = decode_counts(ids.clone().view(context.id_type), context.counts)
                part_N = context.row_index.locate(rows_N).part_N
                grads_NW = kernels.unpack_gradients(packed.clone(), fields_KF, part_N, width)
                found[p] = SummedGradients(rows_N, grads_NW, lookups_N)
    return found
