"""Manifest entries of modules and tables, and modules built from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import nn

from thermocline import formats as F
from thermocline.distributed.saved_shard import layout_text
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.distributed.sharded_table import ShardedTable
from thermocline.errors import BadInput, FormatError
from thermocline.ids.idmap import IdMap
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.nn.embedding import Embedding, EmbeddingBag
from thermocline.nn.precision_tiers import Precision
from thermocline.nn.rows_module import RowsModule
from thermocline.rows.optimizers import SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad

from .cache_slots import saved_pools
from .manifest import POOL_FIELDS, ModuleEntry, TableEntry

_OPTIMIZERS: dict[str, type[RowOptimizer]] = {F.OPTIMIZERS[kind.code]: kind for kind in (SGD, Adagrad, RowwiseAdagrad, Adam)}
_ROW_FIELDS = ("precision", "cache", "budget", "policy", "residency", "update", "seed", "staged", "independent")
_LATER = ("staged", "independent")  # fields that are saved where they are set: older versions do not know them
_KINDS: dict[str, type[RowsModule]] = {kind.__name__: kind for kind in (EmbeddingCollection, EmbeddingBag, Embedding)}


class NamedModule(NamedTuple):
    """A rows module of a model: its name, and its tables in the order of the unsharded arena."""

    name: str
    module: RowsModule
    tables: tuple[TableEntry, ...]
    maps: dict[str, IdMap]


def find_modules(model: nn.Module) -> list[NamedModule]:
    """All rows modules of a model, with unique names for their tables and features."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, RowsModule)]
    if not modules:
        raise BadInput(
            "the model has no thermocline module; save it with torch.save, or convert it first (convert_)", parameter="model"
        )
    tables = [table for name, module in modules for table in _tables(name, module)]
    names, features = Counter(table.name for table in tables), Counter(feature for t in tables for feature in t.features)
    found = []
    for name, module in modules:
        entries: list[TableEntry] = []
        maps: dict[str, IdMap] = {}
        for at, table in enumerate(_tables(name, module)):
            named = tuple(feature if features[feature] == 1 else f"{name}.{feature}" for feature in table.features)
            maps |= {n: table.map_of(f) or IdMap.identity(table.rows) for n, f in zip(named, table.features, strict=True)}
            precision, precisions, first = _stored(module, at)
            entries.append(
                TableEntry(
                    name=table.name if names[table.name] == 1 else f"{name}.{table.name}", module=name, own_name=table.name,
                    rows=table.rows, dim=table.dim, precision=precision, precisions=precisions, features=named, first=first,
                )
            )  # fmt: skip
        found.append(NamedModule(name, module, tuple(entries), maps))
    return found


def _tables(name: str, module: RowsModule) -> Sequence[Table]:
    if not isinstance(module, (EmbeddingBag, Embedding, ShardedTable)):
        assert isinstance(module, (EmbeddingCollection, ShardedCollection))
        return module.tables
    return [Table(name or "table", module.num_embeddings, module.embedding_dim, ids=module.ids)]


def _stored(module: RowsModule, table: int) -> tuple[str, tuple[str, ...], int]:
    """Precision of a table, all precisions of its rows, and its first row in the unsharded arena."""
    if isinstance(module, ShardedCollection):
        parts = [part for part in module.row_index.parts if part.table == table]
        return parts[-1].precision, tuple(dict.fromkeys(part.precision for part in parts)), module.row_index.first[table]
    precision = module.arena.tables[table].precision
    return precision, (precision,), module.arena.views(table)[2]


def module_entry(found: NamedModule) -> ModuleEntry:
    module, rows = found.module, found.module.rows
    settings = {field: getattr(rows, field) for field in _ROW_FIELDS if field not in _LATER or getattr(rows, field)}
    settings |= {"precision": _plain(rows.precision), "dtype": str(module.dtype)[6:]}
    if isinstance(module, (EmbeddingCollection, ShardedCollection)) and not isinstance(module, ShardedTable):
        own: Sequence[Table | TableEntry] = found.tables if isinstance(module, ShardedCollection) else module.tables
        settings["mode"] = module.mode
        settings["tables"] = [
            {"name": t.name, "rows": t.rows, "dim": t.dim, "features": list(t.features), "precision": _plain(saved.precision)}
            for t, saved in zip(module.tables, own, strict=True)
        ]
        kind = "EmbeddingCollection"
    else:
        kind = (module.plain if isinstance(module, ShardedTable) else type(module)).__name__
        fields = ["num_embeddings", "embedding_dim", "padding_idx"]
        fields += ["mode", "include_last_offset"] if kind == "EmbeddingBag" else []
        settings |= {field: getattr(module, field) for field in fields}
    pools = module.arena.pools
    if isinstance(module, ShardedCollection):
        pools = tuple(saved.pool for saved in saved_pools(module, module.row_index))
    clock, optimizer = module.trainer.clock.tolist(), rows.optimizer
    return ModuleEntry(
        name=found.name, kind=kind, settings=settings,  # type: ignore[arg-type]
        optimizer={"name": F.OPTIMIZERS[optimizer.code], **asdict(optimizer)},
        states=len(module.trainer.states), states_by_row=optimizer.states_per_row > 0,
        trains=module.placeholder.requires_grad, step=clock[F.STEP], seed=clock[F.SEED], layout=layout_of(module),
        pools=tuple(dict(zip(POOL_FIELDS, pool, strict=True)) for pool in pools), policy=rows.policy,
    )  # fmt: skip


def _plain(precision: Precision | None) -> Any:
    return {name: float(share) for name, share in precision.items()} if isinstance(precision, Mapping) else precision


def layout_of(module: RowsModule) -> str:
    """Sizes, precisions, slots and policy as text: modules with equal layouts have equal arrays."""
    if isinstance(module, ShardedCollection):
        return layout_text(module) if module.shard.cached else ""
    return bytes(module._text().tolist()).decode()


def _optimizer(entry: ModuleEntry) -> RowOptimizer:
    name = entry.optimizer["name"]
    if name not in _OPTIMIZERS:
        raise FormatError(f"the rows were trained by {name!r}; this package has {', '.join(_OPTIMIZERS)}", optimizer=name)
    return _OPTIMIZERS[name](**{key: value for key, value in entry.optimizer.items() if key != "name"})


def build(
    entry: ModuleEntry, tables: Sequence[TableEntry], maps: Mapping[str, IdMap], device: torch.device | str | None,
    precision: Precision | None,
) -> RowsModule:  # fmt: skip
    """A module as it was saved, on a device, with uninitialised rows; `precision` replaces the saved one."""
    try:
        return _build(entry, tables, maps, device, precision)
    except BadInput:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the settings of module {entry.name!r} are damaged ({error}); use another checkpoint") from error


def _build(
    entry: ModuleEntry, tables: Sequence[TableEntry], maps: Mapping[str, IdMap], device: torch.device | str | None,
    precision: Precision | None,
) -> RowsModule:  # fmt: skip
    settings = {**entry.settings}
    fields = {field: settings.pop(field) for field in _ROW_FIELDS if field in settings}
    for field in ("cache", "budget", "staged"):  # older manifests hold bytes as ints, and shares above 1 for all rows
        if isinstance(fields.get(field), int):
            fields[field] = f"{fields[field]}B"
        elif isinstance(fields.get(field), float):
            fields[field] = min(fields[field], 1.0)
    if precision is not None:
        fields |= {"precision": precision, "budget": None}
        fields["cache"] = None if isinstance(precision, Mapping) else fields["cache"]
    settings |= {"rows": RowConfig(**fields, optimizer=_optimizer(entry)), "device": device}
    settings["dtype"] = getattr(torch, settings["dtype"])
    if entry.kind == "EmbeddingCollection":
        settings["tables"] = [
            Table(
                t["name"], t["rows"], t["dim"], t["features"],
                None if precision is not None or t["precision"] is None else RowConfig(t["precision"]),
                {own: maps[named] for own, named in zip(t["features"], known.features, strict=True)},
            )
            for t, known in zip(settings["tables"], tables, strict=True)
        ]  # fmt: skip
    else:
        map = maps[tables[0].features[0]]
        settings["ids"] = None if map == IdMap.identity(tables[0].rows) else map
    module: RowsModule = _KINDS[entry.kind].without_values(**settings)
    module.placeholder.requires_grad_(entry.trains)
    return module
