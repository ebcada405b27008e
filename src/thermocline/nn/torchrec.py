"""To TorchRec and back: its collections become ours with the same rows, and ours become its.

Three ways in, by how much of a program should change:

    convert_(model)                nothing else changes: the bags inside TorchRec's collections are replaced one by one.
                                   A launch for each table.
    KeyedCollection(theirs)        a module with the same calls, KeyedJaggedTensor in and KeyedTensor (or JaggedTensors)
                                   out, around one collection of ours. One launch, and `shard_` and `save` find the collection.
    from_torchrec(theirs)          the collection alone: it takes a KeyedJaggedTensor, and what it returns has keys(), values(),
                                   length_per_key() and to_dict(), as a KeyedTensor has.

TorchRec is never imported unless something of it is made here: whoever gives us one of its modules has it. Left out on purpose:
its optimizers (ours are fused and configured by `optimizer=`), its sharding plans (a plan of ours is made from heat), and
virtual tables. TorchRec lets tables of one collection pool differently, and a feature look up several tables; one launch of
ours does neither, so such collections are refused, with the way out in the message.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thermocline.errors import BadInput
from thermocline.ids.idmap import IdMap

from .collection import EmbeddingCollection, Table
from .config import RowConfig, TorchArguments
from .inputs import Unpooled

if TYPE_CHECKING:
    from typing_extensions import Unpack

_POOLING = {"SUM": "sum", "MEAN": "mean"}


def from_torchrec(
    theirs: nn.Module, *, rows: RowConfig = RowConfig(), **torch_arguments: Unpack[TorchArguments]
) -> EmbeddingCollection:
    """A collection with the tables, features and rows of a TorchRec collection.

    Args:
        theirs: a TorchRec `EmbeddingBagCollection` or `EmbeddingCollection`.
        rows: how rows are stored and trained.
        torch_arguments: `device` (by default that of the TorchRec tables), and `dtype` of the output.

    Raises:
        BadInput: tables pool differently, or a feature looks up several tables.

    Example::

        collection = from_torchrec(torchrec_collection, rows=thermocline.RowConfig("int8", cache=0.05))
    """
    configs, pooled = _configs(theirs)
    modes = {_POOLING[config.pooling.name] for config in configs} if pooled else {"none"}
    if len(modes) > 1:
        raise BadInput(
            f"tables of this collection pool by {' and by '.join(sorted(modes))}; one collection pools one way: split it in "
            "two, or use convert_, which replaces its bags one by one"
        )
    names = [name for config in configs for name in config.feature_names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(
            f"feature {twice[0]!r} looks up {names.count(twice[0])} tables; give it a name for each, or use convert_"
        )
    bags = theirs.embedding_bags if pooled else theirs.embeddings
    weights: dict[str, Tensor] = {config.name: bags[config.name].weight for config in configs}  # type: ignore[index, union-attr]
    tables = [Table(c.name, c.num_embeddings, c.embedding_dim, tuple(c.feature_names)) for c in configs]
    given: TorchArguments = {"device": next(iter(weights.values())).device, **torch_arguments}
    ours = EmbeddingCollection(tables, mode=modes.pop(), rows=rows, **given)
    with torch.no_grad():
        for table in tables:
            rows_R = torch.arange(table.rows, device=weights[table.name].device)
            ours.set_rows(table.name, rows_R, weights[table.name].detach().float())
    return ours.train(theirs.training)


def to_torchrec(ours: EmbeddingCollection) -> nn.Module:
    """A TorchRec collection with the rows of ours as fp32: `EmbeddingBagCollection`, or for mode "none" `EmbeddingCollection`.

    Optimizer state stays behind: TorchRec's optimizers begin anew.
    """
    plain = {feature: IdMap.identity(table.rows) for table in ours.tables for feature in table.features}
    if mapped := [feature for feature, map in ours.id_maps.items() if map != plain[feature]]:
        raise BadInput(f"ids of {', '.join(mapped)} become rows by id maps, which TorchRec does not have; map them before it")
    modules = import_module("torchrec.modules.embedding_modules")
    configs = import_module("torchrec.modules.embedding_configs")
    device = ours.arena.device
    pooled = ours.mode != "none"
    made = []
    for table in ours.tables:
        named = {
            "name": table.name,
            "num_embeddings": table.rows,
            "embedding_dim": table.dim,
            "feature_names": [*table.features],
        }
        if pooled:
            named["pooling"] = configs.PoolingType[ours.mode.upper()]
        made.append(configs.EmbeddingBagConfig(**named) if pooled else configs.EmbeddingConfig(**named))
    kind = modules.EmbeddingBagCollection if pooled else modules.EmbeddingCollection
    theirs: nn.Module = kind(tables=made, device=device)
    bags: Any = theirs.embedding_bags if pooled else theirs.embeddings
    with torch.no_grad():
        for table in ours.tables:
            bags[table.name].weight.copy_(ours.get_rows(table.name))
    return theirs.train(ours.training)


class KeyedCollection(nn.Module):
    """What a TorchRec collection is to a model, with rows of ours: a KeyedJaggedTensor in, what TorchRec would return out.

    As in TorchRec the input may have more features than the collection, and weights count only in a weighted one.
    """

    def __init__(self, theirs: nn.Module, *, rows: RowConfig = RowConfig(), **torch_arguments: Unpack[TorchArguments]) -> None:
        super().__init__()
        self.collection = from_torchrec(theirs, rows=rows, **torch_arguments)
        self.weighted = bool(getattr(theirs, "is_weighted", lambda: False)())

    def forward(self, features: Any) -> Any:
        """A KeyedTensor; for mode "none" a dict of JaggedTensors."""
        out = self.collection(self._taken(features))
        sparse = import_module("torchrec.sparse.jagged_tensor")
        if isinstance(out, Unpooled):
            return {name: sparse.JaggedTensor(out[name], offsets=out.offsets(name)) for name in out.keys()}  # noqa: SIM118
        return sparse.KeyedTensor(keys=out.keys(), length_per_key=out.length_per_key(), values=out.values())

    def _taken(self, keyed: Any) -> Any:
        """The features that the collection has, with weights only where they count."""
        if keyed.variable_stride_per_key():
            raise BadInput("features of this KeyedJaggedTensor have different batch sizes; give all features the same")
        keys, wanted = list(keyed.keys()), self.collection.features
        if keys == list(wanted) and (self.weighted or keyed.weights_or_none() is None):
            return keyed
        if missing := [name for name in wanted if name not in keys]:
            raise BadInput(f"the input lacks {', '.join(missing)}; it has {', '.join(keys)}")
        parts = keyed.to_dict()
        return {
            name: (part.values(), part.offsets(), part.weights()) if self.weighted else (part.values(), part.offsets())
            for name, part in ((name, parts[name]) for name in wanted)
        }


def _configs(theirs: nn.Module) -> tuple[list[Any], bool]:
    """The tables of a TorchRec collection, and whether it pools."""
    for ask, pooled in (("embedding_bag_configs", True), ("embedding_configs", False)):
        if hasattr(theirs, ask):
            return list(getattr(theirs, ask)()), pooled
    raise BadInput(
        f"{type(theirs).__name__} is not a collection of TorchRec; give an EmbeddingBagCollection or EmbeddingCollection"
    )
