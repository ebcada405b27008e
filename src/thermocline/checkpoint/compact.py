"""A chain of saves made one: what was changed is put in its place, and nothing else of the folder changes.

It needs no model and no more memory than a few sections. Whoever trains may go on saving meanwhile: what comes after the save
that was compacted continues the chain.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.rows.precision import bytes_per_row, format_of

from .format.array_patch import AT, TO
from .format.folder import new_subfolder, publish
from .format.manifest import VERSION, Manifest, Save, Section, TableEntry
from .format.sections import SECTION_BYTES, Pending, row_type
from .format.tensor_files import Lot, writing
from .format.write import STATE, write_pending, write_state
from .reader import Checkpoint, Shapes

_ELEMENTS = 1 << 22


def compact(folder: str | Path) -> Manifest:
    """Make one full save of a full one and the incremental ones after it. The checkpoint stays the same, row by row."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    old, root = checkpoint.manifest, checkpoint.folder
    if len(old.saves) == 1:
        return old
    last = old.saves[-1]
    with writing(root):
        aside = new_subfolder(root, last.number)
    try:
        total = old.saves[0].bytes
        with ThreadPoolExecutor(1) as pool:
            note = write_pending((p for table in old.tables for p in _merged(checkpoint, table)), aside, 0, total, pool)
        note.files.append(write_state([_lot(checkpoint, name) for name in _names(checkpoint)], aside / STATE))
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        whole = Save(
            number=last.number, token=last.token, kind="full", created=now, step=last.step, ranks=1, files=tuple(note.files),
            sections=tuple(note.sections), state=f"{aside.name}/{STATE}",
        )  # fmt: skip

        def make(current: Manifest | None) -> Manifest:
            later = () if current is None else tuple(s for s in current.saves if s.number > last.number)
            if current is None or old.saves != current.saves[: len(old.saves)]:
                raise BadInput(f"somebody has saved to '{root}' anew meanwhile; there is nothing to compact")
            return current.model_copy(update={"version": VERSION, "saves": (whole, *later)})

        return publish(root, aside, make)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _names(checkpoint: Checkpoint) -> list[str]:
    """Tensors of the state: what the last save has of models and optimizers, and modules and id maps of all."""
    *before, last = checkpoint.beside_rows
    found = dict.fromkeys(name for name in last.names() if not name.endswith((AT, TO)))
    for each in before:
        found |= dict.fromkeys(n for n in each.names() if n.startswith(("module/", "ids/")) and not n.endswith((AT, TO)))
    return list(found)


def _lot(checkpoint: Checkpoint, name: str) -> Lot:
    """A tensor of the state, read as it is written."""
    entry = next(each.entry(name) for each in reversed(checkpoint.beside_rows) if name in each)
    ends = range(0, entry.shape[0], _ELEMENTS) if len(entry.shape) == 1 else ()
    if not ends:
        return [entry], lambda: [checkpoint.read(name)]
    return [entry], lambda: [(checkpoint.read(name, at, min(at + _ELEMENTS, entry.shape[0])) for at in ends)]


def _merged(checkpoint: Checkpoint, table: TableEntry) -> Iterator[Pending]:
    """The rows of a table in ranges, of each precision."""
    module = checkpoint.manifest.module(table.module)
    state_bytes = module.states * (4 if module.states_by_row else 4 * table.dim)
    for precision in table.precisions:
        sections = [s for s in checkpoint.sections(table.name) if s.precision == precision]
        numbers: dict[int, Tensor] = {}
        shapes = _shapes(table, precision, module.states, module.states_by_row)
        size = max(64, SECTION_BYTES // (bytes_per_row(precision, table.dim) + state_bytes) // 64 * 64)
        for first in range(0, table.rows, size):
            end = min(first + size, table.rows)
            known_R, _ = checkpoint.merge(sections, {}, first, end, numbers)
            count = int(known_R.sum())

            if count:
                make = partial(_made, checkpoint, table, sections, shapes, first, end)
                some = count < end - first
                yield Pending(table, precision, first, end, count, some, module.states, module.states_by_row, make)


def _made(
    checkpoint: Checkpoint, table: TableEntry, sections: list[Section], shapes: Shapes, first: int, end: int
) -> list[Tensor]:
    """The tensors of a range, with the numbers of rows where it has not all of them."""
    known_R, found = checkpoint.merge(sections, shapes, first, end, {})
    if bool(known_R.all()):
        return [found[name] for name in shapes]
    rows_K = (first + known_R.nonzero()[:, 0]).to(row_type(table.rows))
    return [rows_K, *(found[name][known_R] for name in shapes)]


def _shapes(table: TableEntry, precision: str, states: int, by_row: bool) -> Shapes:
    """Tensors of a section in their order, but for the numbers of rows."""
    format = format_of(precision)
    shapes: Shapes = {f"state{n}": (torch.float32, () if by_row else (table.dim,)) for n in range(states)}
    if words := F.META_WORDS[format]:
        shapes["meta"] = (torch.int32, (words,))
    return shapes | {"codes": (torch.uint8, (F.row_bytes(format, table.dim),))}
