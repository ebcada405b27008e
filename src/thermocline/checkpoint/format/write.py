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

from thermocline.errors import ThermoclineError
from thermocline.nn.rows_module import RowsModule
from thermocline.rows.memory import size_of

from .manifest import File, Save, Section
from .sections import Pending
from .tensor_files import Entry, Lot, write_file, writing

_FILES, _LEAST, _MOST = 8, 1 << 25, 1 << 30  # that a rank writes, where it has enough for them; bytes of a file
STATE, SLOTS = "state.safetensors", "slots-{:04d}.safetensors"
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
    for path in [*aside.glob(_ROWS.format(rank, "*")), aside / SLOTS.format(rank)]:
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
    slots = {f"{aside.name}/{SLOTS.format(rank)}" for rank in range(ranks)}
    return Save(
        created=now, ranks=ranks, files=tuple(files), sections=tuple(found), state=f"{aside.name}/{STATE}",
        slots=tuple(file.name for file in files if file.name in slots), **about,
    )  # fmt: skip


def bytes_of_rows(modules: Iterable[RowsModule]) -> int:
    """Of tables and optimizer state, without caches."""
    return sum(size_of(module.arena.codes, module.arena.meta, *module.trainer.states) for module in modules)


def write_pending(pending: Iterator[Pending], aside: Path, rank: int, total: int, pool: Executor, gently: bool = False) -> Note:
    """Sections of about so many bytes in all, several files at once: hashing and writing wait for different things."""
    note = Note([], [])

    def write(number: int, lot: list[Pending]) -> tuple[File, list[Section]]:
        path = aside / _ROWS.format(rank, f"{number:03d}")
        size, sha256 = write_file(path, [section.lot() for section in lot], gently)
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


def write_state(lots: Sequence[Lot], path: Path, gently: bool = False) -> File:
    """What is not rows."""
    size, sha256 = write_file(path, lots, gently)
    return File(name=f"{path.parent.name}/{path.name}", bytes=size, sha256=sha256)


def lot_of(name: str, tensor: Tensor) -> Lot:
    return [Entry(name, tensor.dtype, tuple(tensor.shape))], lambda: [tensor]
