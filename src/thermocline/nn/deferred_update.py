"""A lookup whose backward leaves the rows alone: distinct rows and their summed gradients wait for `fused_optimizer.step()`.

Its backward runs Python, which a compiled graph would not call. Under torch.compile this lookup is a graph break; models that
use it compile without fullgraph=True.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thermocline.kernels import sum_row_gradients, weight_gradient
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.checks import check_lookup
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.stage.reference import arena_rows
from thermocline.rows.arena import Arena

from .placeholder import Anchor


class _WithDeferredBackward(torch.autograd.Function):
    """Attaches the backward to the output of a lookup, which is computed before."""

    @staticmethod
    def forward(ctx: Any, tie: Tensor, weights_N: Tensor | None, done: tuple[Any, ...]) -> Tensor:
        ctx.arena, ctx.anchor, call, out, winners = done
        ctx.mode = call.mode
        ctx.save_for_backward(call.ids_N, call.offsets, weights_N, winners)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ids_N, offsets, weights_N, winners = ctx.saved_tensors
        arena, grad, weights_grad = ctx.arena, grad.contiguous(), None
        call = LookupCall(ids_N, offsets, weights_N, ctx.mode)
        if ctx.needs_input_grad[1]:
            weights_grad = weight_gradient(arena.arrays, call, grad).to(weights_N.dtype)
        sums = sum_row_gradients(arena.layout, call, winners, grad)
        ctx.anchor.let_wait(*sums, arena_rows(arena.layout, ids_N, offsets) if arena.cache else ids_N[:0])
        return None, weights_grad, None


def deferred_lookup(arena: Arena, call: LookupCall, tie: Tensor, anchor: Anchor) -> Tensor:
    """A lookup whose gradients wait with `anchor`. `tie`, a leaf that requires grad, ties the lookup into the graph."""
    weights_N = call.weights_N
    if weights_N is not None:
        call = call._replace(weights_N=weights_N.detach())
    rows = arena.arrays
    check_lookup(rows.layout, call)
    out, winners = implementation_for("gather", rows.meta).gather_pool(rows, call)
    return _WithDeferredBackward.apply(tie, weights_N, (arena, anchor, call, out, winners))  # type: ignore[no-any-return, no-untyped-call]


deferred_lookup_uncompiled = torch.compiler.disable(deferred_lookup)
