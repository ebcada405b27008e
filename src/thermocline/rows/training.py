"""Lookup and training of an arena's rows, without modules."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput, ThermoclineError
from thermocline.kernels import dequantize_rows, ops, quantize_rows
from thermocline.kernels.arguments import LookupCall, OptimizerArrays

from .arena import Arena
from .optimizers import RowOptimizer
from .precision import format_of

_ROWS, _DIM, _SHARE = 256, 16, 0.25  # of the rounding check


class Trainer:
    """The optimizer of an arena: state, hyperparameters, and the clock of the rounding bits.

    Args:
        arena: the rows to train.
        optimizer: SGD, RowwiseAdagrad, Adagrad or Adam.
        stochastic: whether rows are rounded stochastically; False rounds to nearest, which loses small updates.
        seed: seed of stochastic rounding.

    Raises:
        ThermoclineError: stochastic rounding to a precision of the arena does not work on this device.

    Example::

        arena = thermocline.Arena([thermocline.TableSpec(1000, 64, "int8", "user")])
        trainer = thermocline.Trainer(arena, thermocline.RowwiseAdagrad(lr=0.02))
        out = thermocline.lookup(arena, torch.tensor([3, 5]), torch.tensor([0, 2]), trainer=trainer)  # [1, 64]
        out.sum().backward()  # updates rows 3 and 5
    """

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
        self.placeholder = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)  # ties lookups into the graph

    @property
    def arrays(self) -> OptimizerArrays:
        """The optimizer as kernels take it."""
        return OptimizerArrays(self.states, self.hyper, self.clock, self.optimizer.code, self.stochastic)


@cache
def check_rounding(format: int, device: torch.device) -> None:
    """Raise unless stochastic rounding rounds values a quarter of a step above a code up in about a quarter of the cases.

    Without it updates below half a step would be lost, and nothing else would show it.
    """
    if format == F.FP32 or device.type == "meta":
        return
    low, step = {F.FP16: (1.0, 2.0**-10), F.BF16: (1.0, 2.0**-7), F.FP8: (1.0, 0.125)}.get(format, (0.0, 1.0))
    values_ND = torch.full((_ROWS, _DIM), low + _SHARE * step, dtype=torch.float32, device=device)
    if low:
        values_ND[:, 0] = 448.0 if format == F.FP8 else low  # so that the scale of fp8 rows is 1
    else:
        values_ND[:, 0], values_ND[:, 1] = (127.0, -127.0) if format == F.INT8 else (0.0, float(F.levels(format)))
    clock = torch.tensor([1, 1], dtype=torch.int64, device=device)
    codes_NB, meta_NW = quantize_rows(values_ND, format, clock, torch.arange(_ROWS, device=device))
    rounded_ND = dequantize_rows(codes_NB, meta_NW, format, _DIM)[:, 2:]
    up = float((rounded_ND > low + 0.5 * step).float().mean())
    if not 0.6 * _SHARE < up < 1.4 * _SHARE:
        raise ThermoclineError(
            f"stochastic rounding to {F.NAMES[format]} does not work on {device}: of values {_SHARE} of a step above a code, "
            f"{up:.0%} were rounded up. Run `thermocline verify` and report what it says"
        )


def lookup(
    arena: Arena, ids: Tensor, offsets: Tensor, weights: Tensor | None = None, mode: str = "sum",
    trainer: Trainer | None = None, dtype: torch.dtype = torch.float32, checked: bool = True,
) -> Tensor:  # fmt: skip
    """Look up rows of all features of an arena.

    Args:
        arena: the rows.
        ids: rows of all features, feature after feature.
        offsets: features * batch + 1 offsets of bags; with mode "none" features + 1 offsets.
        weights: a factor for each id, with mode "sum".
        mode: pooling: "sum", "mean", "max", or "none" for a row of each id.
        trainer: makes backward update the rows.
        dtype: type of the output.
        checked: False trusts the ids.

    Returns:
        [batch, sum of dimensions]; with mode "none" [ids, largest dimension].

    Raises:
        BadInput: an argument has a wrong type, shape or value.
        IdOutOfRange: an id is not a row of its table.

    Example::

        out = thermocline.lookup(arena, torch.tensor([3, 5, 3]), torch.tensor([0, 2, 3]), mode="mean")  # 2 bags
    """
    if mode not in F.MODES:
        raise BadInput(f"mode is {mode!r}; use one of {', '.join(F.MODES)}", parameter="mode", value=mode)
    call = LookupCall(ids, offsets, weights, F.MODES.index(mode), dtype, checked)
    if trainer is None:
        return ops.lookup(arena.arrays, call)
    return ops.lookup(arena.arrays, call, trainer.arrays, trainer.placeholder)


def synchronize(arena: Arena) -> None:
    """Wait for the arena's GPU and raise the errors of its kernels, which the next lookup or update would raise otherwise.

    Args:
        arena: the arena whose kernels to wait for. On a CPU errors are raised at once, and this does nothing.

    Raises:
        IdOutOfRange: an id is not a row of its table.
        BadGradient: a gradient is NaN or Inf.

    Example::

        thermocline.synchronize(arena)
    """
    if arena.device.type == "cuda":
        torch.cuda.synchronize(arena.device)
        raise_pending(arena)


def raise_pending(arena: Arena) -> None:
    """`synchronize` for the current stream."""
    if arena.device.type == "cuda":
        from thermocline.kernels.gpu.errors import error_buffer

        torch.cuda.current_stream(arena.device).synchronize()
        error_buffer(arena.meta).raise_pending()


def report_to(errors: Any) -> AbstractContextManager[None]:
    """Kernels that this thread launches inside the context report to an `ErrorBuffer`; to the usual one if it is None."""
    if errors is None:
        return nullcontext()
    from thermocline.kernels.gpu.errors import reporting_to

    return reporting_to(errors)
