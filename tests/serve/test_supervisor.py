"""Cards that are kept alive: also when no process can be started for a while, and after a question that was given up."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from thermocline.serve.errors import CardDown
from thermocline.serve.tables import forkserver as nursery
from thermocline.serve.tables import supervisor
from thermocline.serve.tables.supervisor import Supervisor

PATIENCE_S = 120.0


@pytest.fixture
def cards() -> Iterator[Supervisor]:
    cards = Supervisor(3)
    yield cards
    cards.close()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Released whenever a card was replaced."""
    times, replace = threading.Semaphore(0), Supervisor._replace

    def and_tell(self: Supervisor, number: int) -> None:
        replace(self, number)
        times.release()

    monkeypatch.setattr(Supervisor, "_replace", and_tell)
    yield times


def test_a_card_is_replaced_when_processes_can_be_started_again(
    cards: Supervisor, replaced: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, before = threading.Semaphore(0), cards.pids

    def fail(*_: Any, **__: Any) -> Any:
        tried.release()
        raise OSError(errno.EAGAIN, "no more processes")

    with monkeypatch.context() as now:
        now.setattr(nursery.subprocess, "Popen", fail)
        cards._nursery.process.kill()
        os.kill(before[1], signal.SIGKILL)
        for _ in range(7):  # by the third time that somebody asks for a card
            assert tried.acquire(timeout=PATIENCE_S)
        assert cards.ready == [True, False, True]
    assert replaced.acquire(timeout=PATIENCE_S)
    assert cards.ready == [True] * 3
    assert [pid == old for pid, old in zip(cards.pids, before, strict=True)] == [True, False, True]


def test_the_log_has_the_end_of_a_card_and_its_return(
    cards: Supervisor, replaced: threading.Semaphore, caplog: pytest.LogCaptureFixture
) -> None:
    before = cards.pids[1]
    with caplog.at_level(logging.INFO, "thermocline.serve"):
        os.kill(before, signal.SIGKILL)
        assert replaced.acquire(timeout=PATIENCE_S)
    said = [
        (line.levelname, line.getMessage(), vars(line)["fields"]["card"], vars(line)["fields"]["pid"])
        for line in caplog.records
    ]
    assert said == [
        ("WARNING", "a card has ended, and is started again", 1, before),
        ("INFO", "a card is back", 1, cards.pids[1]),
    ]


def test_a_question_that_was_given_up_is_not_answered_to_the_next_one(
    cards: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = os.memfd_create("not a job")
    os.write(file, b"?")
    hold = {"do": "hold", "version": "1"}
    assert all("error" in answer for answer in cards._ask_all(hold, [file]))
    with monkeypatch.context() as now:
        now.setattr(supervisor, "ATTEMPTS", 0)
        with pytest.raises(CardDown):
            cards._ask_all(hold, [file])
    assert cards._ask_all({"do": "drop", "version": "1"}) == [{}] * 3
    os.close(file)


def test_a_card_that_died_very_often_is_still_replaced(
    cards: Supervisor, replaced: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LONGEST_S", 0.0)
    before = cards.pids[0]
    cards._deaths[0] = 5000
    os.kill(before, signal.SIGKILL)
    assert replaced.acquire(timeout=PATIENCE_S)
    assert cards.pids[0] != before and cards.ready == [True] * 3
