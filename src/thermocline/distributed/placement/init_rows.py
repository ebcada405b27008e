"""Initial rows and cache slots of a shard: those of an unsharded collection, or fresh ones, the same for every plan.

Slots are assigned before rows get their values, so that cached rows are not rounded. They go to the hottest rows of each part
by the heat file; without one, or if the unsharded collection was warmed, to the rows that it has in slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.shard_source import ShardSource
from thermocline.heat.profile import HeatProfile
from thermocline.ids.idmap import IdMap
from thermocline.kernels.layout import Cache
from thermocline.kernels.quantize.reference import random_bits
from thermocline.nn.collection import Table
from thermocline.nn.rows_module import blocks
from thermocline.rows.arena import Arena

from .local_shard import FP32_SLOT, INT8_SLOT, LocalShard
from .row_index import RowIndex
from .table_map import Counts, hottest_rows


def init_rows(shard: LocalShard, source: ShardSource, heat: HeatProfile | None) -> None:
    """Copy rows, optimizer state and clock of a module; draw fresh rows for a module on the meta device."""
    real = source.arena.device.type != "meta"
    if shard.arena.pools:
        if heat is None or source.arena.predicted is not None:
            scores = [_cache_scores(source.arena, table) for table in range(len(source.tables))]
            shard.arena.warm(_by_local_row(shard, scores))
        else:
            shard.arena.warm(hot_rows(shard, source.tables, source.live_maps, heat))
    if real:
        shard.trainer.clock.copy_(source.trainer.clock)
        shard.trainer.hyper.copy_(source.trainer.hyper)
    for number, table in enumerate(source.tables):
        first_row = shard.row_index.first[number]
        for first, last in blocks(table.rows):
            rows_N = torch.arange(first, last, device=shard.row_index.device)
            for k, at_K, index_K in shard.local(shard.row_index.locate(rows_N + first_row)):
                if real:
                    _copy(shard, source, number, rows_N[at_K], k, index_K)
                else:
                    shard.arena.write(k, index_K, _fresh_rows(table, rows_N[at_K], first_row, source.rows.seed))


def _copy(shard: LocalShard, source: ShardSource, table: int, rows_K: Tensor, k: int, index_K: Tensor) -> None:
    arena, rows_K = shard.arena, rows_K.to(source.arena.device)
    as_stored_K = torch.zeros_like(index_K, dtype=torch.bool)
    if source.arena.tables[table].precision == shard.row_index.parts[k].precision:
        as_stored_K = ~(in_slots(arena, k, index_K) | in_slots(source.arena, table, rows_K).to(index_K.device))
        for mine, theirs in zip(arena.views(k)[:2], source.arena.views(table)[:2], strict=True):
            from_K = rows_K[as_stored_K.to(rows_K.device)].to(theirs.device)
            mine[index_K[as_stored_K].to(mine.device)] = theirs[from_K].to(mine.device)
    rest = (~as_stored_K).nonzero()[:, 0]
    if rest.numel():
        arena.write(k, index_K[rest], source.arena.read(table, rows_K[rest.to(rows_K.device)]).to(arena.device))
    per_row = source.trainer.optimizer.states_per_row > 0
    states = source.arena.state_views(table, source.trainer.states, per_row)
    for mine, theirs in zip(shard.states(k), states, strict=True):
        mine[index_K] = theirs[rows_K].to(mine.device)


def in_slots(arena: Arena, table: int, rows_K: Tensor) -> Tensor:
    """Which rows of a table are cached."""
    meta_RW = arena.views(table)[1]
    return meta_RW[rows_K, 0] < 0 if meta_RW.shape[1] else torch.zeros_like(rows_K, dtype=torch.bool)


def hot_rows(shard: LocalShard, tables: Sequence[Table], ids: Mapping[str, IdMap], heat: HeatProfile) -> list[Tensor]:
    """Lookup counts of each part's local rows, as `Arena.warm` takes them."""
    found = [hottest_rows(table.features, heat, ids) for table in tables]
    return _by_local_row(shard, [(torch.from_numpy(rows_H), torch.from_numpy(counts_H)) for rows_H, counts_H in found])


def _by_local_row(shard: LocalShard, tables: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    row_index = shard.row_index
    found = [torch.zeros(part.local_rows, dtype=torch.int64, device=row_index.device) for part in row_index.parts]
    for number, (rows_H, counts_H) in enumerate(tables):
        for k, at_K, index_K in shard.local(row_index.locate(rows_H.to(row_index.device) + row_index.first[number])):
            found[k][index_K] = counts_H.to(row_index.device)[at_K]
    return found


def _cache_scores(arena: Arena, table: int) -> tuple[Tensor, Tensor]:
    """Cached rows of a table, and their scores."""
    if arena.device.type == "meta" or not arena.cache:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    cache, first = Cache(*arena.cache), arena.views(table)[2]
    rows_S = (cache.rows & ~F.DIRTY) - first
    held_S = (cache.rows != F.EMPTY) & (rows_S >= 0) & (rows_S < arena.tables[table].rows)
    return rows_S[held_S], 1 + cache.scores[held_S].long()


def _fresh_rows(table: Table, rows_K: Tensor, first_row: int, seed: int) -> Tensor:
    """Uniform in +-1/sqrt(rows of the table's feature range), determined by global row and seed."""
    clock = torch.tensor([seed, 0], dtype=torch.int64, device=rows_K.device)
    bits_KD = random_bits(clock, rows_K + first_row, table.dim)
    unit_KD = (bits_KD >> 8).float() * 2.0**-23 - 1
    bound_P = torch.tensor([(end - begin) ** -0.5 for begin, end in table.parts], dtype=torch.float32, device=rows_K.device)
    begins = torch.tensor([begin for begin, _ in table.parts], dtype=torch.int64, device=rows_K.device)
    return unit_KD * bound_P[torch.searchsorted(begins, rows_K, right=True) - 1][:, None]


def initial_cache(
    row_index: RowIndex, features: Sequence[Sequence[str]], heat: HeatProfile | None, ids: Mapping[str, IdMap], local_size: int
) -> tuple[Counts, Counts]:
    """The rows that `shard_` puts into slots on all ranks, for the simulator: global rows, ascending, and their slot kinds.

    `features` are the features of each table.
    """
    rows, kinds = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for table, names in enumerate(features):
        rows_H, counts_H = hottest_rows(names, heat, ids)
        where = row_index.locate(torch.from_numpy(rows_H) + row_index.first[table])
        part_H, home_H, index_H = (each.numpy() for each in where)
        for k, part in enumerate(row_index.parts):
            if part.table == table and part.slots:
                at = np.flatnonzero((part_H == k) & (counts_H > 0))
                rank_N = {1: 0 * home_H, 2: home_H % local_size, 3: home_H}[part.tier][at]
                at, rank_N = (each[np.lexsort((index_H[at], -counts_H[at], rank_N))] for each in (at, rank_N))
                order_N = np.arange(len(at)) - np.searchsorted(rank_N, rank_N)
                taken = order_N < part.slots
                rows.append(rows_H[at][taken] + row_index.first[table])
                kinds.append(np.where(order_N[taken] < part.fp32_slots, FP32_SLOT, INT8_SLOT))
    order = np.argsort(np.concatenate(rows))
    return np.concatenate(rows)[order], np.concatenate(kinds)[order]
