"""One optimizer step for each backward pass, however often a forward reads the rows of a module.

A lookup that is the only read of its module updates rows in its own backward, without sums in memory. `placeholder.open` has
the reads (lookups, and `weight`) whose backward may still run. If there are others, gradients are collected, and a callback
of the autograd engine applies them at the end of the pass. The engine owns the callback, and only the callback owns the
gradients: a pass that raises leaves nothing behind.

A reentrant checkpoint looks up again in the pass of the user and runs a pass inside it. Its lookups belong to the outer pass.
They were made without a graph before, so after such lookups (`placeholder.unseen`) a pass updates rows at its end.
Compiled lookups run no Python in backward, so that each of them is a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.kernels import sum_row_gradients, update_bags
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.ops import is_for_rows
from thermocline.kernels.stage.reference import arena_rows
from thermocline.rows.arena import Arena

from .placeholder import PendingGradients

if TYPE_CHECKING:
    from threading import RLock

    from .optimizer import Trained

MOST_DENSE_BYTES = 1 << 30  # of the gradient of `weight`

current_pass = torch._C._current_graph_task_id  # the backward pass that runs, or -1
at_end_of_pass = torch.autograd.Variable._execution_engine.queue_callback


class UpdateOnce:
    """What the backward of one lookup does before its update: a second pass through the same graph raises."""

    __slots__ = ("done", "trained", "within")

    def __init__(self, trained: Trained) -> None:
        self.trained, self.done = trained, False
        self.within = current_pass()  # activation checkpointing looks up again inside of a backward pass

    @property
    def lock(self) -> RLock:
        """Held while rows change."""
        return self.trained.placeholder.lock

    def begin(self) -> int:
        """Raise if the pass may not update rows; returns the pass that they are updated in."""
        if self.done:
            message = "a second backward through the same graph (retain_graph=True) would update rows twice; use update='step'"
            raise BadInput(message, parameter="retain_graph", value=True)
        task = current_pass() if self.within < 0 else self.within
        self.trained.placeholder.check_pass(task)
        return task

    def __call__(self, grads: Any) -> None:
        """A hook before a backward that updates at once."""
        self.trained.placeholder.begin_update(self.begin())
        self.done = True


class OpenLookup(UpdateOnce):
    """A lookup whose backward updates rows: at once, or with others at the end of the pass."""

    __slots__ = ()

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        trained.placeholder.open.add(id(self))
        if self.within >= 0:  # only here does the engine take callbacks for the outer pass
            CollectedGradients.of(trained, self.within)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Mark that rows are updated, or that no backward will come."""
        self.done = True
        self.trained.placeholder.open.discard(id(self))

    def collects(self, call: LookupCall, winners: Tensor, grad: Tensor, eager: bool) -> bool:
        """Keep the gradient until the end of the pass; False: the caller is to update the rows at once."""
        task, arena, placeholder = self.begin(), self.trained.arena, self.trained.placeholder
        if arena.tracks_writes:
            arena.before_write(arena_rows(arena.layout, call.ids_N, call.offsets))
        if not eager or not placeholder.collects(task, self):
            placeholder.begin_update(task)
            self.close()
            return False
        CollectedGradients.of(self.trained, task).add_lookup(self, (call, winners, grad))
        return True


class SameTenants:
    """A hook before the backward of a lookup of elastic rows with update="step": raises if their ids may be others by now."""

    def __init__(self, trained: Trained) -> None:
        self.trained, self.used = trained, -1  # updates of the rows before the first backward

    def __call__(self, grads: Any = None) -> None:
        placeholder = self.trained.placeholder
        if self.used not in (-1, placeholder.updates):
            message = (
                "a second backward through the same graph after a step: elastic rows may have other ids by now; look up again"
            )
            raise BadInput(message, parameter="retain_graph", value=True)
        self.used = placeholder.updates


class OpenRows(SameTenants):
    """A lookup with update="step" of elastic rows, whose tenants stay until its backward; then until `step`."""

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        trained.placeholder.open.add(id(self))

    def close(self) -> None:
        """Mark that gradients are pending. Raise if the rows of an earlier backward may have other ids by now."""
        self()
        self.trained.placeholder.open.discard(id(self))

    def __del__(self) -> None:
        self.trained.placeholder.open.discard(id(self))


class OpenWeight(OpenLookup):
    """A read of all rows of a module with one table."""

    __slots__ = ("used",)

    def __init__(self, trained: Trained) -> None:
        self.used: int | None = None  # updates of the rows before the first backward
        super().__init__(trained)

    def add(self, grad_RD: Tensor) -> None:
        """Add the gradient of all rows to those that are pending or, with update="backward", to those of this pass."""
        placeholder = self.trained.placeholder
        if (size := 4 * grad_RD.numel()) > MOST_DENSE_BYTES:
            message = (
                f"the gradient of weight takes {size:,} bytes; use at most {MOST_DENSE_BYTES:,}. Look up the rows of a batch "
                "(module(ids), sampled negatives), or detach weight, or keep this table an nn.Embedding"
            )
            raise BadInput(message, parameter="weight", value=size, available=MOST_DENSE_BYTES)
        if self.used not in (None, placeholder.updates):
            message = "weight was read before the last update of the rows; read module.weight in every forward"
            raise BadInput(message, parameter="weight", value="kept")
        self.used = placeholder.updates
        grad_RD = (grad_RD.to_dense() if grad_RD.is_sparse else grad_RD).float()
        if placeholder.update == "step":
            placeholder.accumulate(_nonzero_rows(self.trained.arena, grad_RD))
        else:
            CollectedGradients.of(self.trained, self.begin()).add_dense(self, grad_RD)


class CollectedGradients:
    """Gradients of one backward pass for the rows of one module."""

    def __init__(self, trained: Trained, task: int) -> None:
        self.trained, self.task = trained, task
        self._reads: list[OpenLookup] = []
        self._lookups: list[tuple[LookupCall, Tensor, Tensor]] = []
        self._dense_RD: Tensor | None = None
        self._streams: set[torch.cuda.Stream] = set()  # that wrote the gradients

    @classmethod
    def of(cls, trained: Trained, task: int) -> CollectedGradients:
        """The gradients of a pass, which must be the current one if it has none yet."""
        found = trained.placeholder.passes.get(task)
        if found is None:
            trained.placeholder.passes[task] = found = cls(trained, task)
            at_end_of_pass(found.apply)
        return found

    def add_lookup(self, read: OpenLookup, lookup: tuple[LookupCall, Tensor, Tensor]) -> None:
        self._add(read)
        self._lookups.append(lookup)

    def add_dense(self, read: OpenLookup, grad_RD: Tensor) -> None:
        self._add(read)
        self._dense_RD = grad_RD if self._dense_RD is None else self._dense_RD + grad_RD

    def _add(self, read: OpenLookup) -> None:
        self._reads.append(read)
        if (device := self.trained.arena.device).type == "cuda":
            self._streams.add(torch.cuda.current_stream(device))

    @torch.no_grad()
    def apply(self) -> None:
        """Take one optimizer step."""
        if not self._reads:
            return
        with self.trained.placeholder.lock:  # once a read has ended, its rows may get other ids
            self._apply(self.trained, self.trained.arena)

    def _apply(self, trained: Trained, arena: Arena) -> None:
        trained.placeholder.begin_update(self.task)
        for read in self._reads:
            read.close()
        others = [s for s in self._streams if s != torch.cuda.current_stream(arena.device)]
        for stream in others:
            torch.cuda.current_stream(arena.device).wait_stream(stream)
        if self._dense_RD is None and (len(arena.features) == 1 or len(self._lookups) == 1):
            update_bags(arena.arrays, trained.trainer.arrays, *_as_one(self._lookups))
        else:
            parts = [pending_of(arena, *lookup) for lookup in self._lookups]
            parts += [] if self._dense_RD is None else [_nonzero_rows(arena, self._dense_RD)]
            trained.apply(reduce(PendingGradients.plus, parts))
        for stream in others:  # the memory of gradients is theirs
            stream.wait_stream(torch.cuda.current_stream(arena.device))


class _WeightRead(torch.autograd.Function):
    """Attaches a backward to a copy of all rows."""

    @staticmethod
    def forward(ctx: Any, tie: Tensor, read: OpenWeight, copied: tuple[Tensor]) -> Tensor:
        ctx.read = read
        return copied[0]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Any, ...]:
        if is_for_rows(ctx.next_functions[0][0]):
            ctx.read.add(grad_RD)
        return None, None, None


def trained_weight(trained: Trained, values_RD: Tensor) -> Tensor:
    """A copy of all rows whose gradient updates them."""
    return _WeightRead.apply(trained.placeholder, OpenWeight(trained), (values_RD,))  # type: ignore[no-any-return, no-untyped-call]


def is_captured(device: torch.device) -> bool:
    """Whether a user captures a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, parameter: str, what: str) -> None:
    """Raise where a CUDA graph would have to wait for the GPU."""
    if is_captured(device):
        message = (
            f"{what} waits for the GPU, so a CUDA graph cannot record it; capture modules with update='backward' and without "
            "padding_idx, each looked up once in a forward"
        )
        raise BadInput(message, parameter=parameter, tool="torch.cuda.graph")


def pending_of(arena: Arena, call: LookupCall, winners: Tensor, grad: Tensor) -> PendingGradients:
    """The summed gradients of the rows of a lookup."""
    refuse_capture(arena.device, "update", "summing the gradients of distinct rows")
    seen_N = arena_rows(arena.layout, call.ids_N, call.offsets) if arena.cache else call.ids_N[:0]
    return PendingGradients(*sum_row_gradients(arena.layout, call, winners, grad), seen_N)


def _nonzero_rows(arena: Arena, grad_RD: Tensor) -> PendingGradients:
    """The rows of a dense gradient that are not zero. Reading all rows is no lookup: it says nothing about their heat."""
    refuse_capture(arena.device, "weight", "finding the rows of the gradient of weight")
    rows_U = (grad_RD != 0).any(1).nonzero()[:, 0]
    return PendingGradients(rows_U + arena.views(0)[2], grad_RD[rows_U], rows_U[:0])


def _as_one(lookups: Sequence[tuple[LookupCall, Tensor, Tensor]]) -> tuple[LookupCall, Tensor, Tensor]:
    """Lookups of one feature as a single one: (call, winners, gradient)."""
    if len(lookups) == 1:
        return lookups[0]
    calls, winners, grads = zip(*lookups, strict=True)
    ids_N = torch.cat([call.ids_N for call in calls])
    offsets, count = [], 0
    for call in calls:
        offsets.append(call.offsets[:-1] + count)
        count += call.ids_N.numel()
    ends = [*offsets, calls[0].offsets.new_full((1,), count)]
    if calls[0].mode == F.NONE:
        ends = [calls[0].offsets[:1], ends[-1]]
    weights_N = None
    if any(call.weights_N is not None for call in calls):
        ones = [torch.ones(call.ids_N.numel(), dtype=torch.float32, device=ids_N.device) for call in calls]
        weights_N = torch.cat([one if c.weights_N is None else c.weights_N for c, one in zip(calls, ones, strict=True)])
    return calls[0]._replace(ids_N=ids_N, offsets=torch.cat(ends), weights_N=weights_N), torch.cat(winners), torch.cat(grads)
