"""The front's side of cards on other hosts: connections to them, rows fetched in one round trip, and which of them are there.

A lookup runs on the front as ever: the kernel turns rows into addresses. Segments of other hosts have addresses too, which no
memory has (`FAR`). Between finding and pooling, those are collected, each row once, asked for from all hosts at the same time
as places on their cards, and the records that come back are pooled from where they landed. So answers are the same to the
bit however cards are spread over hosts, and whatever precision, weights or mode.

    address = FAR | host << 48 | card of the host << 40 | byte of its segment

A thread asks every host every `BEAT` seconds for a sign of life. One that does not answer is lost: its cards have no address
from then on, so lookups in them fail at once, naming the card, and all others go on. When it is back, everything is loaded
anew, beside what is served. A group that cannot be loaded stays without that host, alone, and is tried again with every sign
of life.
"""

from __future__ import annotations

import atexit
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.errors import FormatError
from thermocline.serve.errors import CardDown
from thermocline.serve.tables.load_job import Job
from thermocline.serve.tables.row_split import Rows
from thermocline.serve.tables.segments import Arrangement, Bytes, Words

from . import frames as wire
from .rendezvous import Meeting, cards_of, meet

FAR = 1 << 62
BEAT = 1.0  # seconds between signs of life
SILENT, STUCK = 5.0, 60.0  # seconds until a machine that is silent, and a process that does not answer, is lost
LINGER = 60.0  # seconds that hosts keep a version after another took its place
_HOST, _CARD = 48, 40


@dataclass(frozen=True)
class Far:
    """The segment of a card of another host: an address that only `fetch` understands."""

    host: int
    card: int  # of that host

    def data_ptr(self) -> int:
        return FAR | self.host << _HOST | self.card << _CARD


class OtherHost:
    """One host: a connection for rows, one for messages, one for signs of life."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        self.number, self._meeting = number, meeting
        self.lost, self._broken = True, False
        self.without: WeakSet[Any] = WeakSet()  # groups that have nothing on it since it came back
        self.rows_lock, self._control_lock, self._beats_lock = (threading.Lock() for _ in range(3))
        self.cards: dict[str, tuple[list[int], list[bool]]] = {}  # of a group: processes, and whether they are there

    def connect(self) -> None:
        where = self._meeting.where(self.number)
        self.rows, self._beats, self._control = (self._open(where, seconds) for seconds in (STUCK, STUCK, None))
        self.tell({"do": "forget"})  # what it may have from before
        self.lost = self._broken = False

    def _open(self, where: tuple[str, int], seconds: float | None) -> socket.socket:
        connection = socket.create_connection(where, SILENT)
        connection.settimeout(STUCK)
        wire.prepare(connection, SILENT)
        connection.sendall(self._meeting.token)
        wire.exactly(connection, 1)
        connection.settimeout(seconds)  # messages may take as long as loading takes
        return connection

    def tell(self, message: dict[str, Any], *data: Any) -> dict[str, Any]:
        """What a host answers to a message; what went wrong there goes wrong here."""
        with self._control_lock:
            try:
                self._control.sendall(wire.CONTROL)
                wire.tell(self._control, message, *data)
                said, _ = wire.hear(self._control)
            except BaseException:
                self._broken = True  # the next answer may be to this message
                raise
        if "error" in said:
            raise FormatError(f"host {self.number}: {said['error']}")
        return said

    def say_goodbye(self) -> None:
        """The last message. It goes where signs of life do: among the others it would wait for a load."""
        if self._beats_lock.acquire(timeout=SILENT):
            try:
                self._beats.sendall(wire.CONTROL)
                wire.tell(self._beats, {"do": "end"})
            finally:
                self._beats_lock.release()

    def beat(self) -> None:
        """Ask for a sign of life."""
        if self._broken:
            raise EOFError("messages do not get through")
        with self._beats_lock:
            self._beats.sendall(wire.CONTROL)
            wire.tell(self._beats, {"do": "status"})
            said, _ = wire.hear(self._beats)
        self.cards = {name: (pids, ready) for name, (pids, ready) in said["cards"].items()}

    def close(self) -> None:
        self.lost = True
        for each in ("rows", "_beats", "_control"):
            with suppress(OSError, AttributeError):
                getattr(self, each).shutdown(socket.SHUT_RDWR)
                getattr(self, each).close()


class Hosts:
    """All other hosts. `lost` and `back` of what is in `groups` are called when one goes and comes."""

    def __init__(self, meeting: Meeting) -> None:
        self.count = meeting.hosts
        self.others = [OtherHost(meeting, number) for number in range(1, meeting.hosts)]
        self.groups: WeakSet[Any] = WeakSet()
        self.sent = self.received = 0  # bytes, for rows
        self._versions = self._joined = 0
        self._ended = threading.Event()
        for other in self.others:
            other.connect()
        atexit.register(self.end)
        threading.Thread(target=self._watch, name="hosts", daemon=True).start()

    def join(self, group: Any) -> str:
        """What hosts call a group: groups may have the same name, one that is being closed and the next."""
        self.groups.add(group)
        self._joined += 1
        return f"{self._joined}"

    def mine(self, cards: int) -> range:
        return cards_of(0, self.count, cards)

    def segments(self, near: Sequence[Any], cards: int) -> list[Any]:
        """Segments of all cards: those here, and where the others' would be; None where a host is lost."""
        found: list[Any] = list(near)
        for other in self.others:
            there = cards_of(other.number, self.count, cards)
            found += [None if other.lost else Far(other.number, n) for n in range(len(there))]
        return found

    def owner(self, card: int, cards: int) -> tuple[OtherHost, int]:
        """The host of a card, and the card's number there."""
        other = next(each for each in self.others if card in cards_of(each.number, self.count, cards))
        return other, card - cards_of(other.number, self.count, cards).start

    # -- versions --

    def load(self, group: str, job: Job, cards: int) -> tuple[int, Callable[[], None]]:
        """Have all hosts begin to load; the number of the version, and how to wait for them."""
        self._versions += 1
        held, errors = self._versions, list[Exception]()

        def one(other: OtherHost) -> None:
            try:
                tell(other)
            except Exception as error:
                errors.append(error)

        def tell(other: OtherHost) -> None:
            there = cards_of(other.number, self.count, cards)
            if other.lost:
                raise CardDown(there.start, f"host {other.number} is gone")
            theirs = Job(job.arrangement, job.files, job.phases, job.checksums, there.start)
            try:
                other.tell({"do": "load", "group": group, "held": held, "cards": len(there)}, theirs.to_bytes())
            except (OSError, EOFError) as error:
                raise CardDown(there.start, f"host {other.number} does not answer: {error}") from None

        loading = [threading.Thread(target=one, args=(other,), daemon=True) for other in self.others]
        for each in loading:
            each.start()

        def wait() -> None:
            for each in loading:
                each.join()
            if errors:
                raise errors[0]

        return held, wait

    def put(self, held: int, table: int, rows_K: Rows, codes_KB: Bytes, meta_KW: Words) -> None:
        """Rows that were read here: every host takes what is its own."""
        for other in self.others:
            message = {"do": "put", "held": held, "table": table, "rows": len(rows_K)}
            other.tell(message, np.ascontiguousarray(rows_K, np.int64), codes_KB, meta_KW)

    def drop(self, held: int) -> None:
        for other in self.others:
            with suppress(OSError, EOFError, FormatError):
                if not other.lost:
                    other.tell({"do": "drop", "held": held})

    def drop_later(self, held: int) -> None:
        """Whoever still reads a version that was replaced has some time to end."""
        later = threading.Timer(LINGER, self.drop, (held,))
        later.daemon = True
        later.start()

    def leave(self, group: Any, called: str) -> None:
        self.groups.discard(group)
        for other in self.others:
            with suppress(OSError, EOFError, FormatError):
                if not other.lost:
                    other.tell({"do": "close", "group": called})

    # -- who is there --

    def _watch(self) -> None:
        while not self._ended.wait(BEAT):
            for other in self.others:
                try:
                    if other.lost:
                        other.connect()
                        other.without.update(self.groups)
                    for group in list(other.without):
                        self._bring_back(group, other)
                    other.beat()
                except Exception:  # whatever it is, the host is of no use now; the next beat tries again
                    self.lose(other)

    def _bring_back(self, group: Any, other: OtherHost) -> None:
        """What keeps a group from being loaded is its own; where it is the host, that does not give the next sign of life."""
        with suppress(Exception):
            group.back(other.number)
            other.without.discard(group)

    def lose(self, other: OtherHost) -> None:
        """A host does not answer."""
        if not other.lost:
            other.close()
            for group in list(self.groups):
                group.lost(other.number)

    def end(self) -> None:
        """Let the hosts go."""
        self._ended.set()
        for other in self.others:
            with suppress(OSError, EOFError, FormatError):
                if not other.lost:
                    other.say_goodbye()
            other.close()


@cache
def other_hosts() -> Hosts | None:
    """The other hosts of this process, met when they are first needed; None where there are none."""
    meeting = meet()
    return None if meeting is None else Hosts(meeting)


class Fetch:
    """Brings rows of other hosts here, for one version."""

    def __init__(self, hosts: Hosts, arrangement: Arrangement, held: int) -> None:
        self._hosts, self._held, self._cards = hosts, held, arrangement.cards
        begins, strides, metas, self._owners = [], [], [], []
        for card in range(hosts.mine(arrangement.cards).stop, arrangement.cards):
            other, number = hosts.owner(card, arrangement.cards)
            for table, shelf in enumerate(arrangement.shelves):
                begins.append(Far(other.number, number).data_ptr() + shelf.codes_C[card])
                strides.append(shelf.stride)
                metas.append(4 * F.META_WORDS[shelf.table.format])
                self._owners.append((other, number * len(arrangement.shelves) + table, card))
        self._begins_K, self._strides_K, self._metas_K = (np.array(each, np.int64) for each in (begins, strides, metas))

    def __call__(self, addresses_N: NDArray[np.int64]) -> object:
        """Replace addresses that are far by those of fetched records; returns what must be kept while they are read."""
        far_M = np.flatnonzero(addresses_N >= FAR)
        if not len(far_M):
            return None
        wanted_U, which_M = np.unique(addresses_N[far_M], return_inverse=True)
        run_U = np.searchsorted(self._begins_K, wanted_U, "right") - 1
        strides_U = self._strides_K[run_U]
        places_U = ((wanted_U - self._begins_K[run_U]) // strides_U).astype(np.uint32)
        ends_U = strides_U.cumsum()
        memory = np.empty(int(ends_U[-1]) + 128, np.uint8)  # vector loads may look a little beyond the last row
        numbers, firsts, counts = np.unique(run_U, return_index=True, return_counts=True)
        runs = list(zip(numbers.tolist(), firsts.tolist(), counts.tolist(), strict=True))
        self._exchange(runs, places_U, ends_U, memory)
        at_U = ends_U - strides_U + self._metas_K[run_U]
        addresses_N[far_M] = memory.__array_interface__["data"][0] + at_U[which_M]
        return memory

    def _exchange(
        self, runs: list[tuple[int, int, int]], places_U: NDArray[np.uint32], ends_U: NDArray[np.int64], memory: Bytes
    ) -> None:  # fmt: skip
        """Ask all hosts, then hear all: one round trip. A host has its runs one after another."""
        asked = [(other, own) for other in self._hosts.others if (own := [run for run in runs if self._owner(run) is other])]
        view, card = memory.data, -1
        with ExitStack() as locks:
            for other, own in asked:
                locks.enter_context(other.rows_lock)
                if other.lost:
                    raise CardDown(self._owners[own[0][0]][2], f"host {other.number} is gone")
            try:
                for other, own in asked:
                    card, said = self._owners[own[0][0]][2], [(self._owners[number][1], count) for number, _, count in own]
                    mine = slice(own[0][1], own[-1][1] + own[-1][2])
                    self._hosts.sent += wire.ask_rows(other.rows, self._held, said, places_U[mine])
                refused = -1
                for other, own in asked:
                    card, first, last = self._owners[own[0][0]][2], own[0][1], own[-1][1] + own[-1][2]
                    begin, end = int(ends_U[first - 1]) if first else 0, int(ends_U[last - 1])
                    refused = refused if self._hear(other, view[begin:end]) else card
            except (OSError, EOFError) as error:
                for other, _ in asked:
                    self._hosts.lose(other)  # all that were asked: what they still send is for nobody
                raise CardDown(card, f"its host does not answer: {error}") from None
        if refused >= 0:
            raise CardDown(refused, "its host has another version")

    def _owner(self, run: tuple[int, int, int]) -> OtherHost:
        return self._owners[run[0]][0]

    def _hear(self, other: OtherHost, into: memoryview) -> bool:
        """Records, unless a host does not have them."""
        (size,) = wire.SIZE.unpack(wire.exactly(other.rows, wire.SIZE.size))
        if size == wire.REFUSED:
            return False
        if size != len(into):
            raise EOFError(f"it sent {size} bytes for {len(into)}")
        wire.fill(other.rows, into)
        self._hosts.received += wire.SIZE.size + size
        return True
