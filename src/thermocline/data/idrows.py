"""From the raw ids of a log to rows of tables: a vocabulary learned from the training part, or a salted hash.

A vocabulary gives every id of the training part a row of its own, in the order of first appearance, and keeps row 0 of every
table for all others. A hash needs no pass over the log and no memory, but ids collide. Both are calls on a [B, F] tensor of raw
ids that return rows of the same shape, and know how many rows each table needs; nothing more, so that a full id map can take
their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadInput
from .hashing import bits, keys, right

UNKNOWN = 0


class IdRows(Protocol):
    """Raw ids to rows."""

    @property
    def rows(self) -> tuple[int, ...]: ...

    def __call__(self, raw_BF: Tensor) -> Tensor: ...


class Vocabulary:
    """Rows by first appearance; row 0 is for unknown ids. Holds 16 bytes for each distinct id."""

    def __init__(self, batches: Iterable[Tensor], features: int) -> None:
        empty = np.empty(0, np.int64)
        self._known: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = [(empty, empty)] * features
        for raw_BF in batches:
            columns_FB = raw_BF.numpy().T
            self._known = [_learn(*known, ids_B) for known, ids_B in zip(self._known, columns_FB, strict=True)]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(len(ids) + 1 for ids, _ in self._known)

    def __call__(self, raw_BF: Tensor) -> Tensor:
        columns_FB = raw_BF.numpy().T
        found = [_find(*known, ids_B) for known, ids_B in zip(self._known, columns_FB, strict=True)]
        return torch.from_numpy(np.stack(found, axis=1))


def _find(ids_K: NDArray[np.int64], row_K: NDArray[np.int64], raw_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of raw ids; `ids_K` is sorted and `row_K` goes with it."""
    if not len(ids_K):
        return np.full(len(raw_B), UNKNOWN, np.int64)
    place_B = np.searchsorted(ids_K, raw_B).clip(max=len(ids_K) - 1)
    return np.where(ids_K[place_B] == raw_B, row_K[place_B], UNKNOWN)


def _learn(
    ids_K: NDArray[np.int64], row_K: NDArray[np.int64], raw_B: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The known ids with those of one more batch."""
    new_U, seen_U = np.unique(raw_B, return_index=True)
    fresh_U = _find(ids_K, row_K, new_U) == UNKNOWN
    new_U, seen_U = new_U[fresh_U], seen_U[fresh_U]
    row_U = np.empty(len(new_U), np.int64)
    row_U[np.argsort(seen_U)] = np.arange(len(new_U)) + len(ids_K) + 1
    place_U = np.searchsorted(ids_K, new_U)
    return np.insert(ids_K, place_U, new_U), np.insert(row_K, place_U, row_U)


class HashedRows:
    """Rows by a salted hash; each table has a hash of its own."""

    def __init__(self, rows: Sequence[int], salt: int = 0) -> None:
        if not rows or min(rows) < 1 or max(rows) > 1 << 32:
            raise BadInput(f"hashed tables have {list(rows)} rows; give each 1 to 2^32")
        self.rows = tuple(rows)
        self._key_F = torch.tensor([keys(salt, table) for table in range(len(rows))])
        self._rows_F = torch.tensor(self.rows)

    def __call__(self, raw_BF: Tensor) -> Tensor:
        # 31 bits times at most 2^32 rows stays below 2^63.
        drawn_BF = right(bits(self._key_F.to(raw_BF.device), raw_BF), 33)
        return (drawn_BF * self._rows_F.to(raw_BF.device)) >> 31
