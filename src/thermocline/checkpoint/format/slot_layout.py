"""Where the slots of a pool lie in the arrays of a cache, and how a checkpoint names them.

One process writes the arrays of its cache whole, `cache_<array>`, in which pools lie one after another. Ranks write the pools
that are theirs, each in a file of its own: `cache_<array>/<number of the pool>`.
"""

from __future__ import annotations

from thermocline import formats as F
from thermocline.kernels.cache.reference import COUNTERS
from thermocline.kernels.layout import Cache, Pool

ARRAYS = Cache._fields[: Cache._fields.index("ledger") + 1]
CLOCKS = ("clock", "steps")  # the same on all ranks


def piece(array: str, number: int) -> str:
    """The name of what one pool has of an array."""
    return f"cache_{array}/{number}"


def places(pool: Pool, number: int) -> dict[str, slice]:
    """By array, the part that is a pool's. The ledger has a line for each pool, all others are flat."""
    words, each = F.int8_slot_words(pool.dim), slice(pool.slot, pool.slot + pool.slots)
    sketch = COUNTERS // 2
    found = [
        slice(pool.base * pool.dim, (pool.base + pool.fp32_slots) * pool.dim),
        slice(pool.int8_base * words, (pool.int8_base + pool.int8_slots) * words),
        each, each, each, slice(sketch * pool.slot, sketch * (pool.slot + pool.slots)), slice(number, number + 1),
    ]  # fmt: skip
    return dict(zip(ARRAYS, found, strict=True))
