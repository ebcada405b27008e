"""The caches of a sharded collection in a checkpoint: as the cache that one process would have, of which ranks have parts.

Every part of a table has slots of its own on each card (`distributed/held.py`). In a checkpoint they are pools one after
another, in the order of parts and then of cards, each with rows numbered as in the arena of one process. So whoever reads a
checkpoint finds rows in slots, their values and what they were worth, whatever they will be: another number of ranks, one
process, tables that serve. Of copied rows one card's slots are saved, for those of others are the same.

Ranks that carry out the same plan take their pools over as they were, sketches and all, and go on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import formats as F
from ..distributed.atlas import Part
from ..distributed.sharded import ShardedCollection
from ..errors import FormatError
from ..kernels.cache.reference import COUNTERS
from ..kernels.layout import Cache, Pool
from ..kernels.slots import pointers
from ..nn.base import blocks
from ..rows.cache import make_cache

ARRAYS = Cache._fields[: Cache._fields.index("ledger") + 1]
CLOCKS = ("clock", "steps")  # the same on all ranks


class Saved(NamedTuple):
    """A pool of a checkpoint: the part and the card whose slots it has."""

    part: int
    rank: int
    pool: Pool


def shards_layout(module: ShardedCollection) -> str:
    """What decides which slots are whose: two collections with the same take them over from each other."""
    atlas, world = module.atlas, module.world
    parts = [f"{p.name} tier {p.tier} {p.dim} {p.precision} {p.full} + {p.near}" for p in atlas.parts]
    maps = [map.digest()[:16] for map in atlas.maps]
    return "; ".join([f"{world.nodes} x {world.cards} cards", *parts, *maps, module.storage.policy])


def saved_pools(module: ShardedCollection) -> list[Saved]:
    """The pools that a checkpoint of a collection has, the same on every rank."""
    found: list[Saved] = []
    slot = end = near_end = 0
    for k, part in enumerate(module.atlas.parts):
        words = F.near_words(part.dim)
        for rank in _savers(module, k) if part.slots else ():
            base, near_base = -(-end // part.dim), -(-near_end // words)
            rows = module.tables[part.table].rows
            place = (module.atlas.first[part.table], rows, 0, 0, part.slots, slot, base, part.near, near_base)
            found.append(Saved(k, rank, Pool(part.dim, part.format, *place)))
            slot, end, near_end = slot + part.slots, (base + part.full) * part.dim, (near_base + part.near) * words
    return found


def _savers(module: ShardedCollection, k: int) -> range:
    """The ranks whose slots of a part are saved."""
    part, card = module.atlas.parts[k], module.atlas.maps[module.atlas.parts[k].table].card
    if card is not None:
        return range(card, card + 1)
    return range({1: 1, 2: module.world.cards, 3: module.world.size}[part.tier])


def _mine(module: ShardedCollection) -> Iterator[tuple[int, Saved]]:
    """The pools of this card's arena, and where a checkpoint has them."""
    world, own = module.world, {pool.row: index for index, pool in enumerate(module.arena.pools)}
    for saved in saved_pools(module):
        tier = module.atlas.parts[saved.part].tier
        holds = tier == 1 or saved.rank == (world.rank % world.cards if tier == 2 else world.rank)
        if holds and (row := module.arena.views(saved.part)[2]) in own:
            yield own[row], saved


def gathered(module: ShardedCollection) -> dict[str, Tensor]:
    """The arrays of all pools, on rank 0. All ranks call this together."""
    mine = {
        (saved.part, saved.rank): _part_arrays(module, saved) for _, saved in _mine(module) if saved.rank == module.world.rank
    }
    everyone = [mine]
    if module.world.size > 1:
        everyone = [mine] * module.world.size if module.world.rank == 0 else []
        group = module.world.everyone.process
        dist.gather_object(mine, everyone if module.world.rank == 0 else None, dst=0, group=group)
    if module.world.rank:
        return {}
    pools = saved_pools(module)
    whole = dict(zip(ARRAYS, make_cache([saved.pool for saved in pools], "cpu"), strict=False))
    for number, saved in enumerate(pools):
        arrays = next(each[saved.part, saved.rank] for each in everyone if (saved.part, saved.rank) in each)
        for name, here, array in zip(ARRAYS, _slices(saved.pool, number), arrays, strict=True):
            whole[name][here] = array
    return {f"cache_{name}": array for name, array in whole.items()}


def _slices(pool: Pool, number: int) -> list[slice | int]:
    """Where a pool lies in each of the arrays."""
    words, each = F.near_words(pool.dim), slice(pool.slot, pool.slot + pool.slots)
    sketch = COUNTERS // 2
    return [
        slice(pool.base * pool.dim, (pool.base + pool.full) * pool.dim),
        slice(pool.near_base * words, (pool.near_base + pool.near) * words),
        each, each, each, slice(sketch * pool.slot, sketch * (pool.slot + pool.slots)), number,
    ]  # fmt: skip


def _part_arrays(module: ShardedCollection, saved: Saved) -> list[Tensor]:
    """The slots of a part of this card; rows are numbered as in one process."""
    arrays = [array.detach().cpu().reshape(-1).clone() for array in module.held.slots(saved.part)]
    rows_S = arrays[2]
    held_S = rows_S != F.EMPTY
    places_K = (rows_S[held_S] & ~F.DIRTY) - module.arena.views(saved.part)[2]
    rows_S[held_S] = (_rows_at(module, saved.part)[places_K.to(module.atlas.device)].cpu()) | (rows_S[held_S] & F.DIRTY)
    return arrays


def _rows_at(module: ShardedCollection, k: int) -> Tensor:
    """The global row of each place of a part."""
    part: Part = module.atlas.parts[k]
    first, device = module.atlas.first[part.table], module.atlas.device
    found = torch.zeros(part.held, dtype=torch.int64, device=device)
    for begin, end in blocks(module.tables[part.table].rows):
        rows_N = torch.arange(first + begin, first + end, device=device)
        for other, at_K, place_K in module._mine(module.atlas(rows_N)):
            if other == k:
                found[place_K] = rows_N[at_K]
    return found


def restore(module: ShardedCollection, read: Callable[[str], Tensor]) -> None:
    """Slots as they were, and pointers to them in the rows that they hold; `read` gives an array of a checkpoint."""
    arena, saved_at = module.arena, {saved: number for number, saved in enumerate(saved_pools(module))}
    if not arena.cache:
        return
    cache, whole = Cache(*arena.cache), {name: read(f"cache_{name}") for name in ARRAYS}
    for name in CLOCKS:
        with contextlib.suppress(FormatError):  # where rank 0 had no slots there are none; the next step sets them
            getattr(cache, name).copy_(read(f"cache_{name}"))
    for index, saved in _mine(module):
        own = arena.pools[index]
        for name, there, here in zip(ARRAYS, _slices(saved.pool, saved_at[saved]), _slices(own, index), strict=True):
            getattr(cache, name)[here] = whole[name][there].to(arena.device)
        rows_S = cache.rows[own.slot : own.slot + own.slots]
        held = (rows_S != F.EMPTY).nonzero()[:, 0]
        place_K = module.atlas((rows_S[held] & ~F.DIRTY).to(module.atlas.device)).place_N
        rows_S[held] = (own.row + place_K) | (rows_S[held] & F.DIRTY)
        arena.meta[own.meta + F.META_WORDS[own.format] * place_K] = pointers(own, held)


def rows_then(module: ShardedCollection, read: Callable[[str], Tensor]) -> Tensor:
    """By slot of this card, the arena row that a checkpoint has there, or EMPTY."""
    found, whole = torch.full_like(Cache(*module.arena.cache).rows, F.EMPTY), read("cache_rows")
    for index, saved in _mine(module):
        own, rows_S = module.arena.pools[index], whole[saved.pool.slot : saved.pool.slot + saved.pool.slots].clone()
        held = (rows_S != F.EMPTY).nonzero()[:, 0]
        rows_S[held] = own.row + module.atlas((rows_S[held] & ~F.DIRTY).to(module.atlas.device)).place_N.cpu()
        found[own.slot : own.slot + own.slots] = rows_S.to(found.device)
    return found
