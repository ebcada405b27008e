"""The parameter that stands for the rows of a module: what tools see that walk over `model.parameters()`.

Rows are not a parameter: they are bytes, and no tensor of their gradients is ever as large as the table. But a model's tools
(`clip_grad_norm_`, GradScaler, `requires_grad_`, `zero_grad`) know parameters only. So every module has one, of one element,
whose `.grad` answers for the rows:

* `update="backward"`: there is no gradient to see, as the update happened in backward. Optimizers and loggers read None, as
  for any parameter without a gradient. Clipping and GradScaler would silently do nothing to the rows; so when they ask (the
  module that the asking frame belongs to tells), an error names the other mode. An optimizer of torch that was given all
  parameters asks in its `step`: a second backward before the next one would be accumulation, which is refused as well.
* `update="step"`: the fp32 gradients that wait, one line for each distinct row of the table: [distinct rows, columns], not the
  shape of the parameter. In-place changes (clipping, unscaling) reach what `fused_optimizer.step()` applies. An optimizer of
  torch that was given all parameters of the model reads None and passes by, and GradScaler on its behalf; `zero_grad`, also
  its, drops what waits. Where no fused optimizer was ever made, the rows would not train, without a word: that is warned of.

The obvious alternative, a sparse gradient on a parameter [rows, columns] that expands one zero, was rejected: `clip_grad_norm_`
of torch 2.13 does not take sparse gradients (linalg_vector_norm has no sparse kernel), and whatever copies or wraps the model
would allocate what the expansion had saved.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from thermocline.errors import BadInput

_SCALER, _CLIP = "torch.amp.grad_scaler", "torch.nn.utils.clip_grad"
_OPTIMIZERS = "torch.optim."
_BLIND = (_OPTIMIZERS, "torch._")  # and torch.compile looking at the inputs of a graph


class Waiting:
    """Distinct arena rows and their summed gradients, between backward and `fused_optimizer.step()`.

    `seen_N` has the row of every lookup, for the cache to count.
    """

    def __init__(self, rows_U: Tensor, grads_UW: Tensor, seen_N: Tensor) -> None:
        self.rows_U, self.grads_UW, self.seen_N = rows_U, grads_UW, seen_N

    def plus(self, rows_U: Tensor, grads_UW: Tensor, seen_N: Tensor) -> Waiting:
        """With another backward's gradients. A row meets at most one other here, so no order of adding can change a bit."""
        merged_M, place = torch.unique(torch.cat([self.rows_U, rows_U]), return_inverse=True)
        both = torch.cat([self.grads_UW, grads_UW])
        sums_MW = both.new_zeros(merged_M.numel(), both.shape[1]).index_add_(0, place, both)
        return Waiting(merged_M, sums_MW, torch.cat([self.seen_N, seen_N]))


class Anchor(nn.Parameter):
    """One zero, which requires a gradient while the rows are to be trained."""

    update: str
    waiting: Waiting | None
    stepped: bool  # whether the user ever had an optimizer step
    last_pass: int  # the backward pass that updated rows since then, or -1
    owned: bool  # whether a fused optimizer has the rows; an optimizer of torch that steps while they wait cannot train them
    passed_by: bool

    def __new__(cls, update: str, data: Tensor, requires_grad: bool = True, waiting: Waiting | None = None) -> Anchor:
        self: Anchor = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.update, self.waiting, self.stepped, self.last_pass = update, waiting, False, -1
        self.owned = self.passed_by = False
        return self

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def grad(self) -> Tensor | None:
        frame = sys._getframe(1)
        asker = frame.f_globals.get("__name__", "")
        if self.update == "backward":
            if asker in (_SCALER, _CLIP) and self.requires_grad:
                raise BadInput(_refusal(asker, frame))
            clears = frame.f_code.co_name == "zero_grad"  # of an optimizer, or of a model
            if clears or asker.startswith(_OPTIMIZERS):
                self.end_step(not clears)
            return None
        if self.waiting is None:
            return None
        if asker.startswith(_BLIND) and frame.f_code.co_name != "zero_grad":
            self.passed_by = self.passed_by or asker.startswith(_OPTIMIZERS)
            return None
        if asker == _SCALER and not getattr(frame.f_locals["group"], "trains_rows", False):
            return None  # else two groups that have this parameter, of one optimizer or two, would unscale the rows twice
        return self.waiting.grads_UW

    @grad.setter
    def grad(self, grads_UW: Tensor | None) -> None:
        if grads_UW is None:
            self._warn_if_passed_by()
            self.waiting = None
        elif self.waiting is None or grads_UW.shape != self.waiting.grads_UW.shape:
            raise BadInput(
                "the gradient of rows can be changed or dropped (None), but not put in place of "
                f"{None if self.waiting is None else tuple(self.waiting.grads_UW.shape)} as {tuple(grads_UW.shape)}"
            )
        else:
            self.waiting.grads_UW = grads_UW

    def end_step(self, stepped: bool = True) -> None:
        """The next backward pass is the first of a step; it is the only one for a user whose optimizers have stepped."""
        self.stepped, self.last_pass = self.stepped or stepped, -1

    def begin_update(self, task: int) -> None:
        """Called in a backward pass, before rows change: one pass to a step, from a user who has an optimizer step."""
        if self.stepped and self.last_pass not in (-1, task):
            raise BadInput(
                "a second backward pass since the last step of an optimizer. With update='backward' it would be a second "
                "update of the rows, not a sum of gradients; accumulate with update='step'"
            )
        self.last_pass = task

    def let_wait(self, rows_U: Tensor, grads_UW: Tensor, seen_N: Tensor) -> None:
        """Let gradients of distinct rows wait, added to those that wait already."""
        self._warn_if_passed_by()
        new = (rows_U, grads_UW, seen_N)
        self.waiting = Waiting(*new) if self.waiting is None else self.waiting.plus(*new)

    def _warn_if_passed_by(self) -> None:
        """Called when a step is over: nobody will apply the gradients that wait."""
        if self.passed_by and not (self.owned or self.stepped):
            self.owned = True  # said once
            warnings.warn(
                "an optimizer of torch has stepped, and gradients of rows still wait: it passes rows by, so they are not "
                "trained. With update='step' call step() of module.fused_optimizer, or of thermocline.fused_optimizer(model)",
                stacklevel=3,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Anchor:
        copies = [t.clone() for t in vars(self.waiting).values()] if self.waiting else None
        copy = Anchor(self.update, self.data.clone(), self.requires_grad, Waiting(*copies) if copies else None)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return Anchor, (self.update, self.data, self.requires_grad, self.waiting)


def _refusal(asker: str, frame: FrameType | None) -> str:
    """Names what the user called, where the asking module has several functions for it."""
    tool, effect = "GradScaler", "They have taken a step with a scaled gradient: restore them from what you saved. "
    while asker == _CLIP and frame is not None and frame.f_globals.get("__name__") == _CLIP:
        name, effect = frame.f_code.co_name.lstrip("_"), ""
        tool = name if name.startswith("clip") else tool  # the outermost is the user's
        frame = frame.f_back
    return (
        f"The rows of this module are updated in backward (update='backward'), before {tool} could touch their gradients. "
        f"{effect}Build the module with update='step' and call fused_optimizer.step(), or leave its parameters out of {tool}."
    )
