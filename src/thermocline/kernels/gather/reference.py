"""Look up rows, dequantize them, pool them or leave them: the definition, in plain PyTorch.

Pooled: bag (f, b) is ids[offsets[f * batch + b] : offsets[f * batch + b + 1]]; feature f fills DIM columns from COLUMN on.
Unpooled: `offsets` are those of features; row i of the output holds id i, with zeros after its table's dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.layout import Cache, Fields, output_shape, per_feature, winners_shape
from thermocline.kernels.quantize import reference as quantize
from thermocline.kernels.slots import read_pointed


def read_rows(codes: Tensor, meta: Tensor, field: Fields, rows_N: Tensor, cache: Cache | None = None) -> Tensor:
    """Rows of one table, dequantized, from its codes or from the slots they live in."""
    format, dim, rows = field[F.FORMAT], field[F.DIM], field[F.ROWS]
    width, words = F.row_bytes(format, dim), F.META_WORDS[format]
    codes_RB = codes[field[F.CODES] : field[F.CODES] + rows * width].view(rows, width)
    meta_RW = meta[field[F.META] : field[F.META] + rows * words].view(rows, words)
    values_ND = quantize.dequantize_rows(codes_RB[rows_N], meta_RW[rows_N], format, dim)
    if cache is None or words == 0:
        return values_ND
    cached_N = meta_RW[rows_N, 0] < 0
    values_ND[cached_N] = read_pointed(cache, meta_RW[rows_N, 0][cached_N], dim)
    return values_ND


def bag_of_each(offsets: Tensor, count: int) -> Tensor:
    """The bag that each of `count` ids belongs to."""
    bag_N = torch.zeros(count + 1, dtype=torch.int64, device=offsets.device)
    bag_N.index_add_(0, offsets[1:].long(), torch.ones_like(offsets[1:], dtype=torch.int64))
    return bag_N.cumsum(0)[:count]


def gather_pool(rows: RowArrays, call: LookupCall) -> tuple[Tensor, Tensor]:
    """(pooled output, for max pooling the winners, else an empty tensor)."""
    codes, meta, layout, cache = rows
    ids_N, offsets, weights_N, mode, dtype, _ = call
    offsets, batch = offsets.long(), per_feature(layout, offsets)
    shaped = (layout.tables, ids_N, offsets, mode)
    out = torch.zeros(output_shape(*shaped), dtype=torch.float32, device=codes.device)
    winners = torch.full(winners_shape(*shaped), -1, dtype=torch.int32, device=codes.device)
    for f, field in enumerate(layout.tables.features):
        bags = offsets[f * batch : (f + 1) * batch + 1]
        first, last, column, dim = int(bags[0]), int(bags[-1]), field[F.COLUMN], field[F.DIM]
        values_ND = read_rows(codes, meta, field, ids_N[first:last].long(), cache)
        if mode == F.NONE:
            out[first:last, :dim] = values_ND
            continue
        bags = bags - first
        bag_N = bag_of_each(bags, last - first)
        here = slice(column, column + dim)
        if mode == F.MAX:
            out[:, here], winners[:, here] = _largest(values_ND, bags)
            continue
        if weights_N is not None:
            values_ND = values_ND * weights_N[first:last, None].float()
        pooled = torch.zeros(batch, dim, dtype=torch.float32, device=codes.device).index_add_(0, bag_N, values_ND)
        out[:, here] = pooled * bag_scale(bags, mode)[:, None]
    return out.to(dtype), winners


def bag_scale(bags: Tensor, mode: int) -> Tensor:
    """What a bag's sum is multiplied with: 1, or one over its length for mean."""
    length = bags.diff().float()
    return 1.0 / length.clamp(min=1) if mode == F.MEAN else torch.ones_like(length)


def _largest(values_ND: Tensor, bags: Tensor) -> tuple[Tensor, Tensor]:
    batch, dim = bags.numel() - 1, values_ND.shape[1]
    best = torch.zeros(batch, dim, dtype=torch.float32, device=values_ND.device)
    winner = torch.full((batch, dim), -1, dtype=torch.int32, device=values_ND.device)
    for b in range(batch):
        first, last = int(bags[b]), int(bags[b + 1])
        if last > first:
            best[b] = values_ND[first:last].amax(dim=0)
            winner[b] = (values_ND[first:last] == best[b]).int().argmax(dim=0).int()
    return best, winner


def weight_gradient(rows: RowArrays, call: LookupCall, grad_out: Tensor) -> Tensor:
    """Gradient of per-sample weights (sum pooling): each id's row times the gradient of its bag."""
    (codes, meta, layout, cache), (ids_N, offsets) = rows, call[:2]
    offsets, batch = offsets.long(), per_feature(layout, offsets)
    result_N = torch.zeros(ids_N.numel(), dtype=torch.float32, device=codes.device)
    for f, field in enumerate(layout.tables.features):
        bags = offsets[f * batch : (f + 1) * batch + 1]
        first, last, column, dim = int(bags[0]), int(bags[-1]), field[F.COLUMN], field[F.DIM]
        values_ND = read_rows(codes, meta, field, ids_N[first:last].long(), cache)
        bag_N = bag_of_each(bags - first, last - first)
        result_N[first:last] = (values_ND * grad_out[bag_N, column : column + dim].float()).sum(dim=1)
    return result_N
