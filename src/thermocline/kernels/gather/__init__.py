"""Look up, dequantize and pool rows (see `reference.py` for the definition)."""

from __future__ import annotations

from torch import Tensor

from thermocline.kernels.arguments import LookupCall, RowArrays
from thermocline.kernels.checks import check_gradient, check_lookup
from thermocline.kernels.dispatch import implementation_for


def gather_pool(rows: RowArrays, call: LookupCall) -> tuple[Tensor, Tensor]:
    """(pooled output, for max pooling the winners, else an empty tensor)."""
    check_lookup(rows.layout, call)
    out, winners = implementation_for("gather", rows.meta).gather_pool(rows, call)
    return out, winners


def weight_gradient(rows: RowArrays, call: LookupCall, grad_out: Tensor) -> Tensor:
    """Gradient of the per-sample weights of a sum-pooled lookup."""
    check_lookup(rows.layout, call)
    check_gradient(rows.layout, call, grad_out)
    result_N: Tensor = implementation_for("gather", rows.meta).weight_gradient(rows, call, grad_out)
    return result_N
