"""Threads on one processor while requests come one by one, and anywhere when they do not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from running import until

from thermocline.serve.server import cpu_affinity as together
from thermocline.serve.server.cpu_affinity import AWAY, FREE, KEPT, Together

ALLOWED = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="there is one processor")


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What is done to the thread of a loop must not be done to that of all tests."""
    with ThreadPoolExecutor(1) as one:
        return one.submit(work).result()


class Second(NamedTuple):
    """What a look finds."""

    requests: int
    sleeps: float  # for each
    waited: float
    ran: float
    handed: int = 0


class Loop:
    """The thread that calls this stands for an event loop's; what is counted of it is what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests = self.handed = self.sleeps = 0
        self.waited = self.ran = self.now = 0.0
        monkeypatch.setattr(together, "process_time", lambda: self.ran)
        monkeypatch.setattr(together, "monotonic", lambda: self.now)
        monkeypatch.setattr(together, "_of_this_thread", lambda: (self.sleeps, self.waited))
        self.together = Together((), lambda: (self.requests, self.handed))

    def pass_a(self, second: Second) -> set[int]:
        """Where the thread may run after it."""
        self.requests += second.requests
        self.sleeps += round(second.requests * second.sleeps)
        self.waited += second.waited
        self.ran += second.ran
        self.handed += second.handed
        self.now += 1.0
        self.together.look()
        assert self.together.kept == (os.sched_getaffinity(0) != ALLOWED)
        return os.sched_getaffinity(0)

    def kept_in(self, seconds: Iterable[Callable[[bool], Second]]) -> list[bool]:
        """Whether threads were together after each second, where what is found depends on whether they were before it."""
        return [len(self.pass_a(second(self.together.kept))) == 1 for second in seconds]


# As measured on two processors, free and kept; first on a quiet machine, where the time that threads ran was not written down.
def one_client(kept: bool) -> Second:
    return Second(1500, 1.3, 0.18, 0.6) if kept else Second(1500, 2.9, 0.075, 0.7)


def eight_clients(kept: bool) -> Second:
    return Second(4000, 0.39, 0.25, 0.5) if kept else Second(4000, 0.9, 0.07, 0.9)


def one_client_of_a_busy_machine(kept: bool) -> Second:
    return Second(1100, 2.9, 0.03, 0.42) if kept else Second(1000, 2.95, 0.08, 0.55)


def one_client_of_many_ids(kept: bool) -> Second:
    """2,048, beside busy processes."""
    return Second(380, 2.9, 0.02, 0.3) if kept else Second(350, 2.7, 0.28, 0.27)


def three_clients_of_many_ids(kept: bool) -> Second:
    assert not kept
    return Second(450, 2.1, 0.35, 0.43)


def eight_clients_of_a_busy_machine(kept: bool) -> Second:
    return Second(3000, 0.93, 0.165, 0.8) if kept else Second(2600, 0.47, 0.2, 0.85)


def one_client_and_others(kept: bool) -> Second:
    """Others use the processor that threads are kept on."""
    return Second(900, 1.4, 0.45, 0.3) if kept else Second(1400, 3.0, 0.06, 0.6)


def large_requests(kept: bool) -> Second:
    return Second(60, 3.8, 0.05, 0.3, handed=60)


def few_large_requests(kept: bool) -> Second:
    return Second(9, 3.8, 0.05, 0.3, handed=9)


def nothing(kept: bool) -> Second:
    return Second(0, 0.0, 0.0, 0.0)


STAYS_FREE = [False] * (AWAY + 1)


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
        ([one_client_and_others] * (2 * AWAY + 4), [True, *STAYS_FREE, True, *STAYS_FREE]),
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
def test_threads_are_together_while_one_processor_is_enough_and_stay_so(
    seconds: list[Callable[[bool], Second]], kept: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        loop = Loop(monkeypatch)
        assert loop.kept_in(seconds) == kept
        loop.together.let_go()
        assert os.sched_getaffinity(0) == ALLOWED

    in_a_thread(work)


def test_a_few_requests_more_or_less_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        loop = Loop(monkeypatch)
        assert loop.pass_a(Second(FREE.requests - 1, 3.0, 0.0, 0.1)) == ALLOWED  # too few to matter
        kept = loop.pass_a(Second(FREE.requests, 3.0, 0.0, 0.1))
        assert loop.pass_a(Second(FREE.requests - 1, 1.4, 0.0, 0.1)) == kept
        assert loop.pass_a(Second(KEPT.requests - 1, 1.4, 0.0, 0.1)) == ALLOWED

    in_a_thread(work)


def test_sleeps_of_the_thread_are_counted() -> None:
    def by_the_kernel() -> int:
        return int(Path("/proc/thread-self/status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def work() -> tuple[int, int, int]:
        begin = by_the_kernel()
        while by_the_kernel() < begin + 70:  # a sleep so short may be over before it begins
            time.sleep(1e-6)
        return by_the_kernel(), together._of_this_thread()[0], by_the_kernel()

    before, counted, after = in_a_thread(work)
    assert before <= counted <= after


def test_a_thread_that_a_kept_one_makes_runs_anywhere_after_the_next_look_or_at_once_if_it_asks(
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
        with ThreadPoolExecutor(1, initializer=loop.together.release) as released:
            assert released.submit(os.sched_getaffinity, 0).result() == ALLOWED
        loop.together.let_go()

    in_a_thread(work)


def test_where_threads_may_run_is_as_somebody_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        loop, one = Loop(monkeypatch), {min(ALLOWED)}
        os.sched_setaffinity(0, one)
        loop.together.release()
        assert os.sched_getaffinity(0) == one
        loop.requests, loop.sleeps, loop.now = 1500, 4500, 1.0
        loop.together.look()
        assert not loop.together.kept and os.sched_getaffinity(0) == one

    in_a_thread(work)


def test_threads_start_where_their_processors_may_not_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("by a filter of system calls")

    def work() -> None:
        loop = Loop(monkeypatch)
        loop.pass_a(one_client(False))
        with monkeypatch.context() as now:
            now.setattr(os, "sched_setaffinity", refuse)
            with ThreadPoolExecutor(1, initializer=loop.together.release) as pool:
                assert pool.submit(int, "7").result() == 7

    in_a_thread(work)


def test_a_server_knows_the_threads_that_its_requests_pass(served: Any) -> None:
    def known() -> set[str]:
        return {together._name(thread).strip() for thread in served.server._together._mine()}

    until(lambda: "event_engine" in known(), "none has this name")  # which threads give themselves
    assert len(served.server._together._mine()) >= 3  # and the loop's, and the one that waits for events
