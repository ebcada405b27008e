"""Map raw ids to rows on a GPU: all features in one launch; a program maps a tile of the ids of one feature."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline.kernels.gpu.bags import NO_POSITION, check_ids, ids_of_program
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.gpu.launch import ceil_div, launch, power_of_two

from . import fields as M

TILE = 512

_GOLDEN, _MIX1, _MIX2 = tl.constexpr(M.GOLDEN), tl.constexpr(M.MIX1), tl.constexpr(M.MIX2)
_FIELDS, _BLOCK_WORDS = tl.constexpr(M.FIELDS), tl.constexpr(M.BLOCK_WORDS)
_START, _START_ROWS, _START_KEY = tl.constexpr(M.START), tl.constexpr(M.START_ROWS), tl.constexpr(M.START_KEY)
_KEPT, _KEPT_COUNT, _PLACE, _BLOCK = (tl.constexpr(k) for k in (M.KEPT, M.KEPT_COUNT, M.PLACE, M.BLOCK))
_LOW, _HIGH, _FIRST = tl.constexpr(M.LOW), tl.constexpr(M.HIGH), tl.constexpr(M.FIRST)
_OTHERS, _OTHERS_KEY = tl.constexpr(M.OTHERS), tl.constexpr(M.OTHERS_KEY)
_WITHIN, _HASHED = tl.constexpr(M.WITHIN), tl.constexpr(M.HASHED)
_ALL, _SORTED = tl.constexpr(M.ALL), tl.constexpr(M.SORTED)


@triton.jit
def hash_id(id_T, key):
    """64 bits of each id."""
    z = (id_T ^ key).to(tl.uint64) * _GOLDEN
    z = (z ^ (z >> 30)) * _MIX1
    z = (z ^ (z >> 27)) * _MIX2
    return z ^ (z >> 31)


@triton.jit
def hashed(id_T, key, rows):
    """Rows of hashed ids."""
    z = hash_id(id_T, key)
    return tl.umulhi(z, tl.zeros_like(z) + rows.to(tl.uint64)).to(tl.int64)


@triton.jit
def ones_of(word_T):
    """Population count, in a form that compilers turn into one instruction."""
    x = word_T.to(tl.uint64)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int64)


@triton.jit
def rank_in_sorted(words, count, id_T, mask_T):
    """(whether each id is kept, its rank)."""
    rank_T = tl.zeros_like(id_T)
    left = count
    while left > 1:
        half = left >> 1
        below_T = tl.load(words + rank_T + half, mask=mask_T, other=0) <= id_T
        rank_T += tl.where(below_T, half, 0)
        left -= half
    some_T = mask_T & (rank_T < count)
    return some_T & (tl.load(words + rank_T, mask=some_T, other=0) == id_T), rank_T


@triton.jit
def rank_in_bitmap(words, counts, low, high, id_T, mask_T):
    inside_T = mask_T & (id_T >= low) & (id_T <= high)
    at_T = tl.where(inside_T, id_T - low, 0)
    word_T, bit_T = at_T >> 6, at_T & 63
    block_T = word_T // _BLOCK_WORDS
    begin_T = block_T * _BLOCK_WORDS
    mine_T = tl.load(words + word_T, mask=inside_T, other=0)
    rank_T = tl.load(counts + block_T, mask=inside_T, other=0).to(tl.int64)
    one_T = tl.zeros_like(at_T) + 1
    rank_T += ones_of(mine_T & ((one_T << bit_T) - 1))
    kept_T = inside_T & (((mine_T >> bit_T) & 1) == 1)
    for step in tl.static_range(_BLOCK_WORDS - 1):
        before_T = begin_T + step
        rank_T += ones_of(tl.load(words + before_T, mask=kept_T & (before_T < word_T), other=0))
    return kept_T, rank_T


@triton.jit
def _map(
    fields, words, counts, ids, offsets, rows, flag, record, ids_count, batch,
    FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    feature, first, last = ids_of_program(offsets, tl.program_id(0), ids_count, batch, FEATURES, BLOCK_F, TILE)
    if feature >= FEATURES:
        return
    field = fields + feature * _FIELDS
    at_T = first + tl.arange(0, TILE)
    mask_T = at_T < last
    row_T = tl.load(ids + at_T, mask=mask_T, other=0).to(tl.int64)
    start, limit = tl.load(field + _START), tl.load(field + _START_ROWS)
    bad_T = mask_T & (start == _WITHIN) & ((row_T < 0) | (row_T >= limit))
    if start == _HASHED:
        row_T = hashed(row_T, tl.load(field + _START_KEY), limit)
    kept = tl.load(field + _KEPT)
    if kept != _ALL:
        count = tl.load(field + _KEPT_COUNT)
        words += tl.load(field + _PLACE)
        if kept == _SORTED:
            kept_T, rank_T = rank_in_sorted(words, count, row_T, mask_T)
        else:
            counts += tl.load(field + _BLOCK)
            kept_T, rank_T = rank_in_bitmap(words, counts, tl.load(field + _LOW), tl.load(field + _HIGH), row_T, mask_T)
        other_T = count + hashed(row_T, tl.load(field + _OTHERS_KEY), tl.load(field + _OTHERS))
        row_T = tl.where(kept_T, rank_T, other_T)
    tl.store(rows + at_T, tl.where(bad_T, -1, row_T + tl.load(field + _FIRST)), mask=mask_T)
    check_ids(ids, fields, feature, limit, tl.where(bad_T, at_T, NO_POSITION), flag, record)


def map_ids(fields_FM: Tensor, words: Tensor, counts: Tensor, ids_N: Tensor, offsets: Tensor) -> Tensor:
    """Rows (int64) of the ids of all features. An id without a row is reported, and its row is -1."""
    ids_N, offsets, features, count = ids_N.contiguous(), offsets.contiguous(), fields_FM.shape[0], ids_N.numel()
    rows_N = torch.empty_like(ids_N, dtype=torch.int64)
    if count:
        errors, batch = error_buffer(fields_FM), (offsets.numel() - 1) // features
        launch(
            _map, ceil_div(count, TILE) + features - 1,
            (fields_FM, words, counts, ids_N, offsets, rows_N, errors.flag, errors.record), (count, batch),
            (features, power_of_two(features), TILE), exact=True,
        )  # fmt: skip
    return rows_N
