"""Bags that are pooled where their rows lie: sums travel instead of rows, and gradients of bags instead of those of rows.

A *share* is what lies of one bag on one card. Of tables that a plan has `pooled_by: owner`, rows of tier 3 go this way:

    ids          asker -> owner     every lookup, bag after bag; ~id where a share begins, so bags need no numbers
    sums         owner -> asker     one a share, in fp32
    gradients    asker -> owner     that of its bag, one a share

That is fewer bytes than distinct rows where bags are long and rows seldom repeat. Rows of such tables that have copies, on this
card or in its node, are pooled by the asker as ever, and so are bags with weights: those would travel with the ids, and their
own gradients need the rows.

**Order of sums.** A bag is the sum of its shares in the order of their owners' ranks, and then of what the asker has pooled.
The gradient of a row is summed by its owner over all lookups, in the order of the ranks that asked and, of each, in the order
of its ids. For a table of one feature that is the order of one process with the batches of all ranks: gradients that are the
same then have sums that are the same, bit for bit.

The sums of a batch that comes ahead (`ahead.py`) wait for the update of the one before: of long bags nearly all have a row that
it changes. Their ids do not wait.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.placement.local_shard import Sums, ends_of
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.exchange.fields import STRAIGHT
from thermocline.kernels.sum_gradients import sum_row_gradients

from .all_to_all import Ways
from .frequency_codec import added
from .routes import Counts, Phase


class Apart(NamedTuple):
    """Lookups of a batch that others pool: their global rows, and the bags they are in, ascending."""

    rows_N: Tensor
    bag_N: Tensor

    @classmethod
    def none(cls, device: torch.device) -> Apart:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(nothing, nothing)


class Shares:
    """The shares [S] that one batch asks for, by card, part and bag; and those [T] that are asked of this card."""

    def __init__(self, ways: Ways, apart: Apart) -> None:
        self.ways, self._group = ways, ways.world.everyone
        where, world = ways.atlas(apart.rows_N), ways.world
        straight_K = torch.full_like(ways.atlas.tier_K, STRAIGHT)
        counts_PK, order_N = ways.kernels.route(
            where.part_N, where.home_N, straight_K, world.rank // world.cards, world.cards, world.size
        )
        self._asked_PK: Counts = counts_PK.cpu().numpy()
        rows_N, bag_N, home_N = apart.rows_N[order_N], apart.bag_N[order_N], where.home_N[order_N]
        begins_N = torch.ones_like(rows_N, dtype=torch.bool)
        begins_N[1:] = (bag_N[1:] != bag_N[:-1]) | (home_N[1:] != home_N[:-1])
        self._ids_N = torch.where(begins_N, ~rows_N, rows_N).to(ways.id_type)
        self._part_S, self._bag_S = where.part_N[order_N][begins_N], bag_N[begins_N]
        self._sums_PK = ways.by_card(self._group, home_N[begins_N], self._part_S)
        self._sums_SW: Tensor | None = None

    @property
    def asked_P(self) -> Counts:
        """Lookups of rows of each card."""
        return np.asarray(self._asked_PK.sum(axis=1))

    @property
    def total(self) -> int:
        """Shares."""
        return self._bag_S.numel()

    def tell(self) -> None:
        """Tell how many ids will come, where no meeting has told it, and ask."""
        self.ask(*self.ways.tell(self._group, "ids", self.asked_P, self.total))

    def ask(self, got_P: Counts, most: int) -> None:
        """Ask for the sums; `got_P` ids come from each card, and no card asks for more than `most` sums."""
        ways, self._most = self.ways, most
        ids_M = self._swap("ids", self._ids_N, self.asked_P, got_P, self._asked_PK).long()
        self._begins_M = ids_M < 0
        self.rows_M = torch.where(self._begins_M, ~ids_M, ids_M)
        self._where = ways.atlas(self.rows_M)
        sender_M = torch.repeat_interleave(torch.from_numpy(got_P).to(ids_M.device), output_size=ids_M.numel())
        self._part_T = self._where.part_N[self._begins_M]
        self._got_PK = ways.by_card(self._group, sender_M[self._begins_M], self._part_T)

    def _swap(self, phase: Phase, send: Tensor, sent_P: Counts, got_P: Counts, sent_PK: Counts) -> Tensor:
        """`sent_PK`: what is sent, in ids or in sums."""
        if not self._most:
            return send
        ways, meter = self.ways, self.ways.meter
        large = ways.is_large(self._most, phase, sums=True)
        with meter.timed(phase):
            received = self._group.swap(send, sent_P.tolist(), got_P.tolist(), large)
        meter.hold(phase, send.nbytes + received.nbytes)
        bytes_PK = sent_PK * ways.routes.sum_bytes_K[phase]
        meter.add(phase, self._group.links, bytes_PK, np.zeros_like(ways.routes.summed_K), own=True)
        return received

    def _move(self, phase: Phase, values: Tensor, fields_KF: Tensor, back: bool) -> Tensor:
        """Values of shares, as they travel: `back` from who owns the rows to who asked."""
        kernels, bytes_K = self.ways.kernels, self.ways.routes.sum_bytes_K[phase]
        part_S, part_T = (self._part_T, self._part_S) if back else (self._part_S, self._part_T)
        out_PK, in_PK = (self._got_PK, self._sums_PK) if back else (self._sums_PK, self._got_PK)
        at_S = torch.arange(part_S.numel(), device=part_S.device) if back else self._bag_S
        message = kernels.pack_gradients(values, fields_KF, part_S, at_S)
        got = self._swap(phase, message, (out_PK * bytes_K).sum(axis=1), (in_PK * bytes_K).sum(axis=1), out_PK)
        found: Tensor = kernels.unpack_gradients(got, fields_KF, part_T, self.ways.width)
        return found

    def fetch(self) -> None:
        """Give and get sums."""
        if self._most:
            held = self.ways.held
            pooled_TW = held.pool(self._where, self._begins_M, self.ways.width)
            self._sums_SW = self._move("rows", pooled_TW, held.sums_KF, back=True)

    def pooled(self, bags: int) -> Tensor:
        """Bags as far as others have pooled them: [bags, width]."""
        pooled_XW = torch.zeros(bags, self.ways.width, device=self._bag_S.device)
        if self._sums_SW is not None:
            sizes = self._sums_PK.sum(axis=1).tolist()
            for bag_S, sums_SW in zip(self._bag_S.split(sizes), self._sums_SW.split(sizes), strict=True):
                pooled_XW[bag_S] += sums_SW  # a bag has one share on a card
        return pooled_XW

    def bring(self, grads_XW: Tensor | None) -> Sums | None:
        """Bring the gradients of bags to those who own their rows: sums for rows of this card, if any were asked for."""
        if not self._most:
            return None
        ways = self.ways
        if grads_XW is None:  # all bags of this card have weights, or none has anything: it asks for nothing
            grads_XW = torch.zeros(0, ways.width, device=self._bag_S.device)
        grads_TW = self._move("gradients", grads_XW, ways.held.fields_KF, back=False)
        if not self.rows_M.numel():
            return None
        winners = torch.empty(0, dtype=torch.int32, device=grads_TW.device)
        call = LookupCall(self.rows_M, ends_of(self._begins_M), None, F.SUM)
        found = sum_row_gradients(ways.all_rows, call, winners, grads_TW)
        return Sums(*found, added(found[0], self.rows_M, torch.ones_like(self.rows_M) if ways.counts else None))
