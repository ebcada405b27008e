"""`shard_torchrec_`: a TorchRec model, placed as a plan of TorchRec says, with this package's rows: one line in place of
`DistributedModelParallel`.

    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharding = thermocline.distributed.shard_torchrec_(model, plan, thermocline.RowConfig("int8", cache=0.05), batch=1024)

The dense part goes into DistributedDataParallel as it is. A model that `DistributedModelParallel` has wrapped is refused: its
rows are in FBGEMM's shards by then, and each rank has only its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.heat.curve import Curve
from thermocline.heat.profile import HeatProfile
from thermocline.nn.config import RowConfig
from thermocline.nn.interop.torchrec import KeyedCollection
from thermocline.plan.tables import TablesConfig
from thermocline.plan.topology import Topology
from thermocline.plan.torchrec import plan_from_torchrec

from .process_groups import world_size
from .shard import Sharding, shard_


def shard_torchrec_(
    model: nn.Module,
    sharding_plan: Any,
    rows: RowConfig = RowConfig(),
    *,
    batch: int,
    heat: HeatProfile | None = None,
    topology: Topology | None = None,
) -> Sharding:
    """Replace the collections of a TorchRec model by sharded ones, placed as TorchRec's plan says. Collective.

    Collections keep their input and output: a KeyedJaggedTensor, and a KeyedTensor or JaggedTensors. Rows are those of the
    model, or new ones where it is on the device "meta".

    Args:
        model: contains `EmbeddingBagCollection`s and `EmbeddingCollection`s, which are replaced in place.
        sharding_plan: what `EmbeddingShardingPlanner` returns; the same on every rank.
        rows: how rows are stored and trained.
        batch: samples per rank and step, for the predictions of the plan.
        heat: which rows are hot, for the first cache slots; by default none.
        topology: the cluster, for the predictions of the plan; by default nodes of H200.

    Returns:
        The sharding, as `shard_` returns it; its `plan` has the placement and predictions.

    Raises:
        BadInput: the model has no collection, is one, or is wrapped; or plan and model do not fit together.

    Example::

        sharding = shard_torchrec_(model, planner.collective_plan(model, sharders, dist.group.WORLD), batch=1024)
    """
    kind, asked = type(model).__name__, ("embedding_bag_configs", "embedding_configs")
    modules = model.named_modules(remove_duplicate=False)  # a collection may have several names
    theirs = {name: each for name, each in modules if any(hasattr(each, way) for way in asked)}
    if kind == "DistributedModelParallel" or not theirs or "" in theirs:
        words = "model is a collection: put it into a module" if "" in theirs else "model has no collection of TorchRec"
        if kind == "DistributedModelParallel":
            words = "DistributedModelParallel has moved the rows into its own shards; call shard_torchrec_ in its place"
        raise BadInput(words, parameter="model", value=kind)
    made = {each: KeyedCollection(each, rows=rows) for each in theirs.values()}
    precision = dict(rows.precision) if isinstance(rows.precision, Mapping) else rows.precision
    cache = rows.cache if isinstance(rows.cache, float) else None  # bytes: that of the plan
    tables = [
        {
            "name": table.name, "rows": table.rows, "dim": table.dim, "features": tuple(table.features), "precision": precision,
            "cache": cache, "pooling": each.collection.mode, "lookups": float(len(table.features)),
        }
        for each in made.values() for table in each.collection.tables
    ]  # fmt: skip
    optimizer = F.OPTIMIZERS[rows.optimizer.code]
    config = TablesConfig.model_validate({"batch": batch, "optimizer": optimizer, "tables": tables})
    curves = heat if heat is not None else {table.name: Curve.zipf(table.rows, 0.0) for table in config.tables}
    plan = plan_from_torchrec(sharding_plan, config, curves, topology or _topology())
    for name, each in theirs.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made[each])
    return shard_(model, plan, heat)


def _topology() -> Topology:
    """Nodes of H200, as many as run."""
    ranks = world_size()
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks)
    backend = "nccl" if dist.is_initialized() and "nccl" in dist.get_backend() else "gloo"
    return Topology.load("hgx-h200").model_copy(update={"nodes": ranks // local, "gpus_per_node": local, "backend": backend})
