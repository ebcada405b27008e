"""Click logs: batches of labels, dense features and rows, from a stream that can start anywhere.

    B  samples of a batch        I  dense features        F  categorical features, one table each

A log does not hold its samples: `batches` produces them, and `first` skips batches that an interrupted run has used. Only
`MemoryLog` keeps its samples, so only it can shuffle; MovieLens needs that, because its file is sorted by user.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Clicks(NamedTuple):
    """A batch: labels 0 or 1 (fp32), dense features (fp32), and one id or row for each feature (int64)."""

    label_B: Tensor
    dense_BI: Tensor
    ids_BF: Tensor

    def to(self, device: torch.device | str) -> Clicks:
        return Clicks(*(part.to(device, non_blocking=True) for part in self))

    def narrow(self, first: int, count: int) -> Clicks:
        return Clicks(*(part[first : first + count] for part in self))

    @staticmethod
    def cat(parts: list[Clicks]) -> Clicks:
        return parts[0] if len(parts) == 1 else Clicks(*(torch.cat(column) for column in zip(*parts, strict=True)))


class ClickLog(Protocol):
    """A stream of samples whose ids are rows of tables."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the table of each feature."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features."""

    @property
    def dense(self) -> int:
        """Dense features of a sample."""

    @property
    def samples(self) -> int:
        """Samples of an epoch."""

    def batches(self, size: int, epoch: int = 0, first: int = 0) -> Iterator[Clicks]:
        """Batches of one epoch from number `first` on; the last may be smaller than `size`."""


@dataclass(frozen=True)
class MemoryLog:
    """A log in memory. With `shuffle`, the order of an epoch is a function of (shuffle, epoch)."""

    clicks: Clicks
    rows: tuple[int, ...]
    shuffle: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return criteo_names(len(self.rows))

    @property
    def dense(self) -> int:
        return self.clicks.dense_BI.shape[1]

    @property
    def samples(self) -> int:
        return len(self.clicks.label_B)

    def batches(self, size: int, epoch: int = 0, first: int = 0) -> Iterator[Clicks]:
        order_N = None
        if self.shuffle is not None:
            generator = torch.Generator().manual_seed((self.shuffle << 16) + epoch)
            order_N = torch.randperm(self.samples, generator=generator).to(self.clicks.label_B.device)
        for start in range(first * size, self.samples, size):
            if order_N is None:
                yield self.clicks.narrow(start, size)
            else:
                yield Clicks(*(part[order_N[start : start + size]] for part in self.clicks))


def criteo_names(features: int) -> tuple[str, ...]:
    """C1, C2, ..."""
    return tuple(f"C{feature + 1}" for feature in range(features))


def heat_of(log: ClickLog) -> list[Tensor]:
    """Lookups of each row of each table in a log, on the device of the log."""
    heat: list[Tensor] = []
    for batch in log.batches(1 << 20):
        device = batch.ids_BF.device
        heat = heat or [torch.zeros(count, dtype=torch.int64, device=device) for count in log.rows]
        one_B = torch.ones((), dtype=torch.int64, device=device).expand(len(batch.ids_BF))
        for total_R, ids_B in zip(heat, batch.ids_BF.t(), strict=True):
            total_R.scatter_add_(0, ids_B, one_B)
    return heat


def rebatch(chunks: Iterable[Clicks], size: int) -> Iterator[Clicks]:
    """Cut a stream of chunks into batches of `size`; the last may be smaller."""
    waiting: list[Clicks] = []
    count = 0
    for chunk in chunks:
        waiting.append(chunk)
        count += len(chunk.label_B)
        if count < size:
            continue
        joined = Clicks.cat(waiting)
        full = count - count % size
        for start in range(0, full, size):
            yield joined.narrow(start, size)
        waiting, count = [joined.narrow(full, size)], count - full
    if count:
        yield Clicks.cat(waiting)
