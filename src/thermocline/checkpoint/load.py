"""`thermocline.load`: from a folder to a module, whatever plan, number of ranks, device and precision either side has.

Rows are read a block at a time. Where the saved module and the new one have the same tables, slots and policy, the cache comes
back as it was, and training goes on as if nothing had happened. Where they differ, rows that were cached get the slots there
are, those first that were worth most, and the others are rounded to nearest.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import formats as F
from ..distributed.shard import shard_
from ..distributed.sharded import ShardedCollection
from ..errors import BadInput
from ..heat.profile import HeatProfile
from ..ids.idmap import IdMap
from ..kernels import dequantize_rows
from ..kernels.layout import Cache
from ..kernels.slots import pointers
from ..nn.base import RowsModule
from ..nn.tiers import Precision
from ..plan.model import Plan
from ..rows.precision import format_of
from .dense import Optimizers, load_dense, named, put_back
from .describe import Found, build, find, layout_of
from .manifest import ModuleEntry, TableEntry
from .reader import BLOCK, Checkpoint, Part
from .team import Team


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
    checkpoint = Checkpoint.open(folder)
    if into is None:
        into = _built(checkpoint, plan, device, precision, heat)
    elif plan is not None or device is not None or precision is not None:
        raise BadInput("plan, device and precision are for a module that load builds; the model in `into` has its own")
    team = Team.of(into)
    team.do(lambda: checkpoint.verify((team.rank, team.size)))
    pairs = _matched(checkpoint, find(into))
    state, names = checkpoint.state, checkpoint.state.names()
    dense = {name[6:]: state.read(name) for name in names if name.startswith("model/")}
    load_dense(into, dense)
    for entry, found in pairs:
        fill(checkpoint, entry, found)
    tensors = {name[10:]: state.read(name) for name in names if name.startswith("optimizer/")}
    put_back(named(optimizers), checkpoint.manifest.optimizers, tensors)
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
    shard_(holder, plan, heat)
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


def fill(checkpoint: Checkpoint, entry: ModuleEntry, found: Found) -> None:
    """Give a module the rows, state and clock of a saved one."""
    module = found.module
    trained_alike = F.OPTIMIZERS.index(entry.optimizer["name"]) == module.trainer.optimizer.code
    if not trained_alike:
        warnings.warn(
            f"the rows of {found.name or 'the module'!r} were trained by {entry.optimizer['name']} and will be by "
            f"{F.OPTIMIZERS[module.trainer.optimizer.code]}: optimizer state begins anew",
            stacklevel=3,
        )
    own = {table.own_name: table for table in checkpoint.manifest.tables if table.module == entry.name}
    same = not isinstance(module, ShardedCollection) and entry.layout == layout_of(module)
    with torch.no_grad():
        module.arena.unstage()
        if not same:
            module.flush()
        for index, table in enumerate(found.tables):
            for part in checkpoint.parts(own[table.own_name].name):
                _put(module, index, part if trained_alike else part._replace(states=[]))
        prefix = f"module/{entry.name}/"
        names = ["hyper", "clock"] if trained_alike else ["clock"]
        for name in names:
            getattr(module.trainer, name).copy_(checkpoint.state.read(prefix + name))
        module.trained.group.read_back()
        if same:
            _put_cache(checkpoint, entry, module)
        else:
            _put_cached_rows(checkpoint, [own[table.own_name] for table in found.tables], module)


def _put(module: RowsModule, index: int, part: Part) -> None:
    """Rows of a part where they belong; all that belong here, of a sharded module."""
    device = module.arena.device
    rows_R = part.rows_R.to(device)
    if not isinstance(module, ShardedCollection):
        by_row = module.trainer.optimizer.states_per_row > 0
        states = module.arena.state_views(index, module.trainer.states, by_row)
        _put_rows(module, index, rows_R, states, part)
        return
    for k, at_K, place_K in module._mine(module.atlas(rows_R + module.atlas.first[index])):
        at = at_K.cpu()
        mine = Part(part.rows_R, part.codes_RB[at], part.meta_RW[at], [state[at] for state in part.states], part.precision)
        _put_rows(module, k, place_K, module.held.states(k), mine)


def _put_rows(module: RowsModule, index: int, at_K: Tensor, states: list[Tensor], part: Part) -> None:
    arena = module.arena
    codes_RB, meta_RW, _, format, dim = arena.views(index)
    if format == format_of(part.precision):
        codes_RB[at_K.to(codes_RB.device)] = part.codes_RB.to(codes_RB.device)
        meta_RW[at_K] = part.meta_RW.to(meta_RW.device)
    else:
        values_KD = dequantize_rows(part.codes_RB, part.meta_RW, format_of(part.precision), dim)
        arena.write(index, at_K, values_KD.to(arena.device))
    for mine, saved in zip(states, part.states, strict=False):
        mine[at_K] = saved.to(mine.device)


def _put_cache(checkpoint: Checkpoint, entry: ModuleEntry, module: RowsModule) -> None:
    """The cache as it was, and pointers to it in the rows that it holds."""
    arena = module.arena
    for name, array in module._arrays().items():
        if name.startswith("cache_"):
            for first in range(0, array.shape[0], BLOCK * 16):
                last = min(first + BLOCK * 16, array.shape[0])
                array[first:last] = checkpoint.state.read(f"module/{entry.name}/{name}", first, last).to(array.device)
    cache = Cache(*arena.cache) if arena.cache else None
    for pool in arena.pools:
        assert cache is not None
        rows_S = cache.rows[pool.slot : pool.slot + pool.slots]
        slot_K = (rows_S != F.EMPTY).nonzero()[:, 0]
        word = pool.meta + F.META_WORDS[pool.format] * ((rows_S[slot_K] & ~F.DIRTY) - pool.row)
        arena.meta[word] = pointers(pool, slot_K)


def _put_cached_rows(checkpoint: Checkpoint, tables: list[TableEntry], module: RowsModule) -> None:
    """Rows that were cached in another arrangement: in slots again, as many as there are, or rounded."""
    if module.arena.pools:
        heat = []
        for table in tables:
            rows_K, scores_K = checkpoint.hot(table.name)
            heat.append(torch.zeros(table.rows, dtype=torch.int64).index_put_((rows_K,), scores_K + 1))
        module.arena.warm(heat)
        module.arena.predicted = None
    for index, table in enumerate(tables):
        rows_K, values_KD = checkpoint.cached(table.name)
        for at in torch.arange(len(rows_K)).split(BLOCK):
            if not isinstance(module, ShardedCollection):
                module.arena.write(index, rows_K[at].to(module.arena.device), values_KD[at].to(module.arena.device))
                continue
            mine = module._mine(module.atlas(rows_K[at].to(module.arena.device) + module.atlas.first[index]))
            for k, at_K, place_K in mine:
                module.arena.write(k, place_K, values_KD[at][at_K.cpu()].to(module.arena.device))
