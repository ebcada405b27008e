"""A lane: the requests that wait for one version of a model, and the micro-batches they leave in.

Requests that arrive in the same turn of the event loop leave together; with a latency budget (`Limits.wait`) the first one
waits so long for others, or until the batch is full. While a batch is being worked on, those that arrive are the next batch,
so batches grow with load by themselves.

Where the work is done: a hop to another thread and back costs 30 to 60 us, a lookup of 64 rows 10. So what is expected to
take less than `SHORT` is done in the event loop's own thread, and the rest in a thread of the lane, so that a large request
does not keep the loop from answering health checks. The expectation is the time that an id took lately, where fewer than `FEW`
count as so many: below, it is the launch that costs.

A request is dropped before work if its client has left (its future is cancelled) or its deadline has passed. A full queue
refuses at once: a client that is told so can go elsewhere, one that waits cannot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from ..errors import Overloaded, TooLate
from ..protocol.tensors import Array
from .limits import Limits
from .metrics import ModelMetrics
from .model import Model

SHORT = 1e-3  # seconds of work that may be done in the event loop
FEW = 256
_FORGET = 0.1  # how much the last batch counts in the expectation


class Ticket:
    """A request in the queue. `left` and `done` are when its batch left and was answered."""

    __slots__ = ("answer", "arrived", "deadline", "done", "ids", "inputs", "left")

    def __init__(
        self, inputs: Mapping[str, Array], ids: int, deadline: float, answer: asyncio.Future[Mapping[str, Array]]
    ) -> None:
        self.inputs, self.ids, self.deadline, self.answer = inputs, ids, deadline, answer
        self.arrived = self.left = self.done = perf_counter()


class Lane:
    """The queue of one version of a model."""

    def __init__(self, model: Model, limits: Limits, metrics: ModelMetrics) -> None:
        self.model, self.limits, self.metrics = model, limits, metrics
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Ticket] = deque()
        self._leaving: asyncio.Handle | None = None
        self._working = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._worker = ThreadPoolExecutor(1, f"lane-{model.name}")
        self._seconds_per_id = SHORT / FEW  # nothing is known yet: the first batch is not done in the loop

    @property
    def queued(self) -> int:
        return len(self._queue)

    def submit(self, inputs: Mapping[str, Array], ids: int, deadline: float) -> Ticket:
        """Queue a request; `deadline` is on the clock of perf_counter. Its outputs are to be awaited from `answer`."""
        limits, queue = self.limits, self._queue
        if len(queue) >= limits.queue:
            raise Overloaded(
                f"{len(queue)} requests wait for model {self.model.name!r}, the limit is {limits.queue}; try later"
            )
        ticket = Ticket(inputs, ids, deadline, self._loop.create_future())
        queue.append(ticket)
        self._idle.clear()
        if not self._working:
            if len(queue) >= limits.batch and limits.wait and self._leaving is not None:
                self._leaving.cancel()
                self._leaving = self._loop.call_soon(self._leave)
            elif self._leaving is None:
                self._leaving = self._schedule()
        return ticket

    def _schedule(self) -> asyncio.Handle:
        wait = self.limits.wait
        return self._loop.call_later(wait, self._leave) if wait else self._loop.call_soon(self._leave)

    def _leave(self) -> None:
        """Take the next micro-batch from the queue and work on it."""
        self._leaving = None
        batch, ids = self._take()
        if not batch:
            self._go_on()
            return
        self._working = True
        if max(ids, FEW) * self._seconds_per_id < SHORT:
            self._answer(batch, ids, self._work(batch))
            return
        working = self._loop.run_in_executor(self._worker, self._work, batch)
        working.add_done_callback(lambda done: self._answer(batch, ids, done.result()))

    def _take(self) -> tuple[list[Ticket], int]:
        batch: list[Ticket] = []
        ids, now, limits, queue = 0, perf_counter(), self.limits, self._queue
        while queue and len(batch) < limits.batch:
            ticket = queue[0]
            if ticket.answer.done():  # cancelled: the client has left
                queue.popleft()
                continue
            if ticket.deadline <= now:
                queue.popleft()
                ticket.answer.set_exception(TooLate("the deadline passed while the request waited; nothing was looked up"))
                continue
            if batch and ids + ticket.ids > limits.batch_ids:
                break
            ids += ticket.ids
            ticket.left = now
            batch.append(queue.popleft())
        return batch, ids

    def _work(self, batch: Sequence[Ticket]) -> Sequence[Mapping[str, Array] | Exception]:
        """Never raises: an exception of the whole batch is everybody's."""
        try:
            answers = self.model.infer([ticket.inputs for ticket in batch])
            assert len(answers) == len(batch), (len(answers), len(batch))
            return answers
        except Exception as error:
            return [error] * len(batch)

    def _answer(self, batch: Sequence[Ticket], ids: int, answers: Sequence[Mapping[str, Array] | Exception]) -> None:
        now = perf_counter()
        per_id = (now - batch[0].left) / max(ids, FEW)
        self._seconds_per_id += (per_id - self._seconds_per_id) * _FORGET
        self.metrics.batches[len(batch)] += 1
        for ticket, answer in zip(batch, answers, strict=True):
            ticket.done = now
            if ticket.answer.done():  # the client left while its rows were looked up
                continue
            if isinstance(answer, Exception):
                ticket.answer.set_exception(answer)
            else:
                ticket.answer.set_result(answer)
        self._working = False
        self._go_on()

    def _go_on(self) -> None:
        if self._queue:
            if self._leaving is None:
                # What waits now has waited for a batch already: its budget is spent.
                self._leaving = self._loop.call_soon(self._leave)
        else:
            self._idle.set()

    async def close(self) -> None:
        """Answer all that wait, then close the model."""
        await self._idle.wait()
        self._worker.shutdown(wait=False)
        await self._loop.run_in_executor(None, self.model.close)
