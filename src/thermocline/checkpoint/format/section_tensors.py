"""Tensors of a section: their types and shapes, as a manifest implies them and as a file must have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thermocline import formats as F
from thermocline.rows.precision import format_of

from .manifest import Section, TableEntry
from .tensor_files import TensorFile, damaged

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # of a section's tensors, without the row dimension


def row_dtype(rows: int) -> torch.dtype:
    """Type of row numbers in files."""
    return torch.int32 if rows <= 1 << 31 else torch.int64


def section_shapes(precision: str, dim: int, states: Sequence[tuple[int, ...]] = ()) -> Shapes:
    """Tensors of a section in file order, without row numbers: optimizer states of these shapes, meta words, codes."""
    format = format_of(precision)
    shapes: Shapes = {f"state{n}": (torch.float32, shape) for n, shape in enumerate(states)}
    if words := F.META_WORDS[format]:
        shapes["meta"] = (torch.int32, (words,))
    return shapes | {"codes": (torch.uint8, (F.row_bytes(format, dim),))}


def section_names(section: Section, table: TableEntry, states: Sequence[tuple[int, ...]], file: TensorFile) -> list[str]:
    """Names of the tensors of a section. Raises `FormatError` if the file has others than the manifest implies."""
    shapes = section_shapes(section.precision, table.dim, states)
    if section.scattered:
        shapes["rows"] = row_dtype(table.rows), ()
    for name, (dtype, shape) in shapes.items():
        found, wanted = file.info(f"{section.key}/{name}"), (dtype, (section.count, *shape))
        if found[1:] != wanted:
            raise damaged(file.path, f"tensor {found.name!r} is {found[1:]}, and {wanted} in the manifest")
    return [f"{section.key}/{name}" for name in shapes]
