"""A thread that runs exchanges in the background, one after another.

Every rank submits the same exchanges in the same order, so the collectives of all ranks match whatever their callers do
meanwhile. Callers wait for the thread before they exchange themselves or read rows.

On a GPU the thread has its own CUDA stream. A job starts after the work that its caller launched before, and is done when all
work that it launched is done. Kernel errors are reported only to the thread that launched the kernel.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from queue import SimpleQueue

import torch
from torch import Tensor

CommJob = Callable[[], None]


class _QueueState:
    """State shared with the thread, which must not keep the `CommThread` alive."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.jobs: SimpleQueue[tuple[CommJob, torch.cuda.Event | None] | None] = SimpleQueue()
        self.changed = threading.Condition()
        self.submitted = self.done = 0
        self.errors: list[Exception] = []


class CommThread:
    """Background exchanges of one collection. The thread starts with the first job; any thread may wait."""

    def __init__(self, device: torch.device) -> None:
        self._state = _QueueState(device)
        self._thread: threading.Thread | None = None
        self._finalizer: Callable[[], object] | None = None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    @property
    def is_idle(self) -> bool:
        """Whether the caller has no job to wait for; always true inside the thread."""
        return self._state.done == self._state.submitted or self.is_current

    def submit(self, job: CommJob) -> None:
        """Run a job after all jobs submitted before."""
        state = self._state
        event = torch.cuda.current_stream(state.device).record_event() if state.device.type == "cuda" else None
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(state,), name="thermocline-exchange", daemon=True)
            self._thread.start()
            self._finalizer = weakref.finalize(self, _end, state, self._thread)
        with state.changed:
            state.submitted += 1
        state.jobs.put((job, event))

    def wait(self) -> None:
        """Wait until all jobs are done, and raise the error of the first job that failed."""
        assert not self.is_current
        state = self._state
        with state.changed:
            last = state.submitted
            state.changed.wait_for(lambda: state.done >= last)
            if state.errors:
                error = state.errors[0]
                state.errors.clear()
                raise error

    def end(self) -> bool:
        """End the thread after its jobs; returns whether it has ended. No job may be submitted afterwards."""
        if self._finalizer is not None:
            self._finalizer()
        return self._thread is None or not self._thread.is_alive()


def _work(state: _QueueState) -> None:
    stream: torch.cuda.Stream | None = None
    if state.device.type == "cuda":
        torch.cuda.set_device(state.device)
        stream = torch.cuda.Stream(state.device)
    while (given := state.jobs.get()) is not None:
        try:
            with torch.no_grad(), nullcontext() if stream is None else _on_stream(stream):
                if not state.errors:  # after a failed exchange the ranks are out of step
                    if stream is not None and given[1] is not None:
                        stream.wait_event(given[1])
                    given[0]()
                if stream is not None:
                    stream.synchronize()
        except Exception as error:
            if stream is not None:  # launched kernels may still use tensors of the job
                with suppress(Exception):
                    stream.synchronize()
            state.errors.append(error)
        given = None  # releases the tensors of the job
        with state.changed:
            state.done += 1
            state.changed.notify_all()


@contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    from thermocline.kernels.gpu.errors import thread_error_buffer  # needs Triton, which CPU-only installations lack

    with torch.cuda.stream(stream), thread_error_buffer(stream.device):
        yield


def record_use(tensors: Iterable[Tensor]) -> None:
    """Mark tensors of the thread's stream as used on the current stream, so that the allocator reuses their memory after it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _end(state: _QueueState, thread: threading.Thread) -> None:
    """End the thread: a thread that Python kills at shutdown may abort the process."""
    state.jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout=10)
