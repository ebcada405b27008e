"""Launches that come again and again, recorded as a CUDA graph and replayed as one.

The host needs longer to ask for a dozen small launches than the card to carry them out. All that is recorded must stay where it
is for as long as the recorder lives. What comes for the third time is recorded, so what comes once costs nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from .launch import INTERPRETED

_SEEN, _KEPT = 3, 8  # times that the same must have come, and how many are kept


class Recorder:
    """Runs work of one kind. `plainly` makes a context in which that work uses no recordings of its own."""

    def __init__(self, plainly: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._plainly = plainly
        self._seen: dict[Hashable, int] = {}
        self._kept: dict[Hashable, Callable[[], None]] = {}

    def run(self, work: Callable[[], None], device: torch.device, key: Hashable) -> None:
        """`work()`, which launches and never waits or returns anything, and launches the same whenever `key` is the same.

        Nothing is recorded where the key is None.
        """
        if key is None or INTERPRETED or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            work()
            return
        key = torch._C._cuda_getCurrentRawStream(device.index), key
        replay = self._kept.get(key)
        if replay is not None:
            replay()
            return
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen < _SEEN or len(self._kept) >= _KEPT:
            work()
            return
        with self._plainly():
            work()
            self._kept[key] = recorded(work, device)


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
    return partial(torch._C._CUDAGraph.replay, graph)  # past a layer of Python
