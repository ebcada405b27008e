"""Dynamic batching: the queue of one model version, and the batches that it executes.

A request that finds the batcher idle is executed at once. Requests that arrive during a batch form the next one, so batches
grow with load. With a maximum queue delay (`ServerLimits.wait`) the first request waits for others.

A hop to another thread and back costs 30 to 60 us, a lookup of 64 rows 10. So a batch that is expected to take less than
`MAX_LOOP_SECONDS` runs in the event loop's thread, and a longer one in a worker thread. The expectation is the recent time for
each id; fewer than `MIN_IDS` count as `MIN_IDS`, because the launch dominates.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from thermocline.serve.errors import DeadlineExceeded, Overloaded
from thermocline.serve.protocol.tensors import Array
from thermocline.serve.served_model import ServableModel

from .config import ServerLimits
from .metrics import ModelMetrics

MAX_LOOP_SECONDS = 3e-3
MIN_IDS, MAX_LOOP_IDS = 256, 1 << 13
# The expectation moves half of the way to a faster batch, and up by a tenth after a slower one: on a busy machine any batch can
# be slow once, and none is fast by chance.
_FASTER, _SLOWER = 0.5, 1.1


class QueuedRequest:
    """Inputs and timestamps of a request: when it arrived, when its batch started, when its batch was done."""

    __slots__ = ("arrived", "deadline", "done", "future", "ids", "inputs", "started")
    future: asyncio.Future[Mapping[str, Array]]  # only of a request in the queue

    def __init__(self, inputs: Mapping[str, Array], ids: int, deadline: float) -> None:
        self.inputs, self.ids, self.deadline = inputs, ids, deadline
        self.arrived = self.started = self.done = perf_counter()


class DynamicBatcher:
    """Queue and batches of one model version. All methods but `execute` belong to the event loop's thread."""

    def __init__(self, model: ServableModel, limits: ServerLimits, metrics: ModelMetrics) -> None:
        self.model, self.limits, self.metrics = model, limits, metrics
        self._loop = asyncio.get_running_loop()
        self._queue: deque[QueuedRequest] = deque()
        self._scheduled: asyncio.Handle | None = None
        self._executing = False
        self._drained = asyncio.Event()
        self._drained.set()
        self._worker = ThreadPoolExecutor(1, f"batcher-{model.name}")
        self._seconds_per_id = 0.0
        # A model that waits for other hosts must not block the loop.
        self._max_loop_seconds = 0.0 if getattr(model, "waits", False) else MAX_LOOP_SECONDS

    @property
    def queued(self) -> int:
        return len(self._queue)

    def is_idle(self, ids: int) -> bool:
        """Whether a request of this size may be executed now, in the event loop."""
        if self._executing or self._queue or self.limits.wait:
            return False
        return self._runs_in_loop(ids)

    def _runs_in_loop(self, ids: int) -> bool:
        """Whether a batch is expected to be fast. The times of narrow features tell too little about many wide rows."""
        return ids <= MAX_LOOP_IDS and (ids if ids > MIN_IDS else MIN_IDS) * self._seconds_per_id < self._max_loop_seconds

    def execute(self, batch: Sequence[QueuedRequest]) -> Sequence[Mapping[str, Array] | Exception]:
        """Results of a batch. Never raises: an exception of the batch is the result of each of its requests."""
        started = perf_counter()
        try:
            results = self.model.infer([request.inputs for request in batch])
            assert len(results) == len(batch), (len(results), len(batch))
        except Exception as error:
            results = [error] * len(batch)
        done = perf_counter()
        for request in batch:
            request.started, request.done = started, done
        self.record(len(batch), sum([request.ids for request in batch]), done - started)
        return results

    def record(self, requests: int, ids: int, seconds: float) -> None:
        """Count an executed batch, and learn from its time."""
        self.metrics.batches[requests] += 1
        expected, found = self._seconds_per_id, seconds / (ids if ids > MIN_IDS else MIN_IDS)
        if found < expected:
            self._seconds_per_id = expected + (found - expected) * _FASTER
        else:
            self._seconds_per_id = min(found, expected * _SLOWER) if expected else found

    def enqueue(self, request: QueuedRequest) -> asyncio.Future[Mapping[str, Array]]:
        """Queue a request. Raises `Overloaded` if the queue is full."""
        limits, queue = self.limits, self._queue
        if len(queue) >= limits.queue:
            waiting = f"{len(queue)} requests wait for model {self.model.name!r}"
            raise Overloaded(f"{waiting}, the limit is {limits.queue}; try later")
        request.future = self._loop.create_future()
        queue.append(request)
        self._drained.clear()
        if not self._executing:
            if len(queue) >= limits.batch and limits.wait and self._scheduled is not None:
                self._scheduled.cancel()
                self._scheduled = self._loop.call_soon(self._start_batch)
            elif self._scheduled is None and limits.wait:
                self._scheduled = self._loop.call_later(limits.wait, self._start_batch)
            elif self._scheduled is None:
                self._scheduled = self._loop.call_soon(self._start_batch)
        return request.future

    def _start_batch(self) -> None:
        self._scheduled = None
        batch, ids = self._take_batch()
        if not batch:
            self._schedule_next()
            return
        self._executing = True
        if self._runs_in_loop(ids):
            self._finish_batch(batch, self.execute(batch))
            return
        self.metrics.worker_batches += 1
        executing = self._loop.run_in_executor(self._worker, self.execute, batch)
        executing.add_done_callback(lambda done: self._finish_batch(batch, done.result()))

    def _take_batch(self) -> tuple[list[QueuedRequest], int]:
        """The next batch of the queue, without cancelled and expired requests, and its ids."""
        batch: list[QueuedRequest] = []
        ids, now, limits, queue = 0, perf_counter(), self.limits, self._queue
        while queue and len(batch) < limits.batch:
            request = queue[0]
            if request.future.done():  # the client cancelled
                queue.popleft()
            elif request.deadline <= now:
                queue.popleft()
                request.future.set_exception(DeadlineExceeded("the deadline passed in the queue; nothing was looked up"))
            elif batch and ids + request.ids > limits.batch_ids:
                break
            else:
                ids += request.ids
                batch.append(queue.popleft())
        return batch, ids

    def _finish_batch(self, batch: Sequence[QueuedRequest], results: Sequence[Mapping[str, Array] | Exception]) -> None:
        for request, result in zip(batch, results, strict=True):
            if request.future.done():  # the client cancelled during the batch
                continue
            if isinstance(result, Exception):
                request.future.set_exception(result)
            else:
                request.future.set_result(result)
        self._executing = False
        self._schedule_next()

    def _schedule_next(self) -> None:
        if not self._queue:
            self._drained.set()
        elif self._scheduled is None:
            # Requests in the queue have waited for a batch already: their delay is spent.
            self._scheduled = self._loop.call_soon(self._start_batch)

    async def close(self) -> None:
        """Execute all queued requests, then close the model."""
        await self._drained.wait()
        self._worker.shutdown(wait=False)
        await self._loop.run_in_executor(None, self.model.close)
