"""`KeyedMap`: an elastic map together with the ids that have rows, as a checkpoint or a moment of training has them.

Nothing comes or goes: ids with a row of their own read it, all others read shared rows by hash, as in training.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .elastic import ElasticRows, KeyTable
from .idmap import IdMap, SaltedHash


@dataclass(frozen=True)
class KeyedMap(IdMap):
    """An elastic map with the ids that have rows now."""

    keys: KeyTable | None = field(default=None, compare=False, repr=False)
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
        rows_N, missed_M = self.keys.find(ids_N.to(self.keys.keys.device).contiguous())
        own_N = torch.ones_like(rows_N, dtype=torch.bool).index_fill_(0, missed_M, False)
        return (rows_N + self.first).to(ids_N.device), own_N.to(ids_N.device)


def new_keys(policy: ElasticRows) -> KeyTable:
    """An empty key table for a rule, on the CPU."""
    return KeyTable(policy, SaltedHash(1, policy.salt).key)


def without_counts(keys: KeyTable) -> KeyTable:
    """Drop what only training needs from a key table: 9 of 16 bytes a row stay."""
    for name in ("last", "heat", "sketch"):
        setattr(keys, name, getattr(keys, name)[:0].clone())
    return keys
