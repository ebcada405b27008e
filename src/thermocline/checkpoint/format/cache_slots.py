"""The caches of a sharded collection in a checkpoint: as the cache that one process would have, of which ranks have parts.

Every part of a table has slots of its own on each card (`local_shard.py`). In a checkpoint they are pools, in the order of
parts and then of cards, each with rows numbered as in the arena of one process. So whoever reads a checkpoint finds rows in
slots, their values and what they were worth, whatever they will be: another number of ranks, one process, tables that serve.
Every rank writes its own, and reads its own: none ever has those of all. Of copied rows one card's slots are saved, for those
of others are the same.

Ranks that carry out the same plan take their pools over as they were, sketches and all, and go on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.checkpoint.reader import Checkpoint
from thermocline.distributed.placement.row_index import Atlas, Part
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import FormatError
from thermocline.kernels.layout import Cache, Pool
from thermocline.kernels.slots import pointers
from thermocline.nn.rows_module import blocks
from thermocline.rows.arena import Arena

from .slot_layout import ARRAYS, CLOCKS, piece, places


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
    return "; ".join([f"{world.nodes} x {world.cards} cards", *parts, *maps, module.rows.policy])


def saved_pools(module: ShardedCollection, atlas: Atlas) -> list[Saved]:
    """The pools that a checkpoint of a collection has, the same on every rank."""
    found: list[Saved] = []
    slot = end = near_end = 0
    for k, part in enumerate(atlas.parts):
        words = F.int8_slot_words(part.dim)
        for rank in _savers(module, atlas, k) if part.slots else ():
            base, near_base = -(-end // part.dim), -(-near_end // words)
            rows = module.tables[part.table].rows
            place = (atlas.first[part.table], rows, 0, 0, part.slots, slot, base, part.near, near_base)
            found.append(Saved(k, rank, Pool(part.dim, part.format, *place)))
            slot, end, near_end = slot + part.slots, (base + part.full) * part.dim, (near_base + part.near) * words
    return found


def _savers(module: ShardedCollection, atlas: Atlas, k: int) -> range:
    """The ranks whose slots of a part are saved."""
    part, card = atlas.parts[k], atlas.maps[atlas.parts[k].table].card
    if card is not None:
        return range(card, card + 1)
    return range({1: 1, 2: module.world.cards, 3: module.world.size}[part.tier])


def _mine(module: ShardedCollection, atlas: Atlas, arena: Arena) -> Iterator[tuple[int, Saved, int]]:
    """The pools of this card's arena: the number that a checkpoint has for each, what it has there, and the number here."""
    world, own = module.world, {pool.row: index for index, pool in enumerate(arena.pools)}
    for number, saved in enumerate(saved_pools(module, atlas)):
        tier = atlas.parts[saved.part].tier
        holds = tier == 1 or saved.rank == (world.rank % world.cards if tier == 2 else world.rank)
        if holds and (row := arena.views(saved.part)[2]) in own:
            yield number, saved, own[row]


def own_slots(module: ShardedCollection, atlas: Atlas, arena: Arena) -> dict[str, Tensor]:
    """The pools that this rank writes, where they lie; rows are numbered as they are here."""
    found: dict[str, Tensor] = {}
    for number, saved, index in _mine(module, atlas, arena):
        if saved.rank == module.world.rank:
            here = places(arena.pools[index], index)
            found |= {piece(name, number): getattr(Cache(*arena.cache), name)[here[name]] for name in ARRAYS}
    return found


def numbered(module: ShardedCollection, atlas: Atlas, arena: Arena, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with rows numbered as in one process. It looks at all rows of the tables, some at a time."""
    found = dict(arrays)
    for number, saved, _ in _mine(module, atlas, arena):
        if (name := piece("rows", number)) in found:
            rows_S = arrays[name].cpu().clone()
            held_S = rows_S != F.EMPTY
            places_K = (rows_S[held_S] & ~F.DIRTY) - arena.views(saved.part)[2]
            rows_S[held_S] = _rows_at(module, atlas, saved.part, places_K) | (rows_S[held_S] & F.DIRTY)
            found[name] = rows_S
    return found


def _rows_at(module: ShardedCollection, atlas: Atlas, k: int, places_K: Tensor) -> Tensor:
    """The global rows of some places of a part."""
    part: Part = atlas.parts[k]
    first, device = atlas.first[part.table], atlas.device
    sorted_K, order_K = places_K.to(device).sort()
    found_K = torch.zeros_like(sorted_K)
    for begin, end in blocks(module.tables[part.table].rows if places_K.numel() else 0):
        rows_N = torch.arange(first + begin, first + end, device=device)
        for other, at_N, place_N in atlas.held_by(module.world.rank, atlas(rows_N)):
            if other == k:
                at_K = torch.searchsorted(sorted_K, place_N).clamp(max=len(sorted_K) - 1)
                hit_N = sorted_K[at_K] == place_N
                found_K[order_K[at_K[hit_N]]] = rows_N[at_N[hit_N]]
    return found_K.cpu()


def restore(module: ShardedCollection, checkpoint: Checkpoint, name: str) -> None:
    """Slots as they were when a module of this name was saved, and pointers to them in the rows that they hold."""
    arena = module.arena
    if not arena.cache:
        return
    cache = Cache(*arena.cache)
    for clock in CLOCKS:
        with contextlib.suppress(FormatError):  # where rank 0 had no slots there are none; the next step sets them
            getattr(cache, clock).copy_(checkpoint.read(f"module/{name}/cache_{clock}"))
    for number, _, index in _mine(module, module.atlas, arena):
        own = arena.pools[index]
        for array, here in places(own, index).items():
            getattr(cache, array)[here] = checkpoint.slots(name, number, array).to(arena.device)
        rows_S = cache.rows[own.slot : own.slot + own.slots]
        held = (rows_S != F.EMPTY).nonzero()[:, 0]
        place_K = module.atlas((rows_S[held] & ~F.DIRTY).to(module.atlas.device)).place_N
        rows_S[held] = (own.row + place_K) | (rows_S[held] & F.DIRTY)
        arena.meta[own.meta + F.META_WORDS[own.format] * place_K] = pointers(own, held)


def rows_then(module: ShardedCollection, checkpoint: Checkpoint, name: str) -> Tensor:
    """By slot of this card, the arena row that a checkpoint has there, or EMPTY."""
    arena = module.arena
    found = torch.full_like(Cache(*arena.cache).rows, F.EMPTY)
    for number, _, index in _mine(module, module.atlas, arena):
        own, rows_S = arena.pools[index], checkpoint.slots(name, number, "rows")
        held = (rows_S != F.EMPTY).nonzero()[:, 0]
        rows_S[held] = own.row + module.atlas((rows_S[held] & ~F.DIRTY).to(module.atlas.device)).place_N.cpu()
        found[own.slot : own.slot + own.slots] = rows_S.to(found.device)
    return found
