"""What the rows of a sharded collection begin with: those of a whole one, or fresh ones, the same whatever the plan.

Slots are given away before rows get their values, so that those in slots are not rounded: to the hottest rows of each part, by
the heat file; or, without one or where the whole collection was warmed, to the rows that it has in slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.heat.profile import HeatProfile
from thermocline.kernels.layout import Cache
from thermocline.kernels.quantize.reference import random_bits
from thermocline.nn.collection import EmbeddingCollection
from thermocline.nn.rows_module import blocks
from thermocline.rows.arena import Arena

from .table_map import counted

if TYPE_CHECKING:
    from thermocline.distributed.sharded_collection import ShardedCollection


def take(into: ShardedCollection, source: EmbeddingCollection, heat: HeatProfile | None) -> None:
    """Rows, state and clock of a whole collection; of one without values (device "meta") the rows it would begin with."""
    real = source.arena.device.type != "meta"
    if into.arena.pools:
        into.arena.warm(_given(into, source) if source.arena.predicted is not None or heat is None else hot_rows(into, heat))
    if real:
        into.trainer.clock.copy_(source.trainer.clock)
        into.trainer.hyper.copy_(source.trainer.hyper)
        into.trained.group.read_back()
    for index, table in enumerate(into.tables):
        for first, last in blocks(table.rows):
            rows_N = torch.arange(first, last, device=into.atlas.device)
            for k, at_K, place_K in into._mine(into.atlas(rows_N + into.atlas.first[index])):
                if real:
                    _copy(into, source, index, rows_N[at_K], k, place_K)
                else:
                    into.arena.write(k, place_K, _initial(into, index, rows_N[at_K]))


def _copy(
    into: ShardedCollection, whole: EmbeddingCollection, table: int, rows_K: Tensor, k: int, place_K: Tensor
) -> None:  # fmt: skip
    arena, rows_K = into.arena, rows_K.to(whole.arena.device)
    as_stored_K = torch.zeros_like(place_K, dtype=torch.bool)
    if whole.arena.tables[table].precision == into.atlas.parts[k].precision:
        as_stored_K = ~(in_slots(arena, k, place_K) | in_slots(whole.arena, table, rows_K).to(place_K.device))
        for mine, theirs in zip(arena.views(k)[:2], whole.arena.views(table)[:2], strict=True):
            mine[place_K[as_stored_K]] = theirs[rows_K[as_stored_K.to(rows_K.device)]].to(mine.device)
    rest = (~as_stored_K).nonzero()[:, 0]
    if rest.numel():
        arena.write(k, place_K[rest], whole.arena.read(table, rows_K[rest.to(rows_K.device)]).to(arena.device))
    by_row = whole.trainer.optimizer.states_per_row > 0
    states = whole.arena.state_views(table, whole.trainer.states, by_row)
    for mine, theirs in zip(into.held.states(k), states, strict=True):
        mine[place_K] = theirs[rows_K].to(mine.device)


def in_slots(arena: Arena, table: int, rows_K: Tensor) -> Tensor:
    """Which rows of a table are cached."""
    meta_RW = arena.views(table)[1]
    return meta_RW[rows_K, 0] < 0 if meta_RW.shape[1] else torch.zeros_like(rows_K, dtype=torch.bool)


def hot_rows(into: ShardedCollection, heat: HeatProfile) -> list[Tensor]:
    """By part, how often the row of each place was looked up, as `Arena.warm` takes it."""
    of_tables = [counted(table.features, heat, into.id_maps) for table in into.tables]
    return _by_place(into, [(torch.from_numpy(rows_H), torch.from_numpy(counts_H)) for rows_H, counts_H in of_tables])


def _given(into: ShardedCollection, source: EmbeddingCollection) -> list[Tensor]:
    """The same of the rows that a whole collection has in slots."""
    return _by_place(into, [_in_slots_of(source.arena, index) for index in range(len(into.tables))])


def _by_place(into: ShardedCollection, of_tables: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    atlas = into.atlas
    found = [torch.zeros(part.held, dtype=torch.int64, device=atlas.device) for part in atlas.parts]
    for index, (rows_H, counts_H) in enumerate(of_tables):
        for k, at_K, place_K in into._mine(atlas(rows_H.to(atlas.device) + atlas.first[index])):
            found[k][place_K] = counts_H.to(atlas.device)[at_K]
    return found


def _in_slots_of(arena: Arena, table: int) -> tuple[Tensor, Tensor]:
    """Rows of a table that are cached, and what they are worth."""
    if arena.device.type == "meta" or not arena.cache:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    cache, first = Cache(*arena.cache), arena.views(table)[2]
    rows_S = (cache.rows & ~F.DIRTY) - first
    held_S = (cache.rows != F.EMPTY) & (rows_S >= 0) & (rows_S < arena.tables[table].rows)
    return rows_S[held_S], 1 + cache.scores[held_S].long()


def _initial(into: ShardedCollection, index: int, rows_K: Tensor) -> Tensor:
    """What rows begin with: uniform in +-1/sqrt(rows of their part of the table), by their number and the seed."""
    table, device = into.tables[index], into.atlas.device
    clock = torch.tensor([into.rows.seed, 0], device=device)
    bits_KD = random_bits(clock, rows_K + into.atlas.first[index], table.dim)
    unit_KD = (bits_KD >> 8).float() * 2.0**-23 - 1
    bound_P = torch.tensor([(end - begin) ** -0.5 for begin, end in table.parts], device=device)
    at_K = torch.searchsorted(torch.tensor([begin for begin, _ in table.parts], device=device), rows_K, right=True) - 1
    return unit_KD * bound_P[at_K][:, None]
