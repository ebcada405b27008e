"""Threads on one processor while requests come one by one, and anywhere when they do not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from thermocline.serve.front import together
from thermocline.serve.front.together import FEWEST, Together

ALLOWED = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="there is one processor")


@pytest.fixture(autouse=True)
def a_machine_that_nobody_else_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "WAITED", float("inf"))


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What is done to the thread of a loop must not be done to that of all tests."""
    with ThreadPoolExecutor(1) as one:
        return one.submit(work).result()


class Loop:
    """The thread that calls this stands for an event loop's."""

    def __init__(self) -> None:
        self.answered = 0
        self.together = Together((), lambda: self.answered)

    def answer(self, requests: int, sleeps: int) -> set[int]:
        """Where the thread may run after so many requests, with so many sleeps for each."""
        for _ in range(requests * sleeps):
            time.sleep(1e-6)
        self.answered += requests
        self.together.look()
        return os.sched_getaffinity(0)


def test_requests_that_come_one_by_one_keep_threads_on_one_processor_and_others_let_them_go() -> None:
    def work() -> None:
        loop = Loop()
        assert loop.answer(FEWEST - 1, 4) == ALLOWED and not loop.together.kept  # too few to matter
        kept = loop.answer(3 * FEWEST, 4)
        assert len(kept) == 1 and kept < ALLOWED and loop.together.kept
        assert loop.answer(0, 0) == kept  # nothing was asked: nothing changes
        assert loop.answer(20 * FEWEST, 0) == ALLOWED and not loop.together.kept
        assert len(loop.answer(3 * FEWEST, 4)) == 1
        loop.together.let_go()
        assert os.sched_getaffinity(0) == ALLOWED

    in_a_thread(work)


def test_a_thread_that_a_kept_one_makes_runs_anywhere_after_the_next_look_or_at_once_if_it_asks() -> None:
    def work() -> None:
        loop, born, ended = Loop(), threading.Event(), threading.Event()

        def live() -> None:
            born.set()
            ended.wait()

        kept = loop.answer(3 * FEWEST, 4)
        other = threading.Thread(target=live)
        other.start()
        born.wait()
        assert other.native_id is not None and os.sched_getaffinity(other.native_id) == kept
        assert loop.answer(0, 0) == kept and os.sched_getaffinity(other.native_id) == ALLOWED
        ended.set()
        other.join()
        with ThreadPoolExecutor(1, initializer=loop.together.release) as released:
            assert released.submit(os.sched_getaffinity, 0).result() == ALLOWED
        loop.together.let_go()

    in_a_thread(work)


def test_a_thread_that_waits_for_its_processor_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        loop = Loop()
        assert len(loop.answer(3 * FEWEST, 4)) == 1
        monkeypatch.setattr(together, "WAITED", -1.0)  # any wait is too long
        assert loop.answer(3 * FEWEST, 4) == ALLOWED

    in_a_thread(work)


def test_a_server_knows_the_threads_that_its_requests_pass(served: Any) -> None:
    known = served.server._together._mine()
    names = {together._name(thread).strip() for thread in known}
    assert "event_engine" in names and len(known) >= 3  # and the loop's, and the one that waits for events
