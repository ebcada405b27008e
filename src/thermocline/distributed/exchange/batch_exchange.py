"""The way of one batch to its rows, and of their gradients back.

A card asks for distinct rows only. By part:

    tier 1           the row is here
    tier 3, flat     asker -> owner
    tier 2           asker -> the card of its own node that holds the row
    tier 3, node     asker -> the card of its node with the owner's number -> owner, so that a node asks once for a row

So there are two hops: the first to any card, all parts in one message, the second between the nodes. Gradients go the same
ways, those of tier 1 to the card of the node with the number of the row's home; wherever several meet they are summed in the
order of the ranks, so the sum is the same in every run. Copied rows are then made equal: the sums that their homes have made go
back to all who hold them, and each of them takes the same step.

Lookups whose bags are pooled where rows lie go a way of their own, beside this one: `shares.py`.

Where parts have slots, rows come with their kinds (`held.py`), and ids with how often they were looked up (`tally.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thermocline.distributed.placement.local_shard import STORED, Sums
from thermocline.distributed.placement.row_index import Where
from thermocline.kernels.exchange.fields import NOWHERE

from .all_to_all import Hop, Target, Ways, spread
from .frequency_codec import added
from .gradient_pipeline import bring_in_pieces
from .owner_pooling import Apart, Shares
from .routes import Counts

__all__ = ["Journey", "Target", "Ways"]


class Gradients(NamedTuple):
    """Of a batch: of its distinct rows, and of its bags, where others pool any."""

    rows_UW: Tensor
    bags_XW: Tensor | None = None


class Journey:
    """One batch: `rows_U` are its rows, ascending. `trains`: gradients will come, and caches count `lookups_U`, if there are
    any. `apart`: lookups whose bags others pool."""

    def __init__(
        self, ways: Ways, rows_U: Tensor, trains: bool = True, lookups_U: Tensor | None = None, apart: Apart | None = None
    ) -> None:
        self.ways, self.rows_U, self.trains = ways, rows_U, trains
        self.where = ways.atlas(rows_U)
        everyone, where_K = ways.world.everyone, ways.first_ways_K[trains]
        if ways.counts and trains:
            lookups_U = torch.ones_like(rows_U) if lookups_U is None else lookups_U
        self.first = Hop(ways, everyone, rows_U, self.where, where_K, True, lookups_U if trains else None)
        self.second: Hop | None = None
        self.shares = Shares(ways, apart or Apart.none(rows_U.device)) if ways.routes.sums else None

    @property
    def asked_PJ(self) -> Counts:
        """What is asked of each card: rows, and lookups for them to pool."""
        return np.stack([self.first.asked_P] + ([] if self.shares is None else [self.shares.asked_P]), axis=1)

    @property
    def total_J(self) -> Counts:
        """Rows that are asked for, and sums."""
        return np.array([self.first.asked_P.sum()] + ([] if self.shares is None else [self.shares.total]))

    def ask(self, got_PJ: Counts, most_J: Counts) -> None:
        """Ask for the rows, once cards have told each other how many."""
        self.first.ask(got_PJ[:, 0], int(most_J[0]))
        self._ask_between()
        if self.shares is not None:
            self.shares.ask(got_PJ[:, 1], int(most_J[1]))

    def tell(self) -> None:
        """Ask for the rows, and tell how many."""
        self.first.tell()
        self._ask_between()
        if self.shares is not None:
            self.shares.tell()

    def _ask_between(self) -> None:
        if self.ways.routes.relayed and self.ways.world.nodes > 1:
            self._ask_on()

    def _ask_on(self) -> Hop:
        """What the cards of this node ask of this one and others have: each row once for the node."""
        ways, where = self.ways, self.first.where
        up_M = (ways.second_ways_K[self.trains] != NOWHERE)[where.part_N].nonzero()[:, 0]
        rows_V, inverse_M = ways.kernels.distinct_rows(self.first.rows_M[up_M], ways.atlas.rows)
        self.once_M = torch.zeros_like(self.first.rows_M)  # of rows that are asked for once for the node, which they are
        self.once_M[up_M] = inverse_M
        lookups_M = self.first.lookups_M
        lookups_V = None if lookups_M is None else added(rows_V, self.first.rows_M[up_M], lookups_M[up_M])
        ways_K = ways.second_ways_K[self.trains]
        self.second = Hop(ways, ways.world.across, rows_V, ways.atlas(rows_V), ways_K, False, lookups_V)
        self.second.tell()
        return self.second

    # -- forward ------------------------------------------------------------------------------------------------------------

    def fetch(self, target: Target) -> None:
        """Put the rows where the batch looks them up."""
        self.fetch_here(target)
        self._fetch_others(target)

    def _fetch_others(self, target: Target) -> None:
        if self.ways.asks:
            if self.second is not None:
                self._relay(*self.second.answered())
            self._come(target, *self.first.answered())
        if self.shares is not None:
            self.shares.fetch()

    def fetch_here(self, target: Target) -> None:
        """Those that lie on every card."""
        if self.ways.routes.first:
            here_H = (~self.ways.answered_K[self.where.part_N]).nonzero()[:, 0]
            where = self.where.at(here_H)
            kind_H = self.ways.held.kind(where) if self.ways.held.cached else None
            wire_H = where.part_N if kind_H is None else where.part_N + len(self.ways.atlas.parts) * kind_H
            self._put(self._packed(where, kind_H, wire_H), where.part_N, wire_H, here_H, target)

    def fetch_early(self, target: Target, before: Journey | None) -> None:
        """Those of others that the batch before will not update; `fetch_late` gets the rest, after its update."""
        if not self.ways.asks:
            return
        if before is None:  # which then updates nothing
            self._fetch_others(target)
            return
        first, parts_M = self.first, self.first.where.part_N
        late_M = self._changes(first, before.first)
        if before.shares is not None:
            late_M |= torch.isin(first.rows_M, before.shares.rows_M)
        late_M |= self.ways.late_K[parts_M]
        if self.second is not None:
            assert before.second is not None
            which_M, which_N = self.second.answered()
            late2_M = self._changes(self.second, before.second)
            late_N = self.second.flag(late2_M, which_M, which_N)
            self._relay(which_M[~late2_M[which_M]], which_N[~late_N], slots=False)
            self._late2 = which_M[late2_M[which_M]], which_N[late_N]
            late_V = torch.zeros_like(self.second.rows_N, dtype=torch.bool)
            late_V[self.second.order_N[which_N]] = late_N
            far_M = self.ways.relayed_K[parts_M].nonzero()[:, 0]
            late_M[far_M] = late_V[self.once_M[far_M]]
        which_M, which_N = first.answered()
        late_N = first.flag(late_M, which_M, which_N)
        self._come(target, which_M[~late_M[which_M]], which_N[~late_N], slots=False)
        self._late = which_M[late_M[which_M]], which_N[late_N]

    def _changes(self, hop: Hop, before: Hop) -> Tensor:
        """Which of the rows that are asked of this card the batch before may change: those that it has, and those in slots,
        which its rows may drive out. Of rows that lie on other nodes, their owners say it."""
        found_M = torch.isin(hop.rows_M, before.rows_M)
        if self.ways.held.cached:
            here_M = hop.answered_K[hop.where.part_N]
            if hop.first:
                here_M &= ~self.ways.relayed_K[hop.where.part_N]
            here = here_M.nonzero()[:, 0]
            found_M[here] |= self.ways.held.kind(hop.where.at(here)) != STORED
        return found_M

    def fetch_late(self, target: Target) -> None:
        """The rows that were late."""
        if self.ways.asks:
            if self.second is not None:
                self._relay(*self._late2)
            self._come(target, *self._late)
        if self.shares is not None:
            self.shares.fetch()

    def _come(self, target: Target, which_M: Tensor, which_N: Tensor, slots: bool = True) -> None:
        """Answers to cards that asked this one, and to itself. Without `slots`, none of the rows is in one."""
        first = self.first
        kind_M = self._kinds(which_M) if slots and self.ways.held.cached else None
        wire_M, wire_N = first.wire_parts(kind_M, which_M, which_N)
        got = first.answer(self._answers(which_M, kind_M, wire_M), which_M, wire_M, which_N, wire_N)
        self._put(got, first.part_N[which_N], wire_N, first.order_N[which_N], target)

    def _kinds(self, which_M: Tensor) -> Tensor:
        """Of rows that are asked of this card: as they are kept here, or as they came from other nodes."""
        where = self.first.where.at(which_M)
        far_N = self.ways.relayed_K[where.part_N]
        here, far = (~far_N).nonzero()[:, 0], far_N.nonzero()[:, 0]
        kind_N = torch.zeros_like(which_M)
        kind_N[here] = self.ways.held.kind(where.at(here))
        if far.numel():
            kind_N[far] = self.far_wire_V[self.once_M[which_M[far]]] // len(self.ways.atlas.parts)
        return kind_N

    def _packed(self, where: Where, kind_N: Tensor | None, wire_N: Tensor) -> Tensor:
        """Rows that lie here, as they travel."""
        ways = self.ways
        offset_N, size = ways.kernels.offsets(wire_N, ways.size_K)
        message = torch.empty(size, dtype=torch.uint8, device=where.part_N.device)
        ways.held.pack(where, kind_N, offset_N, message)
        return message

    def _relay(self, which_M: Tensor, which_N: Tensor, slots: bool = True) -> None:
        """Get rows that lie on other nodes; they wait as they came."""
        ways, hop = self.ways, self.second
        assert hop is not None
        where = hop.where.at(which_M)
        kind_M = ways.held.kind(where) if slots and ways.held.cached else None
        wire_M, wire_N = hop.wire_parts(kind_M, which_M, which_N)
        self.far = hop.answer(self._packed(where, kind_M, wire_M), which_M, wire_M, which_N, wire_N)
        offset_N, _ = ways.kernels.offsets(wire_N, ways.size_K)
        self.far_V, self.far_wire_V = torch.zeros_like(hop.rows_N), torch.zeros_like(hop.rows_N)
        self.far_V[hop.order_N[which_N]], self.far_wire_V[hop.order_N[which_N]] = offset_N, wire_N

    def _answers(self, which_M: Tensor, kind_M: Tensor | None, wire_M: Tensor) -> Tensor:
        """Rows that cards ask of this one: those that lie here, and those that came from other nodes for them."""
        ways, where = self.ways, self.first.where.at(which_M)
        if self.second is None:
            return self._packed(where, kind_M, wire_M)
        offset_N, size = ways.kernels.offsets(wire_M, ways.size_K)
        message = torch.empty(size, dtype=torch.uint8, device=where.part_N.device)
        far_N = ways.relayed_K[where.part_N]
        here, far = (~far_N).nonzero()[:, 0], far_N.nonzero()[:, 0]
        ways.held.pack(where.at(here), None if kind_M is None else kind_M[here], offset_N[here], message)
        from_N = self.far_V[self.once_M[which_M[far]]]
        ways.kernels.copy_rows(self.far, from_N, ways.held.wire_KF, wire_M[far], offset_N[far], message)
        return message

    def _put(self, message: Tensor, part_N: Tensor, wire_N: Tensor, at_N: Tensor, target: Target) -> None:
        ways = self.ways
        offset_N, _ = ways.kernels.offsets(wire_N, ways.size_K)
        ways.kernels.unpack_rows(message, offset_N, ways.held.wire_KF, wire_N, target.of(part_N, at_N), target.shelf)

    # -- backward -----------------------------------------------------------------------------------------------------------

    def bring(self, grads: Gradients) -> Sums:
        """Bring summed gradients to where rows are updated: distinct rows that this card holds, their sums over all cards."""
        sums, others = self._bring_rows(grads.rows_UW), None if self.shares is None else self.shares.bring(grads.bags_XW)
        return sums if others is None else sums.and_(others)

    def _bring_rows(self, grads_UW: Tensor) -> Sums:
        ways = self.ways
        if self.second is not None and ways.in_pieces(self.first.most):
            return self._made_equal(bring_in_pieces(self.first, self.second, grads_UW))
        sums = ways.sum_rows(self.first.rows_M, self.first.bring(grads_UW), self.first.lookups_M)
        if ways.goes_up:
            up_V = ways.up_K[ways.atlas(sums.rows_V).part_N]
            hop = self._ask_on() if self.second is None else self.second
            sums = sums.at(~up_V).and_(ways.sum_rows(hop.rows_M, hop.bring(sums.grads_VW[up_V]), hop.lookups_M))
        return self._made_equal(sums)

    def _made_equal(self, sums: Sums) -> Sums:
        """Sums that homes have made of rows with copies go to all who hold one."""
        ways, world, routes = self.ways, self.ways.world, self.ways.routes
        if routes.across:
            copied_V = ways.copied_K[ways.atlas(sums.rows_V).part_N]
            sums = sums.at(~copied_V).and_(spread(ways, world.across, sums.at(copied_V)))
        if routes.first:
            first_V = ~ways.answered_K[ways.atlas(sums.rows_V).part_N]
            sums = sums.at(~first_V).and_(spread(ways, world.node, sums.at(first_V)))
        return sums
