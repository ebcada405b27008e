"""Failures in the communication thread: waits end, and tensors that a GPU still uses stay alive."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch

from thermocline.distributed.comm_stream import CommStream
from thermocline.distributed.comm_thread import CommThread
from thermocline.distributed.process_groups import RankGroup
from thermocline.kernels.gpu import errors as gpu_errors


class Stream:
    """A CUDA stream that records its calls."""

    device = torch.device("cuda")

    def __init__(self, *_):
        self.asked = []

    def record_event(self):
        return "event"

    def wait_event(self, event):
        self.asked.append(event)

    def synchronize(self):
        self.asked.append("synchronize")


@pytest.fixture
def streams(monkeypatch):
    """The created CUDA streams, in order."""
    made = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: [made.append(Stream()), made[-1]][1])
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    gpu_errors.error_buffer(torch.zeros(1))  # is made once for all tests
    monkeypatch.setattr(gpu_errors, "ErrorBuffer", lambda device: f"an error buffer on {device}")
    return made


def test_a_job_that_could_not_be_submitted_is_not_waited_for(streams, monkeypatch):
    def fail(_):
        raise torch.OutOfMemoryError

    comm_thread = CommThread(torch.device("cuda"))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "current_stream", fail)
        with pytest.raises(torch.OutOfMemoryError):
            comm_thread.submit(lambda: None)
    assert comm_thread.is_idle
    done = []
    comm_thread.submit(lambda: done.append(1))
    comm_thread.wait()
    assert done == [1] and comm_thread.end()


def test_tensors_of_a_job_live_until_the_gpu_is_done_even_if_it_failed(streams):
    class LocalShard:
        pass

    held = LocalShard()
    alive = []
    seen = weakref.ref(held)

    def job(held=held):
        (stream,) = streams
        synchronize = stream.synchronize
        stream.synchronize = lambda: [synchronize(), alive.append(seen() is not None)]
        raise ZeroDivisionError

    comm_thread = CommThread(torch.device("cuda"))
    comm_thread.submit(job)
    del job, held
    with pytest.raises(ZeroDivisionError):
        comm_thread.wait()
    assert streams[0].asked == ["event", "synchronize"] and alive == [True]
    assert comm_thread.end()


def test_collectives_run_with_the_gpu_of_the_rows_as_current_device(monkeypatch):
    """Objects under NCCL; and nothing is made of it elsewhere."""
    current = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: current.append(device) or contextlib.nullcontext())
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        with RankGroup((0, 1), 0, ("card", "node"), None, device=device).collective():
            pass
    assert current == [torch.device("cuda", 3)]


def test_kernels_of_the_thread_report_to_its_own_error_buffer(streams):
    tensor, found = torch.zeros(1), []
    comm_thread, other = CommThread(torch.device("cuda")), CommThread(torch.device("cpu"))
    for each in (comm_thread, other):
        each.submit(lambda: found.append(gpu_errors.error_buffer(tensor)))
        each.wait()
        assert each.end()
    assert found == ["an error buffer on cuda", gpu_errors.error_buffer(tensor)]


def test_the_caller_waits_for_what_a_failed_job_has_launched(monkeypatch):
    """Tensors of the job are freed on the caller's stream: their memory would be used again while kernels read it."""
    caller = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", type("Own", (Stream,), {"wait_stream": lambda *_: None}))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    exchanges = CommStream(Stream.device)
    with pytest.raises(ZeroDivisionError):
        exchanges.launch(lambda: 1 / 0)
    exchanges.wait()
    assert caller.asked == ["event"]
