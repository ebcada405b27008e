"""`convert`: from one file format to another.

    from                          to
    a checkpoint                  a checkpoint in another precision, without dense optimizers
    a checkpoint                  a safetensors file: state dict for torch or TorchRec, or fused quantized tables
    a safetensors file            a checkpoint of one collection

Pickles (.pt, .pth) are refused: load them where you trust them, and pass the state dict to `interop.import_tables`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from thermocline.errors import BadInput
from thermocline.ids.elastic_rows import refuse_export
from thermocline.nn.config import RowConfig
from thermocline.nn.precision_tiers import Precision
from thermocline.rows.fused_quantized import check_format, export_fused
from thermocline.rows.precision import bytes_per_row, format_of

from .format.module_entries import build, find_modules
from .format.tensor_files import TensorFile, TensorGroup, TensorInfo, write_file
from .interop import Style, import_tables, key_of
from .reader import Checkpoint
from .restore import restore_module
from .save_job import save


def convert(
    source: str | Path, target: str | Path, precision: Precision | None = None, style: Style = "torchrec",
    tables: Sequence[str] | None = None, bits: int | None = None,
) -> None:  # fmt: skip
    """Convert a checkpoint or a safetensors file.

    Args:
        source: a checkpoint folder, or a safetensors file with a state dict.
        target: a new folder, or a new file that ends in .safetensors.
        precision: precision of a checkpoint that is written.
        style: key names of a state dict that is written: "torch", "torchrec" or "fused".
        tables: names of the tables in a state dict that is read.
        bits: bits of fused quantized tables in a state dict that is read.

    Raises:
        BadInput: the source is a pickle, the target exists, or the tables cannot be identified.
        FormatError: the source is damaged.

    Example:
        >>> convert("checkpoint", "tables.safetensors", style="torchrec")
    """
    source, target = Path(source), Path(target)
    if source.suffix in (".pt", ".pth", ".bin", ".pkl"):
        raise BadInput(
            f"'{source}' is a pickle, and opening it can run code; write its tensors with safetensors first",
            parameter="source", value=source,
        )  # fmt: skip
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise BadInput(f"'{target}' exists already; give a new name", parameter="target", value=target)
    if source.is_file():
        file = TensorFile(source)
        state = {name: file.read(name) for name in file.names()}
        save(import_tables(state, tables, bits, RowConfig() if precision is None else RowConfig(precision)), target)
    elif target.suffix == ".safetensors":
        _export(Checkpoint.open(source), target, style)
    else:
        save(_model(Checkpoint.open(source), precision), target)


def _model(checkpoint: Checkpoint, precision: Precision | None) -> nn.Module:
    """All modules and dense tensors of a checkpoint, under their names in plain `nn.Module`s."""
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
    for found in find_modules(model):
        restore_module(checkpoint, manifest.module(found.name), found)
    for name, tensor in checkpoint.dense().items():
        parent, own = _parent(model, name)
        parent.register_buffer(own, tensor)
    return model


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The parent module of a dotted name, created if missing, and the last part of the name."""
    *path, own = name.split(".")
    for part in path:
        if not hasattr(model, part):
            model.add_module(part, nn.Module())
        model = getattr(model, part)
    return model, own


def _export(checkpoint: Checkpoint, target: Path, style: Style) -> None:
    refuse_export(any(map.is_elastic for map in checkpoint.id_maps.values()))
    checkpoint.verify()
    groups: list[TensorGroup] = []
    for table in checkpoint.manifest.tables:
        dtype, width = torch.float32, table.dim
        if style == "fused":
            check_format(format_of(table.precision))
            dtype, width = torch.uint8, bytes_per_row(table.precision, table.dim)
        entry = TensorInfo(key_of(table.name, style), dtype, (table.rows, width))
        groups.append(TensorGroup([entry], partial(_rows, checkpoint, table.name, style)))
    write_file(target, groups)


def _rows(checkpoint: Checkpoint, table: str, style: Style) -> list[Iterator[Tensor]]:
    """A table, read in blocks while it is written."""
    if style != "fused":
        return [(values_RD for _, values_RD in checkpoint.values(table))]
    if len(checkpoint.cached(table).rows_K):
        raise BadInput(
            f"table {table!r} has cached rows in full precision, which fused tables cannot hold; flush it before saving",
            table=table,
        )
    dim = checkpoint.manifest.table(table).dim
    return [(export_fused(b.codes_RB, b.meta_RW, format_of(b.precision), dim) for b in checkpoint.blocks(table))]
