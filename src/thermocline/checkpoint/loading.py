"""`thermocline.load`, `load_into` and `resume`: from a folder to a module under any plan, ranks, device and precision.

Errors are found before anything changes: damaged files by sha256 (ranks share that work), wrong names, sizes and id maps by the
manifest. `restore.py` then writes the rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from thermocline.distributed.shard import shard_
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.nn.precision_tiers import Precision
from thermocline.plan.model import Plan

from .format.dense_state import Optimizers, load_dense, load_optimizers, optimizers_by_name
from .format.folder import current_manifest
from .format.manifest import ModuleEntry
from .format.module_entries import NamedModule, build, find_modules
from .ranks import CheckpointRanks
from .reader import Checkpoint
from .restore import restore_module
from .save_job import wait_for_saves


def load(
    folder: str | Path,
    plan: Plan | str | Path | None = None,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
    *,
    heat: HeatProfile | str | Path | None = None,
) -> nn.Module:
    """Build the thermocline module that was saved alone in a folder.

    With a plan, all ranks call this together, and each builds its shard. A model of your own is filled with `load_into`.

    Args:
        folder: a folder that `save` wrote.
        plan: shard the module by this plan, or plan file.
        device: device of the module; default: torch's current default device.
        precision: replace the saved precision; rows are rounded once.
        heat: the heat profile, or file, that the plan was made with.

    Returns:
        The module, with rows, optimizer state and cache.

    Raises:
        BadInput: the folder holds a model of several modules.
        FormatError: the folder is no checkpoint, or a file is damaged.

    Example:
        >>> tables = tc.load("checkpoint")
        >>> small = tc.load("checkpoint", precision="int4")
    """
    wait_for_saves()
    checkpoint = Checkpoint.open(folder)
    modules = checkpoint.manifest.modules
    if len(modules) > 1 or modules[0].name:
        names = [module.name for module in modules]
        raise BadInput(
            f"'{checkpoint.folder}' holds a model with modules {', '.join(map(repr, names[:3]))}; build the model and use "
            "load_into(model, folder)",
            path=checkpoint.folder, modules=names,
        )  # fmt: skip
    place = "meta" if plan is not None else device
    made: nn.Module = build(modules[0], checkpoint.manifest.tables, checkpoint.id_maps, place, precision)
    if plan is not None:
        holder = nn.ModuleDict({"rows": made})
        shard_(holder, plan, heat, device=device)
        made = holder["rows"]
    _fill(made, checkpoint, None)
    return made


def load_into(model: nn.Module, folder: str | Path, *, optimizers: Optimizers = None) -> None:
    """Fill a model with the rows, dense parameters and optimizer state of a checkpoint.

    The model may be sharded or not, whatever the saved one was. All ranks of a sharded model call this together.

    Args:
        model: a model with the modules, tables and id maps that were saved.
        folder: a folder that `save` wrote.
        optimizers: dense optimizers, one or several by name, as `save` had them.

    Raises:
        BadInput: modules, tables, id maps or dense parameters differ from the saved ones.
        FormatError: the folder is no checkpoint, or a file is damaged.

    Example:
        >>> tc.load_into(model, "checkpoint", optimizers=adam)
    """
    wait_for_saves()
    _fill(model, Checkpoint.open(folder), optimizers)


def resume(folder: str | Path, model: nn.Module, *, optimizers: Optimizers = None) -> dict[str, Any] | None:
    """Fill a model from the last complete save in a folder, if there is one.

    Build the model for the ranks of this job; any number of ranks may have saved it. All ranks call this together.

    Args:
        folder: a folder that `save` wrote, or will write.
        model: as in `load_into`.
        optimizers: as in `load_into`.

    Returns:
        The `progress` that was saved, or None if the folder holds no checkpoint.

    Raises:
        BadInput, FormatError: as in `load_into`.

    Example:
        >>> progress = tc.resume("checkpoint", model, optimizers=adam) or {"batch": 0}
    """
    wait_for_saves()
    path, ranks = Path(folder), CheckpointRanks.of(model)
    found = ranks.on_all(lambda: current_manifest(path) if ranks.rank == 0 else None)[0]
    if found is None:
        return None
    load_into(model, path, optimizers=optimizers)
    return dict(found.progress)


def _fill(model: nn.Module, checkpoint: Checkpoint, optimizers: Optimizers) -> None:
    ranks = CheckpointRanks.of(model)
    ranks.on_all(lambda: checkpoint.verify((ranks.rank, ranks.size)))
    pairs = _matched(checkpoint, find_modules(model))
    load_dense(model, checkpoint.dense())
    for entry, found in pairs:
        restore_module(checkpoint, entry, found)
    tensors = checkpoint.state.with_prefix("optimizer/")
    load_optimizers(optimizers_by_name(optimizers), checkpoint.manifest.optimizers, tensors)
    checkpoint.close()


def _matched(checkpoint: Checkpoint, modules: list[NamedModule]) -> list[tuple[ModuleEntry, NamedModule]]:
    """The saved module for each module of a model, after comparing names, sizes and id maps."""
    saved = {module.name: module for module in checkpoint.manifest.modules}
    own = [found.name for found in modules]
    if saved.keys() != set(own):
        raise BadInput(
            f"'{checkpoint.folder}' holds the modules {', '.join(map(repr, saved))}; the model has "
            f"{', '.join(map(repr, own))}; build the model that was saved",
            path=checkpoint.folder, saved=list(saved), model=own,
        )  # fmt: skip
    for found in modules:
        tables = {table.own_name: table for table in checkpoint.manifest.tables if table.module == found.name}
        for table in found.tables:
            other = tables.get(table.own_name)
            if other is None or len(tables) != len(found.tables) or (other.rows, other.dim) != (table.rows, table.dim):
                size = "missing" if other is None else f"{other.rows} x {other.dim}"
                raise BadInput(
                    f"table {table.name!r} is {table.rows} x {table.dim} in the model and {size} in '{checkpoint.folder}', "
                    f"which has {', '.join(tables)}; build the model that was saved",
                    table=table.name, model=(table.rows, table.dim), saved=None if other is None else (other.rows, other.dim),
                )  # fmt: skip
            for saved_feature, feature in zip(other.features, table.features, strict=True):
                if checkpoint.id_maps[saved_feature] != found.maps[feature]:
                    raise BadInput(
                        f"feature {feature!r} was saved with the id map {checkpoint.id_maps[saved_feature]}, the model has "
                        f"{found.maps[feature]}; build the model with the saved map, which the rows belong to",
                        feature=feature, saved=checkpoint.id_maps[saved_feature], model=found.maps[feature],
                    )  # fmt: skip
    return [(saved[found.name], found) for found in modules]
