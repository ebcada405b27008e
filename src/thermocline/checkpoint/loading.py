"""`thermocline.load`, `load_into` and `resume`: from a folder to a module under any plan, ranks, device and precision.

Errors are found before anything changes: damaged files by sha256 (ranks share that work), wrong names, sizes and id maps by the
manifest. `restore.py` then writes the rows.

`load` and `load_into` refuse a damaged save, and name the earlier ones that `save=` opens: older rows without notice would be
worse than an error. `resume`, which restarted jobs call without a person watching, goes back to the last intact save with a
warning; its `progress` is that of the save.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from thermocline.distributed.shard import shard_
from thermocline.errors import BadInput, FormatError
from thermocline.heat.profile import HeatProfile
from thermocline.ids.elastic_rows import ElasticRows
from thermocline.ids.idmap import IdMap
from thermocline.nn.precision_tiers import Precision
from thermocline.plan.model import Plan

from .format.dense_state import Optimizers, load_dense, load_optimizers, optimizers_by_name
from .format.folder import current_manifest, kept_manifests
from .format.manifest import ModuleEntry, TableEntry
from .format.module_entries import NamedModule, build, find_modules
from .ranks import CheckpointRanks
from .reader import Checkpoint
from .restore import restore_module
from .save_job import wait_for_saves


class LoadedKeys(NamedTuple):
    """Names of tables and dense parameters that `load_into(..., strict=False)` left out."""

    missing_keys: list[str]  # only in the model: they keep their values
    unexpected_keys: list[str]  # only in the checkpoint


def load(
    folder: str | Path,
    plan: Plan | str | Path | None = None,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
    *,
    heat: HeatProfile | str | Path | None = None,
    save: int | None = None,
) -> nn.Module:
    """Build the thermocline module that was saved alone in a folder.

    With a plan, all ranks call this together, and each builds its shard. A model of your own is filled with `load_into`.

    Args:
        folder: a folder that `save` wrote.
        plan: shard the module by this plan, or plan file.
        device: device of the module; default: torch's current default device.
        precision: replace the saved precision; rows are rounded once.
        heat: the heat profile, or file, that the plan was made with.
        save: number of an earlier save that the folder still has; by default the last one.

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
    checkpoint = _opened(folder, save)
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
        shard_(made, plan, heat, device=device)
    _verify(made, checkpoint)
    _fill(made, checkpoint, None)
    return made


def load_into(
    model: nn.Module, folder: str | Path, *, optimizers: Optimizers = None, strict: bool = True, save: int | None = None
) -> LoadedKeys:
    """Fill a model with the rows, dense parameters and optimizer state of a checkpoint.

    The model may be sharded or not, whatever the saved one was. All ranks of a sharded model call this together.

    Args:
        model: a model with the modules, tables and id maps that were saved.
        folder: a folder that `save` wrote.
        optimizers: dense optimizers, one or several by name, as `save` had them.
        strict: False loads what model and checkpoint share, as torch's `load_state_dict` does: tables and dense parameters
            that only one of them has are left out, and a table with more rows than the saved one gets its first rows.
        save: number of an earlier save that the folder still has; by default the last one.

    Returns:
        `missing_keys`, which only the model has, and `unexpected_keys`, which only the checkpoint has; empty if `strict`.

    Raises:
        BadInput: modules, tables, id maps or dense parameters differ from the saved ones. Elastic tables may have other sizes:
            in a smaller one the coldest ids are dropped, with a warning that counts them.
        FormatError: the folder is no checkpoint, or a file is damaged.

    Example:
        >>> tc.load_into(model, "checkpoint", optimizers=adam)
    """
    wait_for_saves()
    checkpoint = _opened(folder, save)
    _verify(model, checkpoint)
    return _fill(model, checkpoint, optimizers, strict)


def resume(folder: str | Path, model: nn.Module, *, optimizers: Optimizers = None) -> dict[str, Any] | None:
    """Fill a model from the last complete save in a folder, if there is one.

    Build the model for the ranks of this job; any number of ranks may have saved it. All ranks call this together. If the last
    save is damaged, an earlier one is used, with a warning that names both.

    Args:
        folder: a folder that `save` wrote, or will write.
        model: as in `load_into`.
        optimizers: as in `load_into`.

    Returns:
        The `progress` that was saved, or None if the folder holds no checkpoint.

    Raises:
        BadInput, FormatError: as in `load_into`; also if the folder has saves but no manifest.

    Example:
        >>> progress = tc.resume("checkpoint", model, optimizers=adam) or {"batch": 0}
    """
    wait_for_saves()
    checkpoint = _last_intact(Path(folder), CheckpointRanks.of(model))
    if checkpoint is None:
        return None
    _fill(model, checkpoint, optimizers)
    return dict(checkpoint.manifest.progress)


def _opened(folder: str | Path, save: int | None) -> Checkpoint:
    with _naming_earlier_saves(Path(folder), save):
        return Checkpoint.open(folder, save)


def _verify(model: nn.Module, checkpoint: Checkpoint) -> None:
    ranks = CheckpointRanks.of(model)
    with _naming_earlier_saves(checkpoint.folder, checkpoint.number):
        ranks.on_all(lambda: checkpoint.verify((ranks.rank, ranks.size)))


@contextlib.contextmanager
def _naming_earlier_saves(folder: Path, save: int | None) -> Iterator[None]:
    """Let errors of damaged files name the earlier saves in the folder."""
    try:
        yield
    except FormatError as error:
        numbers = [manifest.saves[-1].number for manifest in kept_manifests(folder)]
        earlier = [number for number in numbers if number < (numbers[0] if save is None else save)]
        if not earlier:
            raise
        saves = f"save{'s' * (len(earlier) > 1)} {', '.join(map(str, earlier[:3]))}"
        raise FormatError(
            f"{error}; the folder also has {saves}: open one with save={earlier[0]}", **error.__dict__, earlier=earlier
        ) from error


def _last_intact(folder: Path, ranks: CheckpointRanks) -> Checkpoint | None:
    """The last save without damage, which all ranks check together; None if nothing was saved. Warns if it is not the last."""
    found: Checkpoint | None = None
    first: FormatError | None = None

    def numbers() -> list[int]:
        if ranks.rank or (now := current_manifest(folder)) is None:
            return []
        kept = [manifest.saves[-1].number for manifest in kept_manifests(folder)]
        return [now.saves[-1].number, *(number for number in kept if number < now.saves[-1].number)]

    def damage() -> FormatError | None:
        nonlocal found
        try:
            found = Checkpoint.open(folder, number if first else None)
            found.verify((ranks.rank, ranks.size))
        except FormatError as error:
            return error
        return None

    for number in ranks.on_all(numbers)[0]:
        errors = [error for error in ranks.on_all(damage) if error is not None]
        if not errors:
            assert found is not None
            if first:
                warnings.warn(f"the last save is damaged ({first}); resuming from save {number} before it", stacklevel=3)
            return found
        first = first or errors[0]
    if first:
        raise first
    return None


def _fill(model: nn.Module, checkpoint: Checkpoint, optimizers: Optimizers, strict: bool = True) -> LoadedKeys:
    pairs, keys = _matched(checkpoint, find_modules(model), strict)
    missing, unknown = load_dense(model, checkpoint.dense(), strict)
    for entry, found in pairs:
        restore_module(checkpoint, entry, found)
    tensors = checkpoint.state.with_prefix("optimizer/")
    load_optimizers(optimizers_by_name(optimizers), checkpoint.manifest.optimizers, tensors)
    checkpoint.close()
    return LoadedKeys([*keys.missing_keys, *missing], [*keys.unexpected_keys, *unknown])


def _matched(
    checkpoint: Checkpoint, modules: list[NamedModule], strict: bool
) -> tuple[list[tuple[ModuleEntry, NamedModule]], LoadedKeys]:
    """The saved module for each module of a model, after comparing names, sizes and id maps, and tables without a partner."""
    saved = {module.name: module for module in checkpoint.manifest.modules}
    own = [found.name for found in modules]
    if strict and saved.keys() != set(own):
        raise BadInput(
            f"'{checkpoint.folder}' holds the modules {', '.join(map(repr, saved))}; the model has "
            f"{', '.join(map(repr, own))}; build the model that was saved, or load with strict=False what has the same names",
            path=checkpoint.folder, saved=list(saved), model=own,
        )  # fmt: skip
    others = {(table.module, table.own_name): table for table in checkpoint.manifest.tables}
    here = {(table.module, table.own_name): (table, found) for found in modules for table in found.tables}
    keys = LoadedKeys(
        [table.name for key, (table, _) in here.items() if key not in others],
        [table.name for key, table in others.items() if key not in here],
    )
    if strict and any(keys):
        only = [
            f"only in {where}: {', '.join(names[:3])}" for where, names in zip(("the model", "it"), keys, strict=True) if names
        ]
        raise BadInput(
            f"'{checkpoint.folder}' holds other tables than the model ({'; '.join(only)}); build the model that was saved, or "
            "load with strict=False the tables that both have",
            path=checkpoint.folder, missing=keys.missing_keys, unknown=keys.unexpected_keys,
        )  # fmt: skip
    for key, (table, found) in here.items():
        if key in others:
            _check_table(checkpoint, others[key], table, found, strict)
    if not here.keys() & others.keys():
        raise BadInput(
            f"'{checkpoint.folder}' has none of the model's tables ({', '.join(keys.missing_keys[:3])}); it has "
            f"{', '.join(keys.unexpected_keys[:3])}",
            path=checkpoint.folder, missing=keys.missing_keys, unknown=keys.unexpected_keys,
        )  # fmt: skip
    return [(saved[found.name], found) for found in modules if found.name in saved], keys


def _check_table(checkpoint: Checkpoint, saved: TableEntry, table: TableEntry, found: NamedModule, strict: bool) -> None:
    """Raise if a table cannot take the rows of a saved one."""
    if (
        len(saved.features) == len(table.features)
        and table.dim == saved.dim
        and all(
            _resized(checkpoint.id_maps[then], found.maps[now])
            for then, now in zip(saved.features, table.features, strict=True)
        )
    ):
        return
    grows = not strict and table.rows > saved.rows and table.dim == saved.dim
    if (saved.rows, saved.dim) != (table.rows, table.dim) and not grows:
        raise BadInput(
            f"table {table.name!r} is {table.rows} x {table.dim} in the model and {saved.rows} x {saved.dim} in "
            f"'{checkpoint.folder}'; build it as it was saved, or with more rows and load with strict=False",
            table=table.name, model=(table.rows, table.dim), saved=(saved.rows, saved.dim),
        )  # fmt: skip
    if len(saved.features) != len(table.features):
        raise BadInput(
            f"table {table.name!r} was saved for the features {', '.join(saved.features)} and has "
            f"{', '.join(table.features)} in the model; build the model that was saved",
            table=table.name, model=table.features, saved=saved.features,
        )  # fmt: skip
    for saved_feature, feature in zip(saved.features, table.features, strict=True):
        then, now = checkpoint.id_maps[saved_feature], found.maps[feature]
        if then != now and not (grows and then.is_identity and now.is_identity):
            raise BadInput(
                f"feature {feature!r} was saved with the id map {then}, the model has {now}; build the model with the saved "
                "map, which the rows belong to",
                feature=feature, saved=then, model=now,
            )  # fmt: skip


def _resized(then: IdMap, now: IdMap) -> bool:
    """Whether two maps are the same but for the rows of a whole elastic table, and those that it begins with."""
    if not (isinstance(then.start, ElasticRows) and isinstance(now.start, ElasticRows)) or then.first or now.first:
        return False
    return replace(then.start, rows=now.start.rows, grow_from=now.start.grow_from) == now.start
