"""The cache of a module as a checkpoint holds it: pools of slots, and the rows in them.

One process writes each array of its cache whole, as `cache_<array>`; the pools lie in it one after another. Each rank of a
sharded collection writes its own pools into its own file, as `cache_<array>/<number of the pool>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import FormatError
from thermocline.kernels.cache.reference import COUNTERS
from thermocline.kernels.layout import Cache, Pool
from thermocline.kernels.slots import pointers, read_pointed

from .manifest import POOL_FIELDS, Manifest, TableEntry
from .state_files import StateFiles

ARRAYS = Cache._fields[: Cache._fields.index("ledger") + 1]
_DTYPES = dict(zip(ARRAYS, (torch.float32, torch.int32, torch.int64, *[torch.int32] * 3, torch.int64), strict=True))
CLOCKS = ("clock", "steps")  # equal on all ranks
_SLOTS, _ELEMENTS = 1 << 14, 1 << 22  # read at a time


class CachedRows(NamedTuple):
    """Rows and their fp32 values."""

    rows_K: Tensor
    values_KD: Tensor


def pool_key(array: str, number: int) -> str:
    """The name of one pool's part of an array."""
    return f"cache_{array}/{number}"


def pool_slices(pool: Pool, number: int) -> dict[str, slice]:
    """By array, the part that belongs to a pool. The ledger has one line for each pool; other arrays are flat."""
    words, each = F.int8_slot_words(pool.dim), slice(pool.slot, pool.slot + pool.slots)
    sketch = COUNTERS // 2
    found = [
        slice(pool.base * pool.dim, (pool.base + pool.fp32_slots) * pool.dim),
        slice(pool.int8_base * words, (pool.int8_base + pool.int8_slots) * words),
        each, each, each, slice(sketch * pool.slot, sketch * (pool.slot + pool.slots)), slice(number, number + 1),
    ]  # fmt: skip
    return dict(zip(ARRAYS, found, strict=True))


class SavedCache:
    """Reads cached rows of a checkpoint."""

    def __init__(self, manifest: Manifest, state: StateFiles) -> None:
        self._state = state
        self._saved = {m.name: [Pool(*(entry[field] for field in POOL_FIELDS)) for entry in m.pools] for m in manifest.modules}
        for module, pools in self._saved.items():
            whole, sizes = f"module/{module}/cache_rows", [(pool.slots,) for pool in pools]
            if whole in state:
                sizes, found = [(sum(pool.slots for pool in pools),)], [state.info(whole).shape]
            else:
                found = [state.info(f"module/{module}/{pool_key('rows', number)}").shape for number in range(len(pools))]
            if found != sizes:
                words = f"the cache of module {module!r} has {found} slots, and {sizes} in the manifest"
                raise FormatError(f"{words}; use another checkpoint", module=module)

    def array(self, module: str, number: int, array: str, first: int = 0, last: int | None = None) -> Tensor:
        """One pool's part of an array, or a range of it."""
        name = f"module/{module}/{pool_key(array, number)}"
        if name not in self._state:
            here, name = pool_slices(self._saved[module][number], number)[array], f"module/{module}/cache_{array}"
            first, last = here.start + first, here.stop if last is None else here.start + last
        found = self._state.read(name, first, last)
        if found.dtype != _DTYPES[array] or found.dim() != (2 if array == "ledger" else 1):
            raise FormatError(f"{name!r} is {found.dim()}-D {found.dtype}, not {_DTYPES[array]}; use another checkpoint")
        return found

    def read_into(self, module: str, number: int, array: str, out: Tensor) -> None:
        """Read one pool's part of an array in bounded pieces."""
        for first in range(0, len(out), _ELEMENTS):
            last = min(first + _ELEMENTS, len(out))
            out[first:last].copy_(self.array(module, number, array, first, last))

    def updated_rows(self, table: TableEntry) -> Iterator[CachedRows]:
        """Rows that were updated in the cache, with their values, in bounded pieces."""
        for number, pool, rows_S, held_S in self._pools(table):
            dirty_S = held_S & (rows_S & F.DIRTY != 0)
            for begin, end in ((0, pool.fp32_slots), (pool.fp32_slots, pool.slots)):  # fp32 slots, int8 slots
                for first in range(begin, end, _SLOTS):
                    last = min(first + _SLOTS, end)
                    slot_K = first + dirty_S[first:last].nonzero()[:, 0]
                    if slot_K.numel():
                        values_KD = self._values(table.module, number, pool, first, last)[slot_K - first]
                        yield CachedRows((rows_S[slot_K] & ~F.DIRTY) - table.first, values_KD)

    def scores(self, table: TableEntry) -> tuple[Tensor, Tensor]:
        """All rows that were in the cache, and the score of each."""
        none = torch.zeros(0, dtype=torch.int64)
        rows, scores = [none], [none]
        for number, _, rows_S, held_S in self._pools(table):
            rows.append((rows_S[held_S] & ~F.DIRTY) - table.first)
            scores.append(self.array(table.module, number, "scores")[held_S].long())
        return torch.cat(rows), torch.cat(scores)

    def _pools(self, table: TableEntry) -> Iterator[tuple[int, Pool, Tensor, Tensor]]:
        """Pools of a table: number, pool, rows by slot, and which slots hold rows of the table."""
        for number, pool in enumerate(self._saved[table.module]):
            if pool.row <= table.first < pool.row + pool.rows:
                rows_S = self.array(table.module, number, "rows")
                at_S = (rows_S & ~F.DIRTY) - table.first
                yield number, pool, rows_S, (rows_S != F.EMPTY) & (at_S >= 0) & (at_S < table.rows)

    def _values(self, module: str, number: int, pool: Pool, first: int, last: int) -> Tensor:
        """Values of a range of slots, all fp32 or all int8."""
        fp32 = first < pool.fp32_slots
        name, base, size = ("values", 0, pool.dim) if fp32 else ("near", pool.fp32_slots, F.int8_slot_words(pool.dim))
        array = self.array(module, number, name, (first - base) * size, (last - base) * size)
        none = torch.empty(0, dtype=torch.float32)
        cache = Cache(array, array[:0].int(), *[none] * 7) if fp32 else Cache(none, array, *[none] * 7)
        own = pool._replace(base=0, int8_base=0, slots=last - first, int8_slots=0 if fp32 else last - first)
        return read_pointed(cache, pointers(own, torch.arange(last - first)), pool.dim)
