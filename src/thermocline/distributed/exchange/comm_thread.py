"""A thread on which exchanges go on behind the caller, one after another.

Every card gives its lane the same exchanges in the same order, so cards meet in each of them, whatever their callers do
meanwhile; and while a caller exchanges by itself its lane is idle. What a lane has not done yet is waited for wherever somebody
could see the difference.

On a card a lane has a stream of its own. A job begins when what its caller has launched until then is done, and it is done when
all that it launched is: so whoever has waited for it may use what it made, and what it held may be given back. What is made in
one stream and dropped by another one, memory knows only if it is told (`used_here`). What kernels of a lane find to be wrong,
the lane alone hears of.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from queue import SimpleQueue

import torch
from torch import Tensor

Job = Callable[[], None]


class _State:
    """What the thread of a lane knows: not the lane itself, which may end before it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.jobs: SimpleQueue[tuple[Job, torch.cuda.Event | None] | None] = SimpleQueue()
        self.changed = threading.Condition()
        self.submitted = self.done = 0
        self.errors: list[Exception] = []


class Lane:
    """Jobs of one collection. The thread begins with the first of them. Any thread may wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._state = _State(device)
        self._thread: threading.Thread | None = None
        self._ending: Callable[[], object] | None = None  # of the thread

    @property
    def is_own(self) -> bool:
        """Whether this is asked in the lane itself."""
        return threading.current_thread() is self._thread

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to wait for; in the lane itself there never is."""
        return self._state.done == self._state.submitted or self.is_own

    def submit(self, job: Job) -> None:
        """Let a job be done after those that were submitted before."""
        state = self._state
        event = torch.cuda.current_stream(state.device).record_event() if state.device.type == "cuda" else None
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(state,), name="thermocline-exchange", daemon=True)
            self._thread.start()
            self._ending = weakref.finalize(self, _end, state, self._thread)
        with state.changed:
            state.submitted += 1
        state.jobs.put((job, event))

    def wait(self) -> None:
        """Wait until all jobs are done; raise what the first that failed has raised."""
        assert not self.is_own
        state = self._state
        with state.changed:
            last = state.submitted
            state.changed.wait_for(lambda: state.done >= last)
            if state.errors:
                error = state.errors[0]
                state.errors.clear()
                raise error

    def end(self) -> bool:
        """End the thread when its jobs are done; whether it has ended. Nothing can be submitted after it."""
        if self._ending is not None:
            self._ending()
        return self._thread is None or not self._thread.is_alive()


def _work(state: _State) -> None:
    stream: torch.cuda.Stream | None = None
    if state.device.type == "cuda":
        torch.cuda.set_device(state.device)
        stream = torch.cuda.Stream(state.device)
    while (given := state.jobs.get()) is not None:
        try:
            with torch.no_grad(), nullcontext() if stream is None else _apart(stream):
                if not state.errors:  # an exchange that failed has left the cards out of step
                    if stream is not None and given[1] is not None:
                        stream.wait_event(given[1])
                    given[0]()
                if stream is not None:
                    stream.synchronize()
        except Exception as error:
            if stream is not None:  # which may still use what the job holds
                with suppress(Exception):
                    stream.synchronize()
            state.errors.append(error)
        given = None  # what it holds is not needed until the next one comes
        with state.changed:
            state.done += 1
            state.changed.notify_all()


@contextmanager
def _apart(stream: torch.cuda.Stream) -> Iterator[None]:
    """On a stream, with an error buffer of this thread's own."""
    from thermocline.kernels.gpu.errors import thread_error_buffer

    with torch.cuda.stream(stream), thread_error_buffer(stream.device):
        yield


def used_here(tensors: Iterable[Tensor]) -> None:
    """Tensors that were made in the lane are used on the current stream: when they go, memory waits for it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _end(state: _State, thread: threading.Thread) -> None:
    """Let the thread end: one that Python kills while it shuts down may abort the whole process."""
    state.jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout=10)
