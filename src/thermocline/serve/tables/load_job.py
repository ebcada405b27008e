"""A load job: tables, their splits, and the places of their rows in checkpoint files. Serialized as one npz in memory.

Every shard process takes its share of every phase, whichever shard owns the rows: each byte is read once, in order, and
processes write to each other's segments. The share of a process that died is done again; writing a row twice does no harm.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline import formats as F

from .row_split import TableSplit
from .segments import BlockWriter, Bytes, ServedTable, ShardLayout, SharedSegment, make_layout, put_rows

CHUNK_ROWS = 1 << 14  # written at a time; the unit of shares


class FileSlice(NamedTuple):
    """Rows of one table in a file: consecutive, or any, with their numbers at `rows`. Offsets in bytes from its beginning."""

    table: int
    file: int
    first: int
    length: int
    codes: int
    meta: int
    rows: int = -1  # -1: rows first to first + length - 1
    wide: bool = False  # row numbers of 64 bits, not 32

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of the slice's chunks."""
        return ((begin, min(begin + CHUNK_ROWS, self.length)) for begin in range(0, self.length, CHUNK_ROWS))


@dataclass(frozen=True)
class LoadJob:
    """What a shard process needs to load a version. Slices of a phase may be written in any order; later phases are newer."""

    layout: ShardLayout
    files: tuple[str, ...]
    phases: tuple[tuple[FileSlice, ...], ...]
    checksums: tuple[tuple[int, str], ...] = ()  # file number, sha256
    first: int = 0  # the first shard of this host

    def to_bytes(self) -> bytes:
        """The job for another process."""
        tables: list[dict[str, Any]] = []
        arrays: dict[str, NDArray[Any]] = {}
        for n, each in enumerate(self.layout.tables):
            split = vars(each.split)
            arrays |= {f"{name}{n}": value for name, value in split.items() if isinstance(value, np.ndarray)}
            scalars = {name: value for name, value in split.items() if isinstance(value, (int, str))}
            tables.append({"table": each.table, "split": scalars})
        fields = {"tables": tables, "files": self.files, "phases": self.phases}
        text = json.dumps(fields | {"first": self.first, "checksums": self.checksums})
        file = io.BytesIO()
        np.savez(file, fields=np.frombuffer(text.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> LoadJob:
        """The inverse of `to_bytes`."""
        arrays = np.load(io.BytesIO(data), allow_pickle=False)
        fields: dict[str, Any] = json.loads(arrays["fields"].tobytes())
        tables, splits = [], []
        for n, each in enumerate(fields["tables"]):
            name, rows, dim, format, features = each["table"]
            tables.append(ServedTable(name, rows, dim, format, tuple(features)))
            further = {"rotations_B": arrays.get(f"rotations_B{n}"), "copied_H": arrays[f"copied_H{n}"]}
            splits.append(TableSplit(**each["split"], **further))
        phases = tuple(tuple(FileSlice(*each) for each in phase) for phase in fields["phases"])
        checksums = tuple((file, sha256) for file, sha256 in fields["checksums"])
        return cls(make_layout(tables, splits, records=True), tuple(fields["files"]), phases, checksums, fields["first"])

    def run(self, phase: int, share: int, shares: int, segments: list[SharedSegment]) -> None:
        """Write a share of the rows of a phase to the shards of this host."""
        number, opened = 0, dict[int, Bytes]()
        writers = [BlockWriter(each, segments, self.first) for each in self.layout.tables]
        for slice_ in self.phases[phase]:
            for begin, end in slice_.chunks():
                if number % shares == share:
                    if slice_.file not in opened:
                        opened[slice_.file] = np.memmap(Path(self.files[slice_.file]), np.uint8, "r")
                    _write_chunk(slice_, begin, end, opened[slice_.file], writers[slice_.table])
                number += 1


def _write_chunk(slice_: FileSlice, begin: int, end: int, file: NDArray[np.uint8], writer: BlockWriter) -> None:
    """Write some rows of a slice."""
    table = writer.layout.table
    width, words = F.row_bytes(table.format, table.dim), F.META_WORDS[table.format]
    codes_RB: Any = np.ndarray((end - begin, width), np.uint8, file, slice_.codes + begin * width)
    meta_RW: Any = np.ndarray((end - begin, words), np.int32, file, slice_.meta + 4 * begin * words)
    if slice_.rows < 0:
        writer.put(slice_.first + begin, codes_RB, meta_RW)
    else:
        kind = np.int64 if slice_.wide else np.int32
        rows_R: Any = np.ndarray((end - begin,), kind, file, slice_.rows + begin * np.dtype(kind).itemsize)
        memory = [segment.memory for segment in writer.segments]
        put_rows(writer.layout, memory, rows_R.astype(np.int64), codes_RB, meta_RW, writer.first)
