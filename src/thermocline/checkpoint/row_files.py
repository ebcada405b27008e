"""One table as plain tensors [rows, columns] of a safetensors file, written and read a block at a time.

precision           tensors                                                  value
fp32, fp16, bf16    NAME                                                     as it is
fp8, int8           NAME (F8_E4M3 or I8), and NAME_scale, fp32 [rows, 1]     code * scale of its row
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import BadInput
from thermocline.kernels import dequantize_rows, quantize_rows
from thermocline.nn.rows_module import RowsModule, blocks

from .format.tensor_files import TensorFile, TensorGroup, TensorInfo, write_file

_DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip
_PRECISIONS = {dtype: precision for precision, dtype in _DTYPES.items()}
SCALE = "_scale"


def export_rows(
    module: RowsModule, path: str | Path, *, table: str | None = None, name: str = "weight", precision: str = "bf16"
) -> None:
    """Write the rows of a table to a safetensors file as a plain matrix.

    Args:
        module: a collection, `EmbeddingBag` or `Embedding`.
        path: the new file.
        table: name of the table; by default the only one.
        name: name of the matrix in the file; that of scales is `name` + "_scale".
        precision: "fp32", "fp16", "bf16", or "fp8" or "int8" with a scale for each row. Rows are rounded to nearest.

    Raises:
        BadInput: the file exists, the precision is none of these, or the module is sharded.

    Example:
        >>> export_rows(memory.table, "ngrams.safetensors", precision="int8")
    """
    path, index = Path(path), _index(module, table)
    if path.exists():
        raise BadInput(f"'{path}' exists already; give a new name", parameter="path", value=path)
    if precision not in _DTYPES:
        raise BadInput(f"precision is {precision!r}; use one of {', '.join(_DTYPES)}", parameter="precision", value=precision)
    spec, format = module.arena.tables[index], F.NAMES.index(precision)
    scales: list[Tensor] = []

    def codes() -> Iterator[Tensor]:
        for first, last in blocks(spec.rows):
            values_ND = module.read_table(index, torch.arange(first, last, device=module.arena.device))
            codes_NB, meta_NW = quantize_rows(values_ND, format)
            scales.extend([meta_NW.view(torch.float32).cpu()] if F.META_WORDS[format] else [])
            yield codes_NB.view(_DTYPES[precision])

    infos = [TensorInfo(name, _DTYPES[precision], (spec.rows, spec.dim))]
    infos += [TensorInfo(name + SCALE, torch.float32, (spec.rows, 1))] if F.META_WORDS[format] else []
    write_file(path, [TensorGroup(infos, lambda: [codes(), scales][: len(infos)])])


def import_rows(
    module: RowsModule, path: str | Path, *, table: str | None = None, name: str | None = None,
    columns: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Set the rows of a table to a matrix of a safetensors file, rounded to the precision of the table.

    Args:
        module: a collection, `EmbeddingBag` or `Embedding` with the rows and columns of the matrix.
        path: the file.
        table: name of the table; by default the only one.
        name: name of the matrix in the file; by default the only one.
        columns: first column, and the one after the last, of a matrix that holds several tables side by side; by default all.

    Raises:
        BadInput: the file has no such matrix, or one of another shape, or the module is sharded.
        FormatError: the file is damaged.

    Example:
        >>> import_rows(memory.table, "ngrams.safetensors")
    """
    index, file = _index(module, table), TensorFile(Path(path))
    try:
        info = _matrix(file, name)
        spec, precision = module.arena.tables[index], _PRECISIONS[info.dtype]
        begin, end = (0, info.shape[1]) if columns is None else columns
        shape = (info.shape[0], end - begin)
        if shape != (spec.rows, spec.dim) or not 0 <= begin <= end <= info.shape[1]:
            part = "" if columns is None else f", of which columns {begin} to {end} are asked for"
            message = f"{info.name!r} is {info.shape}{part}, and table {spec.name!r} {(spec.rows, spec.dim)}; make them equal"
            parameter = "name" if columns is None else "columns"
            raise BadInput(message, parameter=parameter, value=shape, needed=(spec.rows, spec.dim))
        format = F.NAMES.index(precision)
        scaled = info.name + SCALE in file
        if precision == "int8" and not scaled:
            message = f"{info.name!r} is int8 without scales; add {info.name + SCALE!r}, fp32 [rows, 1]"
            raise BadInput(message, parameter="name", value=info.name)
        for first, last in blocks(spec.rows):
            codes_NB = file.read(info.name, first, last)[:, begin:end].contiguous().view(torch.uint8)
            scale_N1 = torch.ones(last - first, F.META_WORDS[format], dtype=torch.float32)
            if scaled:
                scale_N1 = file.read(info.name + SCALE, first, last).float().reshape(-1, 1)
            values_ND = dequantize_rows(codes_NB, scale_N1.view(torch.int32), format, spec.dim)
            module.write_table(index, values_ND, torch.arange(first, last))
    finally:
        file.close()


def _index(module: RowsModule, table: str | None) -> int:
    if isinstance(module, ShardedCollection):
        message = "the module is sharded, and a rank has part of the rows; save a checkpoint, and load it without a plan"
        raise BadInput(message, parameter="module")
    names = [spec.name for spec in module.arena.tables]
    if (table is None and len(names) > 1) or (table is not None and table not in names):
        raise BadInput(f"table is {table!r}; use one of {', '.join(names)}", parameter="table", value=table, available=names)
    return 0 if table is None else names.index(table)


def _matrix(file: TensorFile, name: str | None) -> TensorInfo:
    found = [file.info(each) for each in file.names()]
    matrices = {i.name: i for i in found if len(i.shape) == 2 and i.dtype in _PRECISIONS and not i.name.endswith(SCALE)}
    if name is None and len(matrices) == 1:
        return next(iter(matrices.values()))
    if name not in matrices:
        message = f"'{file.path}' has the matrices {', '.join(matrices) or 'none'}; name is {name!r}"
        raise BadInput(message, parameter="name", value=name, available=sorted(matrices))
    return matrices[name]
