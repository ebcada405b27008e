"""Batches of a workload on a device: bag lengths by numpy, ids by a counter-based hash, so that no two batches repeat ids.

The uniform number of lookup n of batch t is a hash of (seed, number, t, n) in 64-bit integers: it is the same on every device.
Zipf ranks come from the inverse of the continuous distribution, `((R^(1-a) - 1) u + 1)^(1 / (1-a))`, for each table's own
number of rows R. Ranks become rows by a multiplication with a prime modulo R, with another shift for each table: hot rows are
scattered. Shared hot ids: a lookup takes one of the `HOT` ids that its table has in this batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.sweep.family import WEIGHTED, SweepWorkload

PATTERNS = 4  # of bag lengths, over which batches rotate
HOT = 16
_PRIME = 2_654_435_761  # larger than any table: coprime to its number of rows
_SHIFT = 7919 * 13


class SweepBatch(NamedTuple):
    """Feature-major ids with tables * batch + 1 offsets, and the number of ids of each table."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    counts: tuple[int, ...]


class _Pattern(NamedTuple):
    """What batches of the same bag lengths share."""

    offsets: Tensor
    weights: Tensor | None
    counts: tuple[int, ...]
    table_N: Tensor
    rows_N: Tensor


class BatchStream:
    """An endless stream of batches; `seed` distinguishes streams of the same workload."""

    def __init__(self, workload: SweepWorkload, device: str, seed: int = 0) -> None:
        self.workload, self.device = workload, device
        self.step = seed << 32
        self._patterns = [self._pattern(number) for number in range(PATTERNS)]

    @property
    def most_ids(self) -> int:
        """Ids of the largest batch."""
        return max(sum(pattern.counts) for pattern in self._patterns)

    def _pattern(self, number: int) -> _Pattern:
        workload, device = self.workload, self.device
        lengths = torch.from_numpy(workload.bag_lengths(number))
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, getattr(torch, workload.id_dtype))
        counts_T = lengths.view(workload.tables, -1).sum(1)
        table_N = torch.arange(workload.tables).repeat_interleave(counts_T).to(device)
        rows_N = torch.tensor(workload.rows, device=device)[table_N]
        weights = _uniform(table_N.numel(), number, device).float() if workload.mode == WEIGHTED else None
        return _Pattern(offsets, weights, tuple(counts_T.tolist()), table_N, rows_N)

    def draw(self) -> SweepBatch:
        """The next batch."""
        workload, pattern = self.workload, self._patterns[self.step % PATTERNS]
        key = _mix_int(workload.seed * 1_000_003 + workload.number) + 4 * self.step
        self.step += 1
        count = pattern.table_N.numel()
        uniform_N = _uniform(count, key, self.device)
        if workload.shared:
            kind_N, which_N = _uniform(count, key + 1, self.device), _uniform(count, key + 2, self.device)
            hot_N = pattern.table_N * HOT + (which_N * HOT).long()
            pool = _uniform(workload.tables * HOT, key + 3, self.device)
            uniform_N = torch.where(kind_N < workload.shared, pool[hot_N], uniform_N)
        ids_N = (self._rank(uniform_N, pattern.rows_N) * _PRIME + pattern.table_N * _SHIFT) % pattern.rows_N
        return SweepBatch(ids_N.to(pattern.offsets.dtype), pattern.offsets, pattern.weights, pattern.counts)

    def _rank(self, uniform_N: Tensor, rows_N: Tensor) -> Tensor:
        exponent, most_N = self.workload.zipf, rows_N.double()
        if not exponent:
            rank_N = uniform_N * most_N
        elif abs(exponent - 1) < 1e-6:
            rank_N = torch.exp(uniform_N * torch.log(most_N + 1)) - 1
        else:
            power = 1 - exponent
            rank_N = (((most_N + 1) ** power - 1) * uniform_N + 1) ** (1 / power) - 1
        return torch.minimum(rank_N.long().clamp_(min=0), rows_N - 1)


def _uniform(count: int, key: int, device: str) -> Tensor:
    """Numbers in [0, 1), 53 bits each, by splitmix64 of a counter."""
    x = torch.arange(count, device=device) * _signed(0x9E3779B97F4A7C15) + _signed(_mix_int(key))
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return _shift(x ^ _shift(x, 31), 11).double() * 2.0**-53


def _shift(x: Tensor, by: int) -> Tensor:
    """A logical shift to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    """splitmix64 of one integer."""
    value = (value + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return value ^ (value >> 31)
