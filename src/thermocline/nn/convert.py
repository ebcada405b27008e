"""`convert_` replaces the embeddings of a model, `revert_` gives torch's modules back. At most one table is held twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from thermocline.errors import BadInput
from thermocline.formats import MAX_DIM
from thermocline.ids.idmap import IdMap
from thermocline.kernels.checks import largest
from thermocline.rows.precision import format_of

from .config import AUTO, RowConfig, TableRequest, TorchArguments, check_rows, choose_tiers, read_torch_arguments
from .conversion_report import ConversionReport, ConvertedTable, memory_of, other_holders, other_tables, table_warnings
from .embedding import Embedding, EmbeddingBag
from .interop.huggingface import add_methods, remove_methods
from .rows_module import RowsModule

if TYPE_CHECKING:
    from typing_extensions import Unpack

Found: TypeAlias = "Sequence[tuple[str, nn.EmbeddingBag | nn.Embedding]]"


def convert_(
    model: nn.Module,
    rows: RowConfig | Mapping[str, RowConfig] = RowConfig(),
    filter: Callable[[str, nn.Module], bool] | None = None,
    *,
    ids: Mapping[str, IdMap] | None = None,
    **torch_arguments: Unpack[TorchArguments],
) -> ConversionReport:
    """Replace the `nn.EmbeddingBag` and `nn.Embedding` modules of a model in place, with the same rows.

    Make optimizers of the dense part afterwards: an optimizer made before keeps the old tables in memory. Subclasses of torch's
    modules, tied weights, and modules with hooks, `max_norm` or `scale_grad_by_freq` are left as they are.

    Args:
        model: the model.
        rows: how rows are stored and trained; or a mapping from patterns of module names (`fnmatch`, the first match counts)
            to configs. Embeddings that match no pattern stay as they are. A `budget` is for all tables of its config together.
        filter: `filter(name, module)` says which embeddings to replace (default: all).
        ids: elastic maps by patterns of module names. Such a table has the rows of its map and begins anew, because its old
            rows belong to other ids.
        torch_arguments: `device` of the new tables, and `dtype` of their output; by default those of the old.

    Returns:
        A report of each embedding, with its bytes and warnings: it grew, or lists and optimizers hold its old weight. It also
        lists tables that were converted before, and 2-D parameters of embedding modules of other kinds.

    Raises:
        BadInput: a pattern matches no embedding, a map is not elastic, or a table does not suit its config. The model is
            unchanged then.

    Example::

        thermocline.convert_(model, thermocline.RowConfig("int8", cache=0.05))
        thermocline.convert_(model, {"items*": thermocline.RowConfig("int4"), "shop": thermocline.RowConfig("fp32")})
    """
    read_torch_arguments("convert_", torch_arguments)
    _check_call(model, filter)
    modules = model.named_modules(remove_duplicate=False)
    found = [(name, module) for name, module in modules if isinstance(module, (nn.EmbeddingBag, nn.Embedding))]
    config_of, maps = _configs(rows, [name for name, _ in found]), _elastic_maps(ids or {}, found)
    reasons = _reasons_to_skip(model, found, config_of, filter)
    configs = _resolve_budgets({id(m): (m, config_of[n]) for n, m in found if not reasons[id(m)]}, maps)
    for name, module in found:
        if not reasons[id(module)]:
            _check(name, module, configs[id(module)], maps.get(id(module)))
    report: list[ConvertedTable] = []
    others, holders = other_tables(model), other_holders(model)
    done: dict[int, nn.Module] = {}
    for name, module in found:
        if id(module) not in done:
            reason = reasons[id(module)]
            config, map = configs.get(id(module)), maps.get(id(module))
            done[id(module)] = module if config is None else _replacement(name, module, config, map, torch_arguments)
            report.append(_line(name, module, done[id(module)], reason, holders[memory_of(module.weight)[0]]))
        put_module(model, name, done[id(module)])
    add_methods(model)
    return ConversionReport((*report, *others))


def put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule of this name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _configs(rows: RowConfig | Mapping[str, RowConfig], names: Sequence[str]) -> dict[str, RowConfig | None]:
    """The config of each embedding, by module name; None where no pattern matches."""
    if not isinstance(rows, Mapping):
        check_rows(rows)
        return dict.fromkeys(names, rows)
    for pattern, config in rows.items():
        check_rows(config)
        if not any(fnmatchcase(name, pattern) for name in names):
            message = f"pattern {pattern!r} matches no embedding; the model has {', '.join(names) or 'none'}"
            raise BadInput(message, parameter="rows", value=pattern, names=tuple(names))
    return {name: next((rows[pattern] for pattern in rows if fnmatchcase(name, pattern)), None) for name in names}


def _elastic_maps(ids: Mapping[str, IdMap], found: Found) -> dict[int, IdMap]:
    """The map of each embedding that gets one, by the id of the module."""
    names = [name for name, _ in found]
    for pattern, map in dict[str, Any](ids).items():
        if not any(fnmatchcase(name, pattern) for name in names) or not (isinstance(map, IdMap) and map.is_elastic):
            message = f"ids has {pattern!r}: {map}; use an IdMap.elastic for a pattern of {', '.join(names) or 'no embeddings'}"
            raise BadInput(message, parameter="ids", value=pattern, names=tuple(names))
    pairs = [(id(module), next((ids[p] for p in ids if fnmatchcase(name, p)), None)) for name, module in found]
    return {key: map for key, map in pairs if map is not None}


def _reasons_to_skip(
    model: nn.Module, found: Found, config_of: Mapping[str, RowConfig | None], filter: Callable[[str, nn.Module], bool] | None
) -> dict[int, str]:
    """Why embeddings are not replaced, by the id of the module; empty for those that are."""
    users: dict[tuple[int, int], set[tuple[int, str]]] = defaultdict(set)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users[memory_of(parameter)].add((id(module), name))
    reasons: dict[int, str] = {}
    for name, m in found:
        if id(m) in reasons:
            continue
        known = {
            f"a subclass, {type(m).__name__}": type(m) not in (nn.EmbeddingBag, nn.Embedding),  # forward may differ
            "its weight is used elsewhere too (tied)": len(users[memory_of(m.weight)]) > 1,
            "max_norm": m.max_norm is not None,
            "scale_grad_by_freq": m.scale_grad_by_freq,
            f"rows of {m.embedding_dim} columns; ours have 1 to {MAX_DIM}": not 1 <= m.embedding_dim <= MAX_DIM,
            "it has hooks": m._forward_hooks or m._forward_pre_hooks or m._backward_hooks,
            "no pattern matches": config_of[name] is None,
        }
        reason = next((reason for reason, holds in known.items() if holds), "")
        reasons[id(m)] = reason or ("" if filter is None or filter(name, m) else "the filter")
    return reasons


def _resolve_budgets(
    wanted: Mapping[int, tuple[nn.EmbeddingBag | nn.Embedding, RowConfig | None]], maps: Mapping[int, IdMap]
) -> dict[int, RowConfig]:
    """Configs with the tiers of their budget in place of "auto"; all tables of a config share its budget."""
    configs: dict[int, RowConfig] = {}
    for at, (_, rows) in wanted.items():
        assert rows is not None
        if rows.precision == AUTO:
            same = [(key, m) for key, (m, each) in wanted.items() if each is rows]
            shapes = [TableRequest(_shape(m, maps.get(key))[0], m.embedding_dim, AUTO) for key, m in same]
            rows = replace(rows, precision=choose_tiers(shapes, rows)[0].precision, budget=None)
        configs[at] = rows
    return configs


def _check_call(model: Any, filter: Any) -> None:
    if isinstance(model, (nn.EmbeddingBag, nn.Embedding)) or not isinstance(model, nn.Module):
        way = "use from_pretrained" if isinstance(model, nn.Module) else "use a torch.nn.Module that has embeddings"
        raise BadInput(f"model is a {type(model).__name__}; {way}", parameter="model", value=type(model).__name__)
    if not (filter is None or callable(filter)):
        message = f"filter is {filter!r}; use a function of name and module, as in lambda name, _: 'user' in name"
        raise BadInput(message, parameter="filter", value=filter)


def _shape(module: nn.EmbeddingBag | nn.Embedding, map: IdMap | None) -> tuple[int, int]:
    return module.num_embeddings if map is None else map.rows, module.embedding_dim


def _check(name: str, module: nn.EmbeddingBag | nn.Embedding, rows: RowConfig, map: IdMap | None) -> None:
    """Raise, before any embedding is replaced, if a table does not suit its config."""
    weight = module.weight.detach()
    kind, arguments = _wanted(module, rows, map)
    try:
        table = kind(*_shape(module, map), device="meta", **arguments).arena.tables[0]
    except BadInput as error:
        raise BadInput(f"{name}: {error}", **{**vars(error), "module": name}) from None
    limit = largest(format_of(table.precision))
    if map is not None or weight.device.type == "meta" or all(bound.abs() <= limit for bound in weight.aminmax()):
        return
    bounds = [float(bound) for bound in weight.aminmax()]
    message = f"{name}: its weight runs from {bounds[0]:g} to {bounds[1]:g}, {table.precision} holds {limit:g}; use filter="
    raise BadInput(message, module=name, value=bounds, available=limit)


def _wanted(
    module: nn.EmbeddingBag | nn.Embedding, rows: RowConfig, map: IdMap | None
) -> tuple[type[EmbeddingBag] | type[Embedding], dict[str, Any]]:
    """The class that replaces an embedding, and its keyword arguments."""
    arguments = {"padding_idx": module.padding_idx, "rows": rows, "ids": map}
    if isinstance(module, nn.EmbeddingBag):
        return EmbeddingBag, {**arguments, "mode": module.mode, "include_last_offset": module.include_last_offset}
    return Embedding, arguments


def _replacement(
    name: str, module: nn.EmbeddingBag | nn.Embedding, rows: RowConfig, map: IdMap | None, given: TorchArguments
) -> RowsModule:  # fmt: skip
    kind, arguments = _wanted(module, rows, map)
    if map is None:
        new = kind.from_pretrained(module.weight, not module.weight.requires_grad, **arguments, **given)
    else:
        place: TorchArguments = {"device": module.weight.device, "dtype": module.weight.dtype}
        new = kind(*_shape(module, map), **{**arguments, **place, **given})
        new.requires_grad_(module.weight.requires_grad)
    new.arena.rename([name])  # for error messages
    return new.train(module.training)


def _line(
    name: str, old: nn.EmbeddingBag | nn.Embedding, new: nn.Module, reason: str, holders: list[str]
) -> ConvertedTable:  # fmt: skip
    before = old.weight.numel() * old.weight.element_size()
    after = new.arena.memory().total if isinstance(new, RowsModule) else before
    warnings = () if reason else table_warnings(before, after, holders)
    return ConvertedTable(name, old.num_embeddings, old.embedding_dim, before, after, reason, warnings)


def revert_(model: nn.Module) -> ConversionReport:
    """Replace the `thermocline.EmbeddingBag` and `thermocline.Embedding` modules of a model in place by torch's.

    Weights are the rows as `get_rows` reads them, in the output type of the module (fp32 by default). Optimizer state of rows
    and gradients that wait for `step` are dropped. Make optimizers afterwards. Collections are left as they are.

    Args:
        model: the model.

    Returns:
        A report of each table, with its bytes.

    Raises:
        BadInput: the model is a module of thermocline itself, or a module maps ids, which torch's modules do not. The model is
            unchanged then.

    Example::

        thermocline.convert_(model)
        thermocline.revert_(model)  # nn.Embedding and nn.EmbeddingBag again
    """
    given: object = model
    if isinstance(given, RowsModule) or not isinstance(given, nn.Module):
        way = "use nn.Embedding.from_pretrained(module.weight)" if isinstance(given, nn.Module) else "use a torch.nn.Module"
        raise BadInput(f"model is a {type(model).__name__}; {way}", parameter="model", value=type(model).__name__)
    modules = model.named_modules(remove_duplicate=False)
    found = [(name, module) for name, module in modules if isinstance(module, (Embedding, EmbeddingBag))]
    for name, module in found:
        if module.maps is not None:
            message = f"{name} maps ids to rows ({module.ids}); map ids before the module, or keep it"
            raise BadInput(message, parameter="ids", module=name)
    done: dict[int, nn.Embedding | nn.EmbeddingBag] = {}
    report: list[ConvertedTable] = []
    for name, module in found:
        if id(module) not in done:
            new = done[id(module)] = _torch_module(module)
            after = new.weight.numel() * new.weight.element_size()
            before = module.arena.memory().total
            report.append(ConvertedTable(name, module.num_embeddings, module.embedding_dim, before, after))
        put_module(model, name, done[id(module)])
    remove_methods(model)
    return ConversionReport(tuple(report))


def _torch_module(module: Embedding | EmbeddingBag) -> nn.Embedding | nn.EmbeddingBag:
    weight, freeze = module.read_table(0).to(module.dtype), not module.placeholder.requires_grad
    new: nn.Embedding | nn.EmbeddingBag
    if isinstance(module, Embedding):
        new = nn.Embedding.from_pretrained(weight, freeze, module.padding_idx)
    else:
        new = nn.EmbeddingBag.from_pretrained(
            weight, freeze, mode=module.mode, include_last_offset=module.include_last_offset, padding_idx=module.padding_idx
        )
    return new.train(module.training)
