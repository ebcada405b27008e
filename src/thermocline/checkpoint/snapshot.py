"""Rows as they were at one moment, read while training goes on and changes them.

A second copy of the tables would not fit. So rows are read where they lie, and a row that is about to change before it was read
is copied first (`Arena.changing` shows it here: in backward, before the kernel runs). Copies wait in bounded room (`room.py`),
and when that is full the step waits until the reader has caught up.

    flag of a row    LIVE    not read yet, not changed since: the arena has it
                     KEPT    changed since: its copy waits, or lies where it will be written from
                     READ    copied to be written, or none of the rows that are to be: it may change

A section is read a few rows at a time, and for no longer than that has a step to wait for its turn. The section has room of its
own (`_Section`): copies that wait for it are put there when it begins, and those of rows that change while it is read at once.

Slots of the cache change in places that only kernels know, so the cache, a small part of all, is copied at the beginning.
What rows leave there when they are put back does not matter: a row that was in a slot then, and had been changed there, has its
value in that copy, and its codes are stale. Its pointer is replaced by the word that it had displaced then.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.kernels.layout import Cache
from thermocline.nn.rows_module import RowsModule
from thermocline.rows.change_bitmap import marked

from .copy_budget import Memory, Room
from .format.tensor_files import breathe
from .live_rows import At, Live

_LIVE, _KEPT, _READ = range(3)
_LOT = 1 << 12  # copies of rows that are kept together
_PIECE = 1 << 12  # rows that are read in one turn; from a card all, where every turn waits for it
_BREAK = 4  # pieces
Rows = NDArray[Any]


class _Copies:
    """Rows of a table as they were, those of several steps; which of them no section has taken yet."""

    def __init__(self, room: int, like: list[Rows]) -> None:
        self.rows_K: Rows = np.empty(room, np.int64)
        self.wanted_K: Rows = np.zeros(room, np.bool_)
        self.arrays = [np.empty((room, *each.shape[1:]), each.dtype) for each in like]
        self.size = self.left = 0

    @property
    def bytes(self) -> int:
        return self.rows_K.nbytes + self.wanted_K.nbytes + sum(each.nbytes for each in self.arrays)

    def add(self, rows_K: Rows, arrays: list[Rows]) -> None:
        here = slice(self.size, self.size + rows_K.size)
        self.rows_K[here], self.wanted_K[here] = rows_K, True
        for mine, array in zip(self.arrays, arrays, strict=True):
            mine[here] = array
        self.size, self.left = here.stop, self.left + rows_K.size

    def hand_over(self, section: _Section) -> None:
        """To a section what belongs there."""
        here_K, place_K = section.places(self.rows_K[: self.size])
        wanted_K = self.wanted_K[here_K]
        here_K, place_K = here_K[wanted_K], place_K[wanted_K]
        for out, array in zip(section.arrays, self.arrays, strict=True):
            out[place_K] = array[here_K]
        self.wanted_K[here_K] = False
        self.left -= here_K.size

    def shrunk(self) -> _Copies:
        """Those that are left, without room for others."""
        found = _Copies(self.left, self.arrays)
        found.add(self.rows_K[self.wanted_K], [each[self.wanted_K] for each in self.arrays])
        return found


class _Section:
    """Rows that are being read: what is there of them already, and where each belongs."""

    def __init__(self, table: int, at: slice | Rows, like: list[Rows], memory: Memory) -> None:
        self.table, self.at = table, at
        self.count = at.stop - at.start if isinstance(at, slice) else at.size
        self.arrays = [memory.take((self.count, *each.shape[1:]), each.dtype) for each in like]
        if not isinstance(at, slice):
            self._order = at.argsort(kind="stable")
            self._sorted = at[self._order]

    @property
    def bytes(self) -> int:
        """Beside its arrays."""
        return 0 if isinstance(self.at, slice) else 3 * self.at.nbytes

    def rows(self, begin: int, end: int) -> slice | Rows:
        """The rows of some places."""
        return slice(self.at.start + begin, self.at.start + end) if isinstance(self.at, slice) else self.at[begin:end]

    def places(self, rows_K: Rows) -> tuple[Rows, Rows]:
        """Which of some rows belong here, and where."""
        if isinstance(self.at, slice):
            here_K = np.flatnonzero((rows_K >= self.at.start) & (rows_K < self.at.stop))
            return here_K, rows_K[here_K] - self.at.start
        if not self.count:
            return rows_K[:0], rows_K[:0]
        place_K = np.searchsorted(self._sorted, rows_K)
        here_K = np.flatnonzero(self._sorted.take(place_K, mode="clip") == rows_K)
        return here_K, self._order[place_K[here_K]]


class Snapshot(Live):
    """What `Live` is, of this moment. With `bits`, of the rows that they mark."""

    def __init__(self, module: RowsModule, bits: Tensor | None, room: Room) -> None:
        super().__init__(module)
        arena, self._room = self.arena, room
        if arena.device.type == "cuda":
            torch.cuda.synchronize(arena.device)  # what was to change rows before this moment has
        self._flag_R: Rows = np.full(arena.rows, _LIVE if bits is None else _READ, np.uint8)
        if bits is not None:
            self._flag_R[marked(bits, 0, arena.rows).numpy()] = _LIVE
        if isinstance(module, ShardedCollection):
            self._pass_by_copies(module)
        self._tables = sorted((arena.views(k)[2], k) for k in range(len(arena.tables)))
        self._copies: dict[int, list[_Copies]] = {k: [] for _, k in self._tables}
        self._section: _Section | None = None
        with room.turn:
            self._state = {name: room.copy(array) for name, array in self._lying().items()}
            self._slots_then = self._copied_slots()
            room.take(self._flag_R.nbytes + sum(each.nbytes for each in self._slots_then))  # `_words` are as many at most
        self.waited = 0  # steps that had to wait for room
        arena.before_write_hook = self.keep

    def copies(self) -> dict[str, Tensor]:
        return self._numbered(self._state)

    def _copied_slots(self) -> tuple[Rows, Rows]:
        """The rows of this card's slots, and the words that their pointers displaced."""
        if isinstance(self.module, ShardedCollection) and self.arena.cache:
            cache = Cache(*self.arena.cache)
            return self._room.copy(cache.rows).numpy(), self._room.copy(cache.words).numpy()
        none = torch.zeros(0, dtype=torch.int64)
        return self._state.get("cache_rows", none).numpy(), self._state.get("cache_words", none).numpy()

    def _pass_by_copies(self, module: ShardedCollection) -> None:
        """Copied rows are written by their home, by the rule of `distributed/placement/table_map.py`."""
        world = module.world
        for k, part in enumerate(self.atlas.parts):
            _, _, first, _, _ = self.arena.views(k)
            place_R = np.arange(part.held)
            if part.tier < 3:
                turns, mine = (world.size, world.rank) if part.tier == 1 else (world.nodes, world.rank // world.cards)
                self._flag_R[first + place_R[place_R % turns != mine]] = _READ

    @cached_property
    def _words(self) -> dict[int, tuple[Rows, Rows]]:
        """By table, the rows that were cached and the words that their pointers displaced. The thread that writes makes it."""
        if not self.arena.cache:
            return {}
        rows_S, words_S = self._slots_then
        held_S = rows_S != F.EMPTY
        rows_K, words_K, found = rows_S[held_S] & ~F.DIRTY, words_S[held_S], {}
        for first, k in self._tables:
            here_K = np.flatnonzero((rows_K >= first) & (rows_K < first + self.arena.tables[k].rows))
            here_K = here_K[rows_K[here_K].argsort()]
            found[k] = rows_K[here_K] - first, words_K[here_K]
            breathe()
        return found

    # -- the step that is about to change rows ------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keep(self, rows_N: Tensor) -> None:
        """Copy arena rows that were not read yet; wait if there is no room."""
        rows = rows_N.detach().cpu().numpy()
        with self._room.turn_of_step():
            while True:
                rows_U = np.unique(rows[self._flag_R[rows] == _LIVE])
                parts = list(self._by_table(rows_U))
                need = sum(self._bytes_of(k, at_K) for k, at_K in parts)
                if not need or self._room.fits(need):
                    break
                self.waited += 1
                self._room.turn.wait()
            for k, at_K in parts:
                self._keep(k, at_K)
            self._flag_R[rows_U] = _KEPT

    def _by_table(self, rows_U: Rows) -> list[tuple[int, Rows]]:
        """Arena rows in rising order, as rows of tables."""
        begins = [first for first, _ in self._tables]
        cuts = [*np.searchsorted(rows_U, begins).tolist(), rows_U.size]
        found = zip(self._tables, cuts[:-1], cuts[1:], strict=True)
        return [(k, rows_U[begin:end] - first) for (first, k), begin, end in found if end > begin]

    def _bytes_of(self, k: int, at_K: Rows) -> int:
        """What copies of rows take; those of the section that is being read have their room."""
        if self._section is not None and self._section.table == k:
            at_K = np.delete(at_K, self._section.places(at_K)[0])
        table, optimizer = self.arena.tables[k], self.optimizer
        states = 4 * optimizer.states_per_row + 4 * table.dim * optimizer.states_per_column
        return int(at_K.size) * (table.bytes // table.rows + states + 9)  # its number and a mark

    def _keep(self, k: int, at_K: Rows) -> None:
        if (section := self._section) is not None and section.table == k:
            here_K, place_K = section.places(at_K)
            for out, array in zip(section.arrays, self._found(k, at_K[here_K]), strict=True):
                out[place_K] = array
            at_K = np.delete(at_K, here_K)
        if not at_K.size:
            return
        lots, found = self._copies[k], self._found(k, at_K)
        if not lots or lots[-1].size + at_K.size > lots[-1].rows_K.size:
            several = min(_LOT, self.arena.tables[k].rows)  # few lots are found in less time than many
            fits = several > at_K.size and self._room.fits(several * (self._bytes_of(k, at_K) // at_K.size))
            lots.append(_Copies(several if fits else at_K.size, found))
            self._room.take(lots[-1].bytes)
        lots[-1].add(at_K, found)

    def _found(self, k: int, at: slice | Rows) -> list[Rows]:
        """Rows as they are in the arena now; those of a slice, on a CPU, where they lie."""
        if self.arena.device.type == "cpu":
            codes_RB, meta_RW, _, _, _ = self.arena.views(k)
            states = self.arena.state_views(k, self.states, self.by_row)
            return [tensor.numpy()[at] for tensor in (*states, meta_RW, codes_RB)]
        return [tensor.cpu().numpy() for tensor in self.raw(k, at if isinstance(at, slice) else torch.from_numpy(at))]

    # -- the thread that writes ---------------------------------------------------------------------------------------------

    def release(self) -> None:
        self._room.memory.release()

    def read(self, table: int, at: At) -> list[Tensor]:
        _, _, first, format, _ = self.arena.views(table)
        like, at = self._found(table, slice(0)), at if isinstance(at, slice) else at.cpu()
        section = _Section(table, at if isinstance(at, slice) else at.numpy(), like, self._room.memory)
        with self._room.turn_of_writer():
            self._room.swap(section.bytes)
            self._section = section
        self._take_copies(section)
        piece = _PIECE if self.arena.device.type == "cpu" else max(1, section.count)
        for begin in range(0, section.count, piece):
            with self._room.turn_of_writer():
                self._read_piece(section, first, slice(begin, min(begin + piece, section.count)))
            if begin // piece % _BREAK == 0:
                breathe()
        self._section = None
        *states, meta, codes = (torch.from_numpy(array) for array in section.arrays)
        if not F.META_WORDS[format]:
            return [*states, codes]
        if table in self._words:
            _overwrite(section, *self._words[table], meta)
        return [*states, meta, codes]

    def _read_piece(self, section: _Section, first: int, here: slice) -> None:
        """Some rows of a section from the arena, but for those that were kept."""
        rows = section.rows(here.start, here.stop)
        at = slice(first + rows.start, first + rows.stop) if isinstance(rows, slice) else first + rows
        kept_K = np.flatnonzero(self._flag_R[at] == _KEPT)
        for out, array in zip(section.arrays, self._found(section.table, rows), strict=True):
            then = out[here][kept_K]
            out[here] = array
            out[here][kept_K] = then
        self._flag_R[at] = _READ

    def _take_copies(self, section: _Section) -> None:
        """Copies that wait for a section, to their places in it. Steps may have their turn between, and add some for others."""
        for copies in list(self._copies[section.table]):
            with self._room.turn_of_writer():
                lots = self._copies[section.table]
                copies.hand_over(section)
                if 2 * copies.left < copies.size:
                    self._room.give_back(copies.bytes)
                    at = lots.index(copies)
                    lots[at : at + 1] = [copies.shrunk()] if copies.left else []
                    self._room.take(lots[at].bytes if copies.left else 0)

    def close(self) -> None:
        """Nothing more is read: rows may change freely."""
        with self._room.turn:
            self.arena.before_write_hook = None
            self._flag_R.fill(_READ)
            self._copies.clear()
            self._room.turn.notify_all()


def _overwrite(section: _Section, rows_C: Rows, words_C: Rows, meta: Tensor) -> None:
    """Words of cached rows in the first column of the meta words of a section."""
    here_C, place_C = section.places(rows_C)
    meta.numpy()[place_C, 0] = words_C[here_C]
