"""Look up, dequantize and pool rows (see `reference.py` for the definition)."""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.checks import check_gradient, check_lookup, check_output
from thermocline.kernels.dispatch import serving
from thermocline.kernels.layout import Cache, Layout


def gather_pool(
    codes: Tensor,
    meta: Tensor,
    layout: Layout,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    mode: int,
    dtype: torch.dtype = torch.float32,
    checked: bool = True,
    cache: Cache | None = None,
) -> tuple[Tensor, Tensor]:
    """Look up `ids_N` and pool them; returns the output and, for max, the winners."""
    check_lookup(layout, ids_N, offsets, weights_N, mode)
    check_output(dtype)
    out, winners = serving("gather", meta).gather_pool(
        codes, meta, layout, ids_N, offsets, weights_N, mode, dtype, checked, cache
    )
    return out, winners


def weight_gradient(
    codes: Tensor,
    meta: Tensor,
    layout: Layout,
    ids_N: Tensor,
    offsets: Tensor,
    grad_out: Tensor,
    cache: Cache | None = None,
) -> Tensor:
    """Gradient of the per-sample weights of a sum-pooled lookup."""
    check_lookup(layout, ids_N, offsets, None, F.SUM)
    check_gradient(layout, ids_N, offsets, F.SUM, grad_out)
    result_N: Tensor = serving("gather", meta).weight_gradient(codes, meta, layout, ids_N, offsets, grad_out, cache)
    return result_N
