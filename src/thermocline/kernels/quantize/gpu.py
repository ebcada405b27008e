"""Quantize and dequantize rows on a GPU: a program converts a tile of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.gpu.launch import ceil_div, launch
from thermocline.kernels.gpu.row_tiles import columns, extent, load_rows, over_columns, over_rows, store_rows, tile_shape


@triton.jit
def _quantize(
    values, codes, meta, rows, clock, count,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    STOCHASTIC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask_T = at_T < count
    column, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    column = over_columns(column)
    mask = over_rows(mask_T, column) & over_columns(inside_D)
    value = tl.load(values + over_rows(at_T, column) * DIM + column, mask=mask, other=0.0)
    row_T = at_T
    if STOCHASTIC:
        row_T = tl.load(rows + at_T, mask=mask_T, other=0).to(tl.int64)
    low_T, high_T, _ = extent(value, inside_D, FORMAT)
    store_rows(codes, meta, at_T, mask_T, value, low_T, high_T, row_T, clock, DIM, FORMAT, BLOCK, BLOCK_H, STOCHASTIC)


@triton.jit
def _dequantize(
    codes, meta, values, count,
    DIM: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask_T = at_T < count
    column, _, _, inside_D = columns(DIM, BLOCK, BLOCK_H)
    column = over_columns(column)
    mask = over_rows(mask_T, column) & over_columns(inside_D)
    value = load_rows(codes, meta, at_T, mask_T, DIM, FORMAT, BLOCK, BLOCK_H)
    tl.store(values + over_rows(at_T, column) * DIM + column, value, mask=mask)


def _tile(block: int) -> int:
    return max(1, min(16, 2048 // block))


def quantize_rows(values_ND: Tensor, format: int, clock: Tensor | None, rows_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp32 rows -> (codes as bytes, meta words). Stochastic if a clock is given, seeded by the row numbers `rows_N`."""
    count, dim = values_ND.shape
    values_ND = values_ND.contiguous()
    codes_NB = torch.empty((count, F.row_bytes(format, dim)), dtype=torch.uint8, device=values_ND.device)
    meta_NW = torch.empty((count, F.META_WORDS[format]), dtype=torch.int32, device=values_ND.device)
    if count:
        block, block_h = tile_shape(format, dim)
        tile = _tile(block)
        named, ticks = (codes_NB, codes_NB) if clock is None or rows_N is None else (rows_N, clock)
        launch(
            _quantize, ceil_div(count, tile), (values_ND, codes_NB, meta_NW, named, ticks), (count,),
            (dim, format, block, block_h, clock is not None, tile), exact=True,
        )  # fmt: skip
    return codes_NB, meta_NW


def dequantize_rows(codes_NB: Tensor, meta_NW: Tensor, format: int, dim: int) -> Tensor:
    """(codes as bytes, meta words) -> fp32 rows."""
    count = codes_NB.shape[0]
    values_ND = torch.empty((count, dim), dtype=torch.float32, device=codes_NB.device)
    if count:
        block, block_h = tile_shape(format, dim)
        tile = _tile(block)
        launch(
            _dequantize, ceil_div(count, tile), (codes_NB.contiguous(), meta_NW.contiguous(), values_ND), (count,),
            (dim, format, block, block_h, tile), exact=True,
        )  # fmt: skip
    return values_ND
