"""Sum the gradients of repeated rows: the fp32 sum over a row's lookups, in the order of the ids."""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.gather.reference import bag_of_each, bag_scale
from thermocline.kernels.layout import Layout, per_feature


def sum_row_gradients(layout: Layout, call: LookupCall, winners: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """(distinct arena rows in ascending order, their summed gradients [rows, max_dim], zeros after a row's dimension)."""
    ids_N, weights_N, mode = call.ids_N, call.weights_N, call.mode
    offsets, batch = call.offsets.long(), per_feature(layout, call.offsets)
    max_dim = layout.tables.max_dim
    grads_NW = torch.zeros(ids_N.numel(), max_dim, dtype=torch.float32, device=grad_out.device)
    rows_N = torch.zeros(ids_N.numel(), dtype=torch.int64, device=grad_out.device)
    for f, field in enumerate(layout.tables.features):
        bags = offsets[f * batch : (f + 1) * batch + 1]
        first, last, column, dim = int(bags[0]), int(bags[-1]), field[F.COLUMN], field[F.DIM]
        rows_N[first:last] = field[F.ROW] + ids_N[first:last].long()
        if mode == F.NONE:
            grads_NW[first:last, :dim] = grad_out[first:last, :dim].float()
            continue
        bag_N = bag_of_each(bags - first, last - first)
        grad_ND = grad_out[bag_N, column : column + dim].float()
        if mode == F.MAX:
            place_N = torch.arange(first, last, device=grad_out.device) - bags[bag_N]
            grad_ND = torch.where(winners[bag_N, column : column + dim] == place_N[:, None], grad_ND, 0.0)
        elif mode == F.MEAN:
            grad_ND = grad_ND * bag_scale(bags, mode)[bag_N, None]
        elif weights_N is not None:
            grad_ND = grad_ND * weights_N[first:last, None].float()
        grads_NW[first:last, :dim] = grad_ND
    rows_U, inverse_N = torch.unique(rows_N, return_inverse=True)
    grads_UW = torch.zeros(rows_U.numel(), max_dim, dtype=torch.float32, device=grad_out.device)
    return rows_U, grads_UW.index_add_(0, inverse_N, grads_NW)
