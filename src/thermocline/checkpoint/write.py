"""The files of a save: rows in files of a bounded size, everything else in one more, and a note of what was written."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .describe import Found
from .manifest import File, Save, Section
from .sections import Pending, sections
from .tensors import Entry, Lot, write_file, writing

FILE_BYTES = 1 << 28
STATE = "state.safetensors"
_NOTE = "rank-{:04d}.json"


class Note:
    """What one rank wrote."""

    def __init__(self, files: list[File], sections: list[Section]) -> None:
        self.files, self.sections = files, sections

    def leave(self, aside: Path, rank: int) -> None:
        """As a file next to what it is about."""
        path = aside / _NOTE.format(rank)
        text = {"files": [f.model_dump() for f in self.files], "sections": [s.model_dump() for s in self.sections]}
        with writing(path):
            path.write_text(json.dumps(text))


def collect(aside: Path, ranks: int, **about: Any) -> Save:
    """One save of the notes of all ranks."""
    files: list[File] = []
    found: list[Section] = []
    for rank in range(ranks):
        path = aside / _NOTE.format(rank)
        note = json.loads(path.read_text())
        files += [File(**each) for each in note["files"]]
        found += [Section(**each) for each in note["sections"]]
        path.unlink()
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    state = f"{aside.name}/{STATE}"
    return Save(created=now, ranks=ranks, files=tuple(files), sections=tuple(found), state=state, **about)


def write_rows(found: Sequence[Found], aside: Path, rank: int, bits: Sequence[Tensor] | None) -> Note:
    """The rows that this rank writes; with `bits` for each module, those that they mark."""
    marks = [None] * len(found) if bits is None else bits
    return write_pending((s for each, mark in zip(found, marks, strict=True) for s in sections(each, mark)), aside, rank)


def write_pending(pending: Iterator[Pending], aside: Path, rank: int) -> Note:
    note = Note([], [])
    for number, lot in enumerate(_files(pending)):
        path = aside / f"rows-{rank:04d}-{number:03d}.safetensors"
        size, sha256 = write_file(path, [section.lot() for section in lot])
        name = f"{aside.name}/{path.name}"
        note.files.append(File(name=name, bytes=size, sha256=sha256))
        note.sections += [section.written(name) for section in lot]
    return note


def _files(pending: Iterator[Pending]) -> Iterator[list[Pending]]:
    """Sections that share a file."""
    lot: list[Pending] = []
    size = 0
    for section in pending:
        if lot and size + section.bytes > FILE_BYTES:
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
