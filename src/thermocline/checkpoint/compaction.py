"""`compact`: merges a chain of saves into one full save, without a model and within the memory of a few sections.

Training may continue to save meanwhile; later saves continue the compacted one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch import Tensor

from thermocline.errors import BadInput
from thermocline.rows.precision import bytes_per_row

from .format.folder import COMPACTING, discard, new_subfolder, publish
from .format.manifest import VERSION, Manifest, SaveEntry, Section, TableEntry
from .format.section_tensors import Shapes, row_dtype, section_shapes
from .format.sections import SECTION_BYTES, PendingSection
from .format.tensor_files import TensorGroup, TensorInfo, explain_write_errors, write_file
from .format.write import STATE, utc_now, write_sections
from .reader import Checkpoint

_ELEMENTS = 1 << 22


def compact(folder: str | Path) -> Manifest:
    """Merge a full save and the incremental saves after it into one full save. Rows and state stay equal.

    Args:
        folder: a checkpoint folder.

    Returns:
        The new manifest.

    Raises:
        FormatError: the folder is no checkpoint, or a file is damaged.
        BadInput: another process saved to the folder anew meanwhile.

    Example:
        >>> compact("checkpoint").saves[0].kind
        'full'
    """
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    old, root = checkpoint.manifest, checkpoint.folder
    if len(old.saves) == 1:
        return old
    last = old.saves[-1]
    with explain_write_errors(root):
        subfolder = new_subfolder(root, last.number, COMPACTING)
    try:
        with ThreadPoolExecutor(1) as pool:
            pending = (section for table in old.tables for section in _merged(checkpoint, table))
            files, sections = write_sections(pending, subfolder, 0, old.saves[0].bytes, pool)
        state = [_state_tensor(checkpoint, info) for info in checkpoint.state.merged().values()]
        files.append(write_file(subfolder / STATE, state))
        full = SaveEntry(
            number=last.number, token=last.token, kind="full", created=utc_now(), step=last.step, ranks=1, files=tuple(files),
            sections=tuple(sections), state=f"{subfolder.name}/{STATE}",
        )  # fmt: skip

        def make(current: Manifest | None) -> Manifest:
            later = () if current is None else tuple(s for s in current.saves if s.number > last.number)
            if current is None or old.saves != current.saves[: len(old.saves)]:
                raise BadInput(f"another process saved to '{root}' anew meanwhile; nothing is left to compact", path=root)
            return current.model_copy(update={"version": VERSION, "saves": (full, *later)})

        return publish(root, subfolder, make)
    except BaseException:
        discard(subfolder)
        raise


def _state_tensor(checkpoint: Checkpoint, info: TensorInfo) -> TensorGroup:
    """A state tensor, read in pieces while it is written."""
    read, rows = partial(checkpoint.state.read, info.name), info.shape[0] if len(info.shape) == 1 else 0
    if not rows:
        return TensorGroup([info], lambda: [read()])
    return TensorGroup([info], lambda: [(read(at, min(at + _ELEMENTS, rows)) for at in range(0, rows, _ELEMENTS))])


def _merged(checkpoint: Checkpoint, table: TableEntry) -> Iterator[PendingSection]:
    """Merged rows of a table in ranges, for each precision."""
    states = checkpoint.state_shapes(table)
    state_bytes = sum(4 * (shape[0] if shape else 1) for shape in states)
    for precision in table.precisions:
        sections = checkpoint.sections(table.name, precision)
        shapes = section_shapes(precision, table.dim, states)
        size = max(64, SECTION_BYTES // (bytes_per_row(precision, table.dim) + state_bytes) // 64 * 64)
        for first, known_R, _ in checkpoint.merged(sections, {}, 0, table.rows, size):
            if count := int(known_R.sum()):
                end = first + len(known_R)
                read = partial(_read, checkpoint, table, sections, shapes, first, end)
                yield PendingSection(table, precision, first, end, count, count < end - first, states, read)


def _read(
    checkpoint: Checkpoint, table: TableEntry, sections: list[Section], shapes: Shapes, first: int, end: int
) -> list[Tensor]:
    """Tensors of a range, with row numbers if some rows are missing."""
    _, known_R, found = next(checkpoint.merged(sections, shapes, first, end, end - first))
    tensors = [found[name] for name in shapes]
    if bool(known_R.all()):
        return tensors
    rows_K = (first + known_R.nonzero()[:, 0]).to(row_dtype(table.rows))
    return [rows_K, *(tensor[known_R] for tensor in tensors)]
