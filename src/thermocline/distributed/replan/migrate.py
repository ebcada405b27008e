"""Rows move between tiers and cards while a job runs, and nothing is lost: not a bit of a row, of its optimizer state, of the
clock or of the seed of rounding.

A collection is built beside, by the new plan; rows stream into it, a block of a table at a time; all ranks say that they are
done and compare replicas; then the module that users hold takes over what was built. Until that moment nothing has changed, so
whatever goes wrong before it, an error on one rank or Ctrl-C, leaves a model that trains on. The price is room for the new part
of a card beside the old one. Moving rows in place would need none, but lose the job with the first error.

Both maps are on every card, so nobody asks: the card that needs a row and the one that has it find each other by the rule that
lookups follow. A card takes a row

    of tier 1    from itself
    of tier 2    from the card of its own node that holds it
    of tier 3    from its owner

and both list the rows of a block in the order of their numbers. Rows travel as they are stored, with their state behind them,
and are rounded only if their precision changes, to nearest, as `shard_` does.

Slots of caches are given away before rows come, as `shard_` does it, by the new heat. Rows of parts with slots travel with
their values in fp32 as well: one that has had a slot and gets one is not rounded, one that gets none is, to nearest.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.exchange.routes import member, rank_of
from thermocline.distributed.placement.init_rows import in_slots
from thermocline.distributed.placement.row_index import Where
from thermocline.distributed.process_groups import World
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import BadInput
from thermocline.kernels import dequantize_rows

BLOCK = 1 << 16  # rows of a table that move at a time: what is sent and received of them is all the memory that moving takes


class Move:
    """The rows of a collection on their way to another that was built beside it."""

    def __init__(self, old: ShardedCollection, new: ShardedCollection) -> None:
        self.old, self.new, self.world = old, new, old.world
        self.cards, self.rank = self.world.cards, self.world.rank

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """All rows: the number of a table, and some of its rows."""
        for index, table in enumerate(self.old.tables):
            for first in range(0, table.rows, BLOCK):
                yield index, torch.arange(first, min(first + BLOCK, table.rows), device=self.old.atlas.device)

    def run(self, check: Callable[[], None]) -> None:
        """Move all rows. All ranks call this together; if one fails, all raise, and nothing has changed. `check` may raise."""
        failed: BaseException | None = None
        for table, rows_N in self.blocks():
            try:
                check()
                was = self.old.atlas(rows_N + self.old.atlas.first[table])
                will = self.new.atlas(rows_N + self.new.atlas.first[table])
                sent = [self._packed(was, will, k) for k in torch.unique(was.part_N).tolist()]
            except BaseException as error:
                failed = error
            agree(self.world, failed)
            received = [(k, at_M, self._swapped(k, *message)) for k, message, at_M in sent]
            try:
                for k, at_M, records_MB in received:
                    self._put(will.at(at_M), k, records_MB)
            except BaseException as error:
                failed = error
        agree(self.world, failed)

    def _swapped(self, k: int, records_SB: Tensor, sent: list[int], got: list[int]) -> Tensor:
        """Records of an old part that come to this card; those of tier 1 are here."""
        return records_SB if self.old.atlas.parts[k].tier == 1 else self.world.everyone.swap(records_SB, sent, got)

    def _packed(self, was: Where, will: Where, k: int) -> tuple[int, tuple[Tensor, list[int], list[int]], Tensor]:
        """Of the rows of one old part: what goes to each card, how much comes from each, and which rows those are."""
        mine_P = (was.part_N == k).nonzero()[:, 0]
        was, will = was.at(mine_P), will.at(mine_P)
        held_H, cards_C = self._held(was, k)
        card_S, at_S = _needed(self.new, will.at(held_H), cards_C, self.cards).nonzero(as_tuple=True)
        records_SB = self._records(k, was.place_N[held_H[at_S]])
        gets_M = _needed(self.new, will, cards_C.new_tensor([self.rank]), self.cards)[0].nonzero()[:, 0]
        from_M = self._source(was.at(gets_M), k)
        order_M = from_M.argsort(stable=True)
        sent, got = (torch.bincount(each, minlength=self.world.size).tolist() for each in (cards_C[card_S], from_M))
        return k, (records_SB, sent, got), mine_P[gets_M[order_M]]

    def _held(self, was: Where, k: int) -> tuple[Tensor, Tensor]:
        """Which rows of an old part lie here, and the cards that take them from here."""
        tier, device = self.old.atlas.parts[k].tier, was.part_N.device
        first, count = {1: (self.rank, 1), 2: (self.rank // self.cards * self.cards, self.cards), 3: (0, self.world.size)}[tier]
        here_N = self._source(was, k) == self.rank
        return here_N.nonzero()[:, 0], torch.arange(first, first + count, device=device)

    def _source(self, was: Where, k: int) -> Tensor:
        """The card that this one takes rows of an old part from."""
        tier = self.old.atlas.parts[k].tier
        if tier == 1:
            return torch.full_like(was.home_N, self.rank)
        if tier == 3:
            return was.home_N
        return rank_of("node", torch.full_like(was.home_N, self.rank), member("node", was.home_N, self.cards), self.cards)

    def _records(self, k: int, place_S: Tensor) -> Tensor:
        """Rows of this card as they are stored, codes, meta words and state: [rows, bytes]."""
        codes_RB, meta_RW, _, _, _ = self.old.arena.views(k)
        parts = [codes_RB, meta_RW, *(_as_lines(state) for state in self.old.held.states(k))]
        found = [each[place_S].view(torch.uint8) for each in parts if each.shape[1]]
        if self.old.atlas.parts[k].slots:
            found.append(self.old.arena.read(k, place_S).contiguous().view(torch.uint8))
        return torch.cat(found, dim=1)

    def _put(self, will: Where, k: int, records_MB: Tensor) -> None:
        """Rows of the old part `k` that came, where they will lie."""
        was, arena = self.old.atlas.parts[k], self.new.arena
        widths = [F.row_bytes(was.format, was.dim), 4 * F.META_WORDS[was.format]]
        widths += [_as_lines(state).shape[1] * 4 for state in self.old.held.states(k)]
        widths.append(4 * was.dim * (was.slots > 0))
        codes_MB, meta_MB, *states, values_MB = (
            each.clone(memory_format=torch.contiguous_format) for each in records_MB.split(widths, dim=1)
        )
        meta_MW = meta_MB.view(torch.int32) if meta_MB.numel() else meta_MB.int()
        left_M = meta_MW[:, 0] < 0 if was.slots else torch.zeros(len(meta_MW), dtype=torch.bool, device=meta_MW.device)
        if was.slots:
            values_MD = values_MB.view(torch.float32)
        else:
            values_MD = dequantize_rows(codes_MB, meta_MW, was.format, was.dim)
        for part in torch.unique(will.part_N).tolist():
            at_K = (will.part_N == part).nonzero()[:, 0]
            place_K = will.place_N[at_K]
            codes_RB, meta_RW, _, format, _ = arena.views(part)
            as_stored_K = ~(left_M[at_K] | in_slots(arena, part, place_K)) & (format == was.format)
            stored_K, rest_K = at_K[as_stored_K], at_K[~as_stored_K]
            if stored_K.numel():
                codes_RB[place_K[as_stored_K]], meta_RW[place_K[as_stored_K]] = codes_MB[stored_K], meta_MW[stored_K]
            if rest_K.numel():
                arena.write(part, place_K[~as_stored_K], values_MD[rest_K])
            for mine, theirs in zip(self.new.held.states(part), states, strict=True):
                _as_lines(mine)[place_K] = theirs[at_K].view(torch.float32)


def _needed(new: ShardedCollection, will: Where, cards_C: Tensor, cards: int) -> Tensor:
    """Which of these cards hold which rows: [card, row]."""
    tier_N, card_C1 = new.atlas.tier_K[will.part_N], cards_C[:, None]
    second = (tier_N == 2) & (card_C1 % cards == will.home_N % cards)
    return (tier_N == 1) | second | ((tier_N == 3) & (card_C1 == will.home_N))


def _as_lines(state: Tensor) -> Tensor:
    """A number for each row, or a line, as lines."""
    return state[:, None] if state.dim() == 1 else state


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the function that is given is called, or the end: in an exchange it would leave others waiting."""
    asked: list[int] = []

    def check() -> None:
        if asked:
            asked.clear()
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # where Python raises it
        yield check
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
    check()


def agree(world: World, failed: BaseException | None) -> None:
    """Go on if no rank has failed; else raise on all of them."""
    ones = [1] * world.size
    told = world.everyone.swap(torch.full((world.size,), int(failed is not None)), ones, ones)
    if not bool(told.any()):
        return
    everyone = world.gather("" if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    rank = next(rank for rank, error in enumerate(everyone) if error)
    raise BadInput(f"rank {rank} stopped: {everyone[rank]}; nothing was changed")
