"""Rows of a checkpoint into the arena of a module, a block at a time.

Where the saved module and this one have the same tables, slots and policy, the cache comes back as it was, and training goes on
as if nothing had happened. Where they differ, rows that were cached get the slots there are, those first that were worth most,
and the others are rounded to nearest.

A rank of many looks at the numbers of rows first, and reads the rest of a block only if some of them belong to it: under the
plan that the folder was saved with that is its own part and the copies, and not all tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.kernels import dequantize_rows
from thermocline.kernels.layout import Cache
from thermocline.kernels.slots import pointers
from thermocline.nn.rows_module import RowsModule
from thermocline.rows.precision import format_of

from .format.cache_slots import restore
from .format.manifest import ModuleEntry, Section, TableEntry
from .format.module_entries import Found, layout_of
from .reader import Checkpoint, Part, block_rows

_ELEMENTS = 1 << 22  # of an array of the cache, read at a time


def fill(checkpoint: Checkpoint, entry: ModuleEntry, found: Found) -> None:
    """Give a module the rows, state and clock of a saved one."""
    module = found.module
    if isinstance(module, ShardedCollection):
        module.invalidate_prefetched()
    alike = F.OPTIMIZERS.index(entry.optimizer["name"]) == module.trainer.optimizer.code
    if not alike:
        warnings.warn(
            f"the rows of {found.name or 'the module'!r} were trained by {entry.optimizer['name']} and will be by "
            f"{F.OPTIMIZERS[module.trainer.optimizer.code]}: optimizer state begins anew",
            stacklevel=3,
        )
    tables = {table.own_name: table for table in checkpoint.manifest.tables if table.module == entry.name}
    saved = [tables[table.own_name] for table in found.tables]
    same = bool(entry.layout) and entry.layout == layout_of(module)
    module.arena.changes = None  # what is in the arena now was saved nowhere by it
    with torch.no_grad():
        module.arena.unstage()
        if not same:
            module.flush()
        for index, table in enumerate(saved):
            for section in checkpoint.sections(table.name):
                _fill_section(checkpoint, section, entry.states if alike else 0, module, index)
        for name in ["hyper", "clock"] if alike else ["clock"]:
            getattr(module.trainer, name).copy_(checkpoint.read(f"module/{entry.name}/{name}"))
        module.trained.group.read_back()
        if same:
            _put_cache(checkpoint, entry, module)
        else:
            _put_cached_rows(checkpoint, saved, module)


def _fill_section(checkpoint: Checkpoint, section: Section, states: int, module: RowsModule, index: int) -> None:
    """The rows of a section that belong to this module."""
    arena, size = module.arena, block_rows(checkpoint.manifest.table(section.table), states)
    whole = not section.scattered and not isinstance(module, ShardedCollection)
    if whole and arena.device.type == "cpu" and arena.tables[index].precision == section.precision:
        _read_into(checkpoint, section, states, module, index)
        return
    for begin in range(0, section.count, size):
        end = min(begin + size, section.count)
        rows_R = checkpoint.rows_of(section, begin, end).to(arena.device)
        part: Part | None = None
        for table, at_K, place_K, held in _places(module, index, rows_R):
            part = part or checkpoint.part_of(section, begin, end, states)
            _put(module, table, at_K, place_K, held, part)


def _read_into(checkpoint: Checkpoint, section: Section, states: int, module: RowsModule, index: int) -> None:
    """A range of rows, straight from the file to where they lie."""
    file, here = checkpoint.file(section.file), slice(section.first, section.end)
    codes_RB, meta_RW, _, _, _ = module.arena.views(index)
    file.read_into(f"{section.key}/codes", codes_RB[here])
    if meta_RW.shape[1]:
        file.read_into(f"{section.key}/meta", meta_RW[here])
    by_row = module.trainer.optimizer.states_per_row > 0
    for n, state in enumerate(module.arena.state_views(index, module.trainer.states, by_row)[:states]):
        file.read_into(f"{section.key}/state{n}", state[here])


def _places(module: RowsModule, index: int, rows_R: Tensor) -> Iterator[tuple[int, Tensor, Tensor, list[Tensor]]]:
    """Which of some rows of a table lie here: table of the arena, which rows, their places, and optimizer state there."""
    if isinstance(module, ShardedCollection):
        for k, at_K, place_K in module.shard.local(module.row_index.locate(rows_R + module.row_index.first[index])):
            yield k, at_K, place_K, module.shard.states(k)
        return
    by_row = module.trainer.optimizer.states_per_row > 0
    every = torch.arange(rows_R.numel(), device=rows_R.device)
    yield index, every, rows_R, module.arena.state_views(index, module.trainer.states, by_row)


def _put(module: RowsModule, table: int, at_K: Tensor, place_K: Tensor, states: list[Tensor], part: Part) -> None:
    arena, at = module.arena, at_K.cpu()
    codes_RB, meta_RW, _, format, dim = arena.views(table)
    if format == format_of(part.precision):
        codes_RB[place_K.to(codes_RB.device)] = part.codes_RB[at].to(codes_RB.device)
        meta_RW[place_K] = part.meta_RW[at].to(meta_RW.device)
    else:
        values_KD = dequantize_rows(part.codes_RB[at], part.meta_RW[at], format_of(part.precision), dim)
        arena.write(table, place_K, values_KD.to(arena.device))
    for mine, saved in zip(states, part.states, strict=False):  # none are read where the optimizer is another
        mine[place_K] = saved[at].to(mine.device)


def _put_cache(checkpoint: Checkpoint, entry: ModuleEntry, module: RowsModule) -> None:
    """The cache as it was, and pointers to it in the rows that it holds."""
    arena = module.arena
    if isinstance(module, ShardedCollection):
        restore(module, checkpoint, entry.name)
        return
    if not arena.cache:
        return
    for name, array in module._arrays().items():
        if not name.startswith("cache_"):
            continue
        if array.device.type == "cpu":
            checkpoint.read_into(f"module/{entry.name}/{name}", array)
            continue
        for first in range(0, array.shape[0], _ELEMENTS):
            last = min(first + _ELEMENTS, array.shape[0])
            array[first:last] = checkpoint.read(f"module/{entry.name}/{name}", first, last).to(array.device)
    cache = Cache(*arena.cache)
    for pool in arena.pools:
        rows_S = cache.rows[pool.slot : pool.slot + pool.slots]
        slot_K = (rows_S != F.EMPTY).nonzero()[:, 0]
        word = pool.meta + F.META_WORDS[pool.format] * ((rows_S[slot_K] & ~F.DIRTY) - pool.row)
        arena.meta[word] = pointers(pool, slot_K)


def _put_cached_rows(checkpoint: Checkpoint, tables: list[TableEntry], module: RowsModule) -> None:
    """Rows that were cached in another arrangement: in slots again, as many as there are, or rounded."""
    if module.arena.pools:
        heat = [torch.zeros(table.rows, dtype=torch.int32) for table in module.arena.tables]
        for index, table in enumerate(tables):
            rows_K, scores_K = checkpoint.hot(table.name)
            for k, at_K, place_K, _ in _places(module, index, rows_K.to(module.arena.device)):
                heat[k][place_K.cpu()] = 1 + scores_K[at_K.cpu()].clamp(0, 1 << 30).int()
        module.arena.warm(heat)
        module.arena.predicted = None  # which is for the heat of a log
    for index, table in enumerate(tables):
        for rows_K, values_KD in checkpoint.cached_blocks(table.name):
            for k, at_K, place_K, _ in _places(module, index, rows_K.to(module.arena.device)):
                module.arena.write(k, place_K, values_KD[at_K.cpu()].to(module.arena.device))
