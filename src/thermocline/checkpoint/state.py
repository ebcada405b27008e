"""What a save writes of a module beside its rows: clock, rates, id maps, and the cache.

Of the cache an incremental save writes what differs from the save before, which it reads for that: slots and counters change in
places that only kernels know, and reading a twentieth of the rows' bytes is cheaper than a second copy of them in memory.
"""

from __future__ import annotations

from functools import partial
from math import gcd

from torch import Tensor

from .. import formats as F
from .describe import Found
from .live import Live
from .patch import patches
from .reader import Checkpoint

_FLAT = ("cache_values", "cache_near", "cache_rows", "cache_scores", "cache_words", "cache_sketch")


def state_tensors(found: Found, source: Live, old: Checkpoint | None) -> dict[str, Tensor]:
    """By name, all of it, or after the checkpoint `old` what is new."""
    prefix = f"module/{found.name}/"
    tensors: dict[str, Tensor] = {}
    if old is None:
        for feature, map in found.maps.items():
            tensors |= {f"ids/{feature}/{name}": array for name, array in map.arrays().items()}
    for name, array in source.copies().items():
        if old is None or name not in _FLAT:
            tensors[prefix + name] = array
        else:
            tensors |= patches(prefix + name, array, _width(source, name, array), partial(old.read, prefix + name))
    return tensors


def _width(source: Live, name: str, array: Tensor) -> int:
    """Elements that change together: those of a slot, as far as slots of several dimensions are lines of one width."""
    dims = [pool.dim for pool in source.arena.pools]
    if name == "cache_values":
        return gcd(*dims, array.numel())  # which is 1 where there are near slots alone
    return gcd(*map(F.near_words, dims)) if name == "cache_near" else 1
