"""What the rows of a sharded collection begin with: those of a whole one, or fresh ones, the same whatever the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.quantize.reference import random_bits
from ..nn.base import blocks
from ..nn.collection import EmbeddingCollection

if TYPE_CHECKING:
    from .sharded import ShardedCollection


def take(into: ShardedCollection, source: EmbeddingCollection) -> None:
    """Rows, state and clock of a whole collection; of one without values (device "meta") the rows it would begin with."""
    real = source.arena.device.type != "meta"
    if real:
        source.flush()
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
    if whole.arena.tables[table].precision == into.atlas.parts[k].precision:
        for mine, theirs in zip(arena.views(k)[:2], whole.arena.views(table)[:2], strict=True):
            mine[place_K] = theirs[rows_K].to(mine.device)
    else:
        arena.write(k, place_K, whole.arena.read(table, rows_K).to(arena.device))
    by_row = whole.trainer.optimizer.states_per_row > 0
    states = whole.arena.state_views(table, whole.trainer.states, by_row)
    for mine, theirs in zip(into.held.states(k), states, strict=True):
        mine[place_K] = theirs[rows_K].to(mine.device)


def _initial(into: ShardedCollection, index: int, rows_K: Tensor) -> Tensor:
    """What rows begin with: uniform in +-1/sqrt(rows of their part of the table), by their number and the seed."""
    table, device = into.tables[index], into.atlas.device
    clock = torch.tensor([into.storage.seed, 0], device=device)
    bits_KD = random_bits(clock, rows_K + into.atlas.first[index], table.dim)
    unit_KD = (bits_KD >> 8).float() * 2.0**-23 - 1
    bound_P = torch.tensor([(end - begin) ** -0.5 for begin, end in table.parts], device=device)
    at_K = torch.searchsorted(torch.tensor([begin for begin, _ in table.parts], device=device), rows_K, right=True) - 1
    return unit_KD * bound_P[at_K][:, None]
