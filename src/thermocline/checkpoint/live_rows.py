"""Rows of a module, read from its arena by a save; nothing may change them meanwhile."""

from __future__ import annotations

from torch import Tensor

from thermocline import formats as F
from thermocline.distributed.placement.row_index import RowIndex
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.kernels.layout import Cache
from thermocline.kernels.slots import slots_of
from thermocline.nn.rows_module import RowsModule

from .format.cache_slots import own_slots, with_global_rows
from .format.saved_cache import CLOCKS
from .saved_ids import key_arrays

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
        _, _, first, format, _ = self.arena.views(table)
        if not F.META_WORDS[format]:
            return [*states, codes_KB]
        cached = (meta_KW[:, 0] < 0).nonzero()[:, 0]
        if cached.numel():
            pool, meta_KW = next(p for p in self.arena.pools if p.row <= first < p.row + p.rows), meta_KW.clone()
            meta_KW[cached, 0] = Cache(*self.arena.cache).words[pool.slot + slots_of(pool, meta_KW[cached, 0])]
        return [*states, meta_KW, codes_KB]

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
        if isinstance(self.module, ShardedCollection):
            return with_global_rows(self.module, self.row_index, self.arena, self._arrays())
        return self._arrays()

    def _arrays(self) -> dict[str, Tensor]:
        """Clock, hyperparameters, cache and elastic ids, without a copy and with local row numbers."""
        arrays = self.module._arrays()
        found = {name: arrays[name] for name in ("hyper", "clock")}
        if not isinstance(self.module, ShardedCollection):
            return found | {name: array for name, array in arrays.items() if name.startswith(("cache_", "elastic"))}
        if self.arena.cache:
            found |= {f"cache_{name}": getattr(Cache(*self.arena.cache), name) for name in CLOCKS}
            found |= own_slots(self.module, self.row_index, self.arena)
        return found | key_arrays(self.module)

    def close(self) -> None:
        """End reading."""
