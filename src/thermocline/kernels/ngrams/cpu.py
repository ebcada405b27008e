"""Rows of n-grams on the CPU (definition: `reference.py`), a task for each range of positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thermocline.kernels.cpu import threads
from thermocline.kernels.cpu.compile import addresses, helper, kernel
from thermocline.kernels.cpu.vectors import get_i64, put_i64
from thermocline.kernels.ids.cpu import hash_id, hashed
from thermocline.kernels.ids.fields import GOLDEN

from .reference import bad_token

CHUNK = 2048
_START = np.uint64(GOLDEN)


@helper
def _is_excluded(excluded, count, token):
    for x in range(count):
        if get_i64(excluded, x) == token:
            return True
    return False


@kernel("int64(" + ", ".join(["int64"] * 14) + ")")
def _rows(
    keys, excluded, excluded_count, tokens, length, orders, order_count, heads, vocabulary, part, rows, grams, first, last
):  # fmt: skip
    """Rows of positions first to last - 1; returns -1 or the position of a token outside the vocabulary."""
    slots, longest = order_count * heads, get_i64(orders, order_count - 1)
    for i in range(first, last):
        token = get_i64(tokens, i)
        if token < 0 or token >= vocabulary:
            return np.int64(i)
        known, gram = 0, _START
        while known < min(longest, i % length + 1):
            token = get_i64(tokens, i - known)
            if _is_excluded(excluded, excluded_count, token):
                break
            gram = hash_id(token, gram)
            put_i64(grams, known, np.int64(gram))
            known += 1
        for slot in range(slots):
            row = slots * part
            if known > 0:
                gram_of_slot = get_i64(grams, min(get_i64(orders, slot // heads), known) - 1)
                row = slot * part + hashed(gram_of_slot, get_i64(keys, slot), part)
            put_i64(rows, i * slots + slot, row)
    return np.int64(-1)


def ngram_rows(
    keys_S: Tensor, excluded_X: Tensor, tokens_BL: Tensor, orders: Sequence[int], vocabulary: int, part: int
) -> Tensor:
    """Rows [batch, length, slots] (int64); a token outside the vocabulary raises."""
    tokens_BL = tokens_BL.long().contiguous()
    rows_BLS = torch.empty(*tokens_BL.shape, len(keys_S), dtype=torch.int64)
    orders_O, bad = np.array(orders), []
    inputs = (*addresses("qq", keys_S, excluded_X), len(excluded_X), *addresses("q", tokens_BL), tokens_BL.shape[1])
    how = (*addresses("q", orders_O), len(orders), len(keys_S) // len(orders), vocabulary, part, *addresses("q", rows_BLS))

    def task(first: int, last: int) -> None:
        grams = np.empty(orders[-1], dtype=np.int64)
        position = _rows(*inputs, *how, *addresses("q", grams), first, last)
        if position >= 0:
            bad.append(position)

    threads.run_chunks(task, tokens_BL.numel(), CHUNK)
    if bad:
        raise bad_token(tokens_BL, min(bad), vocabulary)
    return rows_BLS
