"""Migration of rows between tiers and ranks of a running job, without changing a bit of rows, optimizer state, clock or seed.

A second collection is built by the new plan. Rows stream into it, one block of a table at a time. When all ranks are done and
replicas are equal, the module that users hold takes over its state. Until then nothing has changed, so an error on one rank or
Ctrl-C leaves a model that trains on. The price is memory for the new shard beside the old one; moving rows in place would need
none, but would lose the job with the first error.

Both row indexes are on every rank, so ranks exchange no requests. A rank takes a row

    of tier 1    from itself
    of tier 2    from the rank of its own node that holds it
    of tier 3    from its owner

and both sides list the rows of a block in row order. Rows travel as stored, followed by their state, and are rounded (to
nearest, as in `shard_`) only if their precision changes. Cache slots are assigned before rows arrive, by the new heat. Rows of
parts with slots also carry their fp32 value: a row that had a slot and gets one is not rounded.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.exchange.routes import receiver
from thermocline.distributed.placement.init_rows import in_slots
from thermocline.distributed.placement.row_index import RowLocations
from thermocline.distributed.process_groups import raise_if_any_failed
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.kernels import dequantize_rows

BLOCK = 1 << 16  # rows of a table per message round: bounds the memory of a migration


class RowMigration:
    """Moves the rows of a collection into another one that was built for a new plan."""

    def __init__(self, old: ShardedCollection, new: ShardedCollection) -> None:
        self.old, self.new, self.groups = old, new, old.groups
        self.local_size, self.rank = self.groups.local_size, self.groups.rank

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """All rows, as (table number, some of its rows)."""
        for index, table in enumerate(self.old.tables):
            for first in range(0, table.rows, BLOCK):
                yield index, torch.arange(first, min(first + BLOCK, table.rows), device=self.old.row_index.device)

    def run(self, check: Callable[[], None]) -> None:
        """Move all rows. Collective: if one rank fails, all ranks raise and nothing has changed. `check` may raise."""
        failed: BaseException | None = None
        old, new = self.old.row_index, self.new.row_index
        for table, rows_N in self.blocks():
            try:
                check()
                was, will = old.locate(rows_N + old.first[table]), new.locate(rows_N + new.first[table])
                sent = [self._packed(was, will, k) for k in torch.unique(was.part_N).tolist()]
            except BaseException as error:
                failed = error
            raise_if_any_failed(self.groups, failed)
            received = [(k, at_M, self._exchange(k, *message)) for k, message, at_M in sent]
            try:
                for k, at_M, records_MB in received:
                    self._store(will.at(at_M), k, records_MB)
            except BaseException as error:
                failed = error
        raise_if_any_failed(self.groups, failed)

    def _exchange(self, k: int, records_SB: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The records of an old part for this rank; those of tier 1 are local."""
        if self.old.row_index.parts[k].tier == 1:
            return records_SB
        return self.groups.world.all_to_all(records_SB, sent, received)

    def _packed(
        self, was: RowLocations, will: RowLocations, k: int
    ) -> tuple[int, tuple[Tensor, list[int], list[int]], Tensor]:  # fmt: skip
        """For the rows of one old part: the records for each rank, counts sent and received, and the rows received."""
        mine_P = (was.part_N == k).nonzero()[:, 0]
        was, will = was.at(mine_P), will.at(mine_P)
        held_H, ranks_C = self._served(was, k)
        rank_S, at_S = self.new.row_index.stored_by(ranks_C[:, None], will.at(held_H)).nonzero(as_tuple=True)
        records_SB = self._records(k, was.index_N[held_H[at_S]])
        gets_M = self.new.row_index.stored_by(self.rank, will).nonzero()[:, 0]
        from_M = self._source(was.at(gets_M), k)
        order_M = from_M.argsort(stable=True)
        sent, received = (torch.bincount(each, minlength=self.groups.size).tolist() for each in (ranks_C[rank_S], from_M))
        return k, (records_SB, sent, received), mine_P[gets_M[order_M]]

    def _served(self, was: RowLocations, k: int) -> tuple[Tensor, Tensor]:
        """Rows of an old part that this rank sends, and the ranks that take them from here."""
        tier, size, first_of_node = self.old.row_index.parts[k].tier, self.groups.size, self.rank - self.rank % self.local_size
        first, count = {1: (self.rank, 1), 2: (first_of_node, self.local_size), 3: (0, size)}[tier]
        here_N = self._source(was, k) == self.rank
        return here_N.nonzero()[:, 0], torch.arange(first, first + count, device=was.part_N.device)

    def _source(self, was: RowLocations, k: int) -> Tensor:
        """The rank that sends rows of an old part to this one."""
        tier = self.old.row_index.parts[k].tier
        here_N = torch.full_like(was.home_N, self.rank)
        return here_N if tier == 1 else receiver("node" if tier == 2 else "everyone", here_N, was.home_N, self.local_size)

    def _records(self, k: int, index_S: Tensor) -> Tensor:
        """Local rows as stored (codes, meta words, state, and the value if they may be cached): [rows, bytes]."""
        codes_RB, meta_RW, _, _, _ = self.old.arena.views(k)
        parts = [codes_RB, meta_RW, *(_as_matrix(state) for state in self.old.shard.states(k))]
        found = [each[index_S.to(each.device)].to(index_S.device).view(torch.uint8) for each in parts if each.shape[1]]
        if self.old.row_index.parts[k].slots:
            found.append(self.old.arena.read(k, index_S).contiguous().view(torch.uint8))
        return torch.cat(found, dim=1)

    def _store(self, will: RowLocations, k: int, records_MB: Tensor) -> None:
        """Store received rows of the old part `k` at their new locations."""
        was, arena = self.old.row_index.parts[k], self.new.arena
        widths = [F.row_bytes(was.format, was.dim), 4 * F.META_WORDS[was.format]]
        widths += [_as_matrix(state).shape[1] * 4 for state in self.old.shard.states(k)]
        widths.append(4 * was.dim * (was.slots > 0))
        codes_MB, meta_MB, *states, values_MB = (
            each.clone(memory_format=torch.contiguous_format) for each in records_MB.split(widths, dim=1)
        )
        meta_MW = meta_MB.view(torch.int32) if meta_MB.numel() else meta_MB.int()[:, : F.META_WORDS[was.format]]
        cached_M = meta_MW[:, 0] < 0 if was.slots else torch.zeros(len(meta_MW), dtype=torch.bool, device=meta_MW.device)
        if was.slots:
            values_MD = values_MB.view(torch.float32)
        else:
            values_MD = dequantize_rows(codes_MB, meta_MW, was.format, was.dim)
        for part in torch.unique(will.part_N).tolist():
            at_K = (will.part_N == part).nonzero()[:, 0]
            index_K = will.index_N[at_K]
            codes_RB, meta_RW, _, format, _ = arena.views(part)
            as_stored_K = ~(cached_M[at_K] | in_slots(arena, part, index_K)) & (format == was.format)
            stored_K, rest_K = at_K[as_stored_K], at_K[~as_stored_K]
            if stored_K.numel():
                codes_RB[index_K[as_stored_K].to(codes_RB.device)] = codes_MB[stored_K].to(codes_RB.device)
                meta_RW[index_K[as_stored_K]] = meta_MW[stored_K]
            if rest_K.numel():
                arena.write(part, index_K[~as_stored_K], values_MD[rest_K])
            for mine, theirs in zip(self.new.shard.states(part), states, strict=True):
                _as_matrix(mine)[index_K] = theirs[at_K].view(torch.float32)


def _as_matrix(state: Tensor) -> Tensor:
    return state[:, None] if state.dim() == 1 else state


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the yielded function is called, or the end: in an exchange it would leave other ranks waiting."""
    pending: list[int] = []

    def check() -> None:
        if pending:
            pending.clear()
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # Python raises KeyboardInterrupt in the main thread only
        yield check
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
    check()
