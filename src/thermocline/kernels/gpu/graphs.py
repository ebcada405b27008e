"""Repeated launches, recorded as a CUDA graph and replayed as one. Recorded memory must stay in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from .launch import INTERPRETED

_SEEN, _KEPT = 3, 8  # repetitions before a recording, and recordings kept


class Recorder:
    """Runs work and records what repeats. `plainly` makes a context in which the work uses no recordings of its own."""

    def __init__(self, plainly: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._plainly = plainly
        self._seen: dict[Hashable, int] = {}
        self._kept: dict[Hashable, Callable[[], None]] = {}

    def run(self, work: Callable[[], None], device: torch.device, key: Hashable) -> None:
        """Run `work`, which only launches kernels, the same ones for the same key. A key of None is not recorded."""
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


class _CaptureStreams(threading.local):
    """Streams to record on, one a device and thread. PyTorch hands out 32 streams in turn: a new one for every recording could
    be the stream of another thread, whose launches would be recorded too."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.cuda.Stream] = {}


_capture_streams = _CaptureStreams()


def recorded(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that replays the launches of `work`, which must have run before: loading kernels cannot be recorded."""
    graph = torch.cuda.CUDAGraph()
    here = torch.cuda.current_stream(device)
    streams = _capture_streams.by_device
    capture = streams.get(device) or streams.setdefault(device, torch.cuda.Stream(device))
    capture.wait_stream(here)
    with torch.cuda.stream(capture):
        graph.capture_begin(capture_error_mode="thread_local")
        work()
        graph.capture_end()
    here.wait_stream(capture)
    return partial(torch._C._CUDAGraph.replay, graph)  # past a layer of Python
