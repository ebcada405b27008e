"""Shard and place of every row of a table, computed from the row number; without torch, for shard processes.

    ranges    shard = first + row // per,  place = row % per
    blocks    blocks of `shards` rows, one row for each shard, each block rotated by a number: hashed, or chosen from heat

The kernels compute the same (`kernels/serve/fields.py`). *Copied* rows are in every shard, after the rows that it owns. Rotated
blocks rather than a hash of each row: places stay dense, and neighbouring rows, often hot together, are in different shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
_MASK, _MIX1, _MIX2 = 0xFFFFFFFF, 0x85EBCA6B, 0xC2B2AE35


@dataclass(frozen=True, eq=False)
class TableSplit:
    """The split of one table over shards. `rotations_B`: of each block; None if they are hashed."""

    rows: int
    shards: int
    scheme: Literal["ranges", "blocks"]
    first: int = 0  # ranges: the shard of row 0
    per: int = 1  # ranges: rows in a shard
    key: int = 0  # blocks: of the hash
    rotations_B: NDArray[np.uint8] | None = None
    copied_H: Rows = field(default_factory=lambda: np.zeros(0, np.int64))  # ascending

    @property
    def everywhere(self) -> bool:
        """Whether all rows are in every shard."""
        return len(self.copied_H) == self.rows

    @property
    def owned(self) -> int:
        """Places in a shard for rows that it owns. Copies follow."""
        if self.everywhere:
            return 0
        return self.per if self.scheme == "ranges" else -(-self.rows // self.shards)

    def places(self, shard: int) -> int:
        """Places of the table in a shard, copies included."""
        outside = self.scheme == "ranges" and not 0 <= shard - self.first < -(-self.rows // self.per)
        return (0 if outside else self.owned) + len(self.copied_H)

    def _rotations(self, block_N: Rows) -> Rows:
        if self.rotations_B is not None:
            return self.rotations_B[block_N].astype(np.int64)
        return hashed_rotation(block_N, self.key, self.shards)

    def owner_and_place(self, rows_N: Rows) -> tuple[Rows, Rows]:
        """Owning shard and place of rows, without regard to copies."""
        if self.scheme == "ranges":
            return self.first + rows_N // self.per, rows_N % self.per
        block_N = rows_N // self.shards
        return (rows_N + self._rotations(block_N)) % self.shards, block_N

    def owned_runs(self, shards: range, begin: int, end: int) -> Iterator[tuple[int, Rows | slice, slice]]:
        """(shard, which of rows begin to end - 1 it owns, counted from `begin`, their places) for each shard."""
        if self.everywhere:
            return
        if self.scheme == "ranges":
            for shard in shards:
                base = (shard - self.first) * self.per
                low, high = max(begin, base), max(begin, base, min(end, base + self.per))
                yield shard, slice(low - begin, high - begin), slice(low - base, high - base)
            return
        rotations_B = self._rotations(np.arange(begin // self.shards, -(-end // self.shards)))
        for shard in shards:
            yield shard, *self._owned_in_blocks(shard, begin, end, rotations_B)

    def _owned_in_blocks(self, shard: int, begin: int, end: int, rotations_B: Rows) -> tuple[Rows, slice]:
        first, inside_B = begin // self.shards, shard - rotations_B
        inside_B += self.shards * (inside_B < 0)  # position of the shard's row in its block
        rows_B = np.arange(0, self.shards * len(rotations_B), self.shards) + inside_B - (begin - first * self.shards)
        low, high = 0, len(rows_B)
        if high and rows_B[0] < 0:  # the first and last block may be cut
            low = 1
        if high > low and rows_B[-1] >= end - begin:
            high -= 1
        return rows_B[low:high], slice(first + low, first + high) if high > low else slice(0, 0)

    def placed(self, shards: range, rows_K: Rows) -> Iterator[tuple[int, Rows, Rows]]:
        """(shard, which of the rows it holds, their places) for the rows that each shard owns, and for copies."""
        shard_K, place_K = self.owner_and_place(rows_K)
        copied_K = np.flatnonzero(np.isin(rows_K, self.copied_H))
        copy_place_K = self.owned + np.searchsorted(self.copied_H, rows_K[copied_K])
        for shard in shards:
            if not self.everywhere:
                owned_K = np.flatnonzero(shard_K == shard)
                yield shard, owned_K, place_K[owned_K]
            yield shard, copied_K, copy_place_K

    def copied_in(self, begin: int, end: int) -> tuple[Rows, slice]:
        """Which of rows begin to end - 1 are copied, counted from `begin`, and the places of the copies."""
        low, high = np.searchsorted(self.copied_H, [begin, end])
        return self.copied_H[low:high] - begin, slice(self.owned + int(low), self.owned + int(high))


def hashed_rotation(block_N: Rows, key: int, shards: int) -> Rows:
    """Rotations of blocks by the 32-bit mixer of `kernels/quantize/reference.py`."""
    x = (block_N & _MASK) ^ key
    x = ((x ^ (x >> 16)) * _MIX1) & _MASK
    x = ((x ^ (x >> 13)) * _MIX2) & _MASK
    rotation_N: Rows = ((x ^ (x >> 16)) * shards) >> 32
    return rotation_N
