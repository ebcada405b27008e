"""A lane: the requests that wait for one version of a model, and the micro-batches they leave in.

Without a latency budget a request that finds the lane idle is answered on the spot. While a batch is being worked on, those
that arrive are the next batch, so batches grow with load by themselves. With a budget (`Limits.wait`) the first request waits
so long for others, or until the batch is full: worth it where a launch costs more than a lookup, as on a GPU.

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

from thermocline.serve.errors import Overloaded, TooLate
from thermocline.serve.protocol.tensors import Array

from .limits import Limits
from .metrics import ModelMetrics
from .served_model import Model

SHORT = 3e-3  # seconds of work that may be done in the event loop
FEW = 256
# The expectation goes half of the way to a batch that was faster, and up by a tenth for one that was slower, whatever it took:
# on a busy machine any batch can be slow once, and none is fast by chance.
_FASTER, _SLOWER = 0.5, 1.1


class Ticket:
    """A request. `left` and `done` are when its batch left and was answered; only one that is queued has a future `answer`."""

    __slots__ = ("answer", "arrived", "deadline", "done", "ids", "inputs", "left")
    answer: asyncio.Future[Mapping[str, Array]]

    def __init__(self, inputs: Mapping[str, Array], ids: int, deadline: float) -> None:
        self.inputs, self.ids, self.deadline = inputs, ids, deadline
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
        self._seconds_per_id = 0.0
        # A model that waits for other hosts must not keep the loop waiting with it.
        self._short = 0.0 if getattr(model, "waits", False) else SHORT

    @property
    def queued(self) -> int:
        return len(self._queue)

    async def ask(self, ticket: Ticket) -> Mapping[str, Array]:
        """The outputs of a request."""
        answer = self.at_once(ticket)
        return await self._enqueue(ticket) if answer is None else answer

    def at_once(self, ticket: Ticket) -> Mapping[str, Array] | None:
        """The outputs of a request if it can be answered now: nothing is before it, there is no budget to wait for others
        with, and it is soon done. Else None: it has to be asked for."""
        if not self.is_free(ticket.ids):
            return None
        (answer,) = self._work((ticket,))
        ticket.done = perf_counter()
        self.metrics.batches[1] += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def is_free(self, ids: int) -> bool:
        """Whether a request of so many ids can be answered now."""
        if self._working or self._queue or self.limits.wait:
            return False
        return (ids if ids > FEW else FEW) * self._seconds_per_id < self._short

    def note(self, ids: int, seconds: float) -> None:
        """A request of so many ids was answered, in so many seconds, by somebody who found the lane free."""
        self.metrics.batches[1] += 1
        self._learn(seconds / (ids if ids > FEW else FEW))

    def _enqueue(self, ticket: Ticket) -> asyncio.Future[Mapping[str, Array]]:
        limits, queue = self.limits, self._queue
        if len(queue) >= limits.queue:
            raise Overloaded(
                f"{len(queue)} requests wait for model {self.model.name!r}, the limit is {limits.queue}; try later"
            )
        answer = ticket.answer = self._loop.create_future()
        queue.append(ticket)
        self._idle.clear()
        if not self._working:
            if len(queue) >= limits.batch and limits.wait and self._leaving is not None:
                self._leaving.cancel()
                self._leaving = self._loop.call_soon(self._leave)
            elif self._leaving is None:
                self._leaving = self._schedule()
        return answer

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
        if max(ids, FEW) * self._seconds_per_id < self._short:
            self._answer(batch, self._work(batch))
            return
        self.metrics.handed += 1
        working = self._loop.run_in_executor(self._worker, self._work, batch)
        working.add_done_callback(lambda done: self._answer(batch, done.result()))

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
        began = perf_counter()
        try:
            answers = self.model.infer([ticket.inputs for ticket in batch])
            assert len(answers) == len(batch), (len(answers), len(batch))
            return answers
        except Exception as error:
            return [error] * len(batch)
        finally:
            ids = batch[0].ids if len(batch) == 1 else sum([ticket.ids for ticket in batch])
            self._learn((perf_counter() - began) / (ids if ids > FEW else FEW))

    def _learn(self, per_id: float) -> None:
        expected = self._seconds_per_id
        if per_id < expected:
            self._seconds_per_id = expected + (per_id - expected) * _FASTER
        else:
            self._seconds_per_id = min(per_id, expected * _SLOWER) if expected else per_id

    def _answer(self, batch: Sequence[Ticket], answers: Sequence[Mapping[str, Array] | Exception]) -> None:
        now = perf_counter()
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
