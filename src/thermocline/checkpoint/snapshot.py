"""Rows of a module at one moment, read while training changes them (copy on write).

Rows are read from the arena. Before a step changes a row that was not read yet, it is copied (the arena's before-write hook
calls `copy_before_write`). Copies count against a budget (`copy_budget.py`); when it is spent, the step waits for the writer.

    flag of a row    LIVE    not read and not changed: the arena holds its value
                     COPIED  changed since: a copy, or the section's buffer, holds its value
                     DONE    read, or not part of this save: it may change

A section is read a few rows at a time, and a step waits at most for that long. The section has its own buffers (`_Section`):
existing copies move there when its reading begins; rows that change while it is read are copied there directly.

Cache slots change at places that only kernels know, so the cache, a small part of all bytes, is copied at the start. A row
that was dirty in the cache has its value in that copy, and its codes are stale; eviction may change them freely. The cache
pointer of such a row is replaced by the meta word that it displaced.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline import formats as F
from thermocline._lazy import uncompiled
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.kernels.layout import Cache
from thermocline.nn.rows_module import RowsModule
from thermocline.rows.change_bitmap import marked

from .copy_budget import CopyBudget, SectionBuffers
from .format.tensor_files import yield_core
from .live_rows import At, LiveRows

_LIVE, _COPIED, _DONE = range(3)
_BATCH = 1 << 12  # copies of rows in one allocation
_PIECE = 1 << 12  # rows read under one lock; a GPU section is read at once, because each piece would synchronize
_PAUSE_EVERY = 4  # pieces
Rows = NDArray[Any]


class _Copies:
    """Copies of rows of a table, from several steps; `wanted_K` marks copies that no section has taken yet."""

    def __init__(self, capacity: int, like: list[Rows]) -> None:
        self.rows_K: Rows = np.empty(capacity, np.int64)
        self.wanted_K: Rows = np.zeros(capacity, np.bool_)
        self.arrays = [np.empty((capacity, *each.shape[1:]), each.dtype) for each in like]
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

    def move_to(self, section: _Section) -> None:
        """Move copies of a section's rows into its buffers."""
        here_K, place_K = section.places(self.rows_K[: self.size])
        wanted_K = self.wanted_K[here_K]
        here_K, place_K = here_K[wanted_K], place_K[wanted_K]
        for out, array in zip(section.arrays, self.arrays, strict=True):
            out[place_K] = array[here_K]
        self.wanted_K[here_K] = False
        self.left -= here_K.size

    def shrunk(self) -> _Copies:
        """The copies that are left, without spare capacity."""
        found = _Copies(self.left, self.arrays)
        found.add(self.rows_K[self.wanted_K], [each[self.wanted_K] for each in self.arrays])
        return found


class _Section:
    """Rows that are being read, their buffers, and the place of each row in the buffers."""

    def __init__(self, table: int, at: slice | Rows, like: list[Rows], buffers: SectionBuffers) -> None:
        self.table, self.at = table, at
        self.count = at.stop - at.start if isinstance(at, slice) else at.size
        self.arrays = [buffers.allocate((self.count, *each.shape[1:]), each.dtype) for each in like]
        if not isinstance(at, slice):
            self._order = at.argsort(kind="stable")
            self._sorted = at[self._order]

    @property
    def bytes(self) -> int:
        """Bytes beside its buffers."""
        return 0 if isinstance(self.at, slice) else 3 * self.at.nbytes

    def rows(self, begin: int, end: int) -> slice | Rows:
        """Rows at places `begin` to `end` (exclusive)."""
        return slice(self.at.start + begin, self.at.start + end) if isinstance(self.at, slice) else self.at[begin:end]

    def places(self, rows_K: Rows) -> tuple[Rows, Rows]:
        """Indices of the rows that belong to the section, and their places."""
        if isinstance(self.at, slice):
            here_K = np.flatnonzero((rows_K >= self.at.start) & (rows_K < self.at.stop))
            return here_K, rows_K[here_K] - self.at.start
        if not self.count:
            return rows_K[:0], rows_K[:0]
        place_K = np.searchsorted(self._sorted, rows_K)
        here_K = np.flatnonzero(self._sorted.take(place_K, mode="clip") == rows_K)
        return here_K, self._order[place_K[here_K]]


class Snapshot(LiveRows):
    """Rows at the moment of construction; with `bits`, only rows that they mark."""

    def __init__(self, module: RowsModule, bits: Tensor | None, budget: CopyBudget) -> None:
        super().__init__(module)
        arena, self._budget = self.arena, budget
        if arena.device.type == "cuda":
            torch.cuda.synchronize(arena.device)  # finishes earlier updates
        self._flag_R: Rows = np.full(arena.rows, _LIVE if bits is None else _DONE, np.uint8)
        if bits is not None:
            self._flag_R[marked(bits, 0, arena.rows).numpy()] = _LIVE
        if isinstance(module, ShardedCollection):
            self._skip_replicas(module)
        self._tables = sorted((arena.views(k)[2], k) for k in range(len(arena.tables)))
        self._copies: dict[int, list[_Copies]] = {k: [] for _, k in self._tables}
        self._section: _Section | None = None
        with budget.lock:
            self._copied_arrays = {name: budget.copy(array) for name, array in super()._arrays().items()}
            self._saved_slots = self._copied_slots()
            budget.take(self._flag_R.nbytes + sum(each.nbytes for each in self._saved_slots))  # the latter for `_words`
        self.waited = 0  # steps that waited for the budget
        arena.before_write_hook = self.copy_before_write

    def _arrays(self) -> dict[str, Tensor]:
        return self._copied_arrays

    def _copied_slots(self) -> tuple[Rows, Rows]:
        """Row and displaced meta word of each slot of this rank."""
        if isinstance(self.module, ShardedCollection) and self.arena.cache:
            cache = Cache(*self.arena.cache)
            return self._budget.copy(cache.rows).numpy(), self._budget.copy(cache.words).numpy()
        none = torch.zeros(0, dtype=torch.int64)
        return tuple(self._copied_arrays.get(name, none).numpy() for name in ("cache_rows", "cache_words"))  # type: ignore[return-value]

    def _skip_replicas(self, module: ShardedCollection) -> None:
        """Mark replicas whose home is another rank as done; `distributed/placement/table_map.py` has the rule."""
        groups = module.groups
        for k, part in enumerate(self.row_index.parts):
            _, _, first, _, _ = self.arena.views(k)
            place_R = np.arange(part.local_rows)
            if part.tier < 3:
                turns, mine = (groups.size, groups.rank) if part.tier == 1 else (groups.nodes, groups.rank // groups.local_size)
                self._flag_R[first + place_R[place_R % turns != mine]] = _DONE

    @cached_property
    def _words(self) -> dict[int, tuple[Rows, Rows]]:
        """By table, cached rows and the meta words that their pointers displaced. The writer thread computes it."""
        if not self.arena.cache:
            return {}
        rows_S, words_S = self._saved_slots
        held_S = rows_S != F.EMPTY
        rows_K, words_K, found = rows_S[held_S] & ~F.DIRTY, words_S[held_S], {}
        for first, k in self._tables:
            here_K = np.flatnonzero((rows_K >= first) & (rows_K < first + self.arena.tables[k].rows))
            here_K = here_K[rows_K[here_K].argsort()]  # sorted rows are searched faster
            found[k] = rows_K[here_K] - first, words_K[here_K]
            yield_core()
        return found

    # -- called by a training step ------------------------------------------------------------------------------------------

    @uncompiled
    def copy_before_write(self, rows_N: Tensor) -> None:
        """Copy arena rows that were not read yet; wait while the budget is spent."""
        rows = rows_N.detach().cpu().numpy()
        with self._budget.step_lock():
            while True:
                rows_U = np.unique(rows[self._flag_R[rows] == _LIVE])
                parts = list(self._by_table(rows_U))
                need = sum(self._bytes_of(k, at_K) for k, at_K in parts)
                if not need or self._budget.fits(need):
                    break
                self.waited += 1
                self._budget.lock.wait()
            for k, at_K in parts:
                self._copy_rows(k, at_K)
            self._flag_R[rows_U] = _COPIED

    def _by_table(self, rows_U: Rows) -> list[tuple[int, Rows]]:
        """Sorted arena rows, split by table and numbered within it."""
        begins = [first for first, _ in self._tables]
        cuts = [*np.searchsorted(rows_U, begins).tolist(), rows_U.size]
        found = zip(self._tables, cuts[:-1], cuts[1:], strict=True)
        return [(k, rows_U[begin:end] - first) for (first, k), begin, end in found if end > begin]

    def _bytes_of(self, k: int, at_K: Rows) -> int:
        """Bytes that copies of rows take; rows of the current section have their buffers already."""
        if self._section is not None and self._section.table == k:
            at_K = np.delete(at_K, self._section.places(at_K)[0])
        table, optimizer = self.arena.tables[k], self.optimizer
        states = 4 * optimizer.states_per_row + 4 * table.dim * optimizer.states_per_column
        return int(at_K.size) * (table.bytes // table.rows + states + 9)  # 9: its number and a flag

    def _copy_rows(self, k: int, at_K: Rows) -> None:
        if (section := self._section) is not None and section.table == k:
            here_K, place_K = section.places(at_K)
            for out, array in zip(section.arrays, self._read_arena(k, at_K[here_K]), strict=True):
                out[place_K] = array
            at_K = np.delete(at_K, here_K)
        if not at_K.size:
            return
        batches, found = self._copies[k], self._read_arena(k, at_K)
        if not batches or batches[-1].size + at_K.size > batches[-1].rows_K.size:
            several = min(_BATCH, self.arena.tables[k].rows)  # few large batches are searched faster than many small ones
            fits = several > at_K.size and self._budget.fits(several * (self._bytes_of(k, at_K) // at_K.size))
            batches.append(_Copies(several if fits else at_K.size, found))
            self._budget.take(batches[-1].bytes)
        batches[-1].add(at_K, found)

    def _read_arena(self, k: int, at: slice | Rows) -> list[Rows]:
        """Rows as the arena holds them now; a slice on a CPU is not copied."""
        if self.arena.device.type == "cpu":
            codes_RB, meta_RW, _, _, _ = self.arena.views(k)
            states = self.arena.state_views(k, self.states, self.by_row)
            return [tensor.numpy()[at] for tensor in (*states, meta_RW, codes_RB)]
        return [tensor.cpu().numpy() for tensor in self.raw(k, at if isinstance(at, slice) else torch.from_numpy(at))]

    # -- called by the writer thread ----------------------------------------------------------------------------------------

    def release(self) -> None:
        self._budget.buffers.release()

    def read(self, table: int, at: At) -> list[Tensor]:
        _, _, first, format, _ = self.arena.views(table)
        like, at = self._read_arena(table, slice(0)), at if isinstance(at, slice) else at.cpu()
        section = _Section(table, at if isinstance(at, slice) else at.numpy(), like, self._budget.buffers)
        with self._budget.writer_lock():
            self._budget.begin_section(section.bytes)
            self._section = section
        self._take_copies(section)
        piece = _PIECE if self.arena.device.type == "cpu" else max(1, section.count)
        for begin in range(0, section.count, piece):
            with self._budget.writer_lock():
                self._read_piece(section, first, slice(begin, min(begin + piece, section.count)))
            if begin // piece % _PAUSE_EVERY == 0:
                yield_core()
        self._section = None
        *states, meta, codes = (torch.from_numpy(array) for array in section.arrays)
        if not F.META_WORDS[format]:
            return [*states, codes]
        if table in self._words:  # cache pointers are not saved
            rows_C, words_C = self._words[table]
            here_C, place_C = section.places(rows_C)
            section.arrays[-2][place_C, 0] = words_C[here_C]
        return [*states, meta, codes]

    def _read_piece(self, section: _Section, first: int, here: slice) -> None:
        """Read rows of a section from the arena, except rows that were copied."""
        rows = section.rows(here.start, here.stop)
        at = slice(first + rows.start, first + rows.stop) if isinstance(rows, slice) else first + rows
        copied_K = np.flatnonzero(self._flag_R[at] == _COPIED)
        for out, array in zip(section.arrays, self._read_arena(section.table, rows), strict=True):
            copies = out[here][copied_K]
            out[here] = array
            out[here][copied_K] = copies
        self._flag_R[at] = _DONE

    def _take_copies(self, section: _Section) -> None:
        """Move copies of a section's rows into its buffers. Steps may run in between and add copies for other sections."""
        for copies in list(self._copies[section.table]):
            with self._budget.writer_lock():
                batches = self._copies[section.table]
                copies.move_to(section)
                if 2 * copies.left < copies.size:
                    left = [copies.shrunk()] if copies.left else []
                    at = batches.index(copies)
                    batches[at : at + 1] = left
                    self._budget.take(sum(each.bytes for each in left) - copies.bytes)

    def close(self) -> None:
        """End reading: rows may change freely."""
        with self._budget.lock:
            self.arena.before_write_hook = None
            self._flag_R.fill(_DONE)
            self._copies.clear()
            self._budget.lock.notify_all()
