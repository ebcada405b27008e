"""`KeyedMap`: an elastic map together with the ids that have rows, as a checkpoint or a moment of training has them.

Ids with a row of their own read it, all others read shared rows by hash, as in training. Ids that a publish moved lie beside
the others (`moved`) until no lookup reads an earlier version. Then the key table is changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .elastic import KeyTable
from .elastic_rows import ElasticRows
from .gpu_keys import rows_of
from .idmap import IdMap, SaltedHash
from .moved_ids import MovedIds


@dataclass(frozen=True)
class KeyedMap(IdMap):
    """An elastic map with the ids that have rows now."""

    keys: KeyTable | None = field(default=None, compare=False, repr=False)
    moved: MovedIds | None = field(default=None, compare=False, repr=False)  # not in `keys` yet
    looked_up: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64), compare=False, repr=False)

    @classmethod
    def of(cls, map: IdMap, keys: KeyTable) -> KeyedMap:
        """`map` with its ids."""
        return cls(map.start, first=map.first, keys=keys)

    @property
    def bytes(self) -> int:
        return 0 if self.keys is None else self.keys.bytes

    @property
    def used(self) -> int:
        """Ids with a row of their own."""
        return 0 if self.keys is None else self.keys.occupied().numel()

    def look_up(self, ids_N: Tensor) -> Tensor:
        """The row of each id. Counts the ids, and those without a row of their own, in `looked_up`."""
        rows_N, own_N = self.find(ids_N)
        self.looked_up.add_(torch.tensor([ids_N.numel(), ids_N.numel() - int(own_N.sum())]))
        return rows_N

    def find(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """(the row of each id, whether it is the id's own)."""
        assert self.keys is not None
        here_N = ids_N.to(self.keys.keys.device).contiguous()
        rows_N = rows_of(self.keys, here_N)
        own_N = rows_N < self.keys.rules.rows
        if self.moved is not None:
            rows_N, own_N = _after(self.moved, self.keys, here_N, rows_N, own_N)
        return (rows_N + self.first).to(ids_N.device), own_N.to(ids_N.device)

    def with_moved(self, moved: MovedIds) -> KeyedMap:
        """The map after a publish; this one stays as it is. Rows count from those of the table."""
        assert self.keys is not None
        low, high = torch.searchsorted(moved.rows_K, torch.tensor([self.first, self.first + self.keys.rules.rows])).tolist()
        if low == high:
            return self
        part = MovedIds(moved.rows_K[low:high] - self.first, moved.ids_K[low:high], moved.used_K[low:high])
        return replace(self, moved=part if self.moved is None else self.moved.merged(part))

    def read_rows(self, rows_K: Tensor) -> MovedIds:
        """The ids of rows, which count from those of the table."""
        assert self.keys is not None
        found = self.keys.read_rows(rows_K - self.first)
        found = found if self.moved is None else found.merged(self.moved)
        at_K = torch.searchsorted(found.rows_K, rows_K - self.first)
        return MovedIds(rows_K, found.ids_K[at_K], found.used_K[at_K])


def _after(
    moved: MovedIds, keys: KeyTable, ids_N: Tensor, rows_N: Tensor, own_N: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `find` gives once ids have moved. `keys` may be changing at the moved rows: what was found there does not count."""
    at_N = torch.searchsorted(moved.rows_K, rows_N).clamp(max=len(moved.rows_K) - 1)
    gone_N = own_N & (moved.rows_K[at_N] == rows_N)
    order_C = moved.ids_K[moved.used_K].argsort()
    came_C, rows_C = (each[moved.used_K][order_C] for each in (moved.ids_K, moved.rows_K))
    rows_N = torch.where(gone_N, keys.shared_rows(ids_N), rows_N)
    if not len(came_C):
        return rows_N, own_N & ~gone_N
    at_N = torch.searchsorted(came_C, ids_N).clamp(max=len(came_C) - 1)
    here_N = came_C[at_N] == ids_N
    return torch.where(here_N, rows_C[at_N], rows_N), (own_N & ~gone_N) | here_N


def new_keys(policy: ElasticRows) -> KeyTable:
    """An empty key table for a rule, on the CPU."""
    return KeyTable(policy, SaltedHash(1, policy.salt).key)


def without_counts(keys: KeyTable) -> KeyTable:
    """Drop what only training needs from a key table: 9 of 16 bytes a row stay."""
    for name in ("last", "heat", "sketch"):
        setattr(keys, name, getattr(keys, name)[:0].clone())
    return keys
