"""Cache slots and the pointers to them: the definition. A cached row has a pointer in place of its first meta word.

fp32 slot n     values[n * dim : (n + 1) * dim]
int8 slot n     near[n * int8_slot_words(dim)], the scale, and the words after it, the codes
"""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline import formats as F

from .layout import Cache, Pool
from .quantize import reference as quantize


def pointers(pool: Pool, slot_K: Tensor) -> Tensor:
    """Pointers to slots of a pool, counted from 0, the fp32 slots first."""
    fp32_K = F.CACHED + pool.base + slot_K
    int8_K = F.CACHED + F.INT8_SLOT + pool.int8_base + slot_K - pool.fp32_slots
    return torch.where(slot_K < pool.fp32_slots, fp32_K, int8_K).int()


def slots_of(pool: Pool, word_K: Tensor) -> Tensor:
    """The slots of a pool that pointers name, counted from 0."""
    number_K = (word_K & F.SLOT_BITS).long()
    return torch.where(word_K & F.INT8_SLOT == 0, number_K - pool.base, number_K - pool.int8_base + pool.fp32_slots)


def read_pointed(cache: Cache, word_K: Tensor, dim: int) -> Tensor:
    """The values of the rows that pointers name."""
    int8_K = word_K & F.INT8_SLOT != 0
    values_KD = cache.values.new_empty(word_K.numel(), dim)
    values_KD[~int8_K] = cache.values[_elements(word_K[~int8_K], dim)]
    if cache.near.numel():
        int8_KW = cache.near[_elements(word_K[int8_K], F.int8_slot_words(dim))]
        codes_KB = int8_KW[:, 1:].contiguous().view(torch.uint8)[:, :dim]
        values_KD[int8_K] = quantize.dequantize_rows(codes_KB, int8_KW[:, :1], F.INT8, dim)
    return values_KD


def write_pointed(cache: Cache, word_K: Tensor, values_KD: Tensor, row_K: Tensor, clock: Tensor | None) -> None:
    """Write the rows that pointers name. Rows in int8 slots are rounded, stochastically if a clock is given."""
    int8_K, dim = word_K & F.INT8_SLOT != 0, values_KD.shape[1]
    cache.values[_elements(word_K[~int8_K], dim)] = values_KD[~int8_K]
    if cache.near.numel():
        codes_KB, scale_K1 = quantize.quantize_rows(values_KD[int8_K], F.INT8, clock, row_K[int8_K])
        words = F.int8_slot_words(dim)
        codes_KB = torch.nn.functional.pad(codes_KB, (0, 4 * (words - 1) - dim))
        cache.near[_elements(word_K[int8_K], words)] = torch.cat([scale_K1, codes_KB.view(torch.int32)], dim=1)


def _elements(word_K: Tensor, size: int) -> Tensor:
    """Indices of the elements of slots of one size."""
    return (word_K & F.SLOT_BITS).long()[:, None] * size + torch.arange(size, device=word_K.device)
