"""A set of integers as one bit per candidate and a running count per block of 512 bits: 1.06 bits per candidate."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .fields import BLOCK_WORDS

BLOCK_BITS = 64 * BLOCK_WORDS
_CHUNK = 1 << 20  # words that are unpacked at a time: unpacked bits take eight times the memory


def pack(members_K: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Words of a bitmap of `size` candidates, in whole blocks. Members are ascending, counted from 0."""
    at_K = members_K.view(np.uint64)
    word_K = (at_K >> np.uint64(6)).view(np.int64)
    begins = np.flatnonzero(np.diff(word_K, prepend=-1))
    words_W = np.zeros(-(-size // BLOCK_BITS) * BLOCK_WORDS, np.uint64)
    if len(begins):
        words_W[word_K[begins]] = np.bitwise_or.reduceat(np.uint64(1) << (at_K & np.uint64(63)), begins)
    return words_W.view(np.int64)


def unpack(words_W: NDArray[np.int64]) -> NDArray[np.int64]:
    """Members of a bitmap, ascending, counted from 0."""
    parts = [np.flatnonzero(_bits(words_W[at : at + _CHUNK])) + 64 * at for at in _chunks(words_W)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def block_counts(words_W: NDArray[np.int64]) -> NDArray[np.int32]:
    """How many members are below each block."""
    parts = [_bits(words_W[at : at + _CHUNK]).reshape(-1, BLOCK_BITS).sum(axis=1, dtype=np.int64) for at in _chunks(words_W)]
    ones_B = np.concatenate([np.zeros(0, np.int64), *parts])
    counts_B: NDArray[np.int32] = (np.cumsum(ones_B) - ones_B).astype(np.int32)
    return counts_B


def _chunks(words_W: NDArray[np.int64]) -> range:
    return range(0, len(words_W), _CHUNK)


def _bits(words_W: NDArray[np.int64]) -> NDArray[np.uint8]:
    return np.unpackbits(words_W.astype("<i8", copy=False).view(np.uint8), bitorder="little")


def rank(words: Tensor, counts: Tensor, at_N: Tensor) -> tuple[Tensor, Tensor]:
    """Whether candidates are members, and how many members are below each."""
    word_N, bit_N = at_N >> 6, at_N & 63
    block_N = word_N // BLOCK_WORDS
    own_N = words[word_N]
    below_N = (torch.ones_like(bit_N) << bit_N) - 1  # bit 63: 2^63 - 1, as it wraps
    rank_N = counts[block_N].long() + count_ones(own_N & below_N)
    for step in range(BLOCK_WORDS - 1):
        before_N = block_N * BLOCK_WORDS + step
        ones_N = count_ones(words[before_N.clamp(max=words.numel() - 1)])
        rank_N += torch.where(before_N < word_N, ones_N, 0)
    return (own_N >> bit_N) & 1 == 1, rank_N


def count_ones(x: Tensor) -> Tensor:
    """Ones among the 64 bits of each word; shifts are logical."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56) & 0xFF


class RankBitmap:
    """A set of rows below `size` on a device."""

    def __init__(self, size: int, members_H: NDArray[np.int64], device: torch.device) -> None:
        words_W = pack(np.sort(members_H), size)
        self.words = torch.from_numpy(words_W).to(device)
        self.counts = torch.from_numpy(block_counts(words_W)).to(device)

    def rank(self, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """Whether rows are in the set, and how many rows of the set are below each."""
        return rank(self.words, self.counts, rows_N)

    @property
    def bytes(self) -> int:
        return 8 * self.words.numel() + 4 * self.counts.numel()
