"""`ShardSource`: what `shard_` takes from a module before the module becomes this rank's shard of itself.

An `EmbeddingBag` or `Embedding` is a collection of one table, which has the module's name and one feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from thermocline.errors import BadInput
from thermocline.ids.idmap import IdMap
from thermocline.nn.collection import EmbeddingCollection, Table
from thermocline.nn.config import RowConfig
from thermocline.nn.embedding import Embedding, EmbeddingBag
from thermocline.nn.id_maps import keyed_maps
from thermocline.plan.model import Plan
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
