"""A lookup whose backward changes nothing: it leaves distinct rows and their summed gradients with the module's anchor.

Python runs in that backward, which a compiled graph would not call. So this lookup stays out of torch.compile: around it the
model is compiled in pieces (not with fullgraph=True).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.kernels.ops import FROZEN, sum_row_gradients, weight_gradient
from thermocline.kernels.ops import lookup as read
from thermocline.rows.arena import Arena

from .placeholder import Anchor


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tie: Tensor, weights: Tensor | None, anchor: Anchor, arena: Arena, *call: Any) -> Tensor:
        ids, offsets, pooling, dtype = call
        fields, none = arena.layout.fields_F8, arena.no_anchor
        out, winners = read(
            arena.codes, arena.meta, arena.cache, fields, ids, offsets, weights, none, [], none, fields, arena.spec, pooling,
            dtype, FROZEN, False, True,
        )  # fmt: skip
        ctx.anchor, ctx.arena, ctx.pooling = anchor, arena, pooling
        ctx.save_for_backward(ids, offsets, weights, winners)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ids, offsets, weights, winners = ctx.saved_tensors
        arena, grad = ctx.arena, grad.contiguous()
        fields, weights_grad = arena.layout.fields_F8, None
        if ctx.needs_input_grad[1]:
            table = (arena.codes, arena.meta, arena.cache, fields)
            weights_grad = weight_gradient(*table, ids, offsets, grad, arena.spec).to(weights.dtype)
        sums = sum_row_gradients(fields, ids, offsets, weights, winners, grad, arena.spec, ctx.pooling)
        ctx.anchor.let_wait(*sums, _rows_seen(arena, ids, offsets) if arena.cache else ids[:0])
        return (None, weights_grad, *[None] * 6)


def _rows_seen(arena: Arena, ids: Tensor, offsets: Tensor) -> Tensor:
    """The arena row of every lookup."""
    features = arena.layout.fields_F8.shape[0]
    ends = offsets[:: max(1, (offsets.numel() - 1) // features)][1:].contiguous()  # or searchsorted copies, and warns
    feature_N = torch.searchsorted(ends, torch.arange(ids.numel(), device=ids.device), right=True)
    return arena.layout.fields_F8[feature_N, F.ROW] + ids


@torch.compiler.disable  # type: ignore[untyped-decorator]
def waiting_lookup(
    arena: Arena, ids: Tensor, offsets: Tensor, weights: Tensor | None, mode: str, tie: Tensor, anchor: Anchor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """As `rows.lookup`, with gradients that wait. `tie`, a leaf that requires grad, ties the lookup into the graph."""
    out: Tensor = _Waits.apply(tie, weights, anchor, arena, ids, offsets, F.MODES.index(mode), dtype)  # type: ignore[no-untyped-call]
    return out
