"""Sum the gradients of repeated rows (see `reference.py` for the definition)."""

from __future__ import annotations

from torch import Tensor

from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.checks import check_gradient, check_lookup
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.layout import Layout


def sum_row_gradients(layout: Layout, call: LookupCall, winners: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """(distinct arena rows in ascending order, their summed fp32 gradients)."""
    check_lookup(layout, call)
    check_gradient(layout, call, grad_out)
    rows_U, grads_UW = implementation_for("sum_gradients", grad_out).sum_row_gradients(layout, call, winners, grad_out)
    return rows_U, grads_UW
