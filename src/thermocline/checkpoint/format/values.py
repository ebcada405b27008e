"""The values of rows in a checkpoint, in fp32, whatever they are stored in: for `diff` and `convert`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.checkpoint.reader import Checkpoint, Shapes, block_rows
from thermocline.kernels import dequantize_rows
from thermocline.rows.precision import format_of

from .manifest import TableEntry


def values_of(checkpoint: Checkpoint, table: str) -> Iterator[tuple[int, Tensor]]:
    """All rows of a table in their order: first row, values."""
    entry = checkpoint.manifest.table(table)
    cached = checkpoint.cached(table)
    order = cached.rows_K.argsort()
    rows_K, values_KD = cached.rows_K[order], cached.values_KD[order]
    size = min(block_rows(entry, 0), (1 << 22) // entry.dim)
    numbers: dict[str, dict[int, Tensor]] = {precision: {} for precision in entry.precisions}
    for first in range(0, entry.rows, size):
        last = min(first + size, entry.rows)
        out_RD = torch.empty(last - first, entry.dim)
        for precision in entry.precisions:
            sections = [s for s in checkpoint.sections(table) if s.precision == precision]
            known_R, found = checkpoint.merge(sections, _shapes(entry, precision), first, last, numbers[precision])
            codes_KB = found["codes"][known_R]
            meta_KW = found["meta"][known_R] if "meta" in found else codes_KB.new_zeros((len(codes_KB), 0), dtype=torch.int32)
            out_RD[known_R] = dequantize_rows(codes_KB, meta_KW, format_of(precision), entry.dim)
        begin, end = torch.searchsorted(rows_K, torch.tensor([first, last])).tolist()
        out_RD[rows_K[begin:end] - first] = values_KD[begin:end]
        yield first, out_RD


def _shapes(table: TableEntry, precision: str) -> Shapes:
    format = format_of(precision)
    shapes: Shapes = {"codes": (torch.uint8, (F.row_bytes(format, table.dim),))}
    if words := F.META_WORDS[format]:
        shapes["meta"] = (torch.int32, (words,))
    return shapes
