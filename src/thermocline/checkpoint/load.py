"""`thermocline.load`: from a folder to a module, whatever plan, number of ranks, device and precision either side has.

What can be seen to be wrong is found before anything is changed: files by their sha256 (ranks share that work), names, sizes
and id maps by the manifest. `fill.py` then puts the rows where they belong.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from thermocline.distributed.shard import shard_
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.nn.precision_tiers import Precision
from thermocline.plan.model import Plan

from .format.dense_state import Optimizers, load_dense, named, put_back
from .format.manifest import ModuleEntry, TableEntry
from .format.module_entries import Found, build, find
from .pending_saves import wait_for_saves
from .ranks import Team
from .reader import Checkpoint
from .restore import fill


def load(
    folder: str | Path,
    plan: Plan | str | Path | None = None,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
    *,
    heat: HeatProfile | str | Path | None = None,
    into: nn.Module | None = None,
    optimizers: Optimizers = None,
) -> nn.Module:
    """What `save` saved.

    A module of thermocline that was saved alone is built as it was; with `plan` (and the `heat` that it was made with) this
    rank's part of it, with `precision` in other formats. A model of your own is built by you and filled: `into=model`, sharded
    or not, with its `optimizers` as `save` had them. All ranks of a sharded model call this together.
    """
    wait_for_saves()
    checkpoint = Checkpoint.open(folder)
    if into is None:
        into = _built(checkpoint, plan, device, precision, heat)
    elif plan is not None or device is not None or precision is not None:
        raise BadInput("plan, device and precision are for a module that load builds; the model in `into` has its own")
    team = Team.of(into)
    team.do(lambda: checkpoint.verify((team.rank, team.size)))
    pairs = _matched(checkpoint, find(into))
    load_dense(into, checkpoint.named("model/"))
    for entry, found in pairs:
        fill(checkpoint, entry, found)
    put_back(named(optimizers), checkpoint.manifest.optimizers, checkpoint.named("optimizer/"))
    checkpoint.close()
    return into


def _built(
    checkpoint: Checkpoint, plan: Plan | str | Path | None, device: torch.device | str | None, precision: Precision | None,
    heat: HeatProfile | str | Path | None,
) -> nn.Module:  # fmt: skip
    modules = checkpoint.manifest.modules
    if len(modules) > 1 or modules[0].name:
        names = ", ".join(repr(module.name) for module in modules[:3])
        raise BadInput(
            f"'{checkpoint.folder}' holds a model with modules {names}; build the model and fill it: load(folder, into=model)"
        )
    place = "meta" if plan is not None else device
    made = build(modules[0], checkpoint.manifest.tables, checkpoint.id_maps, place, precision)
    if plan is None:
        return made
    holder = nn.ModuleDict({"rows": made})
    shard_(holder, plan, heat, device=device)
    return holder["rows"]


def _matched(checkpoint: Checkpoint, found: list[Found]) -> list[tuple[ModuleEntry, Found]]:
    """The saved module for each of a model, after a look at names, sizes and id maps."""
    saved = {module.name: module for module in checkpoint.manifest.modules}
    if saved.keys() != {each.name for each in found}:
        theirs, ours = (", ".join(map(repr, names)) for names in (saved, [each.name for each in found]))
        raise BadInput(f"'{checkpoint.folder}' holds the modules {theirs}; the model has {ours}: build the model it is of")
    for each in found:
        tables = {table.own_name: table for table in checkpoint.manifest.tables if table.module == each.name}
        for table in each.tables:
            other = tables.get(table.own_name)
            if other is None or len(tables) != len(each.tables) or (other.rows, other.dim) != (table.rows, table.dim):
                size = "missing" if other is None else f"{other.rows} x {other.dim}"
                raise BadInput(
                    f"table {table.name!r} is {table.rows} x {table.dim} in the model and {size} in '{checkpoint.folder}', "
                    f"which has {', '.join(tables)}; build the model it is of"
                )
            _check_maps(checkpoint.id_maps, other, each, table)
    return [(saved[each.name], each) for each in found]


def _check_maps(saved: Mapping[str, IdMap], theirs: TableEntry, found: Found, ours: TableEntry) -> None:
    for there, here in zip(theirs.features, ours.features, strict=True):
        if saved[there] != found.maps[here]:
            raise BadInput(
                f"feature {here!r} was saved with the id map {saved[there]}, the model has {found.maps[here]}; build it with "
                "the saved map: its rows are rows of those ids"
            )
