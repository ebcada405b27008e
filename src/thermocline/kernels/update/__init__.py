"""Update rows in place from their gradients (see `reference.py` for the definition)."""

from __future__ import annotations

from torch import Tensor

from thermocline.kernels.arguments import LookupCall, OptimizerArrays, RowArrays
from thermocline.kernels.checks import check_gradient, check_lookup, check_rows
from thermocline.kernels.dispatch import implementation_for

from .reference import STATES

__all__ = ["STATES", "update_bags", "update_rows"]


def update_rows(
    rows: RowArrays,
    optimizer: OptimizerArrays,
    rows_U: Tensor,
    grads_UW: Tensor,
    seen_N: Tensor | None = None,
    names_U: Tensor | None = None,
) -> None:
    """One optimizer step on distinct arena rows, in place.

    Args:
        seen_N: the arena row of every lookup, ascending, for the cache; by default one lookup for each of `rows_U`.
        names_U: numbers of the rows for rounding bits and errors; by default their arena rows.
    """
    check_rows(rows.layout, rows_U, grads_UW, names_U)
    implementation_for("update", rows.meta).update_rows(rows, optimizer, rows_U, grads_UW, seen_N, names_U)


def update_bags(rows: RowArrays, optimizer: OptimizerArrays, call: LookupCall, winners: Tensor, grad_out: Tensor) -> None:
    """One optimizer step on every row that a lookup read, in place."""
    check_lookup(rows.layout, call)
    check_gradient(rows.layout, call, grad_out)
    implementation_for("update", rows.meta).update_bags(rows, optimizer, call, winners, grad_out)
