"""Rows of a checkpoint, written into the arena of a module a block at a time.

If tables, slots and policy equal those of the saved module, the cache is restored exactly, and training continues bit for bit.
Otherwise cached rows get the slots there are, highest scores first, and the remaining ones are rounded to nearest.

Ranks of a sharded module read the folder once together (`shared_reading.py`).

Elastic ids keep their rows in a table of the saved size. In another they take rows anew: `Remap` has the new row of each saved
row of such a table, -1 for rows of the coldest ids that found no place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.rank_keys import RankKeys
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.ids.capacity import take_over
from thermocline.ids.elastic import KeyTable
from thermocline.ids.gpu_keys import on_cpu
from thermocline.ids.keyed_map import new_keys
from thermocline.kernels import dequantize_rows
from thermocline.nn.elastic_maps import ElasticMaps
from thermocline.nn.rows_module import RowsModule
from thermocline.rows.precision import format_of

from .format.cache_slots import restore_cache
from .format.manifest import ModuleEntry, Section, TableEntry
from .format.module_entries import NamedModule, layout_of
from .reader import Checkpoint, SectionRows, block_rows
from .saved_ids import read_keys, saved_places
from .shared_reading import read_together

Remap = dict[int, Tensor]  # by table


def restore_module(checkpoint: Checkpoint, entry: ModuleEntry, found: NamedModule) -> None:
    """Write rows, optimizer state and clock of a saved module into another one."""
    module = found.module
    if isinstance(module, ShardedCollection):
        module.invalidate_prefetched()
    same_optimizer = F.OPTIMIZERS.index(entry.optimizer["name"]) == module.trainer.optimizer.code
    if not same_optimizer:
        warnings.warn(
            f"rows of {found.name or 'the module'!r} were trained by {entry.optimizer['name']}; the model has "
            f"{F.OPTIMIZERS[module.trainer.optimizer.code]}, so optimizer state starts from zero",
            stacklevel=4,
        )
    tables = {table.own_name: table for table in checkpoint.manifest.tables if table.module == entry.name}
    saved = {index: tables[own.own_name] for index, own in enumerate(found.tables) if own.own_name in tables}
    same_layout = bool(entry.layout) and entry.layout == layout_of(module) and len(saved) == len(found.tables)
    module.arena.replaced()
    with torch.no_grad():
        module.arena.unstage()
        if not same_layout:
            module.flush()
        remap = _restore_ids(checkpoint, entry, module, saved)
        for index, table in saved.items():
            states = entry.states if same_optimizer else 0
            if isinstance(module, ShardedCollection) and not module.groups.world.is_single:
                for part in read_together(checkpoint, table, states, module, index, remap.get(index)):
                    _write_part(module, index, part, {})
                continue
            for section in checkpoint.sections(table.name):
                _restore_section(checkpoint, section, states, module, index, remap)
        for name in ["hyper", "clock"] if same_optimizer else ["clock"]:
            getattr(module.trainer, name).copy_(checkpoint.state.read(f"module/{entry.name}/{name}"))
        module.trained.group.read_back()
        if same_layout:
            restore_cache(module, checkpoint, entry.name)
        else:
            _write_cached_rows(checkpoint, saved, module, remap)


def _restore_ids(checkpoint: Checkpoint, entry: ModuleEntry, module: RowsModule, saved: dict[int, TableEntry]) -> Remap:
    """Restore the key tables of elastic ids; those of another size take the ids over."""
    maps = module.maps
    if not isinstance(maps, ElasticMaps):
        return {}
    maps.replaced()
    places = saved_places(checkpoint, entry.name)
    remap: Remap = {}
    for (index, first), keys in zip(maps.places, maps.keys, strict=True):
        if index not in saved:
            continue
        place = places[saved[index].name, first]
        whole = new_keys(keys.policy) if isinstance(keys, RankKeys) else keys
        then = whole if place.policy == keys.policy else new_keys(place.policy)
        read_keys(checkpoint, entry.name, place, then)
        if then is not whole:
            taken: Tensor = on_cpu(whole, lambda host, then=then: take_over(host, then))  # type: ignore[misc]
            remap[index] = taken.to(module.arena.device)
        elif keys.policy.grows and not first:
            remap[index] = _open_rows(whole).to(module.arena.device)
        if isinstance(keys, RankKeys):
            keys.take(whole)
        if index in remap and (dropped := int((remap[index][then.places.rows(then.occupied())] < 0).sum())):
            fewer = f"{then.policy.rows} rows, the model has {keys.policy.rows}: {dropped} ids, the coldest, were dropped"
            warnings.warn(f"elastic table {saved[index].name!r} was saved with {fewer}", stacklevel=5)
    return remap


def _open_rows(keys: KeyTable) -> Tensor:
    """The rows to which a table has grown, as they are, and -1 for others: writing these would take their memory."""
    rows_R = torch.arange(keys.policy.rows)
    closed = keys.places.closed(int(keys.open))
    rows_R[closed.start : closed.stop] = -1
    return rows_R


def _restore_section(
    checkpoint: Checkpoint, section: Section, states: int, module: RowsModule, index: int, remap: Remap
) -> None:
    """Write the rows of a section that belong to this module."""
    arena, size = module.arena, block_rows(checkpoint.manifest.table(section.table), states)
    direct = not section.scattered and not isinstance(module, ShardedCollection) and index not in remap
    if direct and arena.device.type == "cpu" and arena.tables[index].precision == section.precision:
        _read_into(checkpoint, section, states, module, index)
        return
    for begin in range(0, section.count, size):
        part = checkpoint.read_section(section, begin, min(begin + size, section.count), states)
        _write_part(module, index, part, remap)


def _write_part(module: RowsModule, index: int, part: SectionRows, remap: Remap) -> None:
    """Write the rows that belong to this module."""
    for table, at_K, place_K, states in _places(module, index, part.rows_R.to(module.arena.device), remap):
        _write(module, table, at_K, place_K, states, part)


def _read_into(checkpoint: Checkpoint, section: Section, states: int, module: RowsModule, index: int) -> None:
    """Read a range of rows from the file directly into the arena."""
    file, here = checkpoint.file(section.file), slice(section.first, section.end)
    codes_RB, meta_RW, _, _, _ = module.arena.views(index)
    file.read_into(f"{section.key}/codes", codes_RB[here])
    if meta_RW.shape[1]:
        file.read_into(f"{section.key}/meta", meta_RW[here])
    by_row = module.trainer.optimizer.states_per_row > 0
    for n, state in enumerate(module.arena.state_views(index, module.trainer.states, by_row)[:states]):
        file.read_into(f"{section.key}/state{n}", state[here])


def _places(module: RowsModule, index: int, rows_R: Tensor, remap: Remap) -> Iterator[tuple[int, Tensor, Tensor, list[Tensor]]]:
    """Rows of a table that this arena holds: arena table, indices into `rows_R`, places, and optimizer state arrays."""
    every = torch.arange(rows_R.numel(), device=rows_R.device)
    if index in remap:
        rows_R = remap[index][rows_R]
        every = every[rows_R >= 0]
        rows_R = rows_R[every]
    if isinstance(module, ShardedCollection):
        for k, at_K, place_K in module.shard.local(module.row_index.locate(rows_R + module.row_index.first[index])):
            yield k, every[at_K], place_K, module.shard.states(k)
        return
    by_row = module.trainer.optimizer.states_per_row > 0
    yield index, every, rows_R, module.arena.state_views(index, module.trainer.states, by_row)


def _write(module: RowsModule, table: int, at_K: Tensor, place_K: Tensor, states: list[Tensor], part: SectionRows) -> None:
    arena, at = module.arena, at_K.cpu()
    codes_RB, meta_RW, _, format, dim = arena.views(table)
    if format == format_of(part.precision):
        codes_RB[place_K.to(codes_RB.device)] = part.codes_RB[at].to(codes_RB.device)
        meta_RW[place_K] = part.meta_RW[at].to(meta_RW.device)
    else:
        values_KD = dequantize_rows(part.codes_RB[at], part.meta_RW[at], format_of(part.precision), dim)
        arena.write(table, place_K, values_KD.to(arena.device))
    for mine, saved in zip(states, part.states, strict=False):  # empty if the optimizer differs
        mine[place_K] = saved[at].to(mine.device)


def _write_cached_rows(checkpoint: Checkpoint, tables: dict[int, TableEntry], module: RowsModule, remap: Remap) -> None:
    """Put rows that were cached under another layout into slots by score, and round the remaining ones."""
    if module.arena.pools:
        heat = [torch.zeros(table.rows, dtype=torch.int32) for table in module.arena.tables]
        for index, table in tables.items():
            rows_K, scores_K = checkpoint.cache.scores(table)
            for k, at_K, place_K, _ in _places(module, index, rows_K.to(module.arena.device), remap):
                heat[k][place_K.cpu()] = 1 + scores_K[at_K.cpu()].clamp(0, 1 << 30).int()
        module.arena.warm(heat)
        module.arena.predicted = None  # predictions are for the heat of a log
    for index, table in tables.items():
        for rows_K, values_KD in checkpoint.cache.updated_rows(table):
            for k, at_K, place_K, _ in _places(module, index, rows_K.to(module.arena.device), remap):
                module.arena.write(k, place_K, values_KD[at_K.cpu()].to(module.arena.device))
