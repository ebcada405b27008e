"""Sum the gradients of repeated rows (see `reference.py` for the definition)."""

from __future__ import annotations

from torch import Tensor

from thermocline.kernels.checks import check_gradient, check_lookup
from thermocline.kernels.dispatch import serving
from thermocline.kernels.layout import Layout


def sum_row_gradients(
    layout: Layout,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    mode: int,
    winners: Tensor,
    grad_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """(distinct arena rows in ascending order, their summed fp32 gradients)."""
    check_lookup(layout, ids_N, offsets, weights_N, mode)
    check_gradient(layout, ids_N, offsets, mode, grad_out)
    rows_U, grads_UW = serving("sum_gradients", grad_out).sum_row_gradients(
        layout, ids_N, offsets, weights_N, mode, winners, grad_out
    )
    return rows_U, grads_UW
