"""Rows of a module as a save writes them, read where they lie: nothing may change them meanwhile."""

from __future__ import annotations

from torch import Tensor

from .. import formats as F
from ..kernels.layout import Cache
from ..kernels.slots import slots_of
from ..nn.base import RowsModule
from ..rows.arena import Arena

At = slice | Tensor


class Live:
    """The arena of a module, table by table."""

    def __init__(self, module: RowsModule) -> None:
        self.module, self.arena = module, module.arena
        self.by_row = module.trainer.optimizer.states_per_row > 0
        self.arena.settle()

    def read(self, table: int, at: At) -> list[Tensor]:
        """Some rows of a table of the arena: optimizer state, meta words if there are any, codes. None of them is a pointer."""
        *states, meta_KW, codes_KB = self.raw(table, at)
        _, _, _, format, dim = self.arena.views(table)
        return [*states, *([stored_words(self.arena, meta_KW, format, dim)] if F.META_WORDS[format] else []), codes_KB]

    def raw(self, table: int, at: At) -> list[Tensor]:
        """The same as it lies there."""
        codes_RB, meta_RW, _, _, _ = self.arena.views(table)
        states = self.arena.state_views(table, self.module.trainer.states, self.by_row)
        here, there = (at if isinstance(at, slice) else at.to(each.device) for each in (meta_RW, codes_RB))
        return [*(state[here] for state in states), meta_RW[here], codes_RB[there]]

    def copies(self) -> dict[str, Tensor]:
        """Clock, rates and cache: all that is not rows."""
        arrays = self.module._arrays()
        return {name: array for name, array in arrays.items() if name in ("hyper", "clock") or name.startswith("cache_")}

    def close(self) -> None:
        """No more is read."""


def stored_words(arena: Arena, meta_KW: Tensor, format: int, dim: int) -> Tensor:
    """Meta words of rows of one format and dimension, as they would be if nothing were cached."""
    cached_K = meta_KW[:, 0] < 0
    pools = [pool for pool in arena.pools if (pool.dim, pool.format) == (dim, format)]
    if not pools or not bool(cached_K.any()):
        return meta_KW
    words = Cache(*arena.cache).words
    meta_KW = meta_KW.clone()
    meta_KW[cached_K, 0] = words[pools[0].slot + slots_of(pools[0], meta_KW[cached_K, 0])]
    return meta_KW
