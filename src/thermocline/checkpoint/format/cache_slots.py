"""Cache slots of a module in a checkpoint.

On each rank of a sharded collection, every part of a table has its own slots (`local_shard.py`). A checkpoint stores them as
pools in the order of parts and then ranks, with rows numbered as in an unsharded arena. So any reader finds cached rows, values
and scores: another number of ranks, one process, or a server. Each rank writes and reads only its own pools. Slots of
replicated rows are equal on all ranks; one rank writes them.

Ranks under the same plan restore their pools exactly, including sketches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.checkpoint.reader import Checkpoint
from thermocline.distributed.placement.row_index import RowIndex, TablePart
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import FormatError
from thermocline.kernels.layout import Cache, Pool
from thermocline.kernels.slots import pointers
from thermocline.nn.rows_module import RowsModule, blocks
from thermocline.rows.arena import Arena

from .saved_cache import ARRAYS, CLOCKS, pool_key, pool_slices


class SavedPool(NamedTuple):
    """A pool of a checkpoint, with its part and its rank."""

    part: int
    rank: int
    pool: Pool


def saved_pools(module: ShardedCollection, row_index: RowIndex) -> list[SavedPool]:
    """Pools in a checkpoint of a collection, equal on every rank."""
    found: list[SavedPool] = []
    slot = end = near_end = 0
    for k, part in enumerate(row_index.parts):
        words = F.int8_slot_words(part.dim)
        for rank in _saving_ranks(module, row_index, k) if part.slots else ():
            base, near_base = -(-end // part.dim), -(-near_end // words)
            rows = module.tables[part.table].rows
            place = (row_index.first[part.table], rows, 0, 0, part.slots, slot, base, part.int8_slots, near_base)
            found.append(SavedPool(k, rank, Pool(part.dim, part.format, *place)))
            slot, end, near_end = slot + part.slots, (base + part.fp32_slots) * part.dim, (near_base + part.int8_slots) * words
    return found


def _saving_ranks(module: ShardedCollection, row_index: RowIndex, k: int) -> range:
    """Ranks that write their slots of a part."""
    part, owner = row_index.parts[k], row_index.maps[row_index.parts[k].table].owner
    if owner is not None:
        return range(owner, owner + 1)
    return range({1: 1, 2: module.groups.local_size, 3: module.groups.size}[part.tier])


def _own_pools(module: ShardedCollection, row_index: RowIndex, arena: Arena) -> Iterator[tuple[int, SavedPool, int]]:
    """Pools of this rank: number in the checkpoint, pool in the checkpoint, number in the arena."""
    groups, own = module.groups, {pool.row: index for index, pool in enumerate(arena.pools)}
    for number, saved in enumerate(saved_pools(module, row_index)):
        tier = row_index.parts[saved.part].tier
        holds = tier == 1 or saved.rank == (groups.rank % groups.local_size if tier == 2 else groups.rank)
        if holds and (row := arena.views(saved.part)[2]) in own:
            yield number, saved, own[row]


def own_slots(module: ShardedCollection, row_index: RowIndex, arena: Arena) -> dict[str, Tensor]:
    """Arrays of the pools that this rank writes, without a copy; row numbers are local."""
    found: dict[str, Tensor] = {}
    for number, saved, index in _own_pools(module, row_index, arena):
        if saved.rank == module.groups.rank:
            here = pool_slices(arena.pools[index], index)
            found |= {pool_key(name, number): getattr(Cache(*arena.cache), name)[here[name]] for name in ARRAYS}
    return found


def with_global_rows(
    module: ShardedCollection, row_index: RowIndex, arena: Arena, arrays: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The same arrays with global row numbers. Scans all rows of the tables in blocks."""
    found = dict(arrays)
    for number, saved, _ in _own_pools(module, row_index, arena):
        if (name := pool_key("rows", number)) in found:
            rows_S = arrays[name].cpu().clone()
            held_S = rows_S != F.EMPTY
            places_K = (rows_S[held_S] & ~F.DIRTY) - arena.views(saved.part)[2]
            rows_S[held_S] = _rows_at(module, row_index, saved.part, places_K) | (rows_S[held_S] & F.DIRTY)
            found[name] = rows_S
    return found


def _rows_at(module: ShardedCollection, row_index: RowIndex, k: int, places_K: Tensor) -> Tensor:
    """Global rows at places of a part."""
    part: TablePart = row_index.parts[k]
    first, device = row_index.first[part.table], row_index.device
    sorted_K, order_K = places_K.to(device).sort()
    found_K = torch.zeros_like(sorted_K)
    for begin, end in blocks(module.tables[part.table].rows if places_K.numel() else 0):
        rows_N = torch.arange(first + begin, first + end, device=device)
        for other, at_N, place_N in row_index.held_by(module.groups.rank, row_index.locate(rows_N)):
            if other == k:
                at_K = torch.searchsorted(sorted_K, place_N).clamp(max=len(sorted_K) - 1)
                hit_N = sorted_K[at_K] == place_N
                found_K[order_K[at_K[hit_N]]] = rows_N[at_N[hit_N]]
    return found_K.cpu()


def restore_cache(module: RowsModule, checkpoint: Checkpoint, name: str) -> None:
    """Restore the slots of this rank exactly, and the pointers to them in cached rows."""
    arena = module.arena
    if not arena.cache:
        return
    cache = Cache(*arena.cache)
    for clock in CLOCKS:
        with contextlib.suppress(FormatError):  # missing where rank 0 had no slots; the next step sets it
            getattr(cache, clock).copy_(checkpoint.state.read(f"module/{name}/cache_{clock}"))
    for number, index in _restored_pools(module):
        own = arena.pools[index]
        for array, here in pool_slices(own, index).items():
            checkpoint.cache.read_into(name, number, array, getattr(cache, array)[here])
        rows_S = cache.rows[own.slot : own.slot + own.slots]
        held, row_K = _arena_rows(module, own, rows_S)
        rows_S[held] = row_K | (rows_S[held] & F.DIRTY)
        arena.meta[own.meta + F.META_WORDS[own.format] * (row_K - own.row)] = pointers(own, held)


def saved_rows(module: RowsModule, checkpoint: Checkpoint, name: str) -> Tensor:
    """By slot of this rank, the arena row that the checkpoint holds there, or EMPTY."""
    found = torch.full_like(Cache(*module.arena.cache).rows, F.EMPTY)
    for number, index in _restored_pools(module):
        own = module.arena.pools[index]
        rows_S = checkpoint.cache.array(name, number, "rows").to(found.device)
        held, row_K = _arena_rows(module, own, rows_S)
        found[own.slot + held] = row_K
    return found


def _restored_pools(module: RowsModule) -> list[tuple[int, int]]:
    """Pools of this rank: number in a checkpoint with an equal layout, number in the arena."""
    if isinstance(module, ShardedCollection):
        return [(number, index) for number, _, index in _own_pools(module, module.row_index, module.arena)]
    return [(index, index) for index in range(len(module.arena.pools))]


def _arena_rows(module: RowsModule, pool: Pool, rows_S: Tensor) -> tuple[Tensor, Tensor]:
    """Slots that hold a row, and the arena row of each; a sharded collection saves global row numbers."""
    held = (rows_S != F.EMPTY).nonzero()[:, 0]
    row_K = rows_S[held] & ~F.DIRTY
    if isinstance(module, ShardedCollection):
        row_K = pool.row + module.row_index.locate(row_K.to(module.row_index.device)).index_N.to(row_K.device)
    return held, row_K
