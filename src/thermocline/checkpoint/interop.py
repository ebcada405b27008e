"""Tables of other libraries: state dicts of torch and TorchRec, and torch's fused quantized tables.

    library                                   keys                                          style
    nn.EmbeddingBag, nn.Embedding             <name>.weight, or weight alone                torch
    TorchRec EmbeddingBagCollection           <any>.embedding_bags.<table>.weight           torchrec
    TorchRec EmbeddingCollection              <any>.embeddings.<table>.weight               torchrec
    torch.ops.quantized.embedding_bag_*       as either, of type uint8: codes, scale, bias  fused

TorchRec need not be installed. In a state dict with torch's names, tables look like any other matrix: name them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.ids.elastic_rows import refuse_export
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.rows.fused_quantized import FORMAT_OF_BITS, check_fused

Style = Literal["torch", "torchrec", "fused"]
_TORCHREC = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight")


def find_weights(state: Mapping[str, Any], tables: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Tables of a state dict, by name."""
    found = {match[1]: value for key, value in state.items() if (match := _TORCHREC.fullmatch(key))}
    if not found:
        matrices = {key: v for key, v in state.items() if isinstance(v, Tensor) and v.dim() == 2 and _named(key)}
        if tables is None and len(matrices) > 1:
            names = ", ".join(list(matrices)[:4]) + (", ..." if len(matrices) > 4 else "")
            some = f"{len(matrices)} matrices ({names}), perhaps of other layers"
            raise BadInput(
                f"the state dict has {some}; name the tables (--tables)", parameter="tables", matrices=list(matrices)
            )
        found = {_named(key): value for key, value in matrices.items()}
    if tables is not None:
        if missing := [name for name in tables if name not in found]:
            raise BadInput(f"the state dict has no table {missing[0]!r}; it has {', '.join(found) or 'none'}", table=missing[0])
        found = {name: found[name] for name in tables}
    if not found:
        raise BadInput("the state dict has no table: no matrix has a key that ends in .weight", parameter="state")
    return {name: _whole(name, value) for name, value in found.items()}


def _named(key: str) -> str:
    """The table name of a key by torch's convention; "" if the key is not a weight."""
    return "table" if key == "weight" else key.removesuffix(".weight") if key.endswith(".weight") else ""


def _whole(name: str, value: Any) -> Tensor:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, Tensor) or value.dim() != 2:
        raise BadInput(f"table {name!r} is a {type(value).__name__}; gather it to one tensor [rows, columns] first", table=name)
    return value


def import_tables(
    state: Mapping[str, Any], tables: Sequence[str] | None = None, bits: int | None = None, rows: RowConfig = RowConfig()
) -> EmbeddingCollection:
    """Make a collection with the tables of a state dict.

    Args:
        state: a state dict of torch or TorchRec.
        tables: names of the tables; needed if a state dict with torch's names has several matrices.
        bits: bits of fused tables (uint8), which keep every bit in an affine precision.
        rows: how rows are stored and trained.

    Returns:
        The collection, with a feature for each table.

    Raises:
        BadInput: no table is found, or `bits` is missing or unknown.

    Example:
        >>> collection = import_tables(model.state_dict(), rows=tc.RowConfig("int8"))
    """
    weights = find_weights(state, tables)
    fused = {name for name, weight in weights.items() if weight.dtype == torch.uint8}
    if fused and bits is None:
        raise BadInput(
            f"table {sorted(fused)[0]!r} is fused (uint8); give bits=8, 4 or 2", parameter="bits", table=sorted(fused)[0]
        )
    made = [_table(name, weight, bits if name in fused else None) for name, weight in weights.items()]
    collection = EmbeddingCollection(made, rows=rows)
    for index, (name, weight) in enumerate(weights.items()):
        if name in fused:
            collection.arena.import_fused(index, weight.cpu())
        else:
            collection.write_table(index, weight)
    return collection


def _table(name: str, weight: Tensor, bits: int | None) -> Table:
    if bits is None:
        return Table(name, weight.shape[0], weight.shape[1])
    if bits not in FORMAT_OF_BITS:
        raise BadInput(f"bits is {bits}; fused tables have 8, 4 or 2 bits for each column", parameter="bits", value=bits)
    format = FORMAT_OF_BITS[bits]
    return Table(name, weight.shape[0], check_fused(weight.cpu(), format), row_config=RowConfig(F.NAMES[format]))


def key_of(table: str, style: Style) -> str:
    """The key of a table in a state dict of another library."""
    return f"embedding_bags.{table}.weight" if style == "torchrec" else f"{table}.weight"


def export_tables(collection: EmbeddingCollection, style: Style = "torchrec") -> dict[str, Tensor]:
    """Make a state dict with the rows of a collection.

    Args:
        collection: the collection.
        style: key names: "torch" or "torchrec" with rows in fp32, or "fused" for tables in an affine precision, which keep
            every bit in torch's fused form.

    Returns:
        The rows of each table by key.

    Raises:
        BadInput: a table is not in an affine precision, with style "fused", or its ids are elastic.

    Example:
        >>> torchrec_model.load_state_dict(export_tables(collection), strict=False)
    """
    refuse_export(any(map.is_elastic for map in collection.id_maps.values()))
    read = collection.arena.export_fused if style == "fused" else collection.read_table
    return {key_of(table.name, style): read(index) for index, table in enumerate(collection.tables)}
