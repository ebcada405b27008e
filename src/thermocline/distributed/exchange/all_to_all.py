"""One way between the cards of a group: rows are asked for, answered, and their gradients brought.

    ask         every card tells the others which rows it wants of them
    answer      they come back as they are stored
    bring       gradients go the way of the ids
    spread      sums go from the card that made them to all others

What goes from one card to another is ordered by part, then by row, so both sides know from the rows alone what lies where:
nothing but how many rows will come has to be told. Rows of all parts go in one message, of whatever widths. Of some parts only
gradients travel: copied rows are there already.

Rows in slots of a cache travel as they lie there, and only their owner knows which they are: of parts with slots a bit a row,
or two, goes ahead of the answers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.placement.local_shard import NEAR, Held, Sums
from thermocline.distributed.placement.row_index import Atlas, Where
from thermocline.distributed.process_groups import Group, World
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.exchange.fields import NOWHERE, OTHER_NODES, ROW_BYTES, SAME_NODE, STRAIGHT, WORDS
from thermocline.kernels.layout import Layout
from thermocline.kernels.sum_gradients import sum_row_gradients
from thermocline.plan.model import Direction
from thermocline.rows.arena import Arena
from thermocline.rows.table_spec import TableSpec

from .frequency_codec import added, heard, told
from .routes import FLAT, HERE, TELLING, Counts, Phase, Routes
from .traffic_meter import Meter

_LARGE = 1 << 18  # bytes a card sends at most, from which on messages go to each card for themselves


class Target(NamedTuple):
    """Where rows are put, dequantized: row u of a part at byte `base_K[part] + step_K[part] * u`."""

    shelf: Tensor
    base_K: Tensor
    step_K: Tensor

    def of(self, part_N: Tensor, at_N: Tensor) -> Tensor:
        return self.base_K[part_N] + self.step_K[part_N] * at_N


class Ways:
    """What all journeys of a collection share."""

    def __init__(self, world: World, atlas: Atlas, held: Held, meter: Meter) -> None:
        self.world, self.atlas, self.held, self.meter = world, atlas, held, meter
        self.routes = Routes(atlas.parts, world.nodes, world.cards, atlas.id_bytes)
        self.width = max(part.dim for part in atlas.parts)
        self.kernels: Any = implementation_for("exchange", held.arena.meta)
        tier_K, route_K = (torch.from_numpy(each).to(atlas.device) for each in (self.routes.tier_K, self.routes.route_K))
        self.copied_K = tier_K < 3
        self.answered_K = tier_K > 1  # in the first hop
        self.late_K = (tier_K == 2) & (world.nodes > 1)  # rows that other nodes may have updated
        self.relayed_K = torch.from_numpy(self.routes.relayed_K).to(atlas.device) & (world.nodes > 1)
        self.summed_K = torch.from_numpy(self.routes.summed_K).to(atlas.device)
        self.id_type = torch.int32 if atlas.id_bytes == torch.int32.itemsize else torch.int64
        self.counts = held.cached  # whether lookups are told with ids
        self.size_K = (held.wire_KF[:, ROW_BYTES] + 4 * held.wire_KF[:, WORDS]).contiguous()  # of wire parts
        self.sizes_K: Counts = self.size_K.cpu().numpy()
        # Ways of a batch: the first goes to all cards, the second between nodes. Of batches that only look, tier 1 stays here.
        first_K = torch.where(route_K == FLAT, STRAIGHT, SAME_NODE)
        self.first_ways_K = {True: first_K, False: torch.where(route_K == HERE, NOWHERE, first_K)}
        up_K = self.copied_K if world.nodes > 1 else torch.zeros_like(self.copied_K)
        second_K = {trains: self.relayed_K | up_K if trains else self.relayed_K for trains in (True, False)}
        self.second_ways_K = {trains: torch.where(each_K, OTHER_NODES, NOWHERE) for trains, each_K in second_K.items()}
        self.up_K = second_K[True]
        self.asks = self.routes.flat or self.routes.in_node
        self.stays = world.nodes > 1 and not self.routes.flat  # nothing of the first hop leaves the node
        self.goes_up = bool(self.up_K.any())
        # Sums of gradients by global row: one table of all rows, in no memory.
        arena = Arena([TableSpec(atlas.rows, self.width)], device="meta")
        fields = [list(field) for field in arena.layout.tables.features]
        self.all_rows = Layout.of(torch.tensor(fields, device=atlas.device), arena.spec)

    def is_large(self, rows: int, phase: Phase, sums: bool = False) -> bool:
        """Whether what goes of so many rows, or sums, the most that any card asks for, is worth a message to each card."""
        bytes_K = self.routes.sum_bytes_K if sums else self.routes.bytes_K
        return rows * int(bytes_K[phase].max()) > _LARGE

    def summed(self, rows_N: Tensor) -> Tensor:
        """Which rows those who own them pool."""
        return self.summed_K[self.atlas(rows_N).part_N]

    def in_pieces(self, rows: int) -> bool:
        """Whether gradients of so many rows, the most that any card asks for, go in pieces (`stream.py`)."""
        return self.world.everyone.gloo and self.is_large(rows, "gradients")

    def by_card(self, group: Group, card_N: Tensor, part_N: Tensor, kinds: int = 1) -> Counts:
        """How many there are by card and part; with several kinds, by wire part."""
        cards, parts = len(group.ranks), kinds * len(self.atlas.parts)
        counts = torch.bincount(card_N * parts + part_N, minlength=cards * parts)
        found: Counts = counts.view(cards, parts).cpu().numpy()
        return found

    def tell(self, group: Group, direction: Direction, asked_P: Counts, total: int) -> tuple[Counts, int]:
        """Tell each card how many ids will come; how many come from each, and the most of what cards tell as their `total`."""
        with self.meter.timed(direction):
            told_PJ = group.tell(np.stack([asked_P, np.full_like(asked_P, total)], axis=1))
        self.meter.add_sizes(direction, group.links, TELLING)
        return told_PJ[:, 0], int(told_PJ[:, 1].max())

    def sum_rows(self, rows_M: Tensor, grads_MW: Tensor, lookups_M: Tensor | None) -> Sums:
        """Distinct rows, ascending, with their gradients, summed in the order they are given in, and their lookups."""
        ends = torch.tensor([0, rows_M.numel()], device=rows_M.device)
        winners = torch.empty(0, dtype=torch.int32, device=rows_M.device)
        found = sum_row_gradients(self.all_rows, LookupCall(rows_M, ends, None, F.NONE), winners, grads_MW.contiguous())
        return Sums(*found, added(found[0], rows_M, lookups_M))


class Hop:
    """Rows asked of the cards of a group. `rows_M` are the rows that they, and this card itself, ask of this card.

    `ways_K`: where the rows of each part go; `first`: not the second of a journey; `lookups_N`: where they are counted.
    """

    def __init__(
        self, ways: Ways, group: Group, rows_N: Tensor, where: Where, ways_K: Tensor, first: bool, lookups_N: Tensor | None
    ) -> None:
        self.ways, self.group, self.first = ways, group, first
        self.answered_K = ways.answered_K if first else ways.relayed_K
        world = ways.world
        counts_PK, self.order_N = ways.kernels.route(
            where.part_N, where.home_N, ways_K, world.rank // world.cards, world.cards, len(group.ranks)
        )
        self.asked_PK: Counts = counts_PK.cpu().numpy()
        self.rows_N, self.part_N = rows_N[self.order_N], where.part_N[self.order_N]
        self._lookups_N = None if lookups_N is None else lookups_N[self.order_N]
        asked_P = torch.from_numpy(self.asked_P).to(rows_N.device)
        self.card_N = torch.repeat_interleave(asked_P, output_size=self.rows_N.numel())
        tier_K = ways.routes.tier_K
        self._sync_K = tier_K == 1 if first else tier_K < 3

    @property
    def asked_P(self) -> Counts:
        """Rows asked of each card."""
        return np.asarray(self.asked_PK.sum(axis=1))

    def tell(self) -> None:
        """Tell how many rows will come, where nothing has told it yet, and ask."""
        self.ask(*self.ways.tell(self.group, self._direction("ids"), self.asked_P, int(self.asked_P.sum())))

    def ask(self, got_P: Counts, most: int) -> None:
        """Ask for the rows; `got_P` rows come from each card, and no card asks for more than `most`."""
        ways = self.ways
        self.most = most
        ids_M = self._swap("ids", told(self.rows_N, self._lookups_N, ways.id_type), self.asked_P, got_P)
        self.rows_M, self.lookups_M = heard(ids_M, self._lookups_N is not None)
        self.where = ways.atlas(self.rows_M)
        self.sender_M = torch.repeat_interleave(torch.from_numpy(got_P).to(self.rows_M.device), output_size=self.rows_M.numel())
        self.got_PK = self.counts(self.sender_M, self.where.part_N)
        self.count("ids", self.asked_PK * ways.routes.bytes_K["ids"])

    def counts(self, card_N: Tensor, part_N: Tensor, kinds: int = 1) -> Counts:
        """By card of this group and part; with several kinds, by wire part."""
        return self.ways.by_card(self.group, card_N, part_N, kinds)

    def _direction(self, phase: Phase) -> Direction:
        """Of what all cards do at a time: between nodes it is sync, if no card asks there."""
        return phase if self.first or self.ways.routes.relayed else "sync"

    def _swap(self, phase: Phase, send: Tensor, sent_P: Counts, got_P: Counts) -> Tensor:
        if not self.most:  # nobody has anything
            return send
        apart = self.ways.is_large(self.most, phase) or (self.first and self.ways.stays)
        with self.ways.meter.timed(self._direction(phase)):
            received = self.group.swap(send, sent_P.tolist(), got_P.tolist(), apart)
        self.ways.meter.hold(phase, send.nbytes + received.nbytes)
        return received

    def count(self, phase: Phase, sent_PK: Counts) -> None:
        """Tell the meter what goes to each card."""
        self.ways.meter.add(phase, self.group.links, sent_PK, self._sync_K, own=self.first)

    # -- rows ---------------------------------------------------------------------------------------------------------------

    def answered(self) -> tuple[Tensor, Tensor]:
        """Which rows come back: of those that were asked of this card, and of those that it asked for."""
        return self.answered_K[self.where.part_N].nonzero()[:, 0], self.answered_K[self.part_N].nonzero()[:, 0]

    def answer(self, message: Tensor, which_M: Tensor, wire_M: Tensor, which_N: Tensor, wire_N: Tensor) -> Tensor:
        """Give some of the rows that were asked of this card, and get some of those it asked for, one after another, as their
        wire parts say."""
        bytes_K, kinds = self.ways.sizes_K, 3
        sent_PK = self.counts(self.sender_M[which_M], wire_M, kinds) * bytes_K
        got_PK = self.counts(self.card_N[which_N], wire_N, kinds) * bytes_K
        self.count("rows", sent_PK.reshape(len(sent_PK), kinds, -1).sum(axis=1))
        return self._swap("rows", message, sent_PK.sum(axis=1), got_PK.sum(axis=1))

    def wire_parts(self, kind_M: Tensor | None, which_M: Tensor, which_N: Tensor) -> tuple[Tensor, Tensor]:
        """Wire parts of rows that are to be answered, whose kinds this card tells; and of those that it asked for."""
        ways, part_M, part_N = self.ways, self.where.part_N[which_M], self.part_N[which_N]
        if kind_M is None:
            return part_M, part_N
        slotted_K, parts = ways.held.slotted_K, len(ways.atlas.parts)
        at_M, at_N = (slotted_K[each].nonzero()[:, 0] for each in (part_M, part_N))
        kind_N = torch.zeros_like(part_N)
        bits = 1 if ways.held.kinds <= NEAR else 2
        kind_N[at_N] = self._flags(kind_M[at_M], bits, self.sender_M[which_M[at_M]], self.card_N[which_N[at_N]])
        return part_M + parts * kind_M, part_N + parts * kind_N

    def flag(self, late_M: Tensor, which_M: Tensor, which_N: Tensor) -> Tensor:
        """Say which of the rows that are to be answered come later, and hear it of those that this card asked for."""
        return self._flags(late_M[which_M], 1, self.sender_M[which_M], self.card_N[which_N]).bool()

    def _flags(self, flag_M: Tensor, width: int, to_M: Tensor, from_N: Tensor) -> Tensor:
        """Tell cards so many bits a row, and hear as many of rows of theirs."""
        cards, shifts = len(self.group.ranks), np.arange(width)
        out_P, in_P = (width * torch.bincount(each, minlength=cards).cpu().numpy() for each in (to_M, from_N))
        flags = np.split((flag_M.cpu().numpy()[:, None] >> shifts & 1).astype(np.uint8).reshape(-1), np.cumsum(out_P)[:-1])
        message = torch.from_numpy(np.concatenate([np.packbits(each) for each in flags]))
        sizes = [-(-each_P // 8) for each_P in (out_P, in_P)]
        self.ways.meter.add_flags(self.group.links, sizes[0])
        got = self._swap("rows", message, *sizes).numpy()
        parts = np.split(got, np.cumsum(sizes[1])[:-1])
        bits = [np.unpackbits(each, count=count) for each, count in zip(parts, in_P.tolist(), strict=True)]
        found_N = (np.concatenate(bits).reshape(-1, width).astype(np.int64) << shifts).sum(axis=1)
        return torch.from_numpy(found_N).to(flag_M.device)

    # -- gradients ----------------------------------------------------------------------------------------------------------

    def bring(self, grads_NW: Tensor) -> Tensor:
        """Bring the gradients of the rows that were asked for, and get those of the rows that were asked of this card."""
        ways = self.ways
        fields_KF, bytes_K = ways.held.fields_KF, ways.routes.bytes_K["gradients"]
        message = ways.kernels.pack_gradients(grads_NW, fields_KF, self.part_N, self.order_N)
        self.count("gradients", self.asked_PK * bytes_K)
        sent_P, got_P = ((counts_PK * bytes_K).sum(axis=1) for counts_PK in (self.asked_PK, self.got_PK))
        got = self._swap("gradients", message, sent_P, got_P)
        found: Tensor = ways.kernels.unpack_gradients(got, fields_KF, self.where.part_N, grads_NW.shape[1])
        return found


def spread(ways: Ways, group: Group, sums: Sums) -> Sums:
    """Sums that this card has made go to all others of the group; all get the same of them, as they travel."""
    if group.is_one:
        return sums
    rows_N, grads_NW, lookups_N = sums
    kernels, fields_KF, width, device = ways.kernels, ways.held.fields_KF, grads_NW.shape[1], rows_N.device
    part_N = ways.atlas(rows_N).part_N
    ids_N = told(rows_N, lookups_N, ways.id_type)
    ids = ids_N.view(torch.uint8)
    packed = kernels.pack_gradients(grads_NW, fields_KF, part_N, torch.arange(rows_N.numel(), device=device))
    message = torch.cat([ids, packed])
    cards = len(group.ranks)
    with ways.meter.timed("sync"):
        told_PJ = group.tell(np.tile([rows_N.numel(), message.numel()], (cards, 1)))
    ways.meter.add_sizes("sync", group.links, TELLING)
    others_P = np.arange(cards) != group.me
    counts_K = np.bincount(part_N.cpu().numpy(), minlength=len(ways.atlas.parts))
    each_K = ways.routes.bytes_K["ids"] + ways.routes.bytes_K["gradients"]
    ways.meter.add("sync", group.links, others_P[:, None] * (counts_K * each_K), ways.routes.tier_K < 3)
    found = _heard(ways, ids_N, kernels.unpack_gradients(packed, fields_KF, part_N, width))
    if int(told_PJ[:, 1].max()):
        large = int(told_PJ[:, 1].max()) * (cards - 1) > _LARGE
        with ways.meter.timed("sync"):
            got = group.share(message, (told_PJ[:, 1] * others_P).tolist(), large)
        ways.meter.hold("sync", message.nbytes * (cards - 1) + sum(each.nbytes for each in got))
        for count, each in zip(told_PJ[:, 0].tolist(), got, strict=True):
            if each.numel():
                ids, packed = each.tensor_split([count * ways.id_type.itemsize])
                ids_N = ids.clone().view(ways.id_type)  # messages may begin at any byte
                rows_N, _ = heard(ids_N, ways.counts)
                grads_NW = kernels.unpack_gradients(packed.clone(), fields_KF, ways.atlas(rows_N).part_N, width)
                found = found.and_(_heard(ways, ids_N, grads_NW))
    return found


def _heard(ways: Ways, ids_N: Tensor, grads_NW: Tensor) -> Sums:
    rows_N, lookups_N = heard(ids_N, ways.counts)
    return Sums(rows_N, grads_NW, lookups_N)
