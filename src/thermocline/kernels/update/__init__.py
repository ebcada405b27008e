"""Update rows in place from their gradients (see `reference.py` for the definition).

`update_rows` takes distinct rows with their summed gradients. `update_bags` takes the lookup itself and the gradient of its
output, and does what `sum_row_gradients` followed by `update_rows` would, without writing the sums to memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thermocline.kernels.checks import check_gradient, check_lookup, check_rows
from thermocline.kernels.dispatch import serving
from thermocline.kernels.layout import Cache, Layout

from .reference import STATES

__all__ = ["STATES", "update_bags", "update_rows"]


def update_rows(
    codes: Tensor,
    meta: Tensor,
    states: Sequence[Tensor],
    layout: Layout,
    rows_U: Tensor,
    grads_UW: Tensor,
    hyper: Tensor,
    clock: Tensor,
    optimizer: int,
    stochastic: bool,
    cache: Cache | None = None,
    seen_N: Tensor | None = None,
    names_U: Tensor | None = None,
) -> None:
    """One optimizer step on distinct arena rows, in place. `seen_N`: the row of every lookup, ascending, for the cache.

    `names_U`: numbers that rows go by elsewhere, for their rounding bits and in errors; without, they go by their arena rows.
    """
    check_rows(layout, rows_U, grads_UW, names_U)
    serving("update", meta).update_rows(
        codes, meta, states, layout, rows_U, grads_UW, hyper, clock, optimizer, stochastic, cache, seen_N, names_U
    )


def update_bags(
    codes: Tensor,
    meta: Tensor,
    states: Sequence[Tensor],
    layout: Layout,
    ids_N: Tensor,
    offsets: Tensor,
    weights_N: Tensor | None,
    mode: int,
    winners: Tensor,
    grad_out: Tensor,
    hyper: Tensor,
    clock: Tensor,
    optimizer: int,
    stochastic: bool,
    cache: Cache | None = None,
) -> None:
    """One optimizer step on every row that a lookup read, in place."""
    check_lookup(layout, ids_N, offsets, weights_N, mode)
    check_gradient(layout, ids_N, offsets, mode, grad_out)
    serving("update", meta).update_bags(
        codes, meta, states, layout, ids_N, offsets, weights_N, mode, winners, grad_out, hyper, clock, optimizer, stochastic,
        cache,
    )  # fmt: skip
