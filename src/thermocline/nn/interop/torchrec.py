"""Conversion of TorchRec collections, from and to.

    convert_(model)            replaces the bags inside TorchRec's collections one by one; a launch for each table
    KeyedCollection(theirs)    a module with TorchRec's input and output around one EmbeddingCollection; one launch
    from_torchrec(theirs)      the EmbeddingCollection alone; its output has the methods of a KeyedTensor

Optimizers, sharding plans and virtual tables of TorchRec are not converted. Collections whose tables pool differently, or with
a feature that looks up several tables, are refused. TorchRec is imported only where one of its classes is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thermocline.errors import BadInput
from thermocline.ids.idmap import IdMap

from ..collection import EmbeddingCollection, Table
from ..config import RowConfig, TorchArguments
from ..inputs import Unpooled

if TYPE_CHECKING:
    from typing_extensions import Unpack

_POOLING = {"SUM": "sum", "MEAN": "mean"}


def from_torchrec(
    theirs: nn.Module, *, rows: RowConfig = RowConfig(), **torch_arguments: Unpack[TorchArguments]
) -> EmbeddingCollection:
    """Make a collection with the tables, features and rows of a TorchRec collection.

    Args:
        theirs: a TorchRec `EmbeddingBagCollection` or `EmbeddingCollection`.
        rows: how rows are stored and trained.
        torch_arguments: `device` (by default that of the TorchRec tables), and `dtype` of the output.

    Returns:
        The collection.

    Raises:
        BadInput: tables pool differently, or a feature looks up several tables.

    Example::

        collection = from_torchrec(torchrec_collection, rows=thermocline.RowConfig("int8", cache=0.05))
    """
    configs, pooled = _configs(theirs)
    modes = {_POOLING[config.pooling.name] for config in configs} if pooled else {"none"}
    if len(modes) > 1:
        message = f"tables pool by {' and by '.join(sorted(modes))}; split the collection, or use convert_"
        raise BadInput(message, parameter="pooling", value=sorted(modes))
    names = [name for config in configs for name in config.feature_names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        message = f"feature {twice[0]!r} looks up {names.count(twice[0])} tables; give it a name for each, or use convert_"
        raise BadInput(message, feature=twice[0])
    bags = theirs.embedding_bags if pooled else theirs.embeddings
    weights: dict[str, Tensor] = {config.name: bags[config.name].weight for config in configs}  # type: ignore[index, union-attr]
    tables = [Table(c.name, c.num_embeddings, c.embedding_dim, tuple(c.feature_names)) for c in configs]
    given: TorchArguments = {"device": next(iter(weights.values())).device, **torch_arguments}
    ours = EmbeddingCollection(tables, mode=modes.pop(), rows=rows, **given)
    with torch.no_grad():
        for table in tables if ours.arena.device.type != "meta" else ():
            rows_R = torch.arange(table.rows, device=weights[table.name].device)
            ours.set_rows(table.name, rows_R, weights[table.name].detach().float())
    return ours.train(theirs.training)


def to_torchrec(ours: EmbeddingCollection) -> nn.Module:
    """Make a TorchRec collection with the rows of a collection in fp32, without optimizer state.

    Args:
        ours: the collection, without id maps.

    Returns:
        A TorchRec `EmbeddingBagCollection`; for mode "none" an `EmbeddingCollection`.

    Raises:
        BadInput: a feature has an id map.

    Example::

        torchrec_collection = to_torchrec(collection)
    """
    plain = {feature: IdMap.identity(table.rows) for table in ours.tables for feature in table.features}
    if mapped := [feature for feature, map in ours.id_maps.items() if map != plain[feature]]:
        message = f"{', '.join(mapped)} have id maps, which TorchRec does not have; map ids before it"
        raise BadInput(message, parameter="ids", features=mapped)
    modules = import_module("torchrec.modules.embedding_modules")
    configs = import_module("torchrec.modules.embedding_configs")
    pooled = ours.mode != "none"
    config = configs.EmbeddingBagConfig if pooled else configs.EmbeddingConfig
    pooling = {"pooling": configs.PoolingType[ours.mode.upper()]} if pooled else {}
    made = [
        config(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[*t.features], **pooling)
        for t in ours.tables
    ]
    kind = modules.EmbeddingBagCollection if pooled else modules.EmbeddingCollection
    theirs: nn.Module = kind(tables=made, device=ours.arena.device)
    bags: Any = theirs.embedding_bags if pooled else theirs.embeddings
    with torch.no_grad():
        for table in ours.tables:
            bags[table.name].weight.copy_(ours.get_rows(table.name))
    return theirs.train(ours.training)


class KeyedCollection(nn.Module):
    """A module with the input and output of a TorchRec collection, around an `EmbeddingCollection` with its rows.

    As in TorchRec, the input may have more features than the collection, and weights count only in a weighted one.

    Args:
        theirs: a TorchRec `EmbeddingBagCollection` or `EmbeddingCollection`.
        rows: how rows are stored and trained.
        torch_arguments: as of `from_torchrec`.

    Raises:
        BadInput: as of `from_torchrec`.

    Example::

        model.sparse = KeyedCollection(model.sparse, rows=thermocline.RowConfig("int8", cache=0.05))
    """

    def __init__(self, theirs: nn.Module, *, rows: RowConfig = RowConfig(), **torch_arguments: Unpack[TorchArguments]) -> None:
        super().__init__()
        self.collection = from_torchrec(theirs, rows=rows, **torch_arguments)
        self.weighted = bool(getattr(theirs, "is_weighted", lambda: False)())

    def forward(self, features: Any) -> Any:
        """Look up a KeyedJaggedTensor; returns a KeyedTensor, or a dict of JaggedTensors for mode "none"."""
        out = self.collection(self._taken(features))
        sparse = import_module("torchrec.sparse.jagged_tensor")
        if isinstance(out, Unpooled):
            return {name: sparse.JaggedTensor(out[name], offsets=out.offsets(name)) for name in out.keys()}  # noqa: SIM118
        return sparse.KeyedTensor(keys=out.keys(), length_per_key=out.length_per_key(), values=out.values())

    def _taken(self, keyed: Any) -> Any:
        """The features that the collection has, with weights only where they count."""
        if keyed.variable_stride_per_key():
            raise BadInput("features of the KeyedJaggedTensor have different batch sizes; use one", parameter="features")
        keys, wanted = list(keyed.keys()), self.collection.features
        if keys == list(wanted) and (self.weighted or keyed.weights_or_none() is None):
            return keyed
        if missing := [name for name in wanted if name not in keys]:
            raise BadInput(f"the input lacks {', '.join(missing)}; it has {', '.join(keys)}", missing=missing)
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
    message = f"{type(theirs).__name__} is not a collection of TorchRec; use an EmbeddingBagCollection or EmbeddingCollection"
    raise BadInput(message, parameter="theirs", value=type(theirs).__name__)
