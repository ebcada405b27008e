"""A set of rows as one bit a row and a running count for each block of 512: 1.06 bits a row, on any device.

`rank` answers for a row how many rows of the set are below it, from one count and at most eight words.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORDS = 8  # of a block
_BLOCK = 64 * _WORDS


class Bitmap:
    """Rows 0 to `rows` - 1, of which those given are in the set."""

    def __init__(self, rows: int, members_H: NDArray[np.int64], device: torch.device) -> None:
        blocks = -(-rows // _BLOCK)
        bits = np.zeros(blocks * _BLOCK // 8, np.uint8)
        np.bitwise_or.at(bits, members_H >> 3, (1 << (members_H & 7)).astype(np.uint8))
        ones_B = np.bincount(members_H // _BLOCK, minlength=blocks)
        self.words_BW = torch.from_numpy(bits.view(np.int64).reshape(blocks, _WORDS)).to(device)
        self.below_B = torch.from_numpy((np.cumsum(ones_B) - ones_B).astype(np.int32)).to(device)

    def __call__(self, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """Whether rows are in the set, and how many rows of it are below them."""
        block_N, word_N, bit_N = rows_N // _BLOCK, rows_N % _BLOCK // 64, rows_N % 64
        words_NW = self.words_BW[block_N]
        own_N = words_NW.gather(1, word_N[:, None])[:, 0]
        kept_NW = torch.where(torch.arange(_WORDS, device=rows_N.device) < word_N[:, None], words_NW, 0)
        before_N = own_N & ((torch.ones_like(bit_N) << bit_N) - 1)
        ones_N = _ones(kept_NW).sum(dim=1) + _ones(before_N)
        return (own_N >> bit_N) & 1 == 1, self.below_B[block_N].long() + ones_N

    @property
    def bytes(self) -> int:
        return 8 * self.words_BW.numel() + 4 * self.below_B.numel()


def _ones(words: Tensor) -> Tensor:
    """Bits that are set in int64 words."""
    low = 0x5555555555555555
    words = words - ((words >> 1) & low)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((words * 0x0101010101010101) >> 56) & 0x7F
