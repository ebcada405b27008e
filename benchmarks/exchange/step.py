"""Measured steps of the exchange benchmark: forked ranks, the dense part, clocks, kernel counters.

The dense part is a small network over the mean of each sequence's rows and something of their context, and waits that make it
last as long on every rank as it would on a card of its own: two cores cannot compute for eight. Half of it lies below the
lookup, as the bottom network of a DLRM: before it in forward, after it in backward.

    step        forward and backward, on the slowest rank
    exposed     what a step takes beyond the dense part
    exchange    what a rank spends in exchanges of it, waiting for others included; only where nothing overlaps
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.exchange.network import Counted, Net, counted, sent_again
from benchmarks.runner.record import brief

TIMEOUT = timedelta(seconds=200)
HIDDEN = 64  # columns of the dense network
APART, OVERLAP = "apart", "overlap"  # exchange and computing one after the other, or at the same time

Job = dict[str, Any]
Input = tuple[Tensor, Tensor]  # rows, offsets


class Clock:
    """Seconds in exchanges, by part of the step."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0}
        self.part = "forward"
        self._inside = threading.local()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Exchanges of torch.distributed are timed meanwhile: how long they hold up who calls them, or waits for them."""
        plain, waiting = dist.all_to_all_single, dist.Work.wait
        dist.all_to_all_single, dist.Work.wait = self._timed(plain), self._timed(waiting)  # type: ignore[method-assign]
        try:
            yield
        finally:
            dist.all_to_all_single, dist.Work.wait = plain, waiting  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            main = threading.current_thread() is threading.main_thread()
            if not main or getattr(self._inside, "yes", False):  # one call waits within the other
                return function(*arguments, **named)
            self._inside.yes, begun = True, time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[self.part] += time.perf_counter() - begun
                self._inside.yes = False

        return call


class Wait(torch.autograd.Function):
    """A third of the dense part's time in forward, the rest in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return grad, None


class Dense(nn.Module):
    """The part that is not sharded: rows of sequences, or their sums where they come `pooled`, and their context to a loss.
    Half of its time goes to the context."""

    def __init__(self, dim: int, seconds: float, pooled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seconds, self.pooled = seconds / 2, pooled
        self.context = nn.Parameter(torch.zeros(dim))
        self.layers = nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def below(self) -> Tensor:
        """The part before the lookup."""
        context_D: Tensor = Wait.apply(self.context, self.seconds)  # type: ignore[no-untyped-call]
        return context_D

    def forward(self, context_D: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        sums_SD = values
        if not self.pooled:
            sample_N = torch.repeat_interleave(offsets.diff())
            sums_SD = values.new_zeros(len(offsets) - 1, values.shape[1]).index_add(0, sample_N, values)
        means_SD = Wait.apply(sums_SD / offsets.diff()[:, None].clamp(min=1), self.seconds)  # type: ignore[no-untyped-call]
        loss: Tensor = self.layers(means_SD + context_D).square().mean()
        return loss

    def alone(self, batches: Sequence[Input]) -> float:
        """Seconds of the dense part alone, on all ranks at once, with rows that are already there: it computes a little
        besides waiting."""
        dist.barrier()
        seconds = []
        for rows_N, ends in batches:
            count = len(ends) - 1 if self.pooled else len(rows_N)
            values = torch.zeros(count, len(self.context), requires_grad=True)
            begun = time.perf_counter()
            self(self.below(), values, ends).backward()
            seconds.append(time.perf_counter() - begun)
        slowest_S = torch.tensor(seconds)
        dist.all_reduce(slowest_S, dist.ReduceOp.MAX)
        return float(slowest_S.median())


class Steps:
    """Steps of one job on this rank. `look_up` gets the rows of a batch; `ahead` gets the next batch before that;
    `meet` waits for all ranks."""

    def __init__(
        self, net: Net, clock: Clock, meet: Callable[[], Any], look_up: Callable[[Any], Tensor], dense: Any,
        ahead: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self.net, self.clock, self.meet, self.look_up, self.dense, self.ahead = net, clock, meet, look_up, dense, ahead

    def warm_up(self, batch: Input, samples: int = 8) -> None:
        """A step of a few samples: connections are made by the first."""
        ends = batch[1][: samples + 1]
        self._step((batch[0][: int(ends[-1])], ends), None)
        dist.barrier()

    def flow(self, batches: Sequence[Any]) -> dict[str, Any]:
        """Seconds of a step where exchanges go on behind it: of these steps, with one before and one after them under way."""
        self._step(batches[-1], batches[0])
        begun = time.perf_counter()
        for batch, later in zip(batches, [*batches[1:], batches[0]], strict=True):
            self._step(batch, later)
        seconds = torch.tensor([(time.perf_counter() - begun) / len(batches)])
        self._step(batches[0], None)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return {"step": float(seconds)}

    def run(self, batches: Sequence[Any]) -> dict[str, Any]:
        """Measurements of all ranks in these steps, without overlap between steps."""
        before, seconds = self._kernel(), []
        self.clock.seconds = dict.fromkeys(self.clock.seconds, 0.0)
        for batch in batches:
            begun = time.perf_counter()
            self._step(batch, None)
            seconds.append(time.perf_counter() - begun)
        within = {part: spent / len(batches) for part, spent in self.clock.seconds.items()}
        after = self._kernel()
        mine = (seconds, within, {link: after[link].since(before[link]) for link in after})
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return _gathered(everyone, len(batches))

    def _step(self, batch: Any, later: Any) -> None:
        self.clock.part = "forward"
        context_D = self.dense.below()
        if self.ahead is not None and later is not None:
            self.ahead(later)
        loss = self.dense(context_D, self.look_up(batch), batch[1])
        self.clock.part = "backward"
        loss.backward()

    def _kernel(self) -> dict[str, Counted]:
        """Bytes that the node's interfaces sent, and TCP's retransmissions, on its first rank. No rank sends meanwhile: ranks
        meet before and after it, and not over the network."""
        self.meet()
        found = {}
        if self.net.owner and not dist.get_rank() % self.net.cards:
            each = counted()
            found = {"node": each["lo"], "cluster": each["eth0"], "again": Counted(0, sent_again())}
        self.meet()
        return found


def _gathered(everyone: list[Any], steps: int) -> dict[str, Any]:
    """Measurements of all ranks: per step, the mean over ranks."""
    slowest_S = np.max([each[0] for each in everyone], axis=0)  # a step is as long as the slowest rank takes
    kernel = {}
    for link in ("node", "cluster"):
        found = [each[2][link] for each in everyone if link in each[2]]
        if found:
            share = len(everyone) * steps
            kernel[link] = {"bytes": sum(c.bytes for c in found) / share, "carried": sum(c.carried for c in found) / share}
    again = sum(each[2]["again"].frames for each in everyone if "again" in each[2])
    return {
        "step": float(np.mean(slowest_S)),
        "seconds": [round(float(each), 4) for each in slowest_S],
        "exchange": {part: float(np.mean([each[1][part] for each in everyone])) for part in everyone[0][1]},
        "kernel": kernel,
        "again": again,
    }


def load_batches(folder: Path, job: Job, rank: int, ranks: int, batch: int) -> tuple[int, list[Input]]:
    """The rows of the job's table, and the samples of this rank in each step, which are spread over the second half. Ranks take
    turns: where a log has fewer steps than are measured, no rank gets the same samples again."""
    with np.load(folder / f"{job['log']}.npz") as found:
        rows, values_N, offsets = int(found["rows"]), found["values_N"], found["offsets"]
    blocks = (len(offsets) - 1) // (batch * ranks)
    inputs = []
    for step in range(job["steps"]):
        first = (step * blocks // job["steps"] * ranks + (rank + step) % ranks) * batch
        cut = offsets[first : first + batch + 1]
        inputs.append((torch.from_numpy(values_N[cut[0] : cut[-1]]), torch.from_numpy(cut - cut[0])))
    return rows, inputs


# -- processes ------------------------------------------------------------------------------------------------------------


def fork_ranks(task: Path, run: Callable[[dict[str, Any]], None]) -> int:
    """Fork one process per rank on its node, which runs the task; torch is loaded once. Returns the exit status."""
    given = json.loads(task.read_text(encoding="utf-8"))
    net = Net(*given["net"])
    given["meet"] = multiprocessing.get_context("fork").Barrier(net.nodes * net.cards, timeout=TIMEOUT.total_seconds()).wait
    left = {_forked(rank, net, given, run) for rank in range(net.nodes * net.cards)}
    while left:
        process, status = os.wait()
        left.discard(process)
        if status:
            time.sleep(1)  # for the others to say why
            return 1
    return 0


def _forked(rank: int, net: Net, given: dict[str, Any], run: Callable[[dict[str, Any]], None]) -> int:
    """A process with the variables that torchrun sets."""
    if child := os.fork():
        return child
    node, card = divmod(rank, net.cards)
    os.environ |= net.environment() | {
        "RANK": str(rank), "LOCAL_RANK": str(card), "GROUP_RANK": str(node), "MASTER_PORT": str(given["port"]),
        "WORLD_SIZE": str(net.nodes * net.cards), "LOCAL_WORLD_SIZE": str(net.cards),
    }  # fmt: skip
    try:
        net.enter(node)
        run(given)
    except BaseException as error:
        print(f"rank {rank}: {brief(error)}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def add_line(path: str, result: Job) -> None:
    """Append a finished job to the file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
