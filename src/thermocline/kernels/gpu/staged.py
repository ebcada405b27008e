"""Triton functions that locate rows of tables in host memory: in their table, or staged on the GPU."""

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


def cache_tensors(cache: Cache | None, codes: Tensor, meta: Tensor) -> tuple[Tensor, Tensor]:
    """(fp32 slots, staging area or int8 slots) for a launch; `meta` stands in for missing tensors."""
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
def locate_staged(area, pool, meta, word_T, at_T, mask_T, row, FORMAT: tl.constexpr):
    """(index, meta, first words) of rows, staged or in their table; `word_T` holds the first words in the table.

    `row` is the arena row of index 0. Codes and meta of a staged row have different indices, so `meta` becomes a pointer for
    each row that is valid with the index of the codes. A row that is still arriving is read and written in its table; only its
    first word is in the staging area, because the table holds a pointer there.
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
def cancel_leaving(pointer_T, word_T, mask_T):
    """Keep rows staged that were updated while leaving: the copy in host memory is stale."""
    leaving_T = mask_T & is_staged(word_T) & ((word_T & LEAVING) != 0)
    tl.store(pointer_T, word_T & ~LEAVING, mask=leaving_T)
