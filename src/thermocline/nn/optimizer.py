"""The optimizer of rows as PyTorch knows optimizers.

Kernels read learning rate and the rest from a small tensor, `hyper`. A parameter group here is a dictionary that writes through
to it: whoever sets `group["lr"]`, a scheduler or a user, has told the kernels, with one small fill on the device and no wait.
Comparing at every forward instead would cost time on each step, and make torch.compile build the model again for each new rate.

The moments and sums of rows are not in `FusedOptimizer.state_dict()`: they are as large as tables and belong to the module,
whose `state_dict` has them. The optimizer's has the groups only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels import update_rows
from thermocline.kernels.stage.reference import arena_rows
from thermocline.rows.arena import Arena
from thermocline.rows.training import Trainer

from .placeholder import Anchor

_FIELDS = {
    "lr": (F.LR,),
    "eps": (F.EPS,),
    "betas": (F.BETA1, F.BETA2),
    "weight_decay": (F.WEIGHT_DECAY,),
}


class HyperGroup(dict[str, Any]):
    """A parameter group whose learning rate, eps, betas and weight decay are those that kernels read."""

    trains_rows = True  # tells GradScaler's question for the rows' sake from that for another optimizer's
    trainer: Trainer | None = None  # unpickling sets items before attributes

    def __init__(self, trainer: Trainer, anchor: Anchor) -> None:
        super().__init__(params=[anchor], **asdict(trainer.optimizer))
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
        """Take over what `hyper` holds, after it was loaded."""
        assert self.trainer is not None
        hyper = self.trainer.hyper.tolist()
        for name, fields in _FIELDS.items():
            if name in self:
                numbers = tuple(hyper[field] for field in fields)
                super().__setitem__(name, numbers if name == "betas" else numbers[0])


class Trained:
    """The rows of one module as an optimizer sees them."""

    def __init__(self, arena: Arena, trainer: Trainer, anchor: Anchor) -> None:
        self.arena, self.trainer, self.anchor = arena, trainer, anchor
        self.group = HyperGroup(trainer, anchor)

    def step(self) -> None:
        self.anchor.end_step()
        waiting = self.anchor.waiting
        if waiting is None:
            return
        arena = self.arena
        arena.before_write(waiting.rows_U)
        seen_N = waiting.seen_N.sort()[0] if arena.cache else None
        update_rows(arena.arrays, self.trainer.arrays, waiting.rows_U, waiting.grads_UW, seen_N)

    def forget(self) -> None:
        self.anchor.end_step(stepped=False)
        self.anchor.waiting = None


def _current_pass() -> int:
    """The backward pass that runs, or -1."""
    return torch._C._current_graph_task_id()


class UpdateOnce:
    """Goes before the backward of one lookup: a second pass through the same graph would update its rows twice."""

    __slots__ = ("done", "lookup", "trained", "within")

    def __init__(self, trained: Trained, ids: Tensor | None = None, offsets: Tensor | None = None) -> None:
        """`ids` and `offsets` as the lookup had them; without, whoever updates tells the arena which rows change."""
        self.trained, self.done = trained, False
        self.within = _current_pass()  # a checkpoint's, which looks up again and has a pass of its own for that
        self.lookup = None if ids is None or offsets is None else (ids, offsets)

    def __call__(self, grads: Any) -> None:
        if self.done:
            raise BadInput(
                "a second backward through the same graph (retain_graph=True) would update the rows twice; "
                "run the forward again, or use update='step', where gradients are summed"
            )
        self.trained.anchor.begin_update(_current_pass() if self.within < 0 else self.within)
        self.done = True
        arena = self.trained.arena
        if self.lookup is not None and arena.tracks_writes:
            arena.before_write(arena_rows(arena.layout, *self.lookup))


class FusedOptimizer(Optimizer):
    """The rows of one or more modules, a parameter group for each. `state_dict` has the groups; the modules' have the state."""

    def __init__(self, trained: Iterable[Trained]) -> None:
        self._trained = list(trained)
        if not self._trained:
            raise BadInput("the model has no module of thermocline; build it with them, or call thermocline.convert_ first")
        groups = [t.group for t in self._trained]
        defaults = {name: value for name, value in groups[0].items() if name != "params"}
        same = all(group.keys() == groups[0].keys() for group in groups)
        super().__init__(groups, defaults if same else {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not isinstance(param_group, HyperGroup):
            raise BadInput(
                "a fused optimizer trains the rows of thermocline's modules alone; give other parameters to an optimizer of "
                "torch, and several modules to thermocline.fused_optimizer(model)"
            )
        for anchor in param_group["params"]:
            anchor.owned = True
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_trained": self._trained}  # which torch leaves out of copies

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """update="step": apply the gradients that wait. update="backward": rows are up to date; this marks the step's end."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for trained in self._trained:
                trained.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait."""
        for trained in self._trained:
            trained.forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise BadInput(f"the state has {len(saved)} parameter groups; this optimizer has {len(self.param_groups)}")
        for group, other in zip(self.param_groups, saved, strict=True):
            group.update({name: value for name, value in other.items() if name != "params"})
