"""Look rows of an arena up, and train them: the smallest thing that does a whole training step.

arena = Arena([TableSpec(1000, 64, "int8", "user")])
trainer = Trainer(arena, RowwiseAdagrad(lr=0.02))
out = lookup(arena, ids, offsets, trainer=trainer)     # [batch, 64]
out.sum().backward()                                   # the rows that were looked up are updated
"""

from __future__ import annotations

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels import ops
from thermocline.kernels.arguments import LookupCall, OptimizerArrays

from .arena import Arena
from .optimizers import RowOptimizer
from .precision import format_of
from .rounding_check import check_rounding


class Trainer:
    """What training an arena needs beside its rows: optimizer state, hyperparameters, the clock of the rounding bits."""

    def __init__(self, arena: Arena, optimizer: RowOptimizer, stochastic: bool = True, seed: int = 0) -> None:
        device = arena.device
        if stochastic:
            near = {F.INT8} if any(pool.int8_slots for pool in arena.pools) else set()
            for format in {format_of(table.precision) for table in arena.tables} | near:
                check_rounding(format, device)
        self.optimizer, self.stochastic = optimizer, stochastic
        self.states = optimizer.states(arena.rows, arena.elements, device)
        self.hyper = optimizer.hyper(device)
        self.clock = torch.tensor([seed, 0], dtype=torch.int64, device=device)
        self.anchor = torch.zeros(1, device=device, requires_grad=True)

    @property
    def arrays(self) -> OptimizerArrays:
        """The optimizer as kernels take it."""
        return OptimizerArrays(self.states, self.hyper, self.clock, self.optimizer.code, self.stochastic)


def lookup(
    arena: Arena,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    mode: str = "sum",
    trainer: Trainer | None = None,
    dtype: torch.dtype = torch.float32,
    checked: bool = True,
) -> Tensor:
    """Rows of all features of an arena, pooled by "sum", "mean" or "max", or one by one with "none".

    Ids are feature-major. Pooled: offsets has features * batch + 1 entries and the output is [batch, sum of dimensions].
    "none": offsets has features + 1 entries and the output is [ids, largest dimension]. With a trainer, backward updates
    the rows. `checked=False` trusts the ids.
    """
    if mode not in F.MODES:
        raise BadInput(f"mode is {mode!r}; use one of {', '.join(F.MODES)}", parameter="mode", value=mode)
    call = LookupCall(ids, offsets, weights, F.MODES.index(mode), dtype, checked)
    if trainer is None:
        return ops.lookup(arena.arrays, call)
    return ops.lookup(arena.arrays, call, trainer.arrays, trainer.anchor)


def synchronize(arena: Arena) -> None:
    """Wait for the arena's GPU and raise what its kernels reported: bad ids, bad offsets, bad gradients.

    Without it such an error is raised by the next lookup or update. On a CPU they are raised at once, and this does nothing.
    """
    if arena.device.type == "cuda":
        torch.cuda.synchronize(arena.device)
        raise_pending(arena)


def raise_pending(arena: Arena) -> None:
    """The same, of what was launched on the current stream."""
    if arena.device.type == "cuda":
        from thermocline.kernels.gpu.errors import error_buffer

        torch.cuda.current_stream(arena.device).synchronize()
        error_buffer(arena.meta).raise_pending()
