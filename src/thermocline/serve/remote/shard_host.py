"""Cards of another host than the front's: a process that loads what the front says, holds it, and answers for its rows.

    torchrun --nnodes 2 --node-rank N --nproc-per-node 1 ... -m thermocline serve run FOLDER --cards 4        on host N

Hosts meet at torchrun's store: host 0 is the front, all others say there where they listen. Then the front connects, and tells
each what to load: the same job as its own cards get, so a host needs neither the plan nor the heat, only the files, at the same
path. One thread a connection: rows, messages and signs of life do not wait for each other.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline import formats as F
from thermocline.errors import BadInput, FormatError
from thermocline.serve.errors import CardDown, NotReady
from thermocline.serve.tables.load_job import Job
from thermocline.serve.tables.segments import Bytes, Segment, check_fits, put_rows
from thermocline.serve.tables.supervisor import Supervisor

from . import frames as wire
from .rendezvous import Meeting, meet

Records = NDArray[np.uint8]
ALONE = 30.0  # seconds without the front, after which a host ends


class HeldHere:
    """A version on the cards of this host."""

    def __init__(self, group: str, job: Job, cards: int) -> None:
        self.group, self.job = group, job
        sizes = job.arrangement.sizes_C[job.first : job.first + cards]
        check_fits(sum(sizes), f"the rows of cards {job.first} to {job.first + cards - 1}")
        self.segments = [Segment(size, f"card-{job.first + n}") for n, size in enumerate(sizes)]

    def views(self) -> list[Records]:
        """Records of every table on every card, by place: card after card, its tables in their order."""
        found: list[Records] = []
        for n, segment in enumerate(self.segments):
            for shelf in self.job.arrangement.shelves:
                card = self.job.first + n
                shape = (shelf.split.places(card), shelf.stride)
                found.append(np.ndarray(shape, np.uint8, segment.memory, shelf.meta_C[card]))
        return found


class Host:
    """What this host holds, and for whom it answers."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._held: dict[int, HeldHere] = {}
        self._views: dict[int, list[Records]] = {}
        self._supervisors: dict[str, Supervisor] = {}  # by group
        self._closed: set[str] = set()  # groups: a load that comes after its group was closed must not start cards again
        self._lock = threading.Lock()
        self._connections = 0
        self.ended = threading.Event()
        self.told = False  # whether the front said that it is over

    def listen(self) -> None:
        """Answer until the front says that it is over, or is gone."""
        with socket.create_server((self._meeting.address, 0)) as listener:
            self._meeting.publish(f"{self._meeting.address}:{listener.getsockname()[1]}")
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            self.ended.wait()
        for supervisor in list(self._supervisors.values()):
            supervisor.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection, to its end."""
        wire.prepare(connection, ALONE)
        with connection:
            try:
                token = bytes(wire.exactly(connection, len(self._meeting.token)))
                if not hmac.compare_digest(token, self._meeting.token):
                    return
                connection.sendall(b"!")
            except (OSError, EOFError):
                return
            self._count(1)
            try:
                while True:
                    kind = bytes(wire.exactly(connection, 1))
                    if kind == wire.ROWS:
                        self._rows(connection)
                    elif kind == wire.CONTROL:
                        wire.tell(connection, self._take(*wire.hear(connection)))
                    else:
                        return
            except (OSError, EOFError):
                return
            finally:
                self._count(-1)

    def _count(self, more: int) -> None:
        """Connections of the front. One that was merely slow comes again; without any for a while, it is gone."""
        with self._lock:
            self._connections += more
            alone = self._connections == 0
        if alone:
            later = threading.Timer(ALONE, self._look)
            later.daemon = True
            later.start()

    def _look(self) -> None:
        if self._connections == 0:
            self.ended.set()

    def _rows(self, connection: socket.socket) -> None:
        held, runs, places_N = wire.hear_rows(connection)
        views = self._views.get(held)
        if views is None or any(number >= len(views) for number, _ in runs) or sum(many for _, many in runs) != len(places_N):
            connection.sendall(wire.SIZE.pack(wire.REFUSED))
            return
        size = sum(many * views[number].shape[1] for number, many in runs)
        out, at, first = np.empty(size, np.uint8), 0, 0
        for number, many in runs:
            view, end = views[number], at + many * views[number].shape[1]
            view.take(places_N[first : first + many], 0, out[at:end].reshape(many, -1), "clip")
            at, first = end, first + many
        connection.sendall(wire.SIZE.pack(size))
        connection.sendall(out.data)

    def _take(self, message: dict[str, Any], data: bytearray) -> dict[str, Any]:
        """Do what a message asks, and say what was done."""
        try:
            return self._do(message, data)
        except (BadInput, FormatError, CardDown, NotReady, OSError) as error:
            return {"error": str(error)}

    def _do(self, message: dict[str, Any], data: bytearray) -> dict[str, Any]:
        what, held = message["do"], int(message.get("held", -1))
        if what == "load":
            self._load(message["group"], held, Job.from_bytes(bytes(data)), message["cards"])
        elif what == "put":
            self._put(held, message, data)
        elif what == "drop":
            self._drop(held)
        elif what == "status":
            return {"cards": {name: [each.pids, each.ready] for name, each in list(self._supervisors.items())}}
        elif what == "close":
            with self._lock:
                self._closed.add(message["group"])
                self._end(message["group"])
        elif what == "forget":
            with self._lock:
                for group in list(self._supervisors):
                    self._end(group)
        elif what == "end":
            self.told = True
            threading.Timer(0.2, self.ended.set).start()  # the answer leaves before
        return {}

    def _load(self, group: str, held: int, job: Job, cards: int) -> None:
        mine = HeldHere(group, job, cards)
        with self._lock:
            if group in self._closed:
                raise NotReady("the cards are closed")
            if group not in self._supervisors:
                self._supervisors[group] = Supervisor(cards, job.first)
            supervisor = self._supervisors[group]
        supervisor.load(str(held), job, mine.segments)
        with self._lock:
            if self._supervisors.get(group) is not supervisor:
                raise NotReady("the cards were closed while they loaded")
            self._held[held], self._views[held] = mine, mine.views()

    def _drop(self, held: int) -> None:
        with self._lock:
            self._views.pop(held, None)
            gone = self._held.pop(held, None)
            supervisor = None if gone is None else self._supervisors[gone.group]
        if supervisor is not None:
            supervisor.drop(str(held))

    def _end(self, group: str) -> None:
        """A group has no cards here, and no memory."""
        for held in [number for number, each in self._held.items() if each.group == group]:
            del self._views[held], self._held[held]
        if (supervisor := self._supervisors.pop(group, None)) is not None:
            supervisor.close()

    def _put(self, number: int, message: dict[str, Any], data: bytearray) -> None:
        """Rows that the front read itself."""
        if (held := self._held.get(number)) is None:
            raise NotReady("the cards were closed while they loaded")
        shelf, count = held.job.arrangement.shelves[message["table"]], message["rows"]
        width, words = F.row_bytes(shelf.table.format, shelf.table.dim), F.META_WORDS[shelf.table.format]
        rows_K = np.frombuffer(data, np.int64, count)
        codes_KB: Bytes = np.frombuffer(data, np.uint8, count * width, 8 * count).reshape(count, width)
        meta_KW = np.frombuffer(data, np.int32, count * words, count * (8 + width)).reshape(count, words)
        put_rows(shelf, [segment.memory for segment in held.segments], rows_K, codes_KB, meta_KW, held.job.first)


def hold_cards() -> None:
    """Be a host: hold cards for the front until it ends. For every process that torchrun started but the first."""
    meeting = meet()
    if meeting is None or meeting.rank == 0:
        raise BadInput("hold_cards() is for hosts other than the first: RANK and WORLD_SIZE say which this is")
    host = Host(meeting)
    host.listen()
    if not host.told:
        raise BadInput(f"host {meeting.rank} ({os.uname().nodename}): the front end is gone; start all hosts again")
