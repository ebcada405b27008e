"""The memory of the cards: a segment of bytes for each, and where the rows of every table lie in it.

On a CPU a segment is anonymous shared memory (`memfd`): it belongs to nobody in particular and lives as long as any process
has it, so it outlives the card that filled it, needs no name that a crash would leave behind, and is not limited by the size of
/dev/shm. Rows are *records* there, metadata right in front of the codes, filled up to whole words, because one address then
finds both (`kernels/serve/cpu.py`). On a GPU codes and metadata lie apart, as in an arena, so that codes stay aligned.

    cpu    | meta codes . | meta codes . | ...       cuda    | codes | codes | ...   | meta | meta | ...

Nothing here needs torch: card processes put rows in place with numpy.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.errors import BadInput

from . import huge_pages as pages
from .row_split import Rows, TableSplit

_ALIGN = 128
_POPULATE_READ = 22  # of madvise, since Linux 5.14
_libc = ctypes.CDLL(None)
Bytes = NDArray[np.uint8]
Words = NDArray[np.int32]


class TableInfo(NamedTuple):
    """What a checkpoint says of a table."""

    name: str
    rows: int
    dim: int
    format: int
    features: tuple[str, ...]

    @property
    def row_bytes(self) -> int:
        return F.row_bytes(self.format, self.dim) + 4 * F.META_WORDS[self.format]


@dataclass(frozen=True, eq=False)
class Shelf:
    """One table in the segments of all cards: where its first place begins, and how far places are apart."""

    table: TableInfo
    split: TableSplit
    stride: int
    meta_stride: int
    codes_C: tuple[int, ...]
    meta_C: tuple[int, ...]

    def views(self, segment: Bytes, card: int) -> tuple[Bytes, Words]:
        """Codes and meta words of the table in the segment of a card, by place."""
        return self.views_at(segment, self.split.places(card), self.codes_C[card], self.meta_C[card])

    def views_at(self, segment: Bytes, places: int, codes: int, meta: int) -> tuple[Bytes, Words]:
        format, dim = self.table.format, self.table.dim
        width, words = F.row_bytes(format, dim), F.META_WORDS[format]
        codes_PB: Bytes = np.ndarray((places, width), np.uint8, segment, codes, (self.stride, 1))
        meta_PW: Words = np.ndarray((places, words), np.int32, segment, meta if words else 0, (self.meta_stride, 4))
        return codes_PB, meta_PW


@dataclass(frozen=True, eq=False)
class Arrangement:
    """All tables on all cards."""

    cards: int
    shelves: tuple[Shelf, ...]
    sizes_C: tuple[int, ...]  # bytes of each segment

    @property
    def bytes(self) -> int:
        return sum(self.sizes_C)


def strides(format: int, dim: int, records: bool) -> tuple[int, int]:
    """How far places are apart: of codes, and of meta words."""
    width, words = F.row_bytes(format, dim), 4 * F.META_WORDS[format]
    if not records:
        return width, words
    record = words + (width if words == 0 else -(-width // 4) * 4)
    return record, record


def arrange(tables: Sequence[TableInfo], splits: Sequence[TableSplit], records: bool) -> Arrangement:
    """Where everything goes. `records`: metadata in front of the codes of its row."""
    cards = splits[0].cards
    sizes = [0] * cards
    shelves = []
    for table, split in zip(tables, splits, strict=True):
        stride, meta_stride = strides(table.format, table.dim, records)
        codes_C, meta_C = [], []
        for card in range(cards):
            places, begin, words = split.places(card), _aligned(sizes[card]), 4 * F.META_WORDS[table.format]
            codes_C.append(begin + words if records else begin)
            meta_C.append(begin if records else _aligned(begin + places * stride))
            sizes[card] = begin + places * stride if records else meta_C[-1] + places * meta_stride
        shelves.append(Shelf(table, split, stride, meta_stride, tuple(codes_C), tuple(meta_C)))
    # A line more: vector loads may look, though not use, a little beyond the last row.
    return Arrangement(cards, tuple(shelves), tuple(_aligned(size) + _ALIGN for size in sizes))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class BlockWriter:
    """Puts rows of one table that follow each other where they belong: as records, which are made here and then written.

    Through the mapping the same would take twice as long, as every page of it is a fault; so would memory that is new for every
    block. Not for several threads at once. `first`: the card whose segment comes first.
    """

    def __init__(self, shelf: Shelf, segments: Sequence[Segment], first: int = 0) -> None:
        self.shelf, self.segments, self.first = shelf, segments, first
        self._records_RS: Bytes = np.empty((0, shelf.stride), np.uint8)  # of a block
        self._mine_KS: Bytes = np.empty((0, shelf.stride), np.uint8)  # those of one card

    def put(self, begin: int, codes_RB: Bytes, meta_RW: Words) -> None:
        """Rows, the first of them `begin`."""
        split, end = self.shelf.split, begin + len(codes_RB)
        if len(self._records_RS) < len(codes_RB):
            self._records_RS = np.zeros((len(codes_RB), self.shelf.stride), np.uint8)
            self._mine_KS = np.empty((len(codes_RB), self.shelf.stride), np.uint8)
        records_RS = self._records(codes_RB, meta_RW)
        copied, turns_B = split.copied_in(begin, end), split.turns_in(begin, end) if split.way == "blocks" else None
        for card, segment in enumerate(self.segments, self.first):
            for mine, into in (split.owned_by(card, begin, end, turns_B), copied):
                if into.stop > into.start:
                    at = self.shelf.meta_C[card] + into.start * self.shelf.stride
                    segment.write(at, self._some(records_RS, mine))

    def _some(self, records_RS: Bytes, mine: Rows | slice) -> Bytes:
        if isinstance(mine, slice):
            return records_RS[mine]
        return records_RS.take(mine, 0, self._mine_KS[: len(mine)], "clip")  # records_RS[mine] takes three times as long

    def _records(self, codes_RB: Bytes, meta_RW: Words) -> Bytes:
        """All rows of a block as records."""
        words, width = meta_RW.shape[1], codes_RB.shape[1]
        if not words:
            return codes_RB
        records_RS = self._records_RS[: len(codes_RB)]
        records_RS[:, 4 * words : 4 * words + width] = codes_RB
        records_RS.view(np.int32)[:, :words] = meta_RW
        return records_RS


def put_rows(
    shelf: Shelf, segments: Sequence[Bytes], rows_K: Rows, codes_KB: Bytes, meta_KW: Words, first: int = 0
) -> None:  # fmt: skip
    """Put any rows, each at most once, where they belong: on cards `first` and on, whose segments are given."""
    split = shelf.split
    card_K, place_K = split.owner_and_place(rows_K)
    rank_K = np.searchsorted(split.copied_H, rows_K)
    copied_K = np.flatnonzero(np.isin(rows_K, split.copied_H))
    for card, segment in enumerate(segments, first):
        codes_PB, meta_PW = shelf.views(segment, card)
        if not split.everywhere:
            mine_K = np.flatnonzero(card_K == card)
            codes_PB[place_K[mine_K]] = codes_KB[mine_K]
            meta_PW[place_K[mine_K]] = meta_KW[mine_K]
        codes_PB[split.owned + rank_K[copied_K]] = codes_KB[copied_K]
        meta_PW[split.owned + rank_K[copied_K]] = meta_KW[copied_K]


class Segment:
    """Anonymous shared memory. Whoever has the descriptor can map it; it is gone when the last has let it go."""

    def __init__(self, size: int, name: str = "card", descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create(f"thermocline-{name}")
            os.ftruncate(descriptor, size)
        self.descriptor, self.size = descriptor, size
        self.memory = pages.mapped(descriptor, size)

    def populate(self) -> None:
        """Have every page mapped for reading, so that the first lookups do not wait for it. Old kernels do not know how. Others
        go on meanwhile."""
        at = self.memory.__array_interface__["data"][0]
        _libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(self.size), _POPULATE_READ)

    def write(self, at: int, data: Bytes) -> None:
        """Write bytes from `at` on."""
        view = memoryview(np.ascontiguousarray(data)).cast("B")  # type: ignore[arg-type]
        while len(view):
            done = os.pwrite(self.descriptor, view, at)
            view, at = view[done:], at + done

    def __del__(self) -> None:
        if (descriptor := getattr(self, "descriptor", -1)) >= 0:
            os.close(descriptor)
            self.descriptor = -1


def check_fits(needed: int, what: str, available: int | None = None) -> None:
    """Refuse what does not fit into memory."""
    free = free_bytes() if available is None else available
    if needed > free:
        raise BadInput(
            f"{what} needs {needed:,} bytes, and {free:,} are free; unload a version, serve a smaller precision, or use a "
            "machine with more memory"
        )


def free_bytes() -> int:
    """Memory that can still be had: what the system says, or less where a control group sets a limit."""
    found: list[int] = []
    with open("/proc/meminfo") as file:
        lines: dict[str, Any] = dict(line.split(":") for line in file)
    found.append(1024 * int(lines["MemAvailable"].split()[0]))
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        if limit != "max":
            found.append(int(limit) - int(used))
    except (OSError, ValueError):  # no such control group
        pass
    return max(0, min(found))
