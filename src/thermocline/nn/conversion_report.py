"""The report of `convert_` and `revert_`, and what it warns of: other holders of a weight, and tables of other kinds."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thermocline.rows.memory import times_smaller

from .embedding import Embedding, EmbeddingBag

_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has
_DEPTH, _ITEMS = 4, 10_000  # of lists and dicts that are searched


@dataclass(frozen=True)
class ConvertedTable:
    """One embedding of a converted model.

    Attributes:
        name: name of the module.
        rows: number of rows.
        dim: columns of a row.
        bytes_before: bytes of the weight before the conversion.
        bytes_after: bytes of rows and cache after it.
        skipped: why the embedding was not replaced; empty if it was.
        warnings: what to look at: a table that grew, or lists and optimizers that still hold the old weight.

    Example::

        [table.name for table in thermocline.convert_(model).tables if table.skipped or table.warnings]
    """

    name: str
    rows: int
    dim: int
    bytes_before: int
    bytes_after: int
    skipped: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConversionReport:
    """What `convert_` or `revert_` did, for `print`. Bytes are those of rows and cache, without optimizer state.

    Attributes:
        tables: the embeddings of the model.

    Example::

        report = thermocline.convert_(model)
        report.bytes_before / report.bytes_after  # times smaller
    """

    tables: tuple[ConvertedTable, ...]

    @property
    def bytes_before(self) -> int:
        return sum(table.bytes_before for table in self.tables)

    @property
    def bytes_after(self) -> int:
        return sum(table.bytes_after for table in self.tables)

    def to_dict(self) -> dict[str, Any]:
        totals = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        return {"tables": [asdict(table) for table in self.tables], **totals}

    def __str__(self) -> str:
        if not self.tables:
            return "nothing to convert: the model has no nn.EmbeddingBag and no nn.Embedding"
        lines = [("table", "rows", "dim", "bytes before", "after", "")]
        for t in self.tables:
            note = f"left alone: {t.skipped}" if t.skipped else times_smaller(t.bytes_before / t.bytes_after, 1)
            lines.append((t.name, f"{t.rows:,}", str(t.dim), f"{t.bytes_before:,}", f"{t.bytes_after:,}", note))
        lines.append(("all", "", "", f"{self.bytes_before:,}", f"{self.bytes_after:,}", ""))
        name, *numbers = (max(map(len, column)) for column in list(zip(*lines, strict=True))[:5])
        padded = ([line[0].ljust(name), *map(str.rjust, line[1:5], numbers), line[5]] for line in lines)
        names: dict[str, list[str]] = defaultdict(list)
        for t in self.tables:
            for warning in t.warnings:
                names[warning].append(t.name)
        warnings = [f"warning: {', '.join(tables)}: {warning}" for warning, tables in names.items()]
        return "\n".join(["  ".join(cells).rstrip() for cells in padded] + warnings)


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Keys of the memory of a tensor, which its views share, and of where it begins there; also on the meta device."""
    if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        return id(tensor), 0
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def other_holders(model: nn.Module) -> dict[int, list[str]]:
    """Who holds a weight or a view of it beside its module, by memory: attributes and buffers of modules, and optimizers."""
    found: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules():
        kept = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        for name, value in {**kept, **module._buffers}.items():
            for key in {memory_of(tensor)[0] for tensor in _tensors_in(value, _DEPTH)}:
                found[key].append(f"{path}.{name}".lstrip("."))
    for thing in gc.get_objects():
        if issubclass(type(thing), Optimizer):  # isinstance would wake up lazy proxies
            for group in getattr(thing, "param_groups", ()):
                for parameter in group["params"]:
                    found[memory_of(parameter)[0]].append(f"an optimizer ({type(thing).__name__})")
    return found


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (nn.Embedding, nn.EmbeddingBag)):
        yield value.weight
    elif isinstance(value, (list, tuple, set, Mapping)) and depth and len(value) <= _ITEMS:
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item, depth - 1)


def table_warnings(bytes_before: int, bytes_after: int, holders: list[str]) -> tuple[str, ...]:
    """What to look at in a converted table."""
    grew = f"grew from {bytes_before:,} to {bytes_after:,} bytes; use RowConfig('fp32') for it, or leave it out with filter="
    way = "make it again; an L2 penalty becomes weight_decay of the rows' optimizer"
    held = (f"{holder} holds the old weight, which no longer changes the rows: {way}" for holder in holders)
    return (*([grew] if bytes_after > bytes_before else []), *held)


def other_tables(model: nn.Module) -> list[ConvertedTable]:
    """Tables that `convert_` does not replace: those of this package, and 2-D parameters of other embedding modules."""
    lines = []
    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, (Embedding, EmbeddingBag)):
            size, reason = module.arena.memory().total, "converted already; revert_ gives torch's module back"
            lines.append(ConvertedTable(path, module.num_embeddings, module.embedding_dim, size, size, reason))
        elif "embed" in kind.lower() and not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            for name, weight in module.named_parameters(path, recurse=False):
                if weight.dim() == 2:
                    size, reason = weight.numel() * weight.element_size(), f"a parameter of {kind}, which is no nn.Embedding"
                    lines.append(ConvertedTable(name, weight.shape[0], weight.shape[1], size, size, reason))
    return lines
