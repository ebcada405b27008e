"""The thread of exchanges, where something fails: nobody waits for ever, and nothing is dropped that a card still uses."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch

from thermocline.distributed.exchange.comm_thread import Lane
from thermocline.distributed.process_groups import Group
from thermocline.kernels.gpu import errors as gpu_errors


class Stream:
    """A stream of a card that is not there: what was asked of it."""

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
    """A card's streams, in the order in which they were made."""
    made = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: [made.append(Stream()), made[-1]][1])
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    gpu_errors.error_buffer(torch.zeros(1))  # is made once for all tests
    monkeypatch.setattr(gpu_errors, "ErrorBuffer", lambda device: f"an error buffer on {device}")
    return made


def test_what_could_not_be_submitted_is_not_waited_for(streams, monkeypatch):
    def fail(_):
        raise RuntimeError("out of memory")

    lane = Lane(torch.device("cuda"))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "current_stream", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            lane.submit(lambda: None)
    assert lane.is_idle
    done = []
    lane.submit(lambda: done.append(1))
    lane.wait()
    assert done == [1] and lane.end()


def test_what_a_job_holds_is_dropped_when_the_card_is_done_also_where_it_failed(streams):
    class Held:
        pass

    held = Held()
    alive = []
    seen = weakref.ref(held)

    def job(held=held):
        (stream,) = streams
        synchronize = stream.synchronize
        stream.synchronize = lambda: [synchronize(), alive.append(seen() is not None)]
        raise ValueError("half of it was launched")

    lane = Lane(torch.device("cuda"))
    lane.submit(job)
    del job, held
    with pytest.raises(ValueError, match="half of it"):
        lane.wait()
    assert streams[0].asked == ["event", "synchronize"] and alive == [True]
    assert lane.end()


def test_what_is_sent_from_a_card_is_sent_with_it_as_the_current_one(monkeypatch):
    """Objects under NCCL; and nothing is made of it elsewhere."""
    current = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: current.append(device) or contextlib.nullcontext())
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        with Group((0, 1), 0, ("card", "node"), None, device=device).together():
            pass
    assert current == [torch.device("cuda", 3)]


def test_kernels_of_a_lane_report_to_a_mailbox_of_its_own(streams):
    tensor, found = torch.zeros(1), []
    lane, other = Lane(torch.device("cuda")), Lane(torch.device("cpu"))
    for each in (lane, other):
        each.submit(lambda: found.append(gpu_errors.error_buffer(tensor)))
        each.wait()
        assert each.end()
    assert found == ["an error buffer on cuda", gpu_errors.error_buffer(tensor)]
