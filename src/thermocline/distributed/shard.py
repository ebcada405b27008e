"""`shard_`: replace every collection of a model by this rank's shard of it, in place, as a plan says.

    torchrun --nproc-per-node 4 train.py

    model = Model()                                            # the same on every rank; or under torch.device("meta")
    sharding = thermocline.shard_(model, "plan.json", heat="heat.tc")
    ...                                                        # train as before, each rank on its own samples
    sharding.check_replicas()

Ranks first compare plan, heat and collections, and then the maps of rows. Every rank reports a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.nn.collection import EmbeddingCollection
from thermocline.plan.model import Plan

from .planned_tables import map_collections, map_digests
from .process_groups import ProcessGroups, check_same
from .replanning.frequency_counter import FrequencyCounter
from .sharded_collection import Reduce, ShardedCollection
from .sharding import Sharding, read_inputs
from .validate import validate


def shard_(
    model: nn.Module,
    plan: Plan | str | Path,
    heat: HeatProfile | str | Path | None = None,
    *,
    reduce: Reduce = "mean",
    check_every: int = 0,
    count_every: int = 16,
    device: torch.device | str | None = None,
) -> Sharding:
    """Replace every `EmbeddingCollection` of a model by this rank's shard of it. Collective.

    Rows come from the model, which must be the same on every rank: seed it before it is built. A collection on the device
    "meta" gets fresh rows, so that no rank ever holds the whole collection. Make a `fused_optimizer` afterwards.

    Args:
        model: contains the collections.
        plan: a plan or its path; its number of ranks must be that of the job.
        heat: the heat profile of the plan, which says which rows are hot.
        reduce: "mean" averages gradients over ranks, as DDP does for the dense part; "sum" adds them.
        check_every: steps between comparisons of replicas; 0 for never.
        count_every: training steps between counted batches, for `Sharding.heat` and `replan`; 0 for never.
        device: of collections on "meta"; by default that of the rest of the model, or under NCCL the current GPU.

    Returns:
        The sharding, with traffic meters, memory and `migrate`.

    Raises:
        BadInput: plan, model, heat and ranks do not fit together, or ranks were given different inputs.

    Example::

        sharding = thermocline.shard_(model, "plan.json", heat="heat.tc")
        optimizer = thermocline.fused_optimizer(model)
    """
    if reduce not in ("mean", "sum"):
        raise BadInput(f"reduce is {reduce!r}; use 'mean' or 'sum'", parameter="reduce", value=reduce)
    found = {name: module for name, module in model.named_modules() if isinstance(module, EmbeddingCollection)}
    plan, heat = read_inputs(plan, heat, found, reduce)
    validate(model, plan, heat, found)
    here = _device(model, found, device)
    groups = ProcessGroups.of(plan.topology, here)
    tables, maps = map_collections(plan, heat, found, groups, here)
    check_same(groups.all_gather(map_digests(tables, maps)), "maps of rows, made from plan and heat")
    made: dict[str, ShardedCollection] = {}
    for name, collection in found.items():
        own_groups = groups.duplicate() if made else groups
        shard = ShardedCollection(name, collection, tables[name], maps[name], own_groups, here, heat)
        shard.train(collection.training)
        shard.reduce, shard.check_every, shard.plan = reduce, check_every, plan
        shard.counter = FrequencyCounter(collection.features, count_every, plan.batch, groups.local_size)
        shard.anchor.requires_grad_(collection.anchor.requires_grad)
        _replace(model, collection, shard)
        made[name] = shard
    sharding = Sharding(plan, groups, made)
    sharding.check_replicas()
    return sharding


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)


def _device(
    model: nn.Module, found: Mapping[str, EmbeddingCollection], given: torch.device | str | None
) -> torch.device:  # fmt: skip
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
