"""`ShardSource`: what `shard_` takes from a module before the module becomes this rank's shard of itself.

An `EmbeddingBag` or `Embedding` is a collection of one table, which has the module's name and one feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thermocline.errors import BadInput
from thermocline.ids.idmap import IdMap
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.nn.elastic_maps import keyed_maps
from thermocline.nn.embedding import Embedding, EmbeddingBag
from thermocline.plan.model import Plan, TablePlan
from thermocline.rows.arena import Arena
from thermocline.rows.training import Trainer

Shardable = EmbeddingCollection | EmbeddingBag | Embedding


@dataclass(frozen=True)
class ShardSource:
    """Tables, features and rows of a module. `name` is its name in the model."""

    name: str
    tables: tuple[Table, ...]
    features: tuple[str, ...]
    id_maps: Mapping[str, IdMap]
    live_maps: Mapping[str, IdMap]  # elastic ones with the ids that have rows
    mode: str
    rows: RowConfig
    dtype: torch.dtype
    arena: Arena
    trainer: Trainer

    @property
    def model_rows(self) -> RowConfig:
        """The `RowConfig` of the module before the plan."""
        return self.rows

    @classmethod
    def of(cls, name: str, module: Shardable, plan: Plan | None = None) -> ShardSource:
        """The source of a module. The feature of a plain module is that of its table in the plan."""
        rows = module.rows, module.dtype, module.arena, module.trainer
        if isinstance(module, EmbeddingCollection):
            live = keyed_maps(module, module.id_maps)
            return cls(name, module.tables, module.features, module.id_maps, live, module.mode, *rows)
        own = name or "table"  # as in a checkpoint
        feature = next((_only_feature(own, each.features) for each in plan.tables if each.name == own), own) if plan else own
        table = Table(own, module.num_embeddings, module.embedding_dim, (feature,), ids=module.ids)
        mode = module.mode if isinstance(module, EmbeddingBag) else "none"
        live = {feature: keyed_maps(module, {"input": module.ids})["input"]}
        return cls(name, (table,), (feature,), {feature: module.ids}, live, mode, *rows)


def _only_feature(table: str, features: tuple[str, ...]) -> str:
    if len(features) > 1:
        raise BadInput(
            f"table {table!r} is planned for the features {', '.join(features)}, but its module looks up one input; join the "
            "columns of the log to one feature, or build the table in an EmbeddingCollection",
            parameter="features", table=table, value=features,
        )  # fmt: skip
    return features[0]


def shardable_modules(model: nn.Module) -> dict[str, Shardable]:
    """The modules of a model that `shard_` replaces, by name: all but those whose ranks train copies of their own."""
    kinds = (EmbeddingCollection, EmbeddingBag, Embedding)
    return {name: each for name, each in model.named_modules() if isinstance(each, kinds) and not each.rows.independent}


def residency(tables: Sequence[TablePlan], rows: RowConfig, name: str) -> str:
    """Where the rows of a collection lie: on the device, or in host memory if its `RowConfig` or the plan says so.

    Raises:
        BadInput: the plan has some of the tables in host memory, but one module has its rows in one memory.
    """
    host, card = ([table.name for table in tables if table.residency == kind] for kind in ("host", "card"))
    if host and card and rows.residency != "host":
        raise BadInput(
            f"{name!r}: table {host[0]!r} is planned in host memory and table {card[0]!r} on the GPU, but rows of one module "
            "lie in one memory; put them into two collections, or set residency='host' for this one",
            parameter="residency", table=host[0], collection=name,
        )  # fmt: skip
    return "host" if host else rows.residency


def row_config(rows: RowConfig, plans: Sequence[TablePlan], name: str) -> RowConfig:
    """The `RowConfig` of a shard, with the cache that one process would have."""
    share = sum(sum(tier.cached for tier in plan.tiers) for plan in plans) / sum(plan.rows for plan in plans)
    place = residency(plans, rows, name)
    return replace(rows, precision="int8", cache=min(share, 1.0), budget=None, residency=place, staged=None)


def device_of(model: nn.Module, found: Mapping[str, Shardable], given: torch.device | str | None) -> torch.device:
    """The device of the collections, or for collections on "meta" the device that they move to."""
    here: Any = {collection.arena.device for collection in found.values() if collection.arena.device.type != "meta"}
    if len(here) > 1:
        names = ", ".join(map(str, sorted(here, key=str)))
        raise BadInput(f"collections are on {names}; move the model to one device first", parameter="model")
    if here:
        return next(iter(here))  # type: ignore[no-any-return]
    own = {id(tensor) for each in found.values() for tensor in (*each.parameters(), *each.buffers())}
    dense = {t.device for t in (*model.parameters(), *model.buffers()) if id(t) not in own and t.device.type != "meta"}
    nccl = dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend()
    chosen = torch.device(given) if given is not None else dense.pop() if len(dense) == 1 else None
    chosen = chosen or torch.device("cuda" if nccl else "cpu")
    return torch.device("cuda", torch.cuda.current_device()) if chosen == torch.device("cuda") else chosen
