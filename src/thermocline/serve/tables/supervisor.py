"""The processes of the cards: started, told what to load, and started again when one dies.

A thread waits for each process. When one ends that nobody ended, another takes its place, gets the memory of all versions
again, and is ready. Lookups do not notice: the memory was never gone. A card that dies while it loads is replaced by whoever
waits for its answer, and its share of the work is done again. One that keeps dying is given more and more time between two
attempts, and after `ATTEMPTS` loading gives up with `CardDown`. All cards are then ended: answers that nobody took would be
taken for those of the next question. Their threads replace them.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from thermocline.errors import FormatError
from thermocline.serve.errors import CardDown, NotReady

from .forkserver import Born, Nursery
from .load_job import Job
from .segments import Segment
from .shard_server import receive, send

LOGGER = logging.getLogger("thermocline.serve")  # the server writes its lines as JSON
ATTEMPTS = 5
_PAUSE_S, _LONGEST_S = 0.05, 5.0


class Held(NamedTuple):
    """A version that cards hold: its job as a file in memory, and the segments."""

    job: int
    segments: Sequence[Segment]


class CardProcess:
    """One running process, and the socket to it."""

    def __init__(self, born: Born) -> None:
        self.socket, self.pid, self._life = born

    def ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        with suppress(OSError):  # it is gone: the answer will say so
            send(self.socket, message, list(descriptors))

    def answer(self) -> dict[str, Any]:
        """EOFError if it is gone, or was ended here."""
        try:
            return receive(self.socket)[0]
        except OSError:
            raise EOFError from None

    def wait(self, seconds: float | None = None) -> bool:
        """Until it has ended, or for so long; whether it has."""
        poll = select.poll()
        poll.register(self._life, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def end(self) -> None:
        self.socket.close()  # which it takes as the end
        if not self.wait(5):
            self.kill()
            self.wait()
        with suppress(ChildProcessError):  # it is ours only if its nursery is gone and we are process 1, as in a container
            os.waitid(os.P_PIDFD, self._life, os.WEXITED | os.WNOHANG)

    def kill(self) -> None:
        """Whatever it does; it cannot be asked any more, and what it answered is gone."""
        self.socket.close()
        self.strike()

    def strike(self) -> None:
        """The same to a card whose answer another thread may wait for: it hears that the card is gone."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._life, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._life)


class Supervisor:
    """So many cards, kept alive."""

    def __init__(self, cards: int, first: int = 0) -> None:
        self._first = first  # the number of the first card, where others have those before
        self._lock = threading.RLock()
        self._held: dict[str, Held] = {}
        self._deaths = [0] * cards
        self._closed = False
        self._ready = [True] * cards
        self._cards: list[CardProcess] = []
        self._nursery = Nursery(first)
        try:
            for number in range(cards):
                self._cards.append(CardProcess(self._nursery.start(number)))
            for number in range(cards):
                threading.Thread(target=self._watch, args=(number,), name=f"card-{number}", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def _watch(self, number: int) -> None:
        while True:
            card = self._cards[number]
            card.wait()
            with self._lock, suppress(CardDown):  # each attempt waits for longer than the one before
                if self._closed:
                    return
                if self._cards[number] is card:
                    self._replace(number)
            if self._cards[number] is card:
                time.sleep(_PAUSE_S)  # without the lock, so that somebody else gets it

    def _replace(self, number: int) -> None:
        """Start a card anew, and give it what it held."""
        self._ready[number] = False
        self._deaths[number] += 1
        self._log(logging.WARNING, "a card has ended, and is started again", number)
        self._cards[number].end()
        if self._deaths[number] > 1:
            time.sleep(min(_PAUSE_S * 2 ** min(self._deaths[number], 10), _LONGEST_S))
        self._cards[number] = CardProcess(self._nursery.start(number))
        for version, held in self._held.items():
            self._cards[number].ask({"do": "hold", "version": version}, _descriptors(held))
            try:
                self._cards[number].answer()
            except EOFError:
                return  # its watcher tries again
        self._ready[number] = True
        self._log(logging.INFO, "a card is back", number)

    def _log(self, level: int, event: str, number: int) -> None:
        fields = {"card": self._first + number, "pid": self._cards[number].pid, "deaths": self._deaths[number]}
        LOGGER.log(level, event, extra={"fields": fields})

    def _ask_all(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Every card's answer; a card that dies meanwhile is replaced, and asked again."""
        with self._lock:
            try:
                for card in self._cards:
                    card.ask(message, descriptors)
                return [self._answer(number, message, descriptors) for number in range(len(self._cards))]
            except BaseException:
                for card in self._cards:
                    card.kill()
                raise

    def _answer(self, number: int, message: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        for _ in range(ATTEMPTS):
            try:
                answer = self._cards[number].answer()
                self._deaths[number] = 0
                return answer
            except EOFError:
                if self._closed:
                    raise NotReady("the cards were closed while they loaded") from None
                self._replace(number)
                self._cards[number].ask(message, descriptors)
        raise CardDown(self._first + number, f"it ended {ATTEMPTS} times while it was asked to {message['do']}")

    def load(self, version: str, job: Job, segments: Sequence[Segment]) -> int:
        """Have the rows of a version put in place by all cards; bytes that were read. Checksums are taken at the same time, and
        nothing is served before all of them are right."""
        text = job.to_bytes()
        descriptor = os.memfd_create("thermocline-job")
        os.write(descriptor, text)
        held = Held(descriptor, segments)
        with self._lock:
            if self._closed:  # else cards would be started for it that nobody ends
                os.close(descriptor)
                raise NotReady("the cards are closed")
            self._held[version] = held
            done = self._ask_all({"do": "hold", "version": version}, _descriptors(held))
            done += self._ask_all({"do": "verify", "version": version})
            for phase in range(len(job.phases)):
                done += self._ask_all({"do": "load", "version": version, "phase": phase})
            done += self._ask_all({"do": "verified", "version": version})
        if errors := [answer["error"] for answer in done if "error" in answer]:
            self.drop(version)
            raise FormatError(errors[0])
        return sum(answer.get("bytes", 0) for answer in done[len(self._cards) :])

    def drop(self, version: str) -> None:
        """Let cards forget a version."""
        with self._lock:
            held = self._held.pop(version, None)
            if held is not None:
                try:
                    if not self._closed:
                        self._ask_all({"do": "drop", "version": version})
                finally:
                    os.close(held.job)

    @property
    def pids(self) -> list[int]:
        return [card.pid for card in self._cards]

    @property
    def ready(self) -> list[bool]:
        """Whether each card is there; its memory is, in any case."""
        return list(self._ready)

    def close(self) -> None:
        """A load that is under way is not waited for: its cards end."""
        self._closed = True
        while not self._lock.acquire(timeout=_PAUSE_S):
            for card in list(self._cards):
                card.strike()
        try:
            for card in self._cards:
                card.end()
            self._nursery.close()
            for held in self._held.values():
                os.close(held.job)
            self._held.clear()
        finally:
            self._lock.release()


def _descriptors(held: Held) -> list[int]:
    return [held.job, *(segment.descriptor for segment in held.segments)]
