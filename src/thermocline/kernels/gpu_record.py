"""Launches that come again and again with inputs of the same sizes, recorded as a CUDA graph and replayed as one.

The host needs longer to ask for a dozen small launches than the card to carry them out. What is recorded works on copies of its
inputs, at addresses that stay; all else that it touches must stay where it is for as long as the recorder lives. Sizes are
recorded when they come for the third time, so what comes once costs nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .gpu_launch import INTERPRETED

_SEEN, _KEPT = 3, 4  # times that sizes must have come, and how many are kept


class Recorder:
    """Runs work of one kind. `plainly` makes a context in which that work uses no recordings of its own."""

    def __init__(self, plainly: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._plainly = plainly
        self._seen: dict[tuple[object, ...], int] = {}
        self._kept: dict[tuple[object, ...], tuple[list[Tensor], Callable[[], None]]] = {}

    def run(self, work: Callable[..., None], *inputs: Tensor) -> None:
        """`work(*inputs)`, which launches and never waits, returns or depends on anything but the inputs' sizes."""
        first = inputs[0]
        if INTERPRETED or not first.is_cuda or torch.cuda.is_current_stream_capturing():
            work(*inputs)
            return
        stream = torch._C._cuda_getCurrentRawStream(first.device.index)
        key = (stream, *((tuple(t.shape), t.dtype) for t in inputs))
        found = self._kept.get(key)
        if found is not None:
            copies, replay = found
            for copy, given in zip(copies, inputs, strict=True):
                copy.copy_(given)
            replay()
            return
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] < _SEEN or len(self._kept) >= _KEPT:
            work(*inputs)
            return
        with self._plainly():
            work(*inputs)
            copies = [given.clone(memory_format=torch.contiguous_format) for given in inputs]
            self._kept[key] = copies, recorded(lambda: work(*copies), first.device)


class _Asides(threading.local):
    """Streams to record on, one a device and thread. PyTorch has 32 streams and gives them out in turn: if every recording took
    another, it would soon be one that a thread beside this one works on, whose launches would be recorded too."""

    def __init__(self) -> None:
        self.of: dict[torch.device, torch.cuda.Stream] = {}


_asides = _Asides()


def recorded(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What replays the launches of `work`, which must have run before: loading, done once, cannot be recorded."""
    graph = torch.cuda.CUDAGraph()
    here = torch.cuda.current_stream(device)
    aside = _asides.of.get(device) or _asides.of.setdefault(device, torch.cuda.Stream(device))
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        graph.capture_begin(capture_error_mode="thread_local")
        work()
        graph.capture_end()
    here.wait_stream(aside)
    return graph.replay
