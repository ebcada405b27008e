"""From one kind of file to another, for `thermocline checkpoint convert`.

    from                          to
    a checkpoint                  a checkpoint in another precision, without the optimizers of its dense part
    a checkpoint                  a safetensors file with a state dict for torch or TorchRec, or of fused tables
    a safetensors file            a checkpoint of one collection

Pickles (.pt, .pth) are refused: load them where you trust them, and give the state dict to `exchange.import_tables`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.nn.config import RowConfig
from thermocline.nn.precision_tiers import Precision
from thermocline.rows.fused_quantized import check_format, export_fused
from thermocline.rows.precision import format_of

from .format.folder import resolve
from .format.module_entries import build, find
from .format.tensor_files import Entry, Lot, TensorFile, write_file
from .format.values import values_of
from .interop import Style, import_tables, key_of
from .reader import Checkpoint
from .restore import fill
from .save import save

_SUFFIX = ".safetensors"


def convert(
    source: str | Path, target: str | Path, precision: Precision | None = None, style: Style = "torchrec",
    tables: Sequence[str] | None = None, bits: int | None = None,
) -> None:  # fmt: skip
    """`precision`: of a checkpoint that is written, `style`: of a state dict; `tables`, `bits`: of one that is read."""
    source, target = Path(source), Path(target)
    if source.suffix in (".pt", ".pth", ".bin", ".pkl"):
        raise BadInput(f"'{source}' is a pickle, which runs code when it is opened; write its tensors with safetensors first")
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise BadInput(f"'{target}' exists already; give a new name")
    if source.is_file():
        file = TensorFile(source)
        state = {name: file.read(name) for name in file.names()}
        save(import_tables(state, tables, bits, RowConfig() if precision is None else RowConfig(precision)), target)
    elif target.suffix == _SUFFIX:
        _export(Checkpoint.open(source), target, style)
    else:
        save(_opened(Checkpoint.open(resolve(source)), precision), target)


def _opened(checkpoint: Checkpoint, precision: Precision | None) -> nn.Module:
    """All modules and dense tensors of a checkpoint, under their names in modules of no class of their own."""
    checkpoint.verify()
    manifest = checkpoint.manifest
    model = nn.Module()
    for entry in manifest.modules:
        tables = [table for table in manifest.tables if table.module == entry.name]
        module = build(entry, tables, checkpoint.id_maps, None, precision)
        if not entry.name:
            model = module
            continue
        parent, own = _parent(model, entry.name)
        parent.add_module(own, module)
    for found in find(model):
        fill(checkpoint, manifest.module(found.name), found)
    for name, tensor in checkpoint.named("model/").items():
        parent, own = _parent(model, name)
        parent.register_buffer(own, tensor)
    return model


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that something lies in, made where there is none yet, and its own name there."""
    *path, own = name.split(".")
    for part in path:
        if not hasattr(model, part):
            model.add_module(part, nn.Module())
        model = getattr(model, part)
    return model, own


def _export(checkpoint: Checkpoint, target: Path, style: Style) -> None:
    checkpoint.verify()
    lots: list[Lot] = []
    for table in checkpoint.manifest.tables:
        if style == "fused":
            format = format_of(table.precision)
            check_format(format)
            width = F.row_bytes(format, table.dim) + 4 * F.META_WORDS[format]
            entry = Entry(key_of(table.name, style), torch.uint8, (table.rows, width))
        else:
            entry = Entry(key_of(table.name, style), torch.float32, (table.rows, table.dim))
        lots.append(([entry], partial(_rows, checkpoint, table.name, style)))
    write_file(target, lots)


def _rows(checkpoint: Checkpoint, table: str, style: Style) -> list[Iterator[Tensor]]:
    """A table, read as it is written."""
    if style != "fused":
        return [(values_RD for _, values_RD in values_of(checkpoint, table))]
    if len(checkpoint.cached(table).rows_K):
        raise BadInput(
            f"rows of table {table!r} are in the cache in full precision, and fused tables have no place for them; flush the "
            "module before it is saved"
        )
    dim = checkpoint.manifest.table(table).dim
    return [(export_fused(b.codes_RB, b.meta_RW, format_of(b.precision), dim) for b in checkpoint.blocks(table))]
