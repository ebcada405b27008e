"""One way between the cards of a group: rows are asked for, answered, and their gradients brought.

    ask         every card tells the others which rows it wants of them: 8 bytes a row
    answer      they come back as they are stored
    bring       gradients go the way of the ids
    spread      sums go from the card that made them to all others

What goes from one card to another is ordered by part, then by row, so both sides know from the rows alone what lies where:
nothing but how many rows will come has to be told. Rows of different widths go in one message.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import formats as F
from ..kernels.layout import Layout
from ..kernels.sum_gradients import sum_row_gradients
from .atlas import Atlas, Part, Where
from .held import Records
from .meter import Meter
from .routes import PHASES, Counts, Kind, Phase, Routes, direction_of, own_counts
from .world import Group

Blocks = dict[int, Tensor]  # bytes [rows, bytes of one] by part


class Hop:
    """Rows asked of the cards of a group. `rows_M` are the rows that they, and this card itself, ask of this card.

    A hop is the first of a journey ("ask"), goes on from it ("relay"), or brings gradients of copied rows together ("sync").
    """

    def __init__(
        self, group: Group, atlas: Atlas, routes: Routes, meter: Meter, rows_N: Tensor, where: Where, to_N: Tensor, kind: Kind
    ) -> None:
        self.group, self.atlas, self.routes, self.meter, self.kind = group, atlas, routes, meter, kind
        parts, cards = len(atlas.parts), len(group.ranks)
        key_N = to_N * parts + where.part_N
        self.order_N = key_N.argsort(stable=True)
        self.part_N = where.part_N[self.order_N]
        self.asked_PK = _counts(key_N, cards, parts)
        asked = self.asked_PK.sum(axis=1).tolist()
        got = group.tell(asked, rows_N.device)
        self.rows_M = group.swap(rows_N[self.order_N], asked, got)
        self.where = atlas(self.rows_M)
        self.got_PK = _counts(_senders(got, rows_N.device) * parts + self.where.part_N, cards, parts)
        meter.add_sizes(direction_of(kind, "ids"), group.links)
        self._count("ids", self.asked_PK)

    def _count(self, phase: Phase, rows_PK: Counts) -> None:
        sent_PK = rows_PK * self.routes.bytes_K[phase]
        self.meter.add(direction_of(self.kind, phase), self.group.links, sent_PK, own=own_counts(self.kind))

    def answer(self, records: Records) -> Records:
        """Give the rows that were asked of this card, and get those it asked for."""
        bytes_K = self.routes.bytes_K["rows"]
        blocks = {k: bytes_KB for k, (_, bytes_KB) in records.items()}
        self._count("rows", self.got_PK)
        got = _ship(self.group, blocks, _begins(self.got_PK), self.got_PK, self.asked_PK, bytes_K, self.order_N.device)
        return {k: (self.order_N[self.part_N == k], bytes_KB) for k, bytes_KB in got.items()}

    def bring(self, grads_NW: Tensor) -> Tensor:
        """Bring the gradients of the rows that were asked for, and get those of the rows that were asked of this card."""
        bytes_K = self.routes.bytes_K["gradients"]
        self._count("gradients", self.asked_PK)
        blocks = _encoded(self.atlas, self.part_N, grads_NW[self.order_N])
        got = _ship(self.group, blocks, _begins(self.asked_PK), self.asked_PK, self.got_PK, bytes_K, self.order_N.device)
        return _decoded(self.atlas, self.where.part_N, got, grads_NW.shape[1])


def spread(group: Group, atlas: Atlas, routes: Routes, meter: Meter, rows_N: Tensor, grads_NW: Tensor) -> tuple[Tensor, Tensor]:
    """Sums that this card has made go to all others of the group; all get the same of them, as they travel."""
    parts, cards, width = len(atlas.parts), len(group.ranks), grads_NW.shape[1]
    if group.process is None:
        return rows_N, grads_NW
    others_P = np.arange(cards) != group.me
    part_N = atlas(rows_N).part_N
    order_N = part_N.argsort(stable=True)
    rows_N, part_N = rows_N[order_N], part_N[order_N]
    sent = (others_P * rows_N.numel()).tolist()
    got = group.tell(sent, rows_N.device)
    rows_M = group.swap(rows_N.repeat(cards - 1), sent, got)
    part_M = atlas(rows_M).part_N
    out_PK = others_P[:, None] * _counts(part_N, 1, parts)
    in_PK = _counts(_senders(got, rows_N.device) * parts + part_M, cards, parts)
    bytes_K, blocks = routes.bytes_K["gradients"], _encoded(atlas, part_N, grads_NW[order_N])
    grads_MW = _decoded(atlas, part_M, _ship(group, blocks, 0 * out_PK, out_PK, in_PK, bytes_K, rows_N.device), width)
    meter.add_sizes(direction_of("spread", "ids"), group.links)
    for phase in PHASES["spread"]:
        meter.add(direction_of("spread", phase), group.links, out_PK * routes.bytes_K[phase])
    return torch.cat([rows_N, rows_M]), torch.cat([_decoded(atlas, part_N, blocks, width), grads_MW])


def sum_rows(layout: Layout, rows_M: Tensor, grads_MW: Tensor) -> tuple[Tensor, Tensor]:
    """(distinct rows, ascending; their gradients, summed in the order they are given in)."""
    ends = torch.tensor([0, rows_M.numel()], device=rows_M.device)
    winners = torch.empty(0, dtype=torch.int32, device=rows_M.device)
    return sum_row_gradients(layout, rows_M, ends, None, F.NONE, winners, grads_MW.contiguous())


def _ship(
    group: Group, blocks: Blocks, begins_PK: Counts, out_PK: Counts, in_PK: Counts, bytes_K: Counts, device: torch.device
) -> Blocks:
    """Exchange bytes by part: for card p the `out_PK[p]` rows of each part from `begins_PK[p]` on."""
    pieces = [blocks[k][begins_PK[p, k] : begins_PK[p, k] + out_PK[p, k]].reshape(-1) for p, k in np.argwhere(out_PK).tolist()]
    none = torch.empty(0, dtype=torch.uint8, device=device)
    sent, got = ((counts_PK * bytes_K).sum(axis=1).tolist() for counts_PK in (out_PK, in_PK))
    received = group.swap(torch.cat([none, *pieces]), sent, got)
    found: dict[int, list[Tensor]] = {}
    at = 0
    for p, k in np.argwhere(in_PK).tolist():
        size = int(in_PK[p, k] * bytes_K[k])
        found.setdefault(k, []).append(received[at : at + size].view(-1, int(bytes_K[k])))
        at += size
    return {k: torch.cat(each) for k, each in found.items()}


def _encoded(atlas: Atlas, part_N: Tensor, grads_NW: Tensor) -> Blocks:
    """Gradients as they travel, by part."""
    found: Blocks = {}
    for k, part in enumerate(atlas.parts):
        grads_KD = grads_NW[part_N == k][:, : part.dim]
        if grads_KD.numel():
            found[k] = grads_KD.to(_dtype(part)).contiguous().view(torch.uint8)
    return found


def _decoded(atlas: Atlas, part_N: Tensor, blocks: Blocks, width: int) -> Tensor:
    """And back: fp32, zeros after the dimension of a row."""
    grads_NW = torch.zeros(part_N.numel(), width, device=part_N.device)
    for k, bytes_KB in blocks.items():
        part = atlas.parts[k]
        grads_NW[(part_N == k).nonzero()[:, 0], : part.dim] = bytes_KB.contiguous().view(_dtype(part)).float()
    return grads_NW


def _dtype(part: Part) -> torch.dtype:
    return torch.bfloat16 if part.gradient == "bf16" else torch.float32


def _begins(counts_PK: Counts) -> Counts:
    """Where what belongs to each card begins in a block that is in the order of the cards."""
    return np.asarray(np.cumsum(counts_PK, axis=0) - counts_PK)


def _senders(got: list[int], device: torch.device) -> Tensor:
    """The card that each received row came from."""
    return torch.repeat_interleave(torch.tensor(got, device=device))


def _counts(key_N: Tensor, cards: int, parts: int) -> Counts:
    counts: Counts = torch.bincount(key_N, minlength=cards * parts).view(cards, parts).cpu().numpy()
    return counts
