"""Load, decode and add rows of a served lookup on a GPU, by their distances.

A code in the low mantissa bits of a float with exponent 2^23 is 8388608 + code: no conversion instruction (104 us, not 113).
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.kernels.gather.gpu import row_codes
from thermocline.kernels.gpu.floats import decode_fp8
from thermocline.kernels.gpu.row_tiles import FP8, INT8, load_codes, over_rows

EXPONENT = (127 + 23) << 23  # of floats whose last bit is 1
NO_ROW = tl.constexpr(-(1 << 63))  # distance of a missing row


@triton.jit
def _load_words(row_S, mask_S, MASKED: tl.constexpr, DIM: tl.constexpr, PLANES: tl.constexpr, BLOCK_H: tl.constexpr):
    """Words of a tile of rows [rows, BLOCK_H / 4], from pointers to their first bytes; without MASKED no row is missing."""
    WORDS: tl.constexpr = (DIM + PLANES - 1) // PLANES // 4
    w = tl.arange(0, BLOCK_H // 4)
    at = row_S.to(tl.pointer_type(tl.uint32))[:, None] + w[None, :]
    if MASKED:
        return tl.load(at, mask=mask_S[:, None] & (w < WORDS)[None, :], other=0)
    elif 4 * WORDS < BLOCK_H:
        return tl.load(at, mask=(w < WORDS)[None, :], other=0)
    else:
        return tl.load(at)


@triton.jit
def _codes(word, exponent, BYTE: tl.constexpr, PLANE: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr):
    """Codes of a plane in one byte of every word, as fp32."""
    BITS: tl.constexpr = 8 // PLANES
    AT: tl.constexpr = 8 * (BYTE % 2) + BITS * PLANE
    half = word
    if BYTE >= 2:
        half = word >> ((exponent >> 26) - 2).to(tl.uint32)  # 16, unknown to the compiler as well
    if FORMAT == FP8:
        return decode_fp8((half >> AT) & 0xFF)
    else:
        SIGN: tl.constexpr = 128 if FORMAT == INT8 else 0
        over = (exponent - ((AT << 23) - (SIGN << AT))).to(tl.uint32)
        bits = (half & (((1 << BITS) - 1) << AT)) ^ over
        return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - AT) + SIGN)


@triton.jit
def _plane(word, exponent, PLANE: tl.constexpr, FORMAT: tl.constexpr, PLANES: tl.constexpr):
    """Codes of a plane [rows, 4 * words]."""
    even = tl.join(_codes(word, exponent, 0, PLANE, FORMAT, PLANES), _codes(word, exponent, 2, PLANE, FORMAT, PLANES))
    odd = tl.join(_codes(word, exponent, 1, PLANE, FORMAT, PLANES), _codes(word, exponent, 3, PLANE, FORMAT, PLANES))
    return tl.reshape(tl.join(even, odd), (word.shape[0], 4 * word.shape[1]))  # [.., i, j] is byte 2 * i + j


@triton.jit
def _decoded(word, exponent, FORMAT: tl.constexpr, PLANES: tl.constexpr):
    """Codes as fp32, in the shapes of `load_codes` and `load_planes`."""
    if PLANES == 1:
        return _plane(word, exponent, 0, FORMAT, 1)
    elif PLANES == 2:
        return tl.join(_plane(word, exponent, 0, FORMAT, 2), _plane(word, exponent, 1, FORMAT, 2))
    else:
        even = tl.join(_plane(word, exponent, 0, FORMAT, 4), _plane(word, exponent, 2, FORMAT, 4))
        odd = tl.join(_plane(word, exponent, 1, FORMAT, 4), _plane(word, exponent, 3, FORMAT, 4))
        return tl.reshape(tl.join(even, odd), (word.shape[0], 4 * word.shape[1], 4))  # [.., i, j] is plane 2 * i + j


@triton.jit
def add_coded(
    acc, codes, distance_L, scale_L, begin, exponent,
    COUNT: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """Add COUNT rows of codes, from lane `begin` on. All loads are issued before the first row is decoded."""
    G: tl.constexpr = acc.shape[0]
    WHOLE: tl.constexpr = ROW_ALIGN >= 4  # rows are whole words
    lane = begin + tl.arange(0, G)
    words = ()
    for part in tl.static_range(COUNT // G):
        distance = tl.gather(distance_L, lane + part * G, 0)
        row = codes + tl.multiple_of(distance, ROW_ALIGN)
        if WHOLE:
            word = _load_words(row, distance != NO_ROW, MASKED, DIM, BLOCK // BLOCK_H, BLOCK_H)
        else:
            word = row_codes(row[:, None], lane * 0, distance != NO_ROW, DIM, FORMAT, BLOCK, BLOCK_H)
        words += (word,)  # type: ignore[assignment]
    for part in tl.static_range(COUNT // G):
        value = words[part]  # type: ignore[var-annotated]
        if WHOLE:
            value = _decoded(value, exponent, FORMAT, BLOCK // BLOCK_H)
        acc += value * over_rows(tl.gather(scale_L, lane + part * G, 0), value)
    return acc


@triton.jit
def add_plain(
    acc, codes, distance_L, weight_L,
    STRIDE: tl.constexpr, COUNT: tl.constexpr, WEIGHTED: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """Add COUNT rows of floats."""
    ROWS: tl.constexpr = acc.shape[0] * STRIDE
    for part in tl.static_range(COUNT // STRIDE):
        lane = part * STRIDE + tl.arange(0, ROWS)
        distance = tl.gather(distance_L, lane, 0)
        row = codes + tl.multiple_of(distance, ROW_ALIGN)
        value = load_codes(row[:, None], lane * 0, distance != NO_ROW, DIM, FORMAT, BLOCK, BLOCK, True)
        if WEIGHTED:
            value = value * tl.gather(weight_L, lane, 0)[:, None]
        if STRIDE > 1:
            acc += tl.sum(value, 0)[None]
        else:
            acc += value
    return acc
