"""Triton functions for rows that live in slots: `slots.py` on a GPU, bit for bit.

CACHED, a constant of every kernel that meets such rows, is 0 for tables without slots, FULL for those with fp32 slots only and
BOTH where some slots are near ones. Only with BOTH is anything of near slots compiled. A tile may hold rows of both kinds,
told apart by masks: most of a tile's rows are of one kind, and loads whose mask is not set cost little.

The columns of a tile are in the order of the table's format, whichever kind of slot: codes of near slots are one byte a
column, so their place is the column itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline import formats as F
from thermocline.kernels.layout import Pool

from .row_tiles import (
    columns,
    dequantized,
    int8_codes,
    load_codes,
    load_rows,
    over_columns,
    over_rows,
    random_bits,
    reciprocal,
    symmetric_scale,
)

FULL, BOTH = tl.constexpr(1), tl.constexpr(2)
_NEAR, SLOT_BITS = tl.constexpr(F.CACHED + F.NEAR), tl.constexpr(F.SLOT_BITS)


def kinds_of_slots(*pools: Pool) -> int:
    """CACHED of the tables of some pools, or of none."""
    return BOTH.value if any(pool.near for pool in pools) else FULL.value if pools else 0


@triton.jit
def is_near(word_T):
    """Whether first meta words point at near slots."""
    return (word_T < 0) & (word_T >= _NEAR)


@triton.jit
def near_pointers(number_T):
    """What points at near slots."""
    return number_T.to(tl.int32) | _NEAR


@triton.jit
def cached_at(word_T, DIM: tl.constexpr):
    """Where the values of a row in a full slot begin."""
    return (word_T & 0x7FFFFFFF).to(tl.int64) * DIM


@triton.jit
def _near_at(word_T, DIM: tl.constexpr):
    """Where the scale of a row in a near slot lies; its codes begin a word later."""
    return (word_T & SLOT_BITS).to(tl.int64) * (1 + (DIM + 3) // 4)


@triton.jit
def _near_codes_at(near, word_T, DIM: tl.constexpr):
    """Pointers to the codes of rows in near slots."""
    return near.to(tl.pointer_type(tl.int8)) + 4 * (_near_at(word_T, DIM) + 1)


@triton.jit
def load_cached(
    values, word_T, mask_T, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, FLAT: tl.constexpr = False
):
    """A tile of rows of full slots; zeros where the mask is not set."""
    column, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H, FLAT)
    column, inside = over_columns(column), over_columns(inside_D)
    return tl.load(
        values + over_rows(cached_at(word_T, DIM), column) + column, mask=over_rows(mask_T, column) & inside, other=0.0
    )


@triton.jit
def load_near_codes(
    near, word_T, mask_T, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, FLAT: tl.constexpr = False
):
    """Codes of a tile of rows of near slots as fp32; zeros where the mask is not set."""
    column, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H, FLAT)
    column, inside = over_columns(column), over_columns(inside_D)
    at = over_rows(_near_codes_at(near, word_T, DIM), column) + column
    return tl.load(at, mask=over_rows(mask_T, column) & inside, other=0).to(tl.float32)


@triton.jit
def _load_planes(begin_T, mask_T, DIM: tl.constexpr, BLOCK_H: tl.constexpr, PLANES: tl.constexpr):
    """What lies from some pointers on, in the order of `load_planes`: neighbouring columns are loaded together."""
    WIDTH: tl.constexpr = (DIM + PLANES - 1) // PLANES
    h = tl.arange(0, BLOCK_H)
    at = begin_T[:, None] + h[None, :]
    mask = mask_T[:, None] & (h < WIDTH)[None, :]
    first = tl.load(at, mask=mask, other=0)
    second = tl.load(at + WIDTH, mask=mask & (h + WIDTH < DIM)[None, :], other=0)
    if PLANES == 2:
        return tl.join(first, second)
    else:
        third = tl.load(at + 2 * WIDTH, mask=mask & (h + 2 * WIDTH < DIM)[None, :], other=0)
        fourth = tl.load(at + 3 * WIDTH, mask=mask & (h + 3 * WIDTH < DIM)[None, :], other=0)
        both = tl.join(tl.join(first, third), tl.join(second, fourth))
        return tl.reshape(both, (mask_T.shape[0], BLOCK_H, 4))


@triton.jit
def load_full(values, word_T, mask_T, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    """A tile of rows of full slots: flat, or as `load_planes` where columns share bytes. Zeros where the mask is not set."""
    if BLOCK == BLOCK_H:
        return load_cached(values, word_T, mask_T, DIM, BLOCK, BLOCK_H, True)
    else:
        return _load_planes(values + cached_at(word_T, DIM), mask_T, DIM, BLOCK_H, BLOCK // BLOCK_H)


@triton.jit
def load_near(near, word_T, mask_T, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    """The codes of rows of near slots as fp32, in a tile of the same shape."""
    if BLOCK == BLOCK_H:
        return load_near_codes(near, word_T, mask_T, DIM, BLOCK, BLOCK_H, True)
    else:
        return _load_planes(_near_codes_at(near, word_T, DIM), mask_T, DIM, BLOCK_H, BLOCK // BLOCK_H).to(tl.float32)


@triton.jit
def near_scales(near, word_T, mask_T, DIM: tl.constexpr):
    return tl.load(near + _near_at(word_T, DIM), mask=mask_T, other=0).to(tl.float32, bitcast=True)


@triton.jit
def load_near_rows(
    near, word_T, mask_T, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, FLAT: tl.constexpr = False
):
    """A tile of rows of near slots; zeros where the mask is not set."""
    value = load_near_codes(near, word_T, mask_T, DIM, BLOCK, BLOCK_H, FLAT)
    return value * over_rows(near_scales(near, word_T, mask_T, DIM), value)


@triton.jit
def load_slots(
    values, near, word_T, mask_T,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, CACHED: tl.constexpr, FLAT: tl.constexpr = False,
):  # fmt: skip
    """A tile of rows of slots of either kind."""
    if CACHED == BOTH:
        near_T = is_near(word_T)
        value = load_near_rows(near, word_T, mask_T & near_T, DIM, BLOCK, BLOCK_H, FLAT)
        full = load_cached(values, word_T, mask_T & (near_T == 0), DIM, BLOCK, BLOCK_H, FLAT)
        return tl.where(over_rows(near_T, value), value, full)
    else:
        return load_cached(values, word_T, mask_T, DIM, BLOCK, BLOCK_H, FLAT)


@triton.jit
def store_cached(values, word_T, mask_T, value, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    """Store a wide tile of rows in full slots."""
    column, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    column, inside = over_columns(column), over_columns(inside_D)
    tl.store(values + over_rows(cached_at(word_T, DIM), value) + column, value, mask=over_rows(mask_T, value) & inside)


@triton.jit
def store_near(
    near, word_T, mask_T, value, size_T, row_T, clock,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Round a wide tile of rows into near slots. `size_T`: their largest magnitudes; `row_T` names them for the random bits."""
    column_D, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    column, inside = over_columns(column_D), over_columns(inside_D)
    bits = tl.zeros(value.shape, tl.uint32)
    if STOCHASTIC:
        bits = random_bits(clock, row_T, column_D)
    scale_T = symmetric_scale(size_T, 127.0)
    code = int8_codes(value * over_rows(reciprocal(scale_T), value), bits, STOCHASTIC).to(tl.int8, bitcast=True)
    at = over_rows(_near_codes_at(near, word_T, DIM), column) + column
    tl.store(at, code, mask=over_rows(mask_T, value) & inside)
    tl.store(near + _near_at(word_T, DIM), scale_T.to(tl.int32, bitcast=True), mask=mask_T)


@triton.jit
def store_slots(
    values, near, word_T, mask_T, value, size_T, row_T, clock,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, CACHED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store a wide tile of rows in slots of either kind, as `store_near` does in near ones."""
    full_T = mask_T
    if CACHED == BOTH:
        near_T = mask_T & is_near(word_T)
        full_T = mask_T & (near_T == 0)
        store_near(near, word_T, near_T, value, size_T, row_T, clock, DIM, BLOCK, BLOCK_H, STOCHASTIC)
    store_cached(values, word_T, full_T, value, DIM, BLOCK, BLOCK_H)


@triton.jit
def load_rows_or_cached(
    codes, meta, values, near, word_T, at_T, mask_T,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """A flat tile of rows as fp32 wherever they live, of which the first words are at hand (or not used: CACHED is 0)."""
    if CACHED:
        at_T = at_T.to(tl.int64)
        hit_T = mask_T & (word_T < 0)
        value = load_codes(codes, at_T, mask_T & (word_T >= 0), DIM, FORMAT, BLOCK, BLOCK_H, True)
        full = load_slots(values, near, word_T, hit_T, DIM, BLOCK, BLOCK_H, CACHED, True)
        value = dequantized(value, word_T, meta, at_T, mask_T, FORMAT)
        return tl.where(hit_T[:, None], full, value)
    else:
        return load_rows(codes, meta, at_T, mask_T, DIM, FORMAT, BLOCK, BLOCK_H, True)
