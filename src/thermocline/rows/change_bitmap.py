"""Which rows of an arena have changed since somebody asked: one bit a row, for incremental saves.

Rows are marked just before they change: by the backward of a lookup, by `step`, by `write`. A row that leaves the cache changes
its codes too, at a moment that only kernels know; whoever saves knows which rows were in which slots at the save before, and
looks whether they still are. A bit a row is 0.2% of int8 rows of 64 columns, and there only where it is asked for.

On a CPU bits are set one after another by numpy; on a card ids are sorted, and the bits that are new, each once, are added to
their words, which nothing waits for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_WORD = 32


class Changes:
    """Bits of the rows of an arena. `base`: the save that they count from, by its token."""

    def __init__(self, rows: int, device: torch.device, base: str) -> None:
        self.rows, self.base = rows, base
        self.bits = torch.zeros(-(-rows // _WORD), dtype=torch.int32, device=device)

    def mark(self, rows_N: Tensor) -> None:
        """These rows, some of them perhaps twice, are about to change."""
        if self.bits.device.type == "cpu" and not torch.compiler.is_compiling():
            rows = rows_N.detach().cpu().numpy()
            np.bitwise_or.at(self.bits.numpy(), rows >> 5, np.int32(1) << (rows & 31).astype(np.int32))
            return
        sorted_N = rows_N.to(self.bits.device).long().sort()[0]
        first_N = torch.ones_like(sorted_N, dtype=torch.bool)
        first_N[1:] = sorted_N[1:] != sorted_N[:-1]
        word_N, bit_N = sorted_N >> 5, torch.ones_like(sorted_N, dtype=torch.int32) << (sorted_N & 31).int()
        new_N = first_N & (self.bits[word_N] & bit_N == 0)
        self.bits.index_add_(0, word_N, torch.where(new_N, bit_N, torch.zeros_like(bit_N)))

    def take(self) -> Tensor:
        """The bits until now; none are set afterwards."""
        taken, self.bits = self.bits, torch.zeros_like(self.bits)
        return taken

    def give_back(self, taken: Tensor) -> None:
        """Bits that were taken, for a save that did not come about."""
        self.bits |= taken


def marked(bits: Tensor, first: int, end: int) -> Tensor:
    """Of the rows from `first` to before `end`, the numbers of those that are marked, counted from `first`; on the CPU."""
    begin = first // _WORD
    words = bits[begin : -(-end // _WORD)].cpu().numpy().view(np.uint8)
    flags = np.unpackbits(words, bitorder="little")[first - begin * _WORD : end - begin * _WORD]
    return torch.from_numpy(np.flatnonzero(flags).astype(np.int64))
