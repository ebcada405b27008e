"""The placeholder parameter: the one parameter of a module, with one element, that represents its rows.

Tools of PyTorch (`clip_grad_norm_`, GradScaler, `requires_grad_`, `zero_grad`, optimizers) work on parameters. Its `.grad` is:

* with `update="backward"` an `AppliedGradient`, one zero that can be read. Clipping and GradScaler, which write to it, raise;
  `zero_grad` ends the step.
* with `update="step"` a `RowGradient`, the pending fp32 gradients [distinct rows, columns]. Clipping changes what
  the step of the rows applies. GradScaler unscales it once, also if two optimizers have the parameter.

Hooks on all optimizers hide `.grad` from steps of torch's optimizers, after their closure. They also mark the end of a step:
with update="backward" a second backward pass before the next step is refused, because it would accumulate. With update="step"
the step of an optimizer of torch that has the parameter is also that of the rows, unless a fused optimizer has been made: then
that one steps them. A sparse gradient on an expanded zero was rejected: `clip_grad_norm_` of torch 2.13 does not take sparse
gradients, and copies of the model would allocate the expanded tensor.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ReferenceType, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, detect_fake_mode
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thermocline._lazy import uncompiled
from thermocline.errors import BadInput

from .read_only import DetachedPlaceholder, ReadOnlyTensor

if TYPE_CHECKING:
    from .backward_pass import CollectedGradients
    from .optimizer import Trained

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # the one operation of GradScaler that changes gradients
_NORMS = ("linalg_vector_norm", "norm", "_foreach_norm")  # by which gradients are clipped


class GradientRanks(Protocol):
    """Ranks that hold parts of the gradients of one module."""

    def norm(self, pending: PendingGradients, order: float) -> Tensor:
        """The norm of the gradients of all ranks."""

    def any(self, flag: Tensor) -> None:
        """Set a flag if it is set on any rank."""


@dataclass
class PendingGradients:
    """Distinct arena rows, their summed gradients, and the row of every lookup (for the counts of the cache)."""

    rows_U: Tensor
    grads_UW: Tensor
    seen_N: Tensor
    inverse_scale: Tensor | None = None  # of GradScaler, once applied
    stepped: bool = False  # with an optimizer of torch, before there was a fused optimizer
    ranks: GradientRanks | None = None  # that hold other rows; None: this process has all

    def plus(self, other: PendingGradients) -> PendingGradients:
        """The sum with other gradients. A sum has at most two terms, so it is deterministic."""
        merged_M, place = torch.unique(torch.cat([self.rows_U, other.rows_U]), return_inverse=True)
        both = torch.cat([self.grads_UW, other.grads_UW])
        sums_MW = both.new_zeros(merged_M.numel(), both.shape[1]).index_add_(0, place, both)
        return PendingGradients(merged_M, sums_MW, torch.cat([self.seen_N, other.seen_N]), ranks=self.ranks)


def _is_traced() -> bool:
    """Whether `.grad` is read by torch.compile, which does so for all inputs of a graph, or by torch.export."""
    if TracingContext.try_get() is not None:
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and detect_fake_mode() is not None


class AppliedGradient(ReadOnlyTensor):
    """`.grad` with update="backward"."""

    placeholder: PlaceholderParameter | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("detach_", "requires_grad_"):
            return args[0]
        if func.__name__ in ("zero_", "_foreach_zero_"):
            given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            for tensor in given:
                if isinstance(tensor, cls) and tensor.placeholder is not None:
                    tensor.placeholder.end_step(stepped=False)
                elif not isinstance(tensor, cls):
                    tensor.zero_()
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def refuse(cls, name: str) -> None:
        tool, effect = "gradient clipping", ""
        if name == _UNSCALE:
            tool, effect = "GradScaler", " They were updated with a scaled gradient: restore them from a checkpoint."
        raise BadInput(
            f"rows were updated in backward, before {tool} could change their gradients.{effect} Use "
            f"RowConfig(update='step'), or leave the module's parameters out of {tool}",
            parameter="update", value="backward", tool=tool,
        )  # fmt: skip


class RowGradient(Tensor):
    """`.grad` with update="step": a view of the pending gradients."""

    pending: PendingGradients

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in _NORMS:
                return cls._norm(func, args, kwargs)
            if func.__name__ != _UNSCALE:
                return func(*args, **kwargs)
            grads, found_inf, inverse_scale = args
            for grad in grads:
                if isinstance(grad, cls):  # a second optimizer with this parameter only checks for Inf
                    pending, applied = grad.pending, grad.pending.inverse_scale
                    scale = inverse_scale if applied is None else inverse_scale.where(applied == 1, 1.0)  # 1: checked for Inf
                    func([pending.grads_UW], found_inf, scale)
                    pending.inverse_scale = scale if applied is None else applied * scale
                    if pending.ranks is not None:
                        pending.ranks.any(found_inf)
            if others := [grad for grad in grads if not isinstance(grad, cls)]:
                func(others, found_inf, inverse_scale)
            return None

    @classmethod
    def _norm(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """The norm of a gradient or of several, over all ranks where ranks hold parts of it."""

        def norm_of(grad: Tensor) -> Tensor:
            if isinstance(grad, cls) and grad.pending.ranks is not None:
                return grad.pending.ranks.norm(grad.pending, float((*args, *kwargs.values(), 2.0)[1]))
            found: Any = func([grad] if several else grad, *args[1:], **kwargs)
            return found[0] if several else found  # type: ignore[no-any-return]

        several = isinstance(args[0], (list, tuple))
        return [norm_of(grad) for grad in args[0]] if several else norm_of(args[0])


class PlaceholderParameter(nn.Parameter):
    """One zero, which requires a gradient while rows are trained."""

    update: str
    pending: PendingGradients | None
    hidden: bool  # whether an optimizer of torch is stepping, which skips the rows
    stepped: bool  # whether any optimizer with this parameter has stepped
    last_pass: int  # the backward pass that updated rows since the last step, or -1
    updates: int  # of the rows, by backward passes or steps
    open: set[int]  # reads of the rows whose backward may still run, by id()
    passes: WeakValueDictionary[int, CollectedGradients]  # backward passes that update rows at their end
    trained: ReferenceType[Trained] | None  # the rows
    lock: RLock  # held while rows change: threads may train one module
    has_fused_optimizer: bool
    unseen: bool  # whether rows were looked up without a graph since their last update
    told: bool  # whether a weight decay that leaves out the rows was warned of
    skipped: bool  # whether an optimizer of torch has stepped while gradients waited for the fused optimizer

    def __new__(
        cls, update: str, data: Tensor, requires_grad: bool = True, pending: PendingGradients | None = None
    ) -> PlaceholderParameter:
        self: PlaceholderParameter = torch.Tensor._make_subclass(cls, data, True)
        nn.Parameter.register_hook(self, _warn_of_norms)
        self.requires_grad_(requires_grad)
        self.update, self.pending, self.stepped, self.last_pass = update, pending, False, -1
        self.hidden = self.has_fused_optimizer = self.skipped = self.told = self.unseen = False
        self.trained = None
        self.updates, self.open, self.passes, self.lock = 0, set(), WeakValueDictionary(), RLock()
        return self

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def grad(self) -> Tensor | None:
        if self.hidden or _is_traced():
            return None
        if self.update == "backward":
            if not self.requires_grad:
                return None
            applied: AppliedGradient = torch.Tensor._make_subclass(AppliedGradient, self.data)
            applied.placeholder = self
            return applied
        if self.pending is None:
            return None
        grads_UW = self.pending.grads_UW.as_subclass(RowGradient)
        grads_UW.pending = self.pending
        return grads_UW

    @grad.setter
    def grad(self, grads_UW: Tensor | None) -> None:
        self.hidden = False
        if grads_UW is None:
            self.end_step(stepped=False)
            self._warn_if_skipped()
            self.pending = None
        elif self.pending is None and grads_UW.shape == self.shape and not grads_UW.any():
            return  # torch's get_optimizer_state_dict steps with zeros, so that an optimizer makes its state
        elif self.pending is None or grads_UW.shape != self.pending.grads_UW.shape:
            needed = None if self.pending is None else tuple(self.pending.grads_UW.shape)
            message = f"the gradient of rows is {tuple(grads_UW.shape)}; change it in place ({needed}), or set it to None"
            raise BadInput(message, parameter="grad", value=tuple(grads_UW.shape), needed=needed)
        else:
            self.pending.grads_UW = grads_UW.as_subclass(Tensor)

    def register_hook(self, hook: Any) -> Any:
        """Warn, and leave the hook out: autograd computes no gradient of a placeholder."""
        warnings.warn(
            "a hook on the gradient of a table's placeholder never runs, because kernels sum the gradients of rows: with "
            "update='step' change placeholder.grad after backward, or put the hook on the output of the module", stacklevel=2,
        )  # fmt: skip
        return torch.utils.hooks.RemovableHandle(OrderedDict())

    register_post_accumulate_grad_hook = register_hook

    def detach(self) -> Tensor:
        plain = self.data
        return plain.as_subclass(DetachedPlaceholder) if self.requires_grad and type(plain) is Tensor else plain

    def end_step(self, stepped: bool = True) -> None:
        """Mark the end of a step. Once an optimizer has stepped, only one backward pass may follow before the next step."""
        self.stepped, self.last_pass = self.stepped or stepped, -1

    def check_pass(self, task: int) -> None:
        """Raise if rows would change in a second backward pass of a step."""
        if self.stepped and self.last_pass not in (-1, task):
            message = (
                "a second backward pass since the last step would update rows twice; accumulate with RowConfig(update='step')"
            )
            raise BadInput(message, parameter="update", value="backward")

    def begin_update(self, task: int) -> None:
        """Mark that a backward pass updates rows."""
        self.check_pass(task)
        self.last_pass, self.updates, self.unseen = task, self.updates + 1, False

    def read_by(self, given: Any) -> bool:
        """Note a read of the rows by a module that has `given` for this placeholder; returns whether it may train them."""
        self.unseen |= not torch.is_grad_enabled()  # a reentrant checkpoint reads them again within a backward pass
        if given is not self and torch.is_grad_enabled() and given.requires_grad:
            raise BadInput(
                "torch.func.functional_call cannot replace the rows of a module, which are no parameter: leave its placeholder "
                "out of the parameters to train the rows of the module, or give a detached one to train none",
                parameter="placeholder", tool="torch.func.functional_call",
            )  # fmt: skip
        return given is self

    def collects(self, task: int, read: object = None) -> bool:
        """Whether a pass keeps gradients until its end, because it may read rows again: other reads than `read` are open."""
        return self.unseen or task in self.passes or len(self.open) > (read is not None)

    def accumulate(self, new: PendingGradients) -> None:
        """Add gradients of distinct rows to those that are pending."""
        with self.lock:
            self.hidden = False  # a step that raised would leave it set
            self.pending = new if self.pending is None else self.pending.plus(new)

    def skip_step(self) -> None:
        """Hide the gradient from the step of an optimizer of torch."""
        self.hidden = True
        self.skipped = self.pending is not None
        if self.update == "backward":
            self.end_step()

    def _warn_if_skipped(self) -> None:
        if self.skipped and not self.stepped:
            self.stepped = True  # warn once
            warnings.warn(
                "an optimizer of torch has stepped, which skips embedding rows that have a fused optimizer, so they are not "
                "trained: call step() of the fused optimizer, too", stacklevel=3,
            )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> PlaceholderParameter:
        pending = copy.deepcopy(self.pending, memo)
        memo[id(self)] = copied = PlaceholderParameter(self.update, self.data.clone(), self.requires_grad, pending)
        return copied

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return PlaceholderParameter, (self.update, self.data, self.requires_grad, self.pending)


def _warn_of_norms(gradient: Tensor | None) -> None:
    """A hook on the gradient of a placeholder, which a loss has only if it computes with `parameters()`."""
    if gradient is None:  # of a lookup
        return
    warnings.warn(
        "the loss computes with the placeholder parameter of a table, which is zero: a norm over model.parameters() leaves "
        "rows out. Use weight_decay of the table's optimizer, or add the norm of module.weight", stacklevel=2,
    )  # fmt: skip


def _placeholders(optimizer: Optimizer) -> Iterator[tuple[PlaceholderParameter, dict[str, Any]]]:
    """The placeholders of an optimizer of torch, each with its parameter group."""
    if not getattr(optimizer, "trains_rows", False):
        for group in optimizer.param_groups:
            yield from ((each, group) for each in group["params"] if isinstance(each, PlaceholderParameter))


def _warn_of_decay(optimizer: Optimizer) -> None:
    """Warn once if the weight decay of an optimizer of torch leaves out rows that have none of their own."""
    tables = []
    for placeholder, group in _placeholders(optimizer):
        trained, placeholder.told = None if placeholder.trained is None else placeholder.trained(), True
        decays = group.get("weight_decay") and placeholder.requires_grad
        if decays and trained is not None and not trained.group.get("weight_decay"):
            tables += [table.name for table in trained.arena.tables]
    if tables:
        warnings.warn(
            f"weight_decay of {type(optimizer).__name__} leaves out rows (tables: {', '.join(tables[:3])}"
            f"{', ...' if tables[3:] else ''}). Set weight_decay of the optimizer in their RowConfig, which decays the rows of "
            "a batch, or give their placeholders a parameter group with weight_decay=0.0", stacklevel=4,
        )  # fmt: skip


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hide gradients of rows from a step; a closure, which may clip gradients, still sees them."""
    found = [placeholder for placeholder, _ in _placeholders(optimizer)]
    if not found:
        return None
    if not all(placeholder.told for placeholder in found):
        _warn_of_decay(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

    def hide_after_closure() -> Any:
        for placeholder in found:
            placeholder.hidden = False
        loss = None if closure is None else closure()
        for placeholder in found:
            placeholder.skip_step()
        return loss

    if closure is None:
        return hide_after_closure()
    if "closure" in kwargs:
        return args, {**kwargs, "closure": hide_after_closure}
    return (args[0], hide_after_closure, *args[2:]), kwargs


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Step the rows that no fused optimizer has."""
    for placeholder, group in _placeholders(optimizer):
        placeholder.hidden = False
        trained = None if placeholder.has_fused_optimizer or placeholder.trained is None else placeholder.trained()
        if trained is not None and placeholder.pending is not None:
            trained.step_with(optimizer, group)


# Compiled steps call them outside of graphs, where the gradients that a graph has seen are hidden.
register_optimizer_step_pre_hook(uncompiled(_before_step))
register_optimizer_step_post_hook(uncompiled(_after_step))
