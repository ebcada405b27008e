"""Processes of cards: forked by one that is ready, seen to end, and started again when that one is gone."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from thermocline.serve.errors import CardDown
from thermocline.serve.tables import forkserver as module
from thermocline.serve.tables.forkserver import Nursery
from thermocline.serve.tables.supervisor import CardProcess

PATIENCE_S = 120.0


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def answers(card: CardProcess) -> bool:
    card.ask({"do": "drop", "version": "of nobody"})
    return card.answer() == {}


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def test_cards_are_forked_and_each_answers_for_itself(nursery: Nursery) -> None:
    cards = [CardProcess(nursery.start(number)) for number in range(3)]
    assert len({card.pid for card in cards}) == 3 and all(map(answers, cards))
    assert {parent_of(card.pid) for card in cards} == {nursery.process.pid}
    cards[1].socket.close()  # the others have no copy of it, so it sees that it is closed
    assert cards[1].wait(PATIENCE_S) and answers(cards[0]) and answers(cards[2])
    for card in cards:
        card.end()


def test_a_killed_card_is_seen_to_end_and_is_forgotten_when_the_next_is_started(nursery: Nursery) -> None:
    card = CardProcess(nursery.start(0))
    assert answers(card) and not card.wait(0)
    os.kill(card.pid, signal.SIGKILL)
    assert card.wait(PATIENCE_S)
    with pytest.raises(EOFError):
        card.answer()
    other = CardProcess(nursery.start(0))
    assert answers(other)
    with pytest.raises(ProcessLookupError):
        os.kill(card.pid, 0)  # not even as a zombie
    other.end()


def test_cards_outlive_their_nursery_and_another_takes_its_place(nursery: Nursery) -> None:
    first = CardProcess(nursery.start(0))
    before = nursery.process
    before.kill()
    second = CardProcess(nursery.start(1))
    assert nursery.process.pid != before.pid
    assert answers(first) and answers(second)
    for card in (first, second):
        card.end()


def fail_to_start(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EAGAIN, "no more processes")


def fail_to_open() -> Any:
    raise OSError(errno.EMFILE, "no more descriptors")


@pytest.mark.parametrize("what", ["process", "sockets", "descriptor"])
def test_what_is_missing_to_start_a_card_is_a_card_that_is_down_and_the_next_attempt_may_succeed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery, arrived = Nursery(first=7), module.receive

    def receive_alone(source: Any) -> Any:
        answer, descriptors = arrived(source)
        for descriptor in descriptors:
            os.close(descriptor)
        return answer, []

    with monkeypatch.context() as now:
        if what == "process":
            nursery.process.kill()
            now.setattr(module.subprocess, "Popen", fail_to_start)
        elif what == "sockets":
            now.setattr(module.socket, "socketpair", fail_to_open)
        else:
            now.setattr(module, "receive", receive_alone)
        with pytest.raises(CardDown) as down:
            nursery.start(2)
        assert down.value.card == 9  # as all hosts together count
    card = CardProcess(nursery.start(2))
    assert answers(card)
    card.end()
    nursery.close()
