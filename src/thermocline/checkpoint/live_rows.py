"""Rows of a module, read from its arena by a save; nothing may change them meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.placement.row_index import RowIndex
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.kernels.layout import Cache
from thermocline.kernels.slots import slots_of
from thermocline.nn.rows_module import RowsModule
from thermocline.rows.arena import Arena

from .format.cache_slots import own_slots, with_global_rows
from .format.saved_cache import CLOCKS

At = slice | Tensor


class LiveRows:
    """The arena of a module, table by table.

    The constructor waits for pending updates of a sharded module, once: a writer thread must not wait for a step that may wait
    for the writer. A migration replaces the module's row index; `row_index` here still describes this arena.
    """

    def __init__(self, module: RowsModule) -> None:
        if isinstance(module, ShardedCollection):
            module.wait_for_exchange()
        self.module, self.arena = module, module.arena
        self._row_index = module.row_index if isinstance(module, ShardedCollection) else None
        self.optimizer, self.states = module.trainer.optimizer, module.trainer.states
        self.by_row = self.optimizer.states_per_row > 0
        self.arena.settle()

    @property
    def row_index(self) -> RowIndex:
        assert self._row_index is not None
        return self._row_index

    def state_shapes(self, dim: int) -> list[tuple[int, ...]]:
        """Shapes of the optimizer state arrays, without the row dimension."""
        return [() if self.by_row else (dim,)] * len(self.states)

    def read(self, table: int, at: At) -> list[Tensor]:
        """Rows of a table: optimizer states, meta words without cache pointers (if the format has meta words), codes."""
        *states, meta_KW, codes_KB = self.raw(table, at)
        _, _, _, format, dim = self.arena.views(table)
        return [*states, *([stored_words(self.arena, meta_KW, format, dim)] if F.META_WORDS[format] else []), codes_KB]

    def raw(self, table: int, at: At) -> list[Tensor]:
        """Rows of a table as the arena holds them: optimizer states, meta words, codes."""
        codes_RB, meta_RW, _, _, _ = self.arena.views(table)
        states = self.arena.state_views(table, self.states, self.by_row)
        here, there = (at if isinstance(at, slice) else at.to(each.device) for each in (meta_RW, codes_RB))
        return [*(state[here] for state in states), meta_RW[here], codes_RB[there]]

    def release(self) -> None:
        """Rows read so far have been written: their memory may be reused."""

    def other_arrays(self) -> dict[str, Tensor]:
        """Clock, hyperparameters and cache, with global row numbers; of a sharded module, the pools of this rank."""
        return self._with_global_rows(self._arrays())

    def _with_global_rows(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(self.module, ShardedCollection):
            return with_global_rows(self.module, self.row_index, self.arena, arrays)
        return arrays

    def _arrays(self) -> dict[str, Tensor]:
        """Clock, hyperparameters and cache, without a copy and with local row numbers."""
        arrays = self.module._arrays()
        found = {name: arrays[name] for name in ("hyper", "clock")}
        if not isinstance(self.module, ShardedCollection):
            return found | {name: array for name, array in arrays.items() if name.startswith("cache_")}
        if self.arena.cache:
            found |= {f"cache_{name}": getattr(Cache(*self.arena.cache), name) for name in CLOCKS}
            found |= own_slots(self.module, self.row_index, self.arena)
        return found

    def close(self) -> None:
        """End reading."""


def stored_words(arena: Arena, meta_KW: Tensor, format: int, dim: int) -> Tensor:
    """Meta words of rows of one format and dimension, with cache pointers replaced by the words they displaced."""
    cached = (meta_KW[:, 0] < 0).nonzero()[:, 0]
    if not cached.numel():
        return meta_KW
    words, pointer_C = Cache(*arena.cache).words, meta_KW[cached, 0]
    meta_KW = meta_KW.clone()
    for pool in arena.pools:
        if (pool.dim, pool.format) == (dim, format):
            slot_C = slots_of(pool, pointer_C)
            int8_C = pointer_C & F.INT8_SLOT != 0
            here_C = torch.where(
                int8_C, (slot_C >= pool.fp32_slots) & (slot_C < pool.slots), (slot_C >= 0) & (slot_C < pool.fp32_slots)
            )
            meta_KW[cached[here_C], 0] = words[pool.slot + slot_C[here_C]]
    return meta_KW
