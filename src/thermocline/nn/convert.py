"""`convert_`: replace the embeddings of a model in place, one at a time, so that at most one table is held twice.

Subclasses of torch's embeddings are not replaced, because their forward may differ. Embeddings whose weight the model uses
elsewhere (a tied output layer) are not replaced either, because that weight has to stay a tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from thermocline.errors import BadInput
from thermocline.formats import MAX_DIM
from thermocline.kernels.checks import largest
from thermocline.rows.memory import times_smaller
from thermocline.rows.precision import format_of

from .config import AUTO, RowConfig, TableRequest, TorchArguments, check_rows, choose_tiers, read_torch_arguments
from .embedding import Embedding, EmbeddingBag
from .rows_module import RowsModule

if TYPE_CHECKING:
    from typing_extensions import Unpack

Found: TypeAlias = "Sequence[tuple[str, nn.EmbeddingBag | nn.Embedding]]"


@dataclass(frozen=True)
class ConvertedTable:
    """One embedding of the model; `skipped` says why it was not replaced."""

    name: str
    rows: int
    dim: int
    bytes_before: int
    bytes_after: int
    skipped: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """What `convert_` did. Bytes are those of rows and cache, without optimizer state."""

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
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        both = zip(lines, padded, strict=True)
        return "\n".join("  ".join([line[0].ljust(widths[0]), *cells[1:5], line[5]]).rstrip() for line, cells in both)


def convert_(
    model: nn.Module,
    rows: RowConfig | Mapping[str, RowConfig] = RowConfig(),
    filter: Callable[[str, nn.Module], bool] | None = None,
    **torch_arguments: Unpack[TorchArguments],
) -> ConversionReport:
    """Replace the `nn.EmbeddingBag` and `nn.Embedding` modules of a model in place, with the same rows.

    Make optimizers of the dense part afterwards: an optimizer made before keeps the old tables in memory.

    Args:
        model: the model.
        rows: how rows are stored and trained; or a mapping from patterns of module names (`fnmatch`, the first match counts)
            to configs. Embeddings that match no pattern stay as they are. A `budget` is for all tables of its config together.
        filter: `filter(name, module)` says which embeddings to replace (default: all).
        torch_arguments: `device` of the new tables, and `dtype` of their output; by default those of the old.

    Returns:
        What became of each embedding, in bytes.

    Raises:
        BadInput: a pattern matches no embedding, or a table does not suit its config. The model is unchanged then.

    Example::

        thermocline.convert_(model, thermocline.RowConfig("int8", cache=0.05))
        thermocline.convert_(model, {"items*": thermocline.RowConfig("int4"), "shop": thermocline.RowConfig("fp32")})
    """
    read_torch_arguments("convert_", torch_arguments)
    _check_call(model, filter)
    found = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (nn.EmbeddingBag, nn.Embedding))
    ]
    config_of = _configs(rows, [name for name, _ in found])
    reasons = _reasons_to_skip(model, found, config_of, filter)
    configs = _resolve_budgets({id(m): (m, config_of[n]) for n, m in found if not reasons[id(m)]})
    for name, module in found:
        if not reasons[id(module)]:
            _check(name, module, configs[id(module)])
    report: list[ConvertedTable] = []
    done: dict[int, nn.Module] = {}
    for name, module in found:
        if id(module) not in done:
            reason = reasons[id(module)]
            done[id(module)] = module if reason else _replacement(name, module, configs[id(module)], torch_arguments)
            report.append(_line(name, module, done[id(module)], reason))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, done[id(module)])
    return ConversionReport(tuple(report))


def _configs(rows: RowConfig | Mapping[str, RowConfig], names: Sequence[str]) -> dict[str, RowConfig | None]:
    """The config of each embedding, by module name; None where no pattern matches."""
    if not isinstance(rows, Mapping):
        check_rows(rows)
        return dict.fromkeys(names, rows)
    for pattern, config in rows.items():
        check_rows(config)
        if not any(fnmatchcase(name, pattern) for name in names):
            raise BadInput(
                f"pattern {pattern!r} matches no embedding; the model has {', '.join(names) or 'none'}",
                parameter="rows", value=pattern, names=tuple(names),
            )  # fmt: skip
    return {name: next((rows[pattern] for pattern in rows if fnmatchcase(name, pattern)), None) for name in names}


def _reasons_to_skip(
    model: nn.Module, found: Found, config_of: Mapping[str, RowConfig | None], filter: Callable[[str, nn.Module], bool] | None
) -> dict[int, str]:
    """Why an embedding stays as it is, by the id of the module; empty where it is replaced."""
    users: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users[id(parameter)].add((id(module), name))
    reasons: dict[int, str] = {}
    for name, embedding in found:
        if id(embedding) not in reasons:
            reason = _reason_to_skip(embedding, len(users[id(embedding.weight)]) > 1)
            reason = reason or ("no pattern matches" if config_of[name] is None else "")
            reasons[id(embedding)] = reason or ("" if filter is None or filter(name, embedding) else "the filter")
    return reasons


def _resolve_budgets(wanted: Mapping[int, tuple[nn.EmbeddingBag | nn.Embedding, RowConfig | None]]) -> dict[int, RowConfig]:
    """Configs in which "auto" is replaced by the tiers that all tables of that config get from its budget."""
    configs: dict[int, RowConfig] = {}
    for at, (_, rows) in wanted.items():
        assert rows is not None
        if rows.precision == AUTO:
            shapes = [TableRequest(m.num_embeddings, m.embedding_dim, AUTO) for m, each in wanted.values() if each is rows]
            rows = replace(rows, precision=choose_tiers(shapes, rows)[0].precision, budget=None)
        configs[at] = rows
    return configs


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
        raise BadInput("the model itself is an embedding, which has no parent module; use from_pretrained", parameter="model")
    if not isinstance(model, nn.Module):
        raise BadInput(f"model is a {type(model).__name__}; use a torch.nn.Module", parameter="model")
    if not (filter is None or callable(filter)):
        raise BadInput(
            f"filter is {filter!r}; use a function of name and module, as in lambda name, _: 'user' in name", parameter="filter"
        )


def _check(name: str, module: nn.EmbeddingBag | nn.Embedding, rows: RowConfig) -> None:
    """Raise, before any embedding is replaced, if a table does not suit its config."""
    weight = module.weight.detach()
    kind, arguments = _wanted(module, rows)
    try:
        table = kind(*weight.shape, device="meta", **arguments).arena.tables[0]
    except BadInput as error:
        raise BadInput(f"{name}: {error}", **{**vars(error), "module": name}) from None
    limit = largest(format_of(table.precision))
    if weight.device.type == "meta" or all(bound.abs() <= limit for bound in weight.aminmax()):
        return
    if all(bound.isfinite() for bound in weight.aminmax()):
        why = f"values beyond {limit:g}, the largest that {table.precision} holds; use another precision"
    else:
        why = "NaN or Inf; set finite values"
    raise BadInput(f"{name}: its weight holds {why}, or leave it out with filter=", module=name)


def _wanted(
    module: nn.EmbeddingBag | nn.Embedding, rows: RowConfig
) -> tuple[type[EmbeddingBag] | type[Embedding], dict[str, Any]]:
    """The class that replaces an embedding, and its keyword arguments."""
    arguments = {"padding_idx": module.padding_idx, "rows": rows}
    if isinstance(module, nn.EmbeddingBag):
        return EmbeddingBag, {**arguments, "mode": module.mode, "include_last_offset": module.include_last_offset}
    return Embedding, arguments


def _replacement(name: str, module: nn.EmbeddingBag | nn.Embedding, rows: RowConfig, given: TorchArguments) -> RowsModule:
    kind, arguments = _wanted(module, rows)
    new = kind.from_pretrained(module.weight, not module.weight.requires_grad, **arguments, **given)
    new.arena.rename([name])  # for error messages
    return new.train(module.training)


def _line(name: str, old: nn.EmbeddingBag | nn.Embedding, new: nn.Module, reason: str) -> ConvertedTable:
    before = old.weight.numel() * old.weight.element_size()
    after = new.arena.memory().total if isinstance(new, RowsModule) else before
    return ConvertedTable(name, old.num_embeddings, old.embedding_dim, before, after, reason)
