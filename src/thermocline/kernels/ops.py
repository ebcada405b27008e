"""The kernels as PyTorch operators, and the differentiable lookup.

Backward changes the rows in place. They are no parameters: a `placeholder` that requires grad ties a lookup into the graph.
Arrays are kept on `ctx` as attributes, because autograd's version check would forbid a second update of the same table.

A module is the `owner` of its compiled lookups. Their backward hands gradients to it (`hand_over`), so that a graph neither
changes nor copies a table, and a compiled step is checked and summed as an eager one. Operators run Python and read tables
that CUDA graphs of torch.compile would copy, so they are tagged to stay outside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import IdOutOfRange

from . import dispatch as D
from .arguments import LookupCall, OptimizerArrays, RowArrays
from .checks import check_arrays, check_lookup
from .ids.fields import VERSION
from .layout import Cache, Layout, output_shape, parse, winners_shape
from .ngrams.reference import VERSION as NGRAMS_VERSION

_LIBRARY = torch.library.Library("thermocline", "DEF")
_OPS = torch.ops.thermocline
FROZEN = -1  # in place of an optimizer: backward leaves the rows alone

_TABLE = "Tensor codes, Tensor meta, Tensor[] cache, Tensor fields"
_SCHEMAS = {
    "lookup": f"({_TABLE}, Tensor ids, Tensor offsets, Tensor? weights, Tensor placeholder, Tensor[] states, Tensor hyper, "
    "Tensor clock, str spec, int pooling, ScalarType dtype, int optimizer, bool stochastic, bool checked, "
    'str owner="", int padding=-1) -> (Tensor, Tensor)',
    "weight_gradient": f"({_TABLE}, Tensor ids, Tensor offsets, Tensor grad, str spec, int padding=-1) -> Tensor",
    "hand_over": "(Tensor(a!) token, Tensor ids, Tensor offsets, Tensor? weights, Tensor winners, Tensor grad, int pooling, "
    "str owner, int padding) -> ()",
    "update_bags": "(Tensor(a!) codes, Tensor(b!) meta, Tensor(f!)[] cache, Tensor fields, Tensor(c!)[] states, "
    "Tensor(d!) hyper, Tensor(e!) clock, Tensor ids, Tensor offsets, Tensor? weights, Tensor winners, Tensor grad, str spec, "
    "int pooling, int optimizer, bool stochastic) -> ()",
    "map_ids": "(Tensor fields, Tensor words, Tensor counts, Tensor ids, Tensor offsets, int version) -> Tensor",
    "ngram_rows": "(Tensor keys, Tensor excluded, Tensor tokens, int[] orders, int vocabulary, int part, int version) "
    "-> Tensor",
}
# "pooling", not "mode": torch._higher_order_ops.auto_functionalize has an argument of that name.
for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.cudagraph_unsafe,))


class Owner(Protocol):
    """The module of compiled lookups."""

    def open(self) -> None:
        """Expect the gradient of one more lookup."""

    def receive(self, call: LookupCall, winners: Tensor, grad: Tensor) -> None:
        """Take the gradient of a lookup, whose memory belongs to the caller."""


_owners: WeakValueDictionary[str, Owner] = WeakValueDictionary()
_numbers = count()


def register_owner(owner: Owner) -> str:
    """A name by which compiled graphs find this owner as long as it lives."""
    name = f"rows {next(_numbers)}"
    _owners[name] = owner
    return name


# -- eager calls ------------------------------------------------------------------------------------------------------------


def lookup(
    rows: RowArrays, call: LookupCall, optimizer: OptimizerArrays | None = None, placeholder: Tensor | None = None,
    owner: str = "", padding: int = -1,
) -> Tensor:  # fmt: skip
    """Pooled rows. With an optimizer and its placeholder, backward updates the rows.

    Args:
        owner: name of the module that gets the gradients, while graphs are traced.
        padding: id that is neither pooled nor updated, while graphs are traced; else the caller removes it.
    """
    weights_N = call.weights_N
    if not _is_eager(rows.meta):
        out: Tensor = _OPS.lookup.default(*_flat_lookup(rows, call, optimizer, placeholder), owner, padding)[0]
        return out
    trains = torch.is_grad_enabled() and (optimizer is not None or (weights_N is not None and weights_N.requires_grad))
    if trains and weights_N is not None:
        call = call._replace(weights_N=weights_N.detach())
    check_arrays(rows)
    check_lookup(rows.layout, call)
    if trains and rows.meta.device.type == "cpu":  # here, and not again in backward
        call = call._replace(ids_N=call.ids_N.long(), offsets=call.offsets.long())
    out, winners = D.implementation_for("gather", rows.meta).gather_pool(rows, call)
    if not trains:
        return out
    return _WithBackward.apply(weights_N, placeholder, (rows, call, optimizer, out, winners))  # type: ignore[no-any-return, no-untyped-call]


def map_ids_anywhere(fields: Tensor, words: Tensor, counts: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """Map raw ids to rows: eagerly where possible, else through the operator."""
    if _is_eager(fields) and _is_eager(ids):
        return D.map_ids(fields, words, counts, ids, offsets)
    rows: Tensor = _OPS.map_ids.default(fields, words, counts, ids, offsets, VERSION)
    return rows


def ngram_rows_anywhere(
    keys: Tensor, excluded: Tensor, tokens: Tensor, orders: Sequence[int], vocabulary: int, part: int
) -> Tensor:
    """Rows of the n-grams that end at each token: eagerly where possible, else through the operator."""
    if _is_eager(keys) and _is_eager(tokens):
        return D.ngram_rows(keys, excluded, tokens, orders, vocabulary, part)
    rows: Tensor = _OPS.ngram_rows.default(keys, excluded, tokens, orders, vocabulary, part, NGRAMS_VERSION)
    return rows


def _is_eager(tensor: Tensor) -> bool:
    """Whether operators may be skipped: nothing traces, and the tensor has data."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


class _WithBackward(torch.autograd.Function):
    """Attaches the backward of a lookup to its output, which is computed before.

    `torch.library.register_autograd` visits every argument at every call. Here autograd sees two tensors that may require a
    gradient; everything else comes in one tuple.
    """

    @staticmethod
    def forward(ctx: Any, weights_N: Tensor | None, placeholder: Tensor | None, done: tuple[Any, ...]) -> Tensor:
        ctx.rows, call, ctx.optimizer, out, winners, *ctx.traced = done
        ctx.mode = call.mode
        ctx.save_for_backward(call.ids_N, call.offsets, weights_N, winners)
        ctx.set_materialize_grads(False)
        ctx.opened = None  # of a module: decides whether rows are updated at once or at the end of the pass
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None
        ids_N, offsets, weights_N, winners = ctx.saved_tensors
        rows, call, grad = ctx.rows, LookupCall(ids_N, offsets, weights_N, ctx.mode), grad.contiguous()
        eager, weights_grad = _is_eager(grad) and _is_eager(rows.meta), None
        spec, traced = rows.layout.tables.spec, _OPS.weight_gradient.default
        owner, padding = ctx.traced or ("", -1)
        if ctx.needs_input_grad[0]:
            found_N = (
                D.weight_gradient(rows, call, grad) if eager else traced(*_flat(rows), ids_N, offsets, grad, spec, padding)
            )
            weights_grad = once(found_N.to(weights_N.dtype), grad)
        if ctx.optimizer is None or (eager and not is_for_rows(ctx.next_functions[-1][0])):
            return weights_grad, None, None
        if owner:
            _OPS.hand_over.default(ctx.optimizer.clock, *call[:3], winners, grad, call.mode, owner, padding)
        elif eager:
            with nullcontext() if ctx.opened is None else ctx.opened.lock:  # once a read has ended, its rows may get other ids
                if ctx.opened is None or not ctx.opened.collects(call, winners, grad, eager):
                    D.update_bags(rows, ctx.optimizer, call, winners, grad)
        elif ctx.opened is None or not ctx.opened.collects(call, winners, grad, eager):
            states, hyper, clock, kind, stochastic = ctx.optimizer
            how = (spec, call.mode, kind, stochastic)
            _OPS.update_bags.default(*_flat(rows), list(states), hyper, clock, *call[:3], winners, grad, *how)
        return weights_grad, None, None


def is_for_rows(tie: Any) -> bool:
    """Whether the pass that runs trains rows: not `autograd.grad`, `backward(inputs=...)` without them, nor one of frozen rows.

    Args:
        tie: the node in the graph that accumulates the gradient of the placeholder, or passes it on.
    """
    frozen = hasattr(tie, "variable") and not tie.variable.requires_grad
    try:
        return not frozen and torch._C._will_engine_execute_node(tie)
    except RuntimeError:  # autograd.grad with respect to the placeholder
        return False


def once(gradient: Tensor, grad: Tensor) -> Tensor:
    """A gradient that kernels computed. Its own backward raises, where it would leave `grad` out without a word."""
    if not (torch.is_grad_enabled() and grad.requires_grad):
        return gradient
    refuse = torch._C._functions.DelayedError(b"the gradient of per_sample_weights cannot be differentiated again", 1)
    refused: Tensor = refuse(gradient.detach().requires_grad_())
    return refused


def without_padding(call: LookupCall, padding: int) -> tuple[Tensor, LookupCall]:
    """Positions of the ids that are no padding, and the lookup of these."""
    kept_N = call.ids_N != padding
    before = torch.nn.functional.pad(kept_N.cumsum(0), (1, 0))  # ids that are kept before each position
    kept = kept_N.nonzero()[:, 0]
    weights_N = None if call.weights_N is None else call.weights_N[kept]
    return kept, call._replace(ids_N=call.ids_N[kept], offsets=before[call.offsets.long()], weights_N=weights_N)


# -- flat arguments ---------------------------------------------------------------------------------------------------------


def _rows(codes: Tensor, meta: Tensor, cache: list[Tensor], fields: Tensor, spec: str) -> RowArrays:
    """Arrays of an arena from the arguments of an operator. Operators take an empty list for no cache."""
    return RowArrays(codes, meta, Layout.of(fields, spec), Cache(*cache) if cache else None)


def _flat(rows: RowArrays) -> tuple[Any, ...]:
    """The first four arguments of an operator."""
    return rows.codes, rows.meta, list(rows.cache or ()), rows.layout.fields_F8


def _flat_lookup(
    rows: RowArrays, call: LookupCall, optimizer: OptimizerArrays | None, placeholder: Tensor | None
) -> tuple[Any, ...]:
    fields, spec = rows.layout.fields_F8, rows.layout.tables.spec
    optimizer = OptimizerArrays([], fields, fields, FROZEN, False) if optimizer is None else optimizer
    states, hyper, clock, kind, stochastic = optimizer
    state = (fields if placeholder is None else placeholder, list(states), hyper, clock)
    return *_flat(rows), *call[:3], *state, spec, call.mode, call.dtype, kind, stochastic, call.checked


# -- operators --------------------------------------------------------------------------------------------------------------


def _implement(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function, named `_op_` and the operator's name, on CPU and CUDA; the kernels dispatch on the device."""
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(function.__name__.removeprefix("_op_"), function, key)
    return function


@_implement
def _op_lookup(
    codes: Tensor, meta: Tensor, cache: list[Tensor], fields: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None,
    placeholder: Tensor, states: list[Tensor], hyper: Tensor, clock: Tensor, spec: str, pooling: int,
    dtype: torch.dtype, optimizer: int, stochastic: bool, checked: bool, owner: str = "", padding: int = -1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = LookupCall(ids, offsets, weights, pooling, dtype, checked)
    kept = None
    if padding >= 0 and pooling != F.NONE:
        kept, call = without_padding(call, padding)
    if owner:
        _owners[owner].open()
    try:
        return D.gather_pool(_rows(codes, meta, cache, fields, spec), call)
    except IdOutOfRange as error:
        if kept is None or kept.is_cuda:  # a GPU reports an earlier batch
            raise
        raise error.at(int(kept[error.position])) from None


_LISTS = (2, 8)  # arguments of `lookup`; AOTInductor passes None for an empty list


def _autograd_lookup(*args: Any) -> tuple[Tensor, Tensor]:
    """The operator `lookup` above autograd, for tracing."""
    args = tuple([] if at in _LISTS and each is None else each for at, each in enumerate(args))
    with torch._C._AutoDispatchBelowAutograd():
        out, winners = _OPS.lookup.default(*args)
    codes, meta, cache, fields, ids, offsets, weights, placeholder, states, hyper, clock = args[:11]
    spec, mode, dtype, kind, stochastic, _ = args[11:17]
    if torch.is_grad_enabled() and (placeholder.requires_grad or (weights is not None and weights.requires_grad)):
        optimizer = None if kind == FROZEN else OptimizerArrays(states, hyper, clock, kind, stochastic)
        call = LookupCall(ids, offsets, weights, mode, dtype)
        traced = args[17:] + ("", -1)[len(args) - 17 :]  # the dispatcher drops arguments that are defaults
        done = (_rows(codes, meta, cache, fields, spec), call, optimizer, out, winners, *traced)
        out = _WithBackward.apply(weights, placeholder, done)  # type: ignore[no-untyped-call]
    return out, winners


_LIBRARY.impl("lookup", _autograd_lookup, "Autograd")


@_implement
def _op_weight_gradient(
    codes: Tensor, meta: Tensor, cache: list[Tensor], fields: Tensor, ids: Tensor, offsets: Tensor, grad: Tensor, spec: str,
    padding: int = -1,
) -> Tensor:  # fmt: skip
    rows, call = _rows(codes, meta, cache, fields, spec), LookupCall(ids, offsets, None, F.SUM)
    if padding < 0:
        return D.weight_gradient(rows, call, grad)
    kept, call = without_padding(call, padding)
    return grad.new_zeros(ids.shape, dtype=torch.float32).index_copy_(0, kept, D.weight_gradient(rows, call, grad))


@_implement
def _op_hand_over(
    token: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, winners: Tensor, grad: Tensor, pooling: int,
    owner: str, padding: int,
) -> None:  # fmt: skip
    call = LookupCall(ids, offsets, weights, pooling)
    if padding >= 0:
        kept, call = without_padding(call, padding)
        grad = grad[kept] if pooling == F.NONE else grad
    _owners[owner].receive(call, winners, grad)


@_implement
def _op_update_bags(
    codes: Tensor, meta: Tensor, cache: list[Tensor], fields: Tensor, states: list[Tensor], hyper: Tensor, clock: Tensor,
    ids: Tensor, offsets: Tensor, weights: Tensor | None, winners: Tensor, grad: Tensor, spec: str,
    pooling: int, optimizer: int, stochastic: bool,
) -> None:  # fmt: skip
    state = OptimizerArrays(states, hyper, clock, optimizer, stochastic)
    D.update_bags(_rows(codes, meta, cache, fields, spec), state, LookupCall(ids, offsets, weights, pooling), winners, grad)


@_implement
def _op_map_ids(fields: Tensor, words: Tensor, counts: Tensor, ids: Tensor, offsets: Tensor, version: int) -> Tensor:
    assert version == VERSION
    return D.map_ids(fields, words, counts, ids, offsets)


@_implement
def _op_ngram_rows(
    keys: Tensor, excluded: Tensor, tokens: Tensor, orders: list[int], vocabulary: int, part: int, version: int
) -> Tensor:
    assert version == NGRAMS_VERSION
    return D.ngram_rows(keys, excluded, tokens, orders, vocabulary, part)


# -- shapes without data ----------------------------------------------------------------------------------------------------


def _fake_lookup(
    codes: Tensor, meta: Tensor, cache: list[Tensor], fields: Tensor, ids: Tensor, offsets: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    spec, mode, dtype = rest[5:8]
    call = (parse(spec), ids, offsets, mode)
    return fields.new_empty(output_shape(*call), dtype=dtype), fields.new_empty(winners_shape(*call), dtype=torch.int32)


_FAKES: dict[str, Callable[..., Any]] = {
    "lookup": _fake_lookup,
    "hand_over": lambda *_: None,
    "weight_gradient": lambda codes, meta, cache, fields, ids, *_: fields.new_empty(ids.shape, dtype=torch.float32),
    "update_bags": lambda *_: None,
    "ngram_rows": lambda keys, excluded, tokens, *_: tokens.new_empty((*tokens.shape, *keys.shape), dtype=torch.int64),
    "map_ids": lambda fields, words, counts, ids, *_: ids.new_empty(ids.shape, dtype=torch.int64),
}
for _name, _function in _FAKES.items():
    torch.library.register_fake(f"thermocline::{_name}", _function, lib=_LIBRARY)
