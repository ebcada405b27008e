"""What cards are told to load: tables and their splits, and where in which files the rows are. Travels as one npz in memory.

A *piece* is rows of one table that lie one after another in a file: all from row `first` on or, where `rows` says where in the
file they are named, any. Pieces of one phase may be put in place in any order; those of a later phase are newer.

Each card takes its share of every phase, whoever the rows belong to: so every byte is read once, in order, and the cards put
rows into each other's memory. A card that died is replaced, and its share done again: putting a row twice does no harm.
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
from .segments import Arrangement, BlockWriter, Bytes, Segment, TableInfo, arrange, put_rows

CHUNK = 1 << 14  # rows put in place at a time, and what shares are counted in


class Piece(NamedTuple):
    """Places are bytes from the beginning of the file."""

    table: int
    file: int
    first: int
    length: int
    codes: int
    meta: int
    rows: int = -1  # -1: rows first to first + length - 1
    wide: bool = False  # whether rows are named by 64 bits, not 32

    def chunks(self) -> Iterator[tuple[int, int]]:
        return ((begin, min(begin + CHUNK, self.length)) for begin in range(0, self.length, CHUNK))


@dataclass(frozen=True)
class Job:
    """Everything that a card needs to know. `checksums`: sha256 of files, by their number."""

    arrangement: Arrangement
    files: tuple[str, ...]
    phases: tuple[tuple[Piece, ...], ...]
    checksums: tuple[tuple[int, str], ...] = ()
    first: int = 0  # the first card of this host

    def to_bytes(self) -> bytes:
        tables: list[dict[str, Any]] = []
        arrays: dict[str, NDArray[Any]] = {}
        for n, shelf in enumerate(self.arrangement.shelves):
            split = shelf.split
            about = {"way": split.way, "first": split.first, "per": split.per, "key": split.key}
            tables.append({"table": shelf.table, "split": about})
            arrays[f"copied{n}"] = split.copied_H
            if split.turns_B is not None:
                arrays[f"turns{n}"] = split.turns_B
        told: dict[str, Any] = {"cards": self.arrangement.cards, "tables": tables, "files": self.files, "phases": self.phases}
        told["first"] = self.first
        text = json.dumps(told | {"checksums": self.checksums})
        file = io.BytesIO()
        np.savez(file, about=np.frombuffer(text.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Job:
        arrays = np.load(io.BytesIO(data), allow_pickle=False)
        told: dict[str, Any] = json.loads(arrays["about"].tobytes())
        tables, splits = [], []
        for n, each in enumerate(told["tables"]):
            name, rows, dim, format, features = each["table"]
            tables.append(TableInfo(name, rows, dim, format, tuple(features)))
            turns_B = arrays.get(f"turns{n}")
            splits.append(TableSplit(rows, told["cards"], **each["split"], turns_B=turns_B, copied_H=arrays[f"copied{n}"]))
        phases = tuple(tuple(Piece(*piece) for piece in phase) for phase in told["phases"])
        checksums = tuple((file, sha256) for file, sha256 in told["checksums"])
        return cls(arrange(tables, splits, records=True), tuple(told["files"]), phases, checksums, told["first"])

    def run(self, phase: int, share: int, shares: int, segments: list[Segment]) -> int:
        """Put a share of the rows of a phase in place, on the cards of this host; how many bytes that were."""
        done, number, opened = 0, 0, dict[int, Bytes]()
        writers = [BlockWriter(shelf, segments, self.first) for shelf in self.arrangement.shelves]
        for piece in self.phases[phase]:
            for begin, end in piece.chunks():
                if number % shares == share:
                    if piece.file not in opened:
                        opened[piece.file] = np.memmap(Path(self.files[piece.file]), np.uint8, "r")
                    done += _put(piece, begin, end, opened[piece.file], writers[piece.table])
                number += 1
        return done


def _put(piece: Piece, begin: int, end: int, file: NDArray[np.uint8], writer: BlockWriter) -> int:
    """Put some rows of a piece in place; how many bytes they have."""
    table = writer.shelf.table
    width, words = F.row_bytes(table.format, table.dim), F.META_WORDS[table.format]
    codes_RB: Any = np.ndarray((end - begin, width), np.uint8, file, piece.codes + begin * width)
    meta_RW: Any = np.ndarray((end - begin, words), np.int32, file, piece.meta + 4 * begin * words)
    if piece.rows < 0:
        writer.put(piece.first + begin, codes_RB, meta_RW)
    else:
        kind = np.int64 if piece.wide else np.int32
        rows_R: Any = np.ndarray((end - begin,), kind, file, piece.rows + begin * np.dtype(kind).itemsize)
        memory = [segment.memory for segment in writer.segments]
        put_rows(writer.shelf, memory, rows_R.astype(np.int64), codes_RB, meta_RW, writer.first)
    return (end - begin) * (width + 4 * words)
