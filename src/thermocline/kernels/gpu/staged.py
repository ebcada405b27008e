"""Triton functions that find rows where they are stored: in their table or, staged, on the card (`stage/reference.py`).

The distance between two arrays is a number like any other: chosen as a whole number of rows, it makes a staged row a row of
its table with another number. So kernels take one step more between the first word of a row and the rest of it, and only
where rows are staged at all: elsewhere they compile to what they were.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.layout import Cache
from thermocline.kernels.stage import area_of, check_home

from .row_tiles import INT8_AFFINE

STAGED, ARRIVING, LEAVING, PLACE_BITS = (tl.constexpr(k) for k in (F.STAGED, F.ARRIVING, F.LEAVING, F.PLACE_BITS))
AREA, FIRST_ROW = tl.constexpr(F.AREA_FIELDS), tl.constexpr(F.FIRST_ROW)
SHIFT_CODES, SHIFT_META = tl.constexpr(F.SHIFT_CODES), tl.constexpr(F.SHIFT_META)


def cached_parts(cache: Cache | None, codes: Tensor, meta: Tensor) -> tuple[Tensor, Tensor]:
    """(rows in full slots, staging area or rows in near slots: never both) for a launch; meta stands for what is not there."""
    if cache is None:
        return meta, meta
    area = area_of(cache)
    if area is not None:
        check_home(area, codes, meta)
        return cache.values, area.tensor
    return cache.values, cache.near if cache.near.numel() else meta


@triton.jit
def is_staged(word_T):
    return (word_T < 0) & (word_T >= STAGED)


@triton.jit
def follow(area, pool, meta, word_T, at_T, mask_T, row, FORMAT: tl.constexpr):
    """(at, meta, first words) of rows wherever they are stored; `word_T` are the first words that their table has.

    `row` is the arena row that `at_T` counts from. Codes and meta words of a staged row lie at different numbers, so `meta`
    becomes a pointer for each row, from which the number of the codes leads to its words. A row that is still arriving is
    read and written in its table; only its first word is here, where a pointer stands in the table.
    """
    WORDS: tl.constexpr = 2 if FORMAT == INT8_AFFINE else 1
    area += pool * AREA
    staged_T = mask_T & is_staged(word_T)
    here_T = staged_T & ((word_T & ARRIVING) == 0)
    place_T = (word_T & PLACE_BITS).to(tl.int64) + (tl.load(area + FIRST_ROW) - row)
    word_at_T = tl.load(area + SHIFT_META) + place_T
    code_at_T = tl.where(here_T, tl.load(area + SHIFT_CODES) + place_T, at_T)
    stored_T = tl.load(meta + WORDS * word_at_T, mask=staged_T, other=0)
    meta_T = meta + WORDS * tl.where(here_T, word_at_T - code_at_T, 0)
    return code_at_T, meta_T, tl.where(staged_T, stored_T, word_T)


@triton.jit
def stay(pointer_T, word_T, mask_T):
    """Rows that were updated while they were leaving: what was copied out of their places is old, so they stay there."""
    leaving_T = mask_T & is_staged(word_T) & ((word_T & LEAVING) != 0)
    tl.store(pointer_T, word_T & ~LEAVING, mask=leaving_T)
