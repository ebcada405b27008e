"""Rows of n-grams on a GPU (definition: `reference.py`), in one launch: a program has a tile of positions and all slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline.kernels.gpu.bags import NO_POSITION, check_ids
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.gpu.launch import ceil_div, launch, power_of_two
from thermocline.kernels.ids.fields import GOLDEN
from thermocline.kernels.ids.gpu import hash_id, hashed

TILE = 128
_START = tl.constexpr(GOLDEN)


@triton.jit
def _excluded(excluded, token_T, COUNT: tl.constexpr):
    found_T = token_T < token_T
    for x in tl.static_range(COUNT):
        found_T = found_T | (token_T == tl.load(excluded + x))
    return found_T


@triton.jit
def _rows(
    keys, excluded, tokens, rows, flag, record, count, length, vocabulary, part,
    ORDERS: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, EXCLUDED: tl.constexpr, LONGEST: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = len(ORDERS) * HEADS
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask_T = at_T < count
    head_H = tl.arange(0, BLOCK_H)
    token_T = tl.load(tokens + at_T, mask=mask_T, other=0).to(tl.int64)
    bad_T = mask_T & ((token_T < 0) | (token_T >= vocabulary))
    within_T = mask_T & (_excluded(excluded, token_T, EXCLUDED) == 0)
    kept_T = within_T
    gram_T = tl.zeros_like(at_T).to(tl.uint64) + _START
    for back in tl.static_range(LONGEST):
        within_T = within_T & (at_T % length >= back)
        token_T = tl.load(tokens + at_T - back, mask=within_T, other=0).to(tl.int64)
        within_T = within_T & (_excluded(excluded, token_T, EXCLUDED) == 0)
        gram_T = tl.where(within_T, hash_id(token_T, gram_T.to(tl.int64)), gram_T)
        for o in tl.static_range(len(ORDERS)):
            if ORDERS[o] == back + 1:
                slot_H = o * HEADS + head_H
                key_H = tl.load(keys + slot_H, mask=head_H < HEADS, other=0)
                gram_TH = gram_T.to(tl.int64)[:, None] + tl.zeros_like(key_H)[None]
                row_TH = hashed(gram_TH, key_H[None], part) + slot_H[None] * part
                row_TH = tl.where(kept_T[:, None], row_TH, part * SLOTS)
                mask_TH = mask_T[:, None] & (head_H < HEADS)[None]
                tl.store(rows + at_T[:, None] * SLOTS + slot_H[None], row_TH, mask=mask_TH)
    check_ids(tokens, keys, tl.program_id(0) * 0, vocabulary, tl.where(bad_T, at_T, NO_POSITION), flag, record)


def ngram_rows(
    keys_S: Tensor, excluded_X: Tensor, tokens_BL: Tensor, orders: Sequence[int], vocabulary: int, part: int
) -> Tensor:
    """Rows [batch, length, slots] (int64). A token outside the vocabulary is reported; its rows are those of another n-gram."""
    tokens_BL, heads = tokens_BL.contiguous(), len(keys_S) // len(orders)
    rows_BLS = torch.empty(*tokens_BL.shape, len(keys_S), dtype=torch.int64, device=tokens_BL.device)
    if tokens_BL.numel():
        errors = error_buffer(keys_S)
        errors.raise_pending()
        launch(
            _rows, ceil_div(tokens_BL.numel(), TILE),
            (keys_S, excluded_X, tokens_BL, rows_BLS, errors.flag, errors.record),
            (tokens_BL.numel(), tokens_BL.shape[1], vocabulary, part),
            (tuple(orders), heads, power_of_two(heads), len(excluded_X), max(orders), TILE), exact=True,
        )  # fmt: skip
    return rows_BLS
