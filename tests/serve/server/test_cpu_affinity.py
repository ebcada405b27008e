"""CPU affinity: threads are pinned while requests come one at a time, and unpinned under load."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_server import until

from thermocline.serve.server import cpu_affinity
from thermocline.serve.server.cpu_affinity import BACKOFF, PINNED, UNPINNED, CpuAffinity

ALLOWED = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="there is one processor")


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Affinity of the tests' own thread must not change."""
    with ThreadPoolExecutor(1) as one:
        return one.submit(work).result()


class Second(NamedTuple):
    """The load of one second."""

    requests: int
    sleeps: float  # for each
    waited: float
    ran: float
    worker_batches: int = 0


class Loop:
    """The calling thread stands for an event loop's; a test sets its counters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests = self.worker_batches = self.sleeps = 0
        self.waited = self.ran = self.now = 0.0
        monkeypatch.setattr(cpu_affinity, "process_time", lambda: self.ran)
        monkeypatch.setattr(cpu_affinity, "monotonic", lambda: self.now)
        monkeypatch.setattr(cpu_affinity, "_sleeps_and_wait", lambda: (self.sleeps, self.waited))
        self.affinity = CpuAffinity((), lambda: (self.requests, self.worker_batches))

    def pass_a(self, second: Second) -> set[int]:
        """The processors of the thread after this second."""
        self.requests += second.requests
        self.sleeps += round(second.requests * second.sleeps)
        self.waited += second.waited
        self.ran += second.ran
        self.worker_batches += second.worker_batches
        self.now += 1.0
        self.affinity.update()
        assert self.affinity.pinned == (os.sched_getaffinity(0) != ALLOWED)
        return os.sched_getaffinity(0)

    def pinned_in(self, seconds: Iterable[Callable[[bool], Second]]) -> list[bool]:
        """Whether threads are pinned after each second; the load depends on whether they were pinned before."""
        return [len(self.pass_a(second(self.affinity.pinned))) == 1 for second in seconds]


# As measured on two processors, unpinned and pinned.
def one_client(kept: bool) -> Second:
    return Second(1500, 1.3, 0.18, 0.6) if kept else Second(1500, 2.9, 0.075, 0.7)


def eight_clients(kept: bool) -> Second:
    return Second(4000, 0.39, 0.25, 0.5) if kept else Second(4000, 0.9, 0.07, 0.9)


def one_client_of_a_busy_machine(kept: bool) -> Second:
    return Second(1100, 2.9, 0.03, 0.42) if kept else Second(1000, 2.95, 0.08, 0.55)


def one_client_of_many_ids(kept: bool) -> Second:
    """2,048 ids, beside busy processes."""
    return Second(380, 2.9, 0.02, 0.3) if kept else Second(350, 2.7, 0.28, 0.27)


def three_clients_of_many_ids(kept: bool) -> Second:
    assert not kept
    return Second(450, 2.1, 0.35, 0.43)


def eight_clients_of_a_busy_machine(kept: bool) -> Second:
    return Second(3000, 0.93, 0.165, 0.8) if kept else Second(2600, 0.47, 0.2, 0.85)


def one_client_and_others(kept: bool) -> Second:
    """Other processes use the processor that threads are pinned to."""
    return Second(900, 1.4, 0.45, 0.3) if kept else Second(1400, 3.0, 0.06, 0.6)


def large_requests(kept: bool) -> Second:
    return Second(60, 3.8, 0.05, 0.3, worker_batches=60)


def few_large_requests(kept: bool) -> Second:
    return Second(9, 3.8, 0.05, 0.3, worker_batches=9)


def nothing(kept: bool) -> Second:
    return Second(0, 0.0, 0.0, 0.0)


BACKED_OFF = [False] * (BACKOFF + 1)


@pytest.mark.parametrize(
    "seconds, kept",
    [
        ([one_client] * 30, [True] * 30),
        ([one_client_of_a_busy_machine] * 30, [True] * 30),
        ([one_client_of_many_ids] * 30, [True] * 30),
        ([three_clients_of_many_ids] * 30, [False] * 30),
        ([eight_clients] * 30, [False] * 30),
        ([one_client] + [eight_clients] * 30 + [one_client], [True] + [False] * 30 + [True]),
        ([one_client] + [eight_clients_of_a_busy_machine] * 30 + [one_client], [True] + [False] * 30 + [True]),
        ([one_client, nothing, nothing, one_client], [True, False, False, True]),
        ([large_requests] * 3 + [one_client, large_requests], [False] * 3 + [True, False]),
        ([one_client] + [few_large_requests] * 3, [True] + [False] * 3),
        ([one_client_and_others] * (2 * BACKOFF + 4), [True, *BACKED_OFF, True, *BACKED_OFF]),
    ],
    ids=[
        "one",
        "one, busy",
        "one, many ids",
        "three, many ids",
        "eight",
        "one and eight",
        "one and eight, busy",
        "idle",
        "large",
        "few large",
        "others",
    ],
)
def test_threads_are_pinned_while_one_processor_is_enough(
    seconds: list[Callable[[bool], Second]], kept: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        loop = Loop(monkeypatch)
        assert loop.pinned_in(seconds) == kept
        loop.affinity.unpin()
        assert os.sched_getaffinity(0) == ALLOWED

    in_a_thread(work)


def test_few_requests_do_not_pin_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        loop = Loop(monkeypatch)
        assert loop.pass_a(Second(UNPINNED.requests - 1, 3.0, 0.0, 0.1)) == ALLOWED  # too few
        kept = loop.pass_a(Second(UNPINNED.requests, 3.0, 0.0, 0.1))
        assert loop.pass_a(Second(UNPINNED.requests - 1, 1.4, 0.0, 0.1)) == kept
        assert loop.pass_a(Second(PINNED.requests - 1, 1.4, 0.0, 0.1)) == ALLOWED

    in_a_thread(work)


def test_sleeps_of_the_thread_are_counted() -> None:
    def by_the_kernel() -> int:
        return int(Path("/proc/thread-self/status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def work() -> tuple[int, int, int]:
        begin = by_the_kernel()
        while by_the_kernel() < begin + 70:  # a short sleep may end before it begins
            time.sleep(1e-6)
        return by_the_kernel(), cpu_affinity._sleeps_and_wait()[0], by_the_kernel()

    before, counted, after = in_a_thread(work)
    assert before <= counted <= after


def test_new_threads_are_unpinned_by_the_next_update_or_by_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work() -> None:
        loop, born, ended = Loop(monkeypatch), threading.Event(), threading.Event()

        def live() -> None:
            born.set()
            ended.wait()

        kept = loop.pass_a(one_client(False))
        other = threading.Thread(target=live)
        other.start()
        born.wait()
        assert other.native_id is not None and os.sched_getaffinity(other.native_id) == kept
        assert loop.pass_a(one_client(True)) == kept and os.sched_getaffinity(other.native_id) == ALLOWED
        ended.set()
        other.join()
        with ThreadPoolExecutor(1, initializer=loop.affinity.release) as released:
            assert released.submit(os.sched_getaffinity, 0).result() == ALLOWED
        loop.affinity.unpin()

    in_a_thread(work)


def test_a_changed_affinity_of_the_process_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        loop, one = Loop(monkeypatch), {min(ALLOWED)}
        os.sched_setaffinity(0, one)
        loop.affinity.release()
        assert os.sched_getaffinity(0) == one
        loop.requests, loop.sleeps, loop.now = 1500, 4500, 1.0
        loop.affinity.update()
        assert not loop.affinity.pinned and os.sched_getaffinity(0) == one

    in_a_thread(work)


def test_threads_start_where_affinity_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("by a filter of system calls")

    def work() -> None:
        loop = Loop(monkeypatch)
        loop.pass_a(one_client(False))
        with monkeypatch.context() as now:
            now.setattr(os, "sched_setaffinity", refuse)
            with ThreadPoolExecutor(1, initializer=loop.affinity.release) as pool:
                assert pool.submit(int, "7").result() == 7

    in_a_thread(work)


def test_a_server_finds_the_threads_of_its_requests(served: Any) -> None:
    def known() -> set[str]:
        return {cpu_affinity._name(thread).strip() for thread in served.server._affinity._request_threads()}

    until(lambda: "event_engine" in known(), "gRPC has no such thread")
    assert len(served.server._affinity._request_threads()) >= 3  # with the loop's, and gRPC's poller
