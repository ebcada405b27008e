"""Memory of the shards: one segment of bytes for each, and the layout of tables in it; without torch, for shard processes.

On a CPU a segment is anonymous shared memory (`memfd`). It lives as long as a process maps it, so it outlives the shard process
that filled it, needs no name, and is not limited by /dev/shm. A row is a *record* there: metadata in front of the codes, padded
to whole words, because one address then finds both. On a GPU codes and metadata are apart, so that codes stay aligned.

    cpu    | meta codes . | meta codes . | ...       cuda    | codes | codes | ...   | meta | meta | ...
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline import formats as F

from .huge_pages import map_aligned
from .row_split import Rows, TableSplit

_ALIGN = 128
_MADV_POPULATE_READ = 22  # since Linux 5.14
_libc = ctypes.CDLL(None)
Bytes = NDArray[np.uint8]
Words = NDArray[np.int32]


class ServedTable(NamedTuple):
    """A table of a checkpoint."""

    name: str
    rows: int
    dim: int
    format: int
    features: tuple[str, ...]

    @property
    def row_bytes(self) -> int:
        return F.row_bytes(self.format, self.dim) + 4 * F.META_WORDS[self.format]


@dataclass(frozen=True, eq=False)
class ShardedTableLayout:
    """One table in the segments of all shards: offsets of its first place, and distances of places."""

    table: ServedTable
    split: TableSplit
    stride: int
    meta_stride: int
    codes_S: tuple[int, ...]
    meta_S: tuple[int, ...]

    def views(self, segment: Bytes, shard: int) -> tuple[Bytes, Words]:
        """Codes and meta words of the table in the segment of a shard, by place."""
        places, meta = self.split.places(shard), self.meta_S[shard]
        width, words = F.row_bytes(self.table.format, self.table.dim), F.META_WORDS[self.table.format]
        codes_PB: Bytes = np.ndarray((places, width), np.uint8, segment, self.codes_S[shard], (self.stride, 1))
        meta_PW: Words = np.ndarray((places, words), np.int32, segment, meta if words else 0, (self.meta_stride, 4))
        return codes_PB, meta_PW


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """All tables in all shards."""

    shards: int
    tables: tuple[ShardedTableLayout, ...]
    sizes_S: tuple[int, ...]  # bytes of each segment

    @property
    def bytes(self) -> int:
        return sum(self.sizes_S)


def make_layout(tables: Sequence[ServedTable], splits: Sequence[TableSplit], records: bool) -> ShardLayout:
    """Lay tables out in segments. `records`: metadata in front of the codes of its row."""
    shards = splits[0].shards
    sizes = [0] * shards
    layouts = []
    for table, split in zip(tables, splits, strict=True):
        width, words = F.row_bytes(table.format, table.dim), 4 * F.META_WORDS[table.format]
        record = words + (width if words == 0 else -(-width // 4) * 4)
        stride, meta_stride = (record, record) if records else (width, words)
        codes_S, meta_S = [], []
        for shard in range(shards):
            places, begin = split.places(shard), _align(sizes[shard])
            codes_S.append(begin + words if records else begin)
            meta_S.append(begin if records else _align(begin + places * stride))
            sizes[shard] = begin + places * stride if records else meta_S[-1] + places * meta_stride
        layouts.append(ShardedTableLayout(table, split, stride, meta_stride, tuple(codes_S), tuple(meta_S)))
    # Vector loads may read, and ignore, a little beyond the last row.
    return ShardLayout(shards, tuple(layouts), tuple(_align(size) + _ALIGN for size in sizes))


def _align(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class BlockWriter:
    """Writes consecutive rows of one table to the shards that own them. Not thread-safe.

    Records are made in a private buffer and written with `pwrite`: page faults of a mapping take twice the time.
    """

    def __init__(self, layout: ShardedTableLayout, segments: Sequence[SharedSegment], first: int = 0) -> None:
        self.layout, self.segments, self.first = layout, segments, first
        self._records_RS: Bytes = np.empty((0, layout.stride), np.uint8)  # of a block
        self._owned_KS: Bytes = np.empty((0, layout.stride), np.uint8)  # those of one shard

    def put(self, begin: int, codes_RB: Bytes, meta_RW: Words) -> None:
        """Write rows from number `begin` on."""
        split, end = self.layout.split, begin + len(codes_RB)
        if len(self._records_RS) < len(codes_RB):
            self._records_RS = np.zeros((len(codes_RB), self.layout.stride), np.uint8)
            self._owned_KS = np.empty((len(codes_RB), self.layout.stride), np.uint8)
        records_RS = self._records(codes_RB, meta_RW)
        shards, copied = range(self.first, self.first + len(self.segments)), split.copied_in(begin, end)
        for shard, which, places in (*split.owned_runs(shards, begin, end), *((shard, *copied) for shard in shards)):
            if places.stop > places.start:
                at = self.layout.meta_S[shard] + places.start * self.layout.stride
                self.segments[shard - self.first].write(at, self._take(records_RS, which))

    def _take(self, records_RS: Bytes, which: Rows | slice) -> Bytes:
        if isinstance(which, slice):
            return records_RS[which]
        return records_RS.take(which, 0, self._owned_KS[: len(which)], "clip")  # indexing takes three times as long

    def _records(self, codes_RB: Bytes, meta_RW: Words) -> Bytes:
        words, width = meta_RW.shape[1], codes_RB.shape[1]
        if not words:
            return codes_RB
        records_RS = self._records_RS[: len(codes_RB)]
        records_RS[:, 4 * words : 4 * words + width] = codes_RB
        records_RS.view(np.int32)[:, :words] = meta_RW
        return records_RS


def put_rows(
    layout: ShardedTableLayout, segments: Sequence[Bytes], rows_K: Rows, codes_KB: Bytes, meta_KW: Words, first: int = 0
) -> None:  # fmt: skip
    """Write any rows, each at most once, to the shards from `first` on, whose segments are given."""
    for shard, which_K, at_K in layout.split.placed(range(first, first + len(segments)), rows_K):
        codes_PB, meta_PW = layout.views(segments[shard - first], shard)
        codes_PB[at_K], meta_PW[at_K] = codes_KB[which_K], meta_KW[which_K]


class SharedSegment:
    """Anonymous shared memory, mapped by every process that has its descriptor."""

    def __init__(self, size: int, name: str = "shard", descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create(f"thermocline-{name}")
            os.ftruncate(descriptor, size)
        self.descriptor, self.size = descriptor, size
        self.memory = map_aligned(descriptor, size)

    def populate(self) -> None:
        """Map every page for reading, so that the first lookups take no page faults. Older kernels ignore it."""
        at = self.memory.__array_interface__["data"][0]
        _libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(self.size), _MADV_POPULATE_READ)

    def write(self, at: int, data: Bytes) -> None:
        """Write bytes from offset `at` on."""
        view = memoryview(np.ascontiguousarray(data)).cast("B")  # type: ignore[arg-type]
        while len(view):
            done = os.pwrite(self.descriptor, view, at)
            view, at = view[done:], at + done

    def __del__(self) -> None:
        if (descriptor := getattr(self, "descriptor", -1)) >= 0:
            os.close(descriptor)
            self.descriptor = -1
