"""Rows of a module as a save writes them, read where they lie: nothing may change them meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import formats as F
from ..distributed.sharded import ShardedCollection
from ..kernels.layout import Cache
from ..kernels.slots import slots_of
from ..nn.base import RowsModule
from ..rows.arena import Arena
from .slots import CLOCKS, gathered

At = slice | Tensor


class Live:
    """The arena of a module, table by table. A module on shards is not asked for it twice: it would wait for its exchanges."""

    def __init__(self, module: RowsModule) -> None:
        self.module, self.arena, self.trainer = module, module.arena, module.trainer
        self.by_row = self.trainer.optimizer.states_per_row > 0
        self.arena.settle()
        self._slots = gathered(module) if isinstance(module, ShardedCollection) and module.held.cached else {}

    def read(self, table: int, at: At) -> list[Tensor]:
        """Some rows of a table of the arena: optimizer state, meta words if there are any, codes. None of them is a pointer."""
        *states, meta_KW, codes_KB = self.raw(table, at)
        _, _, _, format, dim = self.arena.views(table)
        return [*states, *([stored_words(self.arena, meta_KW, format, dim)] if F.META_WORDS[format] else []), codes_KB]

    def raw(self, table: int, at: At) -> list[Tensor]:
        """The same as it lies there."""
        codes_RB, meta_RW, _, _, _ = self.arena.views(table)
        states = self.arena.state_views(table, self.trainer.states, self.by_row)
        here, there = (at if isinstance(at, slice) else at.to(each.device) for each in (meta_RW, codes_RB))
        return [*(state[here] for state in states), meta_RW[here], codes_RB[there]]

    def copies(self) -> dict[str, Tensor]:
        """Clock, rates and cache: all that is not rows."""
        arrays, names = self.module._arrays(), ["hyper", "clock"]
        if not isinstance(self.module, ShardedCollection):
            names += [name for name in arrays if name.startswith("cache_")]
        elif self.arena.cache:
            arrays |= {f"cache_{name}": getattr(Cache(*self.arena.cache), name) for name in CLOCKS}
            names += [f"cache_{name}" for name in CLOCKS]
        return {name: arrays[name] for name in names} | self._slots

    def close(self) -> None:
        """No more is read."""


def stored_words(arena: Arena, meta_KW: Tensor, format: int, dim: int) -> Tensor:
    """Meta words of rows of one format and dimension, as they would be if nothing were cached."""
    cached = (meta_KW[:, 0] < 0).nonzero()[:, 0]
    if not cached.numel():
        return meta_KW
    words, pointer_C = Cache(*arena.cache).words, meta_KW[cached, 0]
    meta_KW = meta_KW.clone()
    for pool in arena.pools:
        if (pool.dim, pool.format) == (dim, format):
            slot_C = slots_of(pool, pointer_C)
            near_C = pointer_C & F.NEAR != 0
            here_C = torch.where(near_C, (slot_C >= pool.full) & (slot_C < pool.slots), (slot_C >= 0) & (slot_C < pool.full))
            meta_KW[cached[here_C], 0] = words[pool.slot + slot_C[here_C]]
    return meta_KW
