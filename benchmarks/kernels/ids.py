"""Ids that benchmarks look up, Zipf or uniform: the same from the same seed in every process.

Zipf: rank r is drawn with a probability proportional to r^-1.05 (inverse of the cumulative sum). A fixed random permutation
maps ranks to rows, with another shift for each table, so that hot rows are scattered. Only torch is imported: a peer in
another environment must draw the same ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.cases import ZIPF, Shape

EXPONENT = 1.05
_SHIFT = 7919 * 13


class Batch(NamedTuple):
    """Feature-major ids with the offsets of all bags (tables * batch + 1 of them), pooled or not."""

    ids: Tensor
    offsets: Tensor


class ZipfSampler:
    """Draws ranks 0, 1, 2, ... by Zipf's law, and maps ranks to rows."""

    def __init__(self, rows: int, generator: torch.Generator, device: str) -> None:
        self.rows_of_rank = torch.randperm(rows, generator=generator, device=device)
        # Summed on the CPU: a GPU's parallel sum differs between processes in the last bits, and so would some ids.
        cumulative = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-EXPONENT).cumsum(0)
        self.cumulative = (cumulative / cumulative[-1].clone()).to(device)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        device = self.cumulative.device
        uniform = torch.rand(count, dtype=torch.float64, generator=generator, device=device)
        return torch.searchsorted(self.cumulative, uniform).clamp_(max=self.cumulative.numel() - 1)


class IdStream:
    """An endless stream of batches for a shape; `seed` determines all of it."""

    def __init__(self, shape: Shape, kind: str, seed: int, device: str, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.generator = torch.Generator(device=device)
        self.generator.manual_seed(seed)
        self.ranks = ZipfSampler(shape.rows, self.generator, device) if kind == ZIPF else None
        self.shift_T1 = torch.arange(shape.tables, device=device).view(-1, 1) * _SHIFT
        self.offsets = torch.arange(shape.tables * shape.batch + 1, device=device, dtype=dtype) * shape.pooling

    def draw(self) -> Batch:
        """The next batch."""
        shape = self.shape
        if self.ranks is None:
            ids = torch.randint(0, shape.rows, (shape.lookups,), generator=self.generator, device=self.device)
        else:
            drawn_TN = self.ranks.draw(shape.lookups, self.generator).view(shape.tables, -1)
            ids = ((self.ranks.rows_of_rank[drawn_TN] + self.shift_T1) % shape.rows).reshape(-1)
        return Batch(ids.to(self.dtype), self.offsets)


def batches(
    shape: Shape, kind: str, count: int, seed: int = 1, device: str = "cpu", dtype: torch.dtype = torch.int64
) -> list[Batch]:
    """The first `count` batches of a stream."""
    stream = IdStream(shape, kind, seed, device, dtype)
    return [stream.draw() for _ in range(count)]
