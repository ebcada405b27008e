"""Replace the embeddings of an existing model, in place and one at a time, so that no more than one table is held twice.

Only torch's own `nn.EmbeddingBag` and `nn.Embedding` are replaced: a subclass may do anything in forward. A weight that the
model uses elsewhere too (a tied output layer) has to stay a tensor, so its embedding stays as it is. The report says what
became of every embedding.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from thermocline.errors import BadInput
from thermocline.formats import MAX_DIM
from thermocline.kernels.checks import largest
from thermocline.rows.memory import times_smaller
from thermocline.rows.precision import format_of

from .config import AUTO, Shape, Storage, choose_tiers
from .embedding import Embedding, EmbeddingBag
from .precision_tiers import Precision
from .rows_module import RowsModule


@dataclass(frozen=True)
class Converted:
    """One embedding of the model. `skipped`: why it was left alone, empty where it was replaced."""

    name: str
    rows: int
    dim: int
    bytes_before: int
    bytes_after: int
    skipped: str = ""


@dataclass(frozen=True)
class Report:
    """What `convert_` did. Bytes are those of rows and cache, without optimizer state."""

    tables: tuple[Converted, ...]

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
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        both = zip(lines, padded, strict=True)
        return "\n".join("  ".join([line[0].ljust(widths[0]), *cells[1:5], line[5]]).rstrip() for line, cells in both)


def convert_(
    model: nn.Module,
    precision: Precision = "int8",
    cache: float | int | str | None = None,
    filter: Callable[[str, nn.Module], bool] | None = None,
    **keywords: Any,
) -> Report:
    """Replace every `nn.EmbeddingBag` and `nn.Embedding` of a model by ours, with the same rows, and report on each.

    `filter(name, module)` decides which (default: all). `keywords` are those of `thermocline.EmbeddingBag`: optimizer, update,
    policy and so on; a `budget` is for all tables together. Make optimizers of the dense part afterwards: one made before keeps
    the old tables in memory.
    """
    _check_call(model, filter)
    users: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users[id(parameter)].add((id(module), name))
    found = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (nn.EmbeddingBag, nn.Embedding))
    ]
    reasons: dict[int, str] = {}
    for name, module in found:
        if id(module) not in reasons:
            reason = _reason_to_skip(module, len(users[id(module.weight)]) > 1)
            reasons[id(module)] = reason or ("" if filter is None or filter(name, module) else "the filter")
    wanted = {id(module): module.weight.shape for _, module in found if not reasons[id(module)]}
    if precision == AUTO and wanted:
        storage = Storage(AUTO, cache, budget=keywords.pop("budget", None))
        precision = choose_tiers([Shape(rows, dim, AUTO) for rows, dim in wanted.values()], storage)[0].precision
    given = {"precision": precision, "cache": cache, **keywords}
    for name, module in found:
        if not reasons[id(module)]:
            _check(name, module, given)
    report: list[Converted] = []
    done: dict[int, nn.Module] = {}
    for name, module in found:
        if id(module) not in done:
            reason = reasons[id(module)]
            done[id(module)] = module if reason else _replacement(name, module, given)
            report.append(_line(name, module, done[id(module)], reason))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, done[id(module)])
    return Report(tuple(report))


def _reason_to_skip(module: nn.EmbeddingBag | nn.Embedding, tied: bool) -> str:
    if type(module) not in (nn.EmbeddingBag, nn.Embedding):
        return f"a subclass, {type(module).__name__}"
    if tied:
        return "its weight is used elsewhere too (tied)"
    if module.max_norm is not None or module.scale_grad_by_freq:
        return "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
    if not 1 <= module.embedding_dim <= MAX_DIM:
        return f"rows of {module.embedding_dim} columns; ours have 1 to {MAX_DIM}"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "it has hooks"
    return ""


def _check_call(model: Any, filter: Any) -> None:
    if isinstance(model, (nn.EmbeddingBag, nn.Embedding)):
        raise BadInput("the model itself is an embedding, so there is nothing to replace it in; use from_pretrained instead")
    if not isinstance(model, nn.Module):
        raise BadInput(f"model is a {type(model).__name__}; give a torch.nn.Module, whose embeddings are replaced in place")
    if not (filter is None or callable(filter)):
        raise BadInput(f"filter is {filter!r}; give a function of a name and a module, as in lambda name, _: 'user' in name")


def _check(name: str, module: nn.EmbeddingBag | nn.Embedding, given: dict[str, Any]) -> None:
    """Refuse, before any embedding is replaced, what would stop half way: keywords that do not suit a table, and its rows."""
    weight = module.weight.detach()
    kind, arguments = _wanted(module, given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again with the table itself
            table = kind(*weight.shape, **{**arguments, "device": "meta"}).arena.tables[0]
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from None
    limit = largest(format_of(table.precision))
    if weight.device.type == "meta" or all(bound.abs() <= limit for bound in weight.aminmax()):
        return
    if all(bound.isfinite() for bound in weight.aminmax()):
        why = f"values of which {table.precision} holds at most {limit:g} in size; take another precision"
    else:
        why = "NaN or Inf; rows must be finite. Mend it"
    raise BadInput(f"{name}: its weight holds {why}, or leave it out with filter=")


def _wanted(
    module: nn.EmbeddingBag | nn.Embedding, given: dict[str, Any]
) -> tuple[type[EmbeddingBag] | type[Embedding], dict[str, Any]]:
    """What an embedding becomes, and with which keywords."""
    given = {"padding_idx": module.padding_idx, **given}
    if isinstance(module, nn.EmbeddingBag):
        return EmbeddingBag, {**given, "mode": module.mode, "include_last_offset": module.include_last_offset}
    return Embedding, given


def _replacement(name: str, module: nn.EmbeddingBag | nn.Embedding, given: dict[str, Any]) -> RowsModule:
    kind, arguments = _wanted(module, given)
    new = kind.from_pretrained(module.weight, not module.weight.requires_grad, **arguments)
    new.arena.rename([name])  # so that errors say which of them it was
    return new.train(module.training)


def _line(name: str, old: nn.EmbeddingBag | nn.Embedding, new: nn.Module, reason: str) -> Converted:
    before = old.weight.numel() * old.weight.element_size()
    after = new.arena.memory().total if isinstance(new, RowsModule) else before
    return Converted(name, old.num_embeddings, old.embedding_dim, before, after, reason)
