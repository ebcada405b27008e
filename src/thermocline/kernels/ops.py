"""The kernels as PyTorch operators: what autograd, torch.compile and export see.

`lookup` is functional. Its gradient does not flow into the table as a tensor: backward calls `update_bags`, which changes the
rows in place (and returns the gradient of per-sample weights, read from the rows before they change). Rows are buffers, not
parameters; `anchor`, a one-element tensor that requires grad, is what ties the lookup into the graph.

The table's buffers are kept on `ctx` as attributes, not with `save_for_backward`: a table that is looked up twice before
backward is updated twice, and autograd's version check would forbid the second. The second update starts from the rows the
first one left, as two optimizer steps would.

    op                  mutates                                autograd
    lookup              -                                      backward calls update_bags
    weight_gradient     -                                      -
    sum_row_gradients   -                                      -
    update_bags         codes, meta, cache, states, hyper...   -
    update_rows         codes, meta, cache, states, hyper...   -
    map_ids             -                                      -
    quantize_rows       -                                      -
    dequantize_rows     -                                      -
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thermocline import formats as F

from .gather import gather_pool
from .gather import weight_gradient as _weight_gradient
from .ids import map_ids as _map_ids
from .ids.fields import VERSION
from .layout import Cache, Layout, output_shape, parse, winners_shape
from .quantize import dequantize_rows as _dequantize_rows
from .quantize import quantize_rows as _quantize_rows
from .stage import as_staged
from .sum_gradients import sum_row_gradients as _sum_row_gradients
from .update import update_bags as _update_bags
from .update import update_rows as _update_rows

_LIBRARY = torch.library.Library("thermocline", "DEF")
FROZEN = -1  # in place of an optimizer: backward leaves the rows alone

_TABLE = "Tensor codes, Tensor meta, Tensor[] cache, Tensor fields"
_MUTABLE = (
    "Tensor(a!) codes, Tensor(b!) meta, Tensor(f!)[] cache, Tensor fields, Tensor(c!)[] states, Tensor(d!) hyper, "
    "Tensor(e!) clock"
)
_IDS = "Tensor ids, Tensor offsets, Tensor? weights"

_SCHEMAS = {
    "lookup": f"({_TABLE}, {_IDS}, Tensor anchor, Tensor[] states, Tensor hyper, Tensor clock, str spec, int pooling, "
    "ScalarType dtype, int optimizer, bool stochastic, bool checked) -> (Tensor, Tensor)",
    "weight_gradient": f"({_TABLE}, Tensor ids, Tensor offsets, Tensor grad, str spec) -> Tensor",
    "sum_row_gradients": f"(Tensor fields, {_IDS}, Tensor winners, Tensor grad, str spec, int pooling) -> (Tensor, Tensor)",
    "update_bags": f"({_MUTABLE}, {_IDS}, Tensor winners, Tensor grad, str spec, int pooling, int optimizer, "
    "bool stochastic) -> ()",
    "update_rows": f"({_MUTABLE}, Tensor rows, Tensor grads, str spec, int optimizer, bool stochastic, "
    "Tensor? seen=None, Tensor? names=None) -> ()",
    "map_ids": "(Tensor fields, Tensor words, Tensor counts, Tensor ids, Tensor offsets, int version) -> Tensor",
    "quantize_rows": "(Tensor values, int format, Tensor? clock, Tensor? rows) -> (Tensor, Tensor)",
    "dequantize_rows": "(Tensor codes, Tensor meta, int format, int dim) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(_name + _schema)


def _cache(tensors: list[Tensor], codes: Tensor, meta: Tensor) -> Cache | None:
    """The cache as kernels take it: operators know lists of tensors, empty for none, and compiled graphs may have old ones."""
    return as_staged(Cache(*tensors), codes, meta) if tensors else None


def _implement(function: Any) -> Any:
    """Register a Python function as the op of its name on both devices: the kernels dispatch further down."""
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(function.__name__, function, key)
    return function


@_implement
def lookup(
    codes: Tensor, meta: Tensor, cache: list[Tensor], fields: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None,
    anchor: Tensor, states: list[Tensor], hyper: Tensor, clock: Tensor, spec: str, pooling: int,
    dtype: torch.dtype, optimizer: int, stochastic: bool, checked: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return gather_pool(
        codes, meta, Layout.of(fields, spec), ids, offsets, weights, pooling, dtype, checked, _cache(cache, codes, meta)
    )


@_implement
def weight_gradient(
    codes: Tensor, meta: Tensor, cache: list[Tensor], fields: Tensor, ids: Tensor, offsets: Tensor, grad: Tensor, spec: str
) -> Tensor:
    return _weight_gradient(codes, meta, Layout.of(fields, spec), ids, offsets, grad, _cache(cache, codes, meta))


@_implement
def sum_row_gradients(
    fields: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, winners: Tensor, grad: Tensor,
    spec: str, pooling: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _sum_row_gradients(Layout.of(fields, spec), ids, offsets, weights, pooling, winners, grad)


@_implement
def update_bags(
    codes: Tensor, meta: Tensor, cache: list[Tensor], fields: Tensor, states: list[Tensor], hyper: Tensor, clock: Tensor,
    ids: Tensor, offsets: Tensor, weights: Tensor | None, winners: Tensor, grad: Tensor, spec: str,
    pooling: int, optimizer: int, stochastic: bool,
) -> None:  # fmt: skip
    layout = Layout.of(fields, spec)
    _update_bags(
        codes, meta, states, layout, ids, offsets, weights, pooling, winners, grad, hyper, clock, optimizer, stochastic,
        _cache(cache, codes, meta),
    )  # fmt: skip


@_implement
def update_rows(
    codes: Tensor, meta: Tensor, cache: list[Tensor], fields: Tensor, states: list[Tensor], hyper: Tensor, clock: Tensor,
    rows: Tensor, grads: Tensor, spec: str, optimizer: int, stochastic: bool, seen: Tensor | None = None,
    names: Tensor | None = None,
) -> None:  # fmt: skip
    layout = Layout.of(fields, spec)
    _update_rows(
        codes, meta, states, layout, rows, grads, hyper, clock, optimizer, stochastic, _cache(cache, codes, meta), seen, names
    )


@_implement
def map_ids(fields: Tensor, words: Tensor, counts: Tensor, ids: Tensor, offsets: Tensor, version: int) -> Tensor:
    assert version == VERSION
    return _map_ids(fields, words, counts, ids, offsets)


@_implement
def quantize_rows(values: Tensor, format: int, clock: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    codes, meta = _quantize_rows(values, format, clock, rows)
    return (codes.clone() if format == F.FP32 else codes), meta  # an op may not return a view of its input


@_implement
def dequantize_rows(codes: Tensor, meta: Tensor, format: int, dim: int) -> Tensor:
    values = _dequantize_rows(codes, meta, format, dim)
    return values.clone() if format == F.FP32 else values


# -- shapes without data ----------------------------------------------------------------------------------------------------


def _fake(function: Any) -> Any:
    """Register what an op returns, in shapes only. The function's name is `_fake_` and the op's."""
    name = function.__name__.removeprefix("_fake_")
    return torch.library.register_fake(f"thermocline::{name}", function, lib=_LIBRARY)


@_fake
def _fake_lookup(
    codes: Tensor, meta: Tensor, cache: list[Tensor], fields: Tensor, ids: Tensor, offsets: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    spec, pooling, dtype = rest[5:8]
    call = (parse(spec), ids, offsets, pooling)
    return fields.new_empty(output_shape(*call), dtype=dtype), fields.new_empty(winners_shape(*call), dtype=torch.int32)


@_fake
def _fake_weight_gradient(codes: Tensor, meta: Tensor, cache: list[Tensor], fields: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    return fields.new_empty(ids.shape, dtype=torch.float32)


@_fake
def _fake_sum_row_gradients(fields: Tensor, ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    spec = rest[4]
    rows = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty((rows,), dtype=torch.int64), ids.new_empty((rows, parse(spec).max_dim), dtype=torch.float32)


@_fake
def _fake_update_bags(*args: Any) -> None:
    return None


@_fake
def _fake_update_rows(*args: Any) -> None:
    return None


@_fake
def _fake_map_ids(fields: Tensor, words: Tensor, counts: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.int64)


@_fake
def _fake_quantize_rows(values: Tensor, format: int, clock: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    count, dim = values.shape
    codes = values.new_empty((count, F.row_bytes(format, dim)), dtype=torch.uint8)
    return codes, values.new_empty((count, F.META_WORDS[format]), dtype=torch.int32)


@_fake
def _fake_dequantize_rows(codes: Tensor, meta: Tensor, format: int, dim: int) -> Tensor:
    return codes.new_empty((codes.shape[0], dim), dtype=torch.float32)


# -- backward ---------------------------------------------------------------------------------------------------------------


def _plain(tensor: Tensor) -> bool:
    """Whether operators may be skipped: nothing traces, and the tensor is no stand-in. Saves 60 us a call."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


class _Lookup(torch.autograd.Function):
    """`lookup` with its backward. `torch.library.register_autograd` would do, but walks every argument at every call.

    Autograd is shown the two tensors that may require a gradient; all arguments come after them in one, for the same reason.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor | None, anchor: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if _plain(args[0]):
            out, winners = lookup(*args)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                out, winners = torch.ops.thermocline.lookup.default(*args)
        ctx.table = args[:4]
        ids, offsets = args[4:6]
        ctx.state = args[8:11]
        ctx.spec, ctx.pooling, _, ctx.optimizer, ctx.stochastic, _ = args[11:]
        ctx.save_for_backward(ids, offsets, weights, winners)
        ctx.mark_non_differentiable(winners)
        ctx.set_materialize_grads(False)
        return out, winners

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        weights_grad = None
        if grad is not None:
            ids, offsets, weights, winners = ctx.saved_tensors
            grad = grad.contiguous()
            plain = _plain(grad) and _plain(ctx.table[0])
            if ctx.needs_input_grad[0]:
                gradient = weight_gradient if plain else torch.ops.thermocline.weight_gradient.default
                weights_grad = gradient(*ctx.table, ids, offsets, grad, ctx.spec).to(weights.dtype)
            if ctx.optimizer != FROZEN:
                update = update_bags if plain else torch.ops.thermocline.update_bags.default
                update(
                    *ctx.table, *ctx.state, ids, offsets, weights, winners, grad, ctx.spec, ctx.pooling, ctx.optimizer,
                    ctx.stochastic,
                )  # fmt: skip
        return weights_grad, None, None


def lookup_with_backward(*args: Any) -> tuple[Tensor, Tensor]:
    """The op `lookup` as eager code calls it: what the dispatcher would do, without the dispatcher where it can be skipped."""
    weights, anchor = args[6], args[7]
    if torch.is_grad_enabled() and (anchor.requires_grad or (weights is not None and weights.requires_grad)):
        return _Lookup.apply(weights, anchor, args)  # type: ignore[no-any-return, no-untyped-call]
    if _plain(args[0]):
        return lookup(*args)  # type: ignore[no-any-return]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.thermocline.lookup.default(*args)  # type: ignore[no-any-return]


_LIBRARY.impl("lookup", lookup_with_backward, "Autograd")


def map_ids_anywhere(fields: Tensor, words: Tensor, counts: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """The op `map_ids`, without the dispatcher where it can be skipped."""
    run = map_ids if _plain(fields) and _plain(ids) else torch.ops.thermocline.map_ids.default
    rows: Tensor = run(fields, words, counts, ids, offsets, VERSION)
    return rows
