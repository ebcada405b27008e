"""The files of a save: rows in files of a bounded size, everything else in one more, and a note of what was written."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import ThermoclineError
from ..nn.base import RowsModule
from ..rows.memory import size_of
from .describe import Found
from .live import Live
from .manifest import File, Save, Section
from .sections import Pending, sections
from .tensors import Entry, Lot, write_file, writing

_FILES, _LEAST, _MOST = 8, 1 << 25, 1 << 30  # that a rank writes, where it has enough for them; bytes of a file
STATE = "state.safetensors"
_NOTE = "rank-{:04d}.json"
_ROWS = "rows-{:04d}-{}.safetensors"


class Note:
    """What one rank wrote."""

    def __init__(self, files: list[File], sections: list[Section]) -> None:
        self.files, self.sections = files, sections

    def leave(self, aside: Path, rank: int) -> None:
        """As a file next to what it is about."""
        text = {"files": [f.model_dump() for f in self.files], "sections": [s.model_dump() for s in self.sections]}
        leave_note(aside, rank, text)


def leave_note(aside: Path, rank: int, text: Mapping[str, Any]) -> None:
    """A note of a rank, there at once or not at all: others may be waiting for it."""
    path = aside / _NOTE.format(rank)
    with writing(path):
        path.with_suffix(".part").write_text(json.dumps(text))
        os.replace(path.with_suffix(".part"), path)


def leave_failure(aside: Path, rank: int, why: str) -> None:
    """Tell other ranks that this one has failed. What it wrote is of no use, and the note may need the room: disks are full."""
    for path in aside.glob(_ROWS.format(rank, "*")):
        path.unlink(missing_ok=True)
    leave_note(aside, rank, {"failed": why})


def notes(aside: Path, ranks: int) -> list[dict[str, Any]] | None:
    """What all ranks have left; None while one has not, and none is told to have failed."""
    paths = [aside / _NOTE.format(rank) for rank in range(ranks)]
    found = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    for rank, note in enumerate(found):
        if note is not None and "failed" in note:
            raise ThermoclineError(f"rank {rank} stopped: {note['failed']}")
    return None if None in found else found  # type: ignore[return-value]


def collect(aside: Path, ranks: int, **about: Any) -> Save:
    """One save of the notes of all ranks."""
    files: list[File] = []
    found: list[Section] = []
    for rank, note in enumerate(notes(aside, ranks) or ()):
        files += [File(**each) for each in note["files"]]
        found += [Section(**each) for each in note["sections"]]
        (aside / _NOTE.format(rank)).unlink()
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    state = f"{aside.name}/{STATE}"
    return Save(created=now, ranks=ranks, files=tuple(files), sections=tuple(found), state=state, **about)


def write_rows(
    found: Sequence[Found], sources: Sequence[Live], bits: Sequence[Tensor | None], aside: Path, rank: int, pool: Executor
) -> Note:
    """The rows that this rank writes; with `bits` of a module, those that they mark."""
    each = zip(found, sources, bits, strict=True)
    total = bytes_of_rows(sources)
    return write_pending((section for one in each for section in sections(*one)), aside, rank, total, pool)


def bytes_of_rows(sources: Iterable[RowsModule | Live]) -> int:
    """Of tables and optimizer state, without caches."""
    return sum(size_of(each.arena.codes, each.arena.meta, *each.trainer.states) for each in sources)


def write_pending(pending: Iterator[Pending], aside: Path, rank: int, total: int, pool: Executor) -> Note:
    """Sections of about so many bytes in all, several files at once: hashing and writing wait for different things."""
    note = Note([], [])

    def write(number: int, lot: list[Pending]) -> tuple[File, list[Section]]:
        path = aside / _ROWS.format(rank, f"{number:03d}")
        size, sha256 = write_file(path, [section.lot() for section in lot])
        name = f"{aside.name}/{path.name}"
        return File(name=name, bytes=size, sha256=sha256), [section.written(name) for section in lot]

    lots = _files(pending, min(max(_LEAST, total // _FILES), _MOST))
    for done in [pool.submit(write, number, lot) for number, lot in enumerate(lots)]:
        file, written = done.result()
        note.files.append(file)
        note.sections += written
    return note


def _files(pending: Iterator[Pending], most: int) -> Iterator[list[Pending]]:
    """Sections that share a file."""
    lot: list[Pending] = []
    size = 0
    for section in pending:
        if lot and size + section.bytes > most:
            yield lot
            lot, size = [], 0
        lot.append(section)
        size += section.bytes
    if lot:
        yield lot


def write_state(lots: Sequence[Lot], aside: Path) -> File:
    """Everything that is not rows."""
    size, sha256 = write_file(aside / STATE, lots)
    return File(name=f"{aside.name}/{STATE}", bytes=size, sha256=sha256)


def lot_of(name: str, tensor: Tensor) -> Lot:
    return [Entry(name, tensor.dtype, tuple(tensor.shape))], lambda: [tensor]
