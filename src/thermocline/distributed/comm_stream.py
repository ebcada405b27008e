"""Exchanges of gradients on a CUDA stream of their own, launched by the caller's thread: how NCCL overlaps.

Collectives of several communicators on one GPU deadlock if ranks run them in different orders, because each waits for its
peers. Two things make the order the same. The caller launches exchanges where its program calls backward, which is the same
place on all ranks; the thread of `comm_thread.py` would launch them at any time between the collectives of DDP. And NCCL runs
operations of all communicators in the order of their launches: from version 2.26, with NCCL_LAUNCH_ORDER_IMPLICIT=1. Without
both nothing overlaps.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

ORDER_VARIABLE, ORDER_VERSION = "NCCL_LAUNCH_ORDER_IMPLICIT", (2, 26)


class CommStream:
    """A stream for exchanges. A job starts after what its caller launched before; `wait` orders what follows after the jobs."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        # A job keeps tensors of its caller's stream alive, whose memory may be used again only after the job.
        self._launched: list[tuple[Callable[[], None], torch.cuda.Stream, torch.cuda.Event]] = []

    def launch(self, job: Callable[[], None]) -> None:
        """Launch the kernels and messages of a job, and return."""
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            try:
                job()
            finally:  # a job that fails may have launched kernels
                self._launched.append((job, caller, self._stream.record_event()))

    def wait(self) -> None:
        """Let the current stream wait for all jobs. The host does not wait."""
        for _, caller, event in self._launched:
            for stream in {caller, torch.cuda.current_stream(self._device)}:
                stream.wait_event(event)
        self._launched.clear()


def runs_in_launch_order() -> bool:
    """Whether NCCL runs operations of all communicators in the order of their launches."""
    return os.environ.get(ORDER_VARIABLE) == "1" and torch.cuda.nccl.version()[:2] >= ORDER_VERSION
