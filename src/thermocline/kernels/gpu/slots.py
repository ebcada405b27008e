"""Triton functions for rows in cache slots: `slots.py` on a GPU, bit for bit.

CACHED is 0 for tables without slots, FP32_SLOTS, or BOTH_SLOTS with int8 slots as well: only then is code for them compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline import formats as F
from thermocline.kernels.layout import Pool

from . import row_tiles as R

FP32_SLOTS, BOTH_SLOTS = tl.constexpr(1), tl.constexpr(2)
_INT8_SLOT, SLOT_BITS = tl.constexpr(F.CACHED + F.INT8_SLOT), tl.constexpr(F.SLOT_BITS)


def slot_kinds(*pools: Pool) -> int:
    """CACHED of the tables of these pools."""
    return BOTH_SLOTS.value if any(pool.int8_slots for pool in pools) else FP32_SLOTS.value if pools else 0


@triton.jit
def is_int8_slot(word_T):
    """Whether first meta words point to int8 slots."""
    return (word_T < 0) & (word_T >= _INT8_SLOT)


@triton.jit
def int8_pointers(number_T):
    """Pointers to int8 slots."""
    return number_T.to(tl.int32) | _INT8_SLOT


@triton.jit
def fp32_offset(word_T, DIM: tl.constexpr):
    """Offset of the values of a row in an fp32 slot."""
    return (word_T & 0x7FFFFFFF).to(tl.int64) * DIM


@triton.jit
def _int8_offset(word_T, DIM: tl.constexpr):
    """Offset of the scale of a row in an int8 slot; its codes begin one word later."""
    return (word_T & SLOT_BITS).to(tl.int64) * (1 + (DIM + 3) // 4)


@triton.jit
def _int8_codes(int8_slots, word_T, DIM: tl.constexpr):
    """Pointers to the codes of rows in int8 slots."""
    return int8_slots.to(tl.pointer_type(tl.int8)) + 4 * (_int8_offset(word_T, DIM) + 1)


@triton.jit
def load_fp32_slots(
    values, word_T, mask_T, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, FLAT: tl.constexpr = False
):
    """A tile of rows of fp32 slots; zeros where masked."""
    column, _, _, inside_D = R.columns(DIM, BLOCK, BLOCK_H, FLAT)
    column, inside = R.over_columns(column), R.over_columns(inside_D)
    return tl.load(
        values + R.over_rows(fp32_offset(word_T, DIM), column) + column, mask=R.over_rows(mask_T, column) & inside, other=0.0
    )


@triton.jit
def load_int8_codes(
    int8_slots, word_T, mask_T, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, FLAT: tl.constexpr = False
):
    """Codes of a tile of rows of int8 slots as fp32; zeros where masked."""
    column, _, _, inside_D = R.columns(DIM, BLOCK, BLOCK_H, FLAT)
    column, inside = R.over_columns(column), R.over_columns(inside_D)
    at = R.over_rows(_int8_codes(int8_slots, word_T, DIM), column) + column
    return tl.load(at, mask=R.over_rows(mask_T, column) & inside, other=0).to(tl.float32)


@triton.jit
def _load_planes(begin_T, mask_T, DIM: tl.constexpr, BLOCK_H: tl.constexpr, PLANES: tl.constexpr):
    """Values from pointers on, in the order of `load_planes`: neighbouring columns are loaded together."""
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
def load_fp32_tile(values, word_T, mask_T, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    """A tile of rows of fp32 slots: flat, or as `load_planes` if columns share bytes. Zeros where masked."""
    if BLOCK == BLOCK_H:
        return load_fp32_slots(values, word_T, mask_T, DIM, BLOCK, BLOCK_H, True)
    else:
        return _load_planes(values + fp32_offset(word_T, DIM), mask_T, DIM, BLOCK_H, BLOCK // BLOCK_H)


@triton.jit
def load_int8_tile(int8_slots, word_T, mask_T, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    """Codes of rows of int8 slots as fp32, in the shape of `load_fp32_tile`."""
    if BLOCK == BLOCK_H:
        return load_int8_codes(int8_slots, word_T, mask_T, DIM, BLOCK, BLOCK_H, True)
    else:
        return _load_planes(_int8_codes(int8_slots, word_T, DIM), mask_T, DIM, BLOCK_H, BLOCK // BLOCK_H).to(tl.float32)


@triton.jit
def int8_scales(int8_slots, word_T, mask_T, DIM: tl.constexpr):
    return tl.load(int8_slots + _int8_offset(word_T, DIM), mask=mask_T, other=0).to(tl.float32, bitcast=True)


@triton.jit
def load_int8_slots(
    int8_slots, word_T, mask_T, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, FLAT: tl.constexpr = False
):
    """A tile of rows of int8 slots; zeros where masked."""
    value = load_int8_codes(int8_slots, word_T, mask_T, DIM, BLOCK, BLOCK_H, FLAT)
    return value * R.over_rows(int8_scales(int8_slots, word_T, mask_T, DIM), value)


@triton.jit
def load_slots(
    values, int8_slots, word_T, mask_T,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, CACHED: tl.constexpr, FLAT: tl.constexpr = False,
):  # fmt: skip
    """A tile of rows of fp32 or int8 slots."""
    if CACHED == BOTH_SLOTS:
        int8_T = is_int8_slot(word_T)
        value = load_int8_slots(int8_slots, word_T, mask_T & int8_T, DIM, BLOCK, BLOCK_H, FLAT)
        fp32 = load_fp32_slots(values, word_T, mask_T & (int8_T == 0), DIM, BLOCK, BLOCK_H, FLAT)
        return tl.where(R.over_rows(int8_T, value), value, fp32)
    else:
        return load_fp32_slots(values, word_T, mask_T, DIM, BLOCK, BLOCK_H, FLAT)


@triton.jit
def store_fp32_slots(values, word_T, mask_T, value, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):
    """Store a wide tile of rows in fp32 slots."""
    column, _, _, inside_D = R.columns(DIM, BLOCK, BLOCK_H)
    column, inside = R.over_columns(column), R.over_columns(inside_D)
    tl.store(values + R.over_rows(fp32_offset(word_T, DIM), value) + column, value, mask=R.over_rows(mask_T, value) & inside)


@triton.jit
def store_int8_slots(
    int8_slots, word_T, mask_T, value, size_T, row_T, clock,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Round a wide tile of rows into int8 slots. `size_T`: largest magnitudes; row numbers `row_T` seed the random bits."""
    column_D, _, _, inside_D = R.columns(DIM, BLOCK, BLOCK_H)
    column, inside = R.over_columns(column_D), R.over_columns(inside_D)
    bits = tl.zeros(value.shape, tl.uint32)
    if STOCHASTIC:
        bits = R.random_bits(clock, row_T, column_D)
    scale_T = R.symmetric_scale(size_T, 127.0)
    code = R.int8_codes(value * R.over_rows(R.reciprocal(scale_T), value), bits, STOCHASTIC).to(tl.int8, bitcast=True)
    at = R.over_rows(_int8_codes(int8_slots, word_T, DIM), column) + column
    tl.store(at, code, mask=R.over_rows(mask_T, value) & inside)
    tl.store(int8_slots + _int8_offset(word_T, DIM), scale_T.to(tl.int32, bitcast=True), mask=mask_T)


@triton.jit
def store_slots(
    values, int8_slots, word_T, mask_T, value, size_T, row_T, clock,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, CACHED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store a wide tile of rows in fp32 or int8 slots."""
    fp32_T = mask_T
    if CACHED == BOTH_SLOTS:
        int8_T = mask_T & is_int8_slot(word_T)
        fp32_T = mask_T & (int8_T == 0)
        store_int8_slots(int8_slots, word_T, int8_T, value, size_T, row_T, clock, DIM, BLOCK, BLOCK_H, STOCHASTIC)
    store_fp32_slots(values, word_T, fp32_T, value, DIM, BLOCK, BLOCK_H)
