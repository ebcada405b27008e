"""`FusedOptimizer`, the optimizer of rows as a `torch.optim.Optimizer`, and the lookup that defers updates to its `step`.

Kernels read hyperparameters from a small tensor, `hyper`. Parameter groups write through to it, so that a scheduler's
`group["lr"] = ...` reaches the kernels without a check in each forward. Optimizer state of rows is in the `state_dict` of their
module; that of the optimizer has only the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels import update_bags, update_rows, weight_gradient
from thermocline.kernels.arguments import LookupCall, OptimizerArrays
from thermocline.kernels.checks import check_arrays, check_lookup
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.ops import is_for_rows, once, register_owner
from thermocline.kernels.stage.reference import arena_rows
from thermocline.rows.arena import Arena
from thermocline.rows.training import Trainer

from .backward_pass import OpenLookup, current_pass, pending_of
from .many_ranks import ranks, refuse_unsharded
from .placeholder import PendingGradients, PlaceholderParameter

_FIELDS = {"lr": (F.LR,), "eps": (F.EPS,), "betas": (F.BETA1, F.BETA2), "weight_decay": (F.WEIGHT_DECAY,)}


class HyperGroup(dict[str, Any]):
    """A parameter group that writes through to the hyperparameters of the kernels."""

    trainer: Trainer | None = None  # unpickling sets items before attributes

    def __init__(self, trainer: Trainer, placeholder: PlaceholderParameter) -> None:
        super().__init__(params=[placeholder], **asdict(trainer.optimizer))
        self.trainer = trainer

    def __setitem__(self, name: str, value: Any) -> None:
        if self.trainer is not None and name in _FIELDS and value is not self.get(name):
            values = value if name == "betas" else (value,)
            for field, number in zip(_FIELDS[name], values, strict=True):
                self.trainer.hyper[field].fill_(number)
        super().__setitem__(name, value)

    def update(self, *args: Any, **names: Any) -> None:
        for name, value in dict(*args, **names).items():
            self[name] = value

    def read_back(self) -> None:
        """Read the values of `hyper`, after it was loaded."""
        assert self.trainer is not None
        hyper = self.trainer.hyper.tolist()
        for name, fields in _FIELDS.items():
            if name in self:
                numbers = tuple(hyper[field] for field in fields)
                super().__setitem__(name, numbers if name == "betas" else numbers[0])


class Trained:
    """The rows of one module, for an optimizer."""

    def __init__(self, arena: Arena, trainer: Trainer, placeholder: PlaceholderParameter, independent: bool) -> None:
        self.arena, self.trainer, self.placeholder, self.independent = arena, trainer, placeholder, independent
        self.group = HyperGroup(trainer, placeholder)
        self._compiled_reads = 0  # compiled lookups whose backward may still run
        self._register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._register()  # of a copy

    def _register(self) -> None:
        """Let compiled graphs find the rows by name, and optimizers of torch by the placeholder."""
        self.owner = register_owner(self)
        self.placeholder.trained = ref(self)

    def step(self) -> None:
        self.placeholder.end_step()
        pending = self.placeholder.pending
        if pending is not None and not pending.stepped:
            self.placeholder.updates += 1
            self.apply(pending)

    def step_with(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Step as part of the step of an optimizer of torch, whose parameter group has the placeholder.

        A scheduler of that optimizer scales the learning rate of the rows as it does its own. What GradScaler leaves to
        optimizers with `fused=True` is done here.
        """
        pending, initial = self.placeholder.pending, group.get("initial_lr")
        assert pending is not None
        lr = self.trainer.optimizer.lr * (float(group["lr"]) / float(initial) if initial else 1.0)
        if lr != self.group["lr"]:
            self.group["lr"] = lr
        if getattr(optimizer, "found_inf", None):
            return
        if (scale := getattr(optimizer, "grad_scale", None)) is not None:
            pending.grads_UW = pending.grads_UW / scale
        pending.stepped = False
        self.step()
        pending.stepped = True

    def apply(self, pending: PendingGradients) -> None:
        """Take one optimizer step with these gradients."""
        arena = self.arena
        arena.before_write(pending.rows_U)
        seen_N = pending.seen_N.sort()[0] if arena.cache else None
        with self.placeholder.lock:
            update_rows(arena.arrays, self.trainer.arrays, pending.rows_U, pending.grads_UW, seen_N)

    def replace(self, arena: Arena, trainer: Trainer) -> None:
        """Train other rows from now on; optimizers that have the placeholder stay valid."""
        self.forget()
        self.arena, self.trainer, self.group.trainer = arena, trainer, trainer

    def in_graph(self) -> tuple[OptimizerArrays | None, Tensor | None, str]:
        """(optimizer, placeholder, owner) of a compiled lookup; an exported program does not train."""
        if torch.compiler._is_exporting_flag:  # is_exporting() is True in every graph that torch < 2.13 traces
            return None, None, ""
        token = self.arena.untrained_placeholder  # stands for what `hand_over` changes, which keeps it in the graph
        return OptimizerArrays((), token, token, F.SGD, False), self.placeholder, self.owner

    def open(self) -> None:
        if not self.independent and (count := ranks()) > 1:
            refuse_unsharded(count)
        self._compiled_reads += 1

    def receive(self, call: LookupCall, winners: Tensor, grad: Tensor) -> None:
        """Take the gradient of a compiled lookup: update rows at once or, if there are other reads, at the end of the pass."""
        arena, placeholder, task = self.arena, self.placeholder, current_pass()
        self._compiled_reads = max(0, self._compiled_reads - 1)
        if not placeholder.requires_grad or (task >= 0 and not is_for_rows(get_gradient_edge(placeholder).node)):
            return
        if placeholder.update == "step":
            placeholder.accumulate(pending_of(arena, call, winners, grad))
            return
        if task >= 0 and (self._compiled_reads or placeholder.collects(task)):
            ids_N, offsets, winners, grad = (tensor.clone() for tensor in (call.ids_N, call.offsets, winners, grad))
            weights_N = None if call.weights_N is None else call.weights_N.clone()
            OpenLookup(self).collects(LookupCall(ids_N, offsets, weights_N, call.mode), winners, grad, eager=True)
            return
        if arena.tracks_writes:
            arena.before_write(arena_rows(arena.layout, call.ids_N, call.offsets))
        placeholder.begin_update(task)
        with placeholder.lock:
            update_bags(arena.arrays, self.trainer.arrays, call, winners, grad)

    def forget(self) -> None:
        self.placeholder.end_step(stepped=False)
        self.placeholder.pending = None


class FusedOptimizer(Optimizer):
    """The optimizer of the rows of one or more modules, made by `fused_optimizer`, with a parameter group for each.

    Attributes:
        param_groups: hyperparameters of each module; a change reaches the kernels.

    Example::

        rows = thermocline.fused_optimizer(model)
        rows.param_groups[0]["lr"] = 0.01
        rows.step()  # with update="step"
    """

    trains_rows = True  # the hooks of `placeholder.py` hide gradients of rows from other optimizers

    def __init__(self, trained: Iterable[Trained]) -> None:
        self._trained = list(trained)
        if not self._trained:
            raise BadInput("the model has no module of thermocline; call thermocline.convert_ first", parameter="model")
        groups = [t.group for t in self._trained]
        defaults = {name: value for name, value in groups[0].items() if name != "params"}
        same = all(group.keys() == groups[0].keys() for group in groups)
        super().__init__(groups, defaults if same else {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not isinstance(param_group, HyperGroup):
            message = (
                "a fused optimizer trains only rows of thermocline's modules; use an optimizer of torch for other parameters"
            )
            raise BadInput(message, parameter="param_group")
        for placeholder in param_group["params"]:
            placeholder.has_fused_optimizer = True
            self.state[placeholder] = {}  # set_optimizer_state_dict of torch wants an entry for every parameter
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_trained": self._trained}  # torch leaves it out

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply pending gradients with update="step"; with update="backward" mark the end of the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for trained in self._trained:
                trained.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop pending gradients."""
        for trained in self._trained:
            trained.forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            message = f"the state has {len(saved)} parameter groups; this optimizer has {len(self.param_groups)}"
            raise BadInput(message, parameter="param_groups", value=len(saved), needed=len(self.param_groups))
        for group, other in zip(self.param_groups, saved, strict=True):
            group.update({name: value for name, value in other.items() if name != "params"})


class _WithDeferredBackward(torch.autograd.Function):
    """Attaches a backward to the output of a lookup that keeps the summed gradients of distinct rows for `step`."""

    @staticmethod
    def forward(ctx: Any, tie: Tensor, weights_N: Tensor | None, done: tuple[Any, ...]) -> Tensor:
        ctx.arena, ctx.placeholder, call, out, winners = done
        ctx.mode, ctx.opened = call.mode, None  # `opened` of elastic rows
        ctx.save_for_backward(call.ids_N, call.offsets, weights_N, winners)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ids_N, offsets, weights_N, winners = ctx.saved_tensors
        arena, grad, weights_grad = ctx.arena, grad.contiguous(), None
        call = LookupCall(ids_N, offsets, weights_N, ctx.mode)
        if ctx.needs_input_grad[1]:
            weights_grad = once(weight_gradient(arena.arrays, call, grad).to(weights_N.dtype), grad)
        if not is_for_rows(ctx.next_functions[0][0]):
            return None, weights_grad, None
        pending = pending_of(arena, call, winners, grad)
        with ctx.placeholder.lock:  # between the two, other threads could give the rows to other ids
            if ctx.opened is not None:
                ctx.opened.close()
            ctx.placeholder.accumulate(pending)
        return None, weights_grad, None


def deferred_lookup(arena: Arena, call: LookupCall, placeholder: PlaceholderParameter) -> Tensor:
    """A lookup whose gradients are added to `placeholder`."""
    weights_N = call.weights_N
    if weights_N is not None:
        call = call._replace(weights_N=weights_N.detach())
    rows = arena.arrays
    check_arrays(rows)
    check_lookup(rows.layout, call)
    out, winners = implementation_for("gather", rows.meta).gather_pool(rows, call)
    return _WithDeferredBackward.apply(placeholder, weights_N, (arena, placeholder, call, out, winners))  # type: ignore[no-any-return, no-untyped-call]
