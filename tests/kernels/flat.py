"""Kernel entry points with flat arguments: `flat.gather_pool(cpu, codes, meta, ...)` calls `cpu.gather_pool`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thermocline.kernels import Layout, LookupCall, OptimizerArrays, RowArrays


def gather_pool(
    module: Any, codes: Tensor, meta: Tensor, layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None, mode: int,
    dtype: torch.dtype = torch.float32, checked: bool = True, cache: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = LookupCall(ids, offsets, weights, mode, dtype, checked)
    return module.gather_pool(RowArrays(codes, meta, layout, cache), call)  # type: ignore[no-any-return]


def weight_gradient(
    module: Any, codes: Tensor, meta: Tensor, layout: Layout, ids: Tensor, offsets: Tensor, grad: Tensor, cache: Any = None
) -> Tensor:
    return module.weight_gradient(RowArrays(codes, meta, layout, cache), LookupCall(ids, offsets, None, 0), grad)  # type: ignore[no-any-return]


def sum_row_gradients(
    module: Any, layout: Layout, ids: Tensor, offsets: Tensor, weights: Tensor | None, mode: int, winners: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    return module.sum_row_gradients(layout, LookupCall(ids, offsets, weights, mode), winners, grad)  # type: ignore[no-any-return]


def update_rows(
    module: Any, codes: Tensor, meta: Tensor, states: Sequence[Tensor], layout: Layout, rows_U: Tensor, grads_UW: Tensor,
    hyper: Tensor, clock: Tensor, optimizer: int, stochastic: bool, cache: Any = None, seen: Tensor | None = None,
    names: Tensor | None = None,
) -> None:  # fmt: skip
    state = OptimizerArrays(states, hyper, clock, optimizer, stochastic)
    module.update_rows(RowArrays(codes, meta, layout, cache), state, rows_U, grads_UW, seen, names)


def update_bags(
    module: Any, codes: Tensor, meta: Tensor, states: Sequence[Tensor], layout: Layout, ids: Tensor, offsets: Tensor,
    weights: Tensor | None, mode: int, winners: Tensor, grad: Tensor, hyper: Tensor, clock: Tensor, optimizer: int,
    stochastic: bool, cache: Any = None,
) -> None:  # fmt: skip
    state = OptimizerArrays(states, hyper, clock, optimizer, stochastic)
    module.update_bags(RowArrays(codes, meta, layout, cache), state, LookupCall(ids, offsets, weights, mode), winners, grad)
