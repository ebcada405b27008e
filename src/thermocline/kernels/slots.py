"""Rows that live in slots: where they are, and their values. The definition, in plain PyTorch.

A row that is cached has a *pointer* in place of its first meta word: the sign bit, NEAR if its slot is a near one, and the
number of the slot. A **full** slot holds fp32 values, a **near** slot one int8 row: its scale, then its codes, filled up with
zeros to a whole word. Scale and codes lie together because a pointer says nothing of the pool: a number alone must find both,
whatever the dimensions of other pools.

    full slot n     values[n * dim : (n + 1) * dim]
    near slot n     near[n * near_words(dim)], a scale, and the words after it, codes
"""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline import formats as F

from .layout import Cache, Pool
from .quantize import reference as quantize


def pointers(pool: Pool, slot_K: Tensor) -> Tensor:
    """What points at some slots, which a pool counts from 0, the full ones first."""
    full_K = F.CACHED + pool.base + slot_K
    return torch.where(slot_K < pool.full, full_K, F.CACHED + F.NEAR + pool.near_base + slot_K - pool.full).int()


def slots_of(pool: Pool, word_K: Tensor) -> Tensor:
    """The slots that pointers name, as their pool counts them."""
    number_K = (word_K & F.SLOT_BITS).long()
    return torch.where(word_K & F.NEAR == 0, number_K - pool.base, number_K - pool.near_base + pool.full)


def read_pointed(cache: Cache, word_K: Tensor, dim: int) -> Tensor:
    """The values of the rows that pointers name."""
    near_K = word_K & F.NEAR != 0
    values_KD = cache.values.new_empty(word_K.numel(), dim)
    values_KD[~near_K] = cache.values[_elements(word_K[~near_K], dim)]
    if cache.near.numel():
        near_KW = cache.near[_elements(word_K[near_K], F.near_words(dim))]
        codes_KB = near_KW[:, 1:].contiguous().view(torch.uint8)[:, :dim]
        values_KD[near_K] = quantize.dequantize_rows(codes_KB, near_KW[:, :1], F.INT8, dim)
    return values_KD


def write_pointed(cache: Cache, word_K: Tensor, values_KD: Tensor, row_K: Tensor, clock: Tensor | None) -> None:
    """Set the rows that pointers name. In near slots they are rounded, stochastically if a clock is given."""
    near_K, dim = word_K & F.NEAR != 0, values_KD.shape[1]
    cache.values[_elements(word_K[~near_K], dim)] = values_KD[~near_K]
    if cache.near.numel():
        codes_KB, scale_K1 = quantize.quantize_rows(values_KD[near_K], F.INT8, clock, row_K[near_K])
        words = F.near_words(dim)
        codes_KB = torch.nn.functional.pad(codes_KB, (0, 4 * (words - 1) - dim))
        cache.near[_elements(word_K[near_K], words)] = torch.cat([scale_K1, codes_KB.view(torch.int32)], dim=1)


def _elements(word_K: Tensor, size: int) -> Tensor:
    """Where the elements of slots of one size lie."""
    return (word_K & F.SLOT_BITS).long()[:, None] * size + torch.arange(size, device=word_K.device)
