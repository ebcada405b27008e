"""Tables of other libraries: state dicts of torch and TorchRec, by the names of their keys, and torch's fused quantized tables.

    library                                   keys                                          style
    nn.EmbeddingBag, nn.Embedding             <name>.weight, or weight alone                torch
    TorchRec EmbeddingBagCollection           <any>.embedding_bags.<table>.weight           torchrec
    TorchRec EmbeddingCollection              <any>.embeddings.<table>.weight               torchrec
    torch.ops.quantized.embedding_bag_*       as either, of type uint8: codes, scale, bias  fused

TorchRec need not be installed. Which matrices of a state dict with torch's names are tables nobody can see: name them.
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
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.rows.fused_quantized import FORMAT_OF_BITS, check_fused

Style = Literal["torch", "torchrec", "fused"]
_TORCHREC = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight")


def find_weights(state: Mapping[str, Any], tables: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The tables of a state dict by name."""
    found = {match[1]: value for key, value in state.items() if (match := _TORCHREC.fullmatch(key))}
    if not found:
        matrices = {key: v for key, v in state.items() if isinstance(v, Tensor) and v.dim() == 2 and _named(key)}
        if tables is None and len(matrices) > 1:
            raise BadInput(
                f"the state dict has {len(matrices)} matrices ({', '.join(list(matrices)[:4])}, ...), some perhaps of layers; "
                "say which are tables"
            )
        found = {_named(key): value for key, value in matrices.items()}
    if tables is not None:
        if missing := [name for name in tables if name not in found]:
            raise BadInput(f"the state dict has no table {missing[0]!r}; it has {', '.join(found) or 'none'}")
        found = {name: found[name] for name in tables}
    if not found:
        raise BadInput("the state dict has no table: no key ends in .weight and is a matrix")
    return {name: _whole(name, value) for name, value in found.items()}


def _named(key: str) -> str:
    """The name of a table by torch's convention; "" for what is none."""
    return "table" if key == "weight" else key.removesuffix(".weight") if key.endswith(".weight") else ""


def _whole(name: str, value: Any) -> Tensor:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, Tensor) or value.dim() != 2:
        raise BadInput(f"table {name!r} is a {type(value).__name__}; gather it to one tensor [rows, columns] first")
    return value


def import_tables(
    state: Mapping[str, Any], tables: Sequence[str] | None = None, bits: int | None = None, rows: RowConfig = RowConfig()
) -> EmbeddingCollection:
    """A collection with the tables of a state dict. `rows`: how rows are stored and trained.

    Fused tables (uint8) keep every bit, in an affine precision; `bits` says of how many their codes are.
    """
    weights = find_weights(state, tables)
    fused = {name for name, weight in weights.items() if weight.dtype == torch.uint8}
    if fused and bits is None:
        raise BadInput(f"table {sorted(fused)[0]!r} is of type uint8, a fused table; give the bits of its codes: 8, 4 or 2")
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
        raise BadInput(f"fused tables have 8, 4 or 2 bits a column, not {bits}")
    format = FORMAT_OF_BITS[bits]
    return Table(name, weight.shape[0], check_fused(weight.cpu(), format), row_config=RowConfig(F.NAMES[format]))


def key_of(table: str, style: Style) -> str:
    """Where other libraries look for a table."""
    return f"embedding_bags.{table}.weight" if style == "torchrec" else f"{table}.weight"


def export_tables(collection: EmbeddingCollection, style: Style = "torchrec") -> dict[str, Tensor]:
    """A state dict with the rows in fp32; with style "fused", of tables in an affine precision, in torch's fused form."""
    found: dict[str, Tensor] = {}
    for index, table in enumerate(collection.tables):
        fused = style == "fused"
        found[key_of(table.name, style)] = collection.arena.export_fused(index) if fused else collection.read_table(index)
    return found
