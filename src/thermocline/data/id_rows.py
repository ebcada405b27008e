"""Maps from raw ids of a log to rows of tables: a vocabulary of the training part, or id maps.

A vocabulary gives every id of the training part one row, in the order of first appearance; row 0 is for all other ids. A hash,
one of the id maps, needs no pass over the log and no memory, but ids collide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.ids.feature_maps import IdMaps
from thermocline.ids.idmap import IdMap

from .random_bits import key_of

UNKNOWN = 0


@dataclass(frozen=True)
class RawIds:
    """Raw ids unchanged, for tables with their own id maps."""

    rows: tuple[int, ...] = ()

    def __call__(self, raw_BF: Tensor) -> Tensor:
        return raw_BF


class Vocabulary:
    """Rows by first appearance; row 0 is for unknown ids. Takes 16 bytes for each distinct id."""

    def __init__(self, batches: Iterable[Tensor], features: int) -> None:
        empty = np.empty(0, np.int64)
        self._known: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = [(empty, empty)] * features
        for raw_BF in batches:
            columns_FB = raw_BF.numpy().T
            self._known = [_learn(*known, ids_B) for known, ids_B in zip(self._known, columns_FB, strict=True)]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(len(ids) + 1 for ids, _ in self._known)

    @property
    def maps(self) -> tuple[IdMap, ...]:
        """Id maps to the same number of rows, in another order."""
        return tuple(IdMap.pruned(ids) for ids, _ in self._known)

    def __call__(self, raw_BF: Tensor) -> Tensor:
        columns_FB = raw_BF.numpy().T
        found = [_find(*known, ids_B) for known, ids_B in zip(self._known, columns_FB, strict=True)]
        return torch.from_numpy(np.stack(found, axis=1))


def _find(ids_K: NDArray[np.int64], row_K: NDArray[np.int64], raw_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of raw ids; `ids_K` is sorted, `row_K` holds their rows."""
    if not len(ids_K):
        return np.full(len(raw_B), UNKNOWN, np.int64)
    place_B = np.searchsorted(ids_K, raw_B).clip(max=len(ids_K) - 1)
    return np.where(ids_K[place_B] == raw_B, row_K[place_B], UNKNOWN)


def _learn(
    ids_K: NDArray[np.int64], row_K: NDArray[np.int64], raw_B: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Known ids, extended by those of a batch."""
    new_U, seen_U = np.unique(raw_B, return_index=True)
    fresh_U = _find(ids_K, row_K, new_U) == UNKNOWN
    new_U, seen_U = new_U[fresh_U], seen_U[fresh_U]
    row_U = np.empty(len(new_U), np.int64)
    row_U[np.argsort(seen_U)] = np.arange(len(new_U)) + len(ids_K) + 1
    place_U = np.searchsorted(ids_K, new_U)
    return np.insert(ids_K, place_U, new_U), np.insert(row_K, place_U, row_U)


class MappedRows:
    """Rows by id maps, one for each feature."""

    def __init__(self, maps: Sequence[IdMap]) -> None:
        self.maps = tuple(maps)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(each.rows for each in self.maps)

    def __call__(self, raw_BF: Tensor) -> Tensor:
        batch, features = raw_BF.shape
        offsets = torch.arange(features * batch + 1, device=raw_BF.device)
        return IdMaps(self.maps, raw_BF.device)(raw_BF.t().reshape(-1), offsets).view(features, batch).t().contiguous()


IdRows = RawIds | Vocabulary | MappedRows  # map raw ids [B, F] to rows [B, F]; `rows` has the size of each table


def hashed_rows(rows: Sequence[int], salt: int = 0) -> MappedRows:
    """Rows by a salted hash, different for each table."""
    return MappedRows([IdMap.hashed(count, key_of(salt, table)) for table, count in enumerate(rows)])
