"""What a save writes of a module beside its rows: clock, rates, id maps, and the cache.

Of the cache an incremental save writes what differs from the save before, which it reads for that: slots and counters change in
places that only kernels know, and reading a twentieth of the rows' bytes is cheaper than a second copy of them in memory.
"""

from __future__ import annotations

from functools import partial
from math import gcd

from torch import Tensor

from thermocline import formats as F
from thermocline.checkpoint.live_rows import Live
from thermocline.checkpoint.reader import Checkpoint

from .array_patch import patches
from .module_entries import Found

_FLAT = ("cache_values", "cache_near", "cache_rows", "cache_scores", "cache_words", "cache_sketch")


def state_tensors(found: Found, source: Live, old: Checkpoint | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By name, all of it, or after the checkpoint `old` what is new: what is the same on all ranks, and this rank's slots."""
    prefix = f"module/{found.name}/"
    shared: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    if old is None:
        for feature, map in found.maps.items():
            shared |= {f"ids/{feature}/{name}": array for name, array in map.arrays().items()}
    for name, array in source.copies().items():
        kind, _, number = name.partition("/")
        tensors = own if number else shared
        if old is None or kind not in _FLAT:
            tensors[prefix + name] = array
        else:
            dims = [pool.dim for pool in old.manifest.module(found.name).pools]
            width = _width(kind, dims[int(number) :][:1] if number else dims, array)
            tensors |= patches(prefix + name, array, width, partial(old.read, prefix + name))
    return shared, own


def _width(kind: str, dims: list[int], array: Tensor) -> int:
    """Elements that change together: those of a slot, as far as slots of several dimensions are lines of one width."""
    if kind == "cache_values":
        return gcd(*dims, array.numel())  # which is 1 where there are near slots alone
    return gcd(*map(F.int8_slot_words, dims)) if kind == "cache_near" else 1
