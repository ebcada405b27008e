"""Rows as they were at one moment, read while training goes on and changes them.

A second copy of the tables would not fit. So rows are read where they lie, and a row that is about to change before it was read
is copied first (`Arena.changing` shows it here: in backward, before the kernel runs). What the reader finds in its place may be
new, or half of each; it is replaced by the copy. Copies wait in bounded room, and when that is full the step waits until the
reader has caught up: 256 MiB or a tenth of the rows' bytes, whichever is more.

    flag of a row    LIVE    not read yet, not changed since: the arena has it
                     KEPT    changed since: its copy waits here
                     READ    written, or none of the rows that are to be: it may change

Slots of the cache change in places that only kernels know, so the cache, a small part of all, is copied at the beginning.
What rows leave there when they are put back does not matter: a row that was in a slot then, and had been changed there, has its
value in that copy, and its codes are stale. Its pointer is replaced by the word that it had displaced then.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import formats as F
from ..distributed.sharded import ShardedCollection
from ..kernels.layout import Cache
from ..nn.base import RowsModule
from ..rows.changes import marked
from ..rows.memory import size_of
from .live import At, Live

ROOM, SHARE = 1 << 28, 0.1
_LIVE, _KEPT, _READ = range(3)


@dataclass
class _Copies:
    """Rows of a table in rising order as they were, and which of them are still wanted."""

    rows_K: Tensor
    tensors: list[Tensor]
    wanted_K: Tensor

    @property
    def bytes(self) -> int:
        return size_of(self.rows_K, *self.tensors, self.wanted_K)


class Snapshot(Live):
    """What `Live` is, of this moment. With `bits`, of the rows that they mark."""

    def __init__(self, module: RowsModule, bits: Tensor | None = None) -> None:
        super().__init__(module)
        arena = self.arena
        self._flag_R = torch.full((arena.rows,), _LIVE if bits is None else _READ, dtype=torch.uint8)
        if bits is not None:
            self._flag_R[marked(bits, 0, arena.rows)] = _LIVE
        if isinstance(module, ShardedCollection):
            self._pass_by_copies(module)
        self._tables = sorted((arena.views(k)[2], k) for k in range(len(arena.tables)))
        self._copies: dict[int, list[_Copies]] = {k: [] for _, k in self._tables}
        self._used, self._room = 0, max(ROOM, int(SHARE * (arena.bytes + size_of(*module.trainer.states))))
        self._turn = threading.Condition()
        self._state = {name: array.detach().clone() for name, array in super().copies().items()}
        self._words = self._displaced()
        self.waited = 0  # steps that had to wait for room
        arena.keeper = self.keep

    def copies(self) -> dict[str, Tensor]:
        return self._state

    def _pass_by_copies(self, module: ShardedCollection) -> None:
        """Copied rows are written by their home, by the rule of `distributed/maps.py`."""
        world = module.world
        for k, part in enumerate(module.atlas.parts):
            _, _, first, _, _ = module.arena.views(k)
            place_R = torch.arange(part.held)
            if part.tier < 3:
                turns, mine = (world.size, world.rank) if part.tier == 1 else (world.nodes, world.rank // world.cards)
                self._flag_R[first + place_R[place_R % turns != mine]] = _READ

    def _displaced(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By table, the rows that are cached and the words that their pointers displaced."""
        if not self.arena.cache:
            return {}
        cache = Cache(*self.arena.cache)
        rows_S, words_S = cache.rows.cpu(), cache.words.cpu()
        held_S = rows_S != F.EMPTY
        rows_K, order = (rows_S[held_S] & ~F.DIRTY).sort()
        words_K, found = words_S[held_S][order], {}
        for first, k in self._tables:
            begin, end = torch.searchsorted(rows_K, torch.tensor([first, first + self.arena.tables[k].rows])).tolist()
            found[k] = rows_K[begin:end] - first, words_K[begin:end]
        return found

    # -- the step that is about to change rows ------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keep(self, rows_N: Tensor) -> None:
        """Copy arena rows that were not read yet; wait if there is no room."""
        rows_N = rows_N.detach().cpu().long()
        with self._turn:
            while True:
                rows_U = rows_N[self._flag_R[rows_N] == _LIVE].unique()
                need = self._bytes_of(rows_U)
                if not need or self._used + need <= self._room:
                    break
                self.waited += 1
                self._turn.wait()
            for first, k in self._tables if need else ():
                begin, end = torch.searchsorted(rows_U, torch.tensor([first, first + self.arena.tables[k].rows])).tolist()
                if end > begin:
                    at_K = rows_U[begin:end] - first
                    tensors = [tensor.cpu() for tensor in self.raw(k, at_K)]
                    kept = _Copies(at_K, tensors, torch.ones(end - begin, dtype=torch.bool))
                    self._copies[k].append(kept)
                    self._used += kept.bytes
            self._flag_R[rows_U] = _KEPT

    def _bytes_of(self, rows_U: Tensor) -> int:
        """What copies of sorted rows take."""
        total = 0
        for first, k in self._tables:
            table = self.arena.tables[k]
            begin, end = torch.searchsorted(rows_U, torch.tensor([first, first + table.rows])).tolist()
            optimizer = self.module.trainer.optimizer
            states = 4 * optimizer.states_per_row + 4 * table.dim * optimizer.states_per_column
            total += (end - begin) * (table.bytes // table.rows + states + 9)  # its number and a mark
        return total

    # -- the thread that writes ---------------------------------------------------------------------------------------------

    def read(self, table: int, at: At) -> list[Tensor]:
        codes_RB, _, first, format, _ = self.arena.views(table)
        found = [tensor.clone() if isinstance(at, slice) else tensor for tensor in self.raw(table, at)]
        found = [tensor.cpu() for tensor in found]
        at_K = torch.arange(codes_RB.shape[0])[at] if isinstance(at, slice) else at.cpu()
        if self.arena.device.type == "cuda":
            torch.cuda.synchronize(self.arena.device)
        with self._turn:
            self._flag_R[first + at_K] = _READ
            self._put_back(table, at_K, found)
            self._turn.notify_all()
        *states, meta_KW, codes_KB = found
        if not F.META_WORDS[format]:
            return [*states, codes_KB]
        if table in self._words:
            _overwrite(at_K, *self._words[table], meta_KW)
        return [*states, meta_KW, codes_KB]

    def _put_back(self, table: int, at_K: Tensor, found: list[Tensor]) -> None:
        """Copies of rows in the place of what was found there; they are wanted no longer."""
        sorted_K, order = at_K.sort()
        left = []
        for copies in self._copies[table]:
            self._used -= copies.bytes
            place = torch.searchsorted(sorted_K, copies.rows_K).clamp(max=max(0, sorted_K.numel() - 1))
            here_K = copies.wanted_K & (sorted_K[place] == copies.rows_K)
            for out, tensor in zip(found, copies.tensors, strict=True):
                out[order[place[here_K]]] = tensor[here_K]
            copies.wanted_K = copies.wanted_K & ~here_K
            wanted = int(copies.wanted_K.sum())
            if 2 * wanted < copies.rows_K.numel():
                rest = copies.wanted_K
                copies = _Copies(copies.rows_K[rest], [each[rest] for each in copies.tensors], rest[rest])
            if wanted:
                left.append(copies)
                self._used += copies.bytes
        self._copies[table] = left

    def close(self) -> None:
        """Nothing more is read: rows may change freely."""
        with self._turn:
            self.arena.keeper = None
            self._flag_R.fill_(_READ)
            self._copies.clear()
            self._turn.notify_all()


def _overwrite(at_K: Tensor, rows_C: Tensor, words_C: Tensor, meta_KW: Tensor) -> None:
    """Words of some rows in the first column of meta words of others, where they are the same rows."""
    if rows_C.numel():
        place = torch.searchsorted(rows_C, at_K).clamp(max=rows_C.numel() - 1)
        here_K = rows_C[place] == at_K
        meta_KW[here_K, 0] = words_C[place[here_K]]
