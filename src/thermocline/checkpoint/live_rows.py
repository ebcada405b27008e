"""Rows of a module as a save writes them, read where they lie: nothing may change them meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.placement.row_index import Atlas
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.kernels.layout import Cache
from thermocline.kernels.slots import slots_of
from thermocline.nn.rows_module import RowsModule
from thermocline.rows.arena import Arena

from .format.cache_slots import numbered, own_slots
from .format.slot_layout import CLOCKS

At = slice | Tensor


class Live:
    """The arena of a module, table by table.

    A sharded module waits for updates under way whenever it is asked for its arena or trainer. That is done once, here:
    a thread that writes would wait for a step, and the step for its turn. `atlas` is where its rows lie in that arena: a
    migration gives the module another one, with other rows in other places, while a thread writes.
    """

    def __init__(self, module: RowsModule) -> None:
        self.module, self.arena = module, module.arena
        self._atlas = module.atlas if isinstance(module, ShardedCollection) else None
        self.optimizer, self.states = module.trainer.optimizer, module.trainer.states
        self.by_row = self.optimizer.states_per_row > 0
        self.arena.settle()

    @property
    def atlas(self) -> Atlas:
        assert self._atlas is not None
        return self._atlas

    def read(self, table: int, at: At) -> list[Tensor]:
        """Some rows of a table of the arena: optimizer state, meta words if there are any, codes. None of them is a pointer."""
        *states, meta_KW, codes_KB = self.raw(table, at)
        _, _, _, format, dim = self.arena.views(table)
        return [*states, *([stored_words(self.arena, meta_KW, format, dim)] if F.META_WORDS[format] else []), codes_KB]

    def raw(self, table: int, at: At) -> list[Tensor]:
        """The same as it lies there."""
        codes_RB, meta_RW, _, _, _ = self.arena.views(table)
        states = self.arena.state_views(table, self.states, self.by_row)
        here, there = (at if isinstance(at, slice) else at.to(each.device) for each in (meta_RW, codes_RB))
        return [*(state[here] for state in states), meta_RW[here], codes_RB[there]]

    def release(self) -> None:
        """What was read until now has been written: its memory may be used again."""

    def copies(self) -> dict[str, Tensor]:
        """Clock, rates and cache: all that is not rows. A rank of many has its own pools of the cache."""
        return self._numbered(self._lying())

    def _numbered(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """With rows of the cache as a checkpoint knows them."""
        if isinstance(self.module, ShardedCollection):
            return numbered(self.module, self.atlas, self.arena, arrays)
        return arrays

    def _lying(self) -> dict[str, Tensor]:
        """The same as it lies here."""
        arrays = self.module._arrays()
        found = {name: arrays[name] for name in ("hyper", "clock")}
        if not isinstance(self.module, ShardedCollection):
            return found | {name: array for name, array in arrays.items() if name.startswith("cache_")}
        if self.arena.cache:
            found |= {f"cache_{name}": getattr(Cache(*self.arena.cache), name) for name in CLOCKS}
            found |= own_slots(self.module, self.atlas, self.arena)
        return found

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
            near_C = pointer_C & F.INT8_SLOT != 0
            here_C = torch.where(
                near_C, (slot_C >= pool.fp32_slots) & (slot_C < pool.slots), (slot_C >= 0) & (slot_C < pool.fp32_slots)
            )
            meta_KW[cached[here_C], 0] = words[pool.slot + slot_C[here_C]]
    return meta_KW
