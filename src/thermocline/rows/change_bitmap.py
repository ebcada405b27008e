"""Change bitmap of an arena for incremental saves: one bit a row, set just before the row changes.

Evictions from the cache change codes without setting a bit; a save compares the slots with those of the previous save instead.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thermocline._lazy import uncompiled

_WORD = 32


class Changes:
    """Changed rows of an arena since the save with the token `base`."""

    def __init__(self, rows: int, device: torch.device, base: str) -> None:
        self.rows, self.base = rows, base
        self.bits = torch.zeros(-(-rows // _WORD), dtype=torch.int32, device=device)

    def mark(self, rows_N: Tensor) -> None:
        """Set the bits of rows, which may repeat."""
        if self.bits.device.type == "cpu" and not torch.compiler.is_compiling():
            rows = rows_N.detach().cpu().numpy()
            np.bitwise_or.at(self.bits.numpy(), rows >> 5, np.int32(1) << (rows & 31).astype(np.int32))
            return
        sorted_N = rows_N.to(self.bits.device).long().sort()[0]
        first_N = torch.ones_like(sorted_N, dtype=torch.bool)
        first_N[1:] = sorted_N[1:] != sorted_N[:-1]
        # without a synchronization: bits that are new, each once, are added to their words
        word_N, bit_N = sorted_N >> 5, torch.ones_like(sorted_N, dtype=torch.int32) << (sorted_N & 31).int()
        new_N = first_N & (self.bits[word_N] & bit_N == 0)
        self.bits.index_add_(0, word_N, torch.where(new_N, bit_N, torch.zeros_like(bit_N)))

    def take(self) -> Tensor:
        """Return the bits and clear them."""
        taken, self.bits = self.bits, torch.zeros_like(self.bits)
        return taken

    def give_back(self, taken: Tensor) -> None:
        """Set the bits of `take` again, after a save that failed."""
        self.bits |= taken


def marked(bits: Tensor, first: int, end: int) -> Tensor:
    """Marked rows from `first` to before `end`, counted from `first`, on the CPU."""
    begin = first // _WORD
    words = bits[begin : -(-end // _WORD)].cpu().numpy().view(np.uint8)
    flags = np.unpackbits(words, bitorder="little")[first - begin * _WORD : end - begin * _WORD]
    return torch.from_numpy(np.flatnonzero(flags).astype(np.int64))


class UpdateCounts:
    """Updates of each arena row since it was last published, one byte a row: the order in which a byte budget is spent.

    A byte rather than a bit: a store for each row of a batch takes a tenth of the time, and publishing may take 2% of a step.
    """

    MOST, FIRST = 254, 255  # the largest count; and rows that the next publish has, whatever its budget

    def __init__(self, rows: int, device: torch.device) -> None:
        self.counts_R = torch.zeros(rows + -rows % 8, dtype=torch.uint8, device=device)
        self.run = self.number = 0  # the last publish
        self.saved: tuple[str, int] | None = None  # folder of the last save, and the publish that it contains

    @uncompiled
    def mark(self, rows_N: Tensor) -> None:
        """Count a change of rows. Repetitions in one call count once."""
        if self.counts_R.device.type == "cpu":
            rows, counts_R = rows_N.detach().cpu().numpy(), self.counts_R.numpy()
            counts_N = counts_R[rows]
            counts_R[rows] = counts_N + (counts_N < self.MOST)
            return
        rows_N = rows_N.to(self.counts_R.device)
        self.counts_R[rows_N] += self.counts_R[rows_N] < self.MOST

    def publish_first(self, rows_N: Tensor) -> None:
        """Have the next publish send rows: they are another id's now, or a publish that had them failed."""
        self.counts_R[rows_N.to(self.counts_R.device)] = self.FIRST

    def changed(self) -> Tensor:
        """Rows that changed, ascending, on the CPU."""
        if self.counts_R.device.type != "cpu":
            return self.counts_R.nonzero()[:, 0].cpu()
        counts_R = self.counts_R.numpy()
        word_W = np.flatnonzero(counts_R.view(np.uint64))  # eight rows at a time
        at_K = np.flatnonzero(counts_R.reshape(-1, 8)[word_W])
        return torch.from_numpy(8 * word_W[at_K >> 3] + (at_K & 7))

    def clear(self, rows_K: Tensor) -> None:
        """Forget the changes of rows."""
        self.counts_R[rows_K.to(self.counts_R.device)] = 0
