"""Where the processes of cards come from: one process that has imported what cards need, and forks one whenever it is asked.

    python -m thermocline.serve.tables.forkserver             started by `supervisor.py`; standard input is a socket

To start Python and import numpy takes 0.17 s, for every card the same; forked from a process that has done so, a card has it.
The server itself cannot fork them: it has threads, whose locks a child would keep for ever. The nursery has none.

A card is then not the supervisor's child. Its end is seen through a descriptor of the process (`pidfd`), which never comes to
mean another one, as its number may. A nursery that is gone takes no card with it; the next card starts another one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import NamedTuple

from thermocline.serve.errors import CardDown

from .shard_server import main as be_card
from .shard_server import receive, send

_ATTEMPTS = 3


class Born(NamedTuple):
    """A process that was just started: the socket to it, its number, and the descriptor that is readable when it has ended."""

    socket: socket.socket
    pid: int
    life: int


class Nursery:
    """Starts cards. Not for several threads at once. `first`: the number of the first card, where others have those before."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._open()

    def _open(self) -> None:
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        mine, theirs = socket.socketpair()
        with theirs, ExitStack() as if_raised:
            if_raised.callback(mine.close)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thermocline.serve.tables.forkserver"],
                stdin=theirs.fileno(),
                # Numpy would start threads for linear algebra, which takes as long again as the rest of it.
                env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # an interrupt at the keyboard is the group's to deal with
            )
            if_raised.pop_all()
        self._socket = mine

    def start(self, number: int) -> Born:
        """A card's process."""
        for _ in range(_ATTEMPTS):
            try:
                return self._fork(number)
            except (EOFError, OSError, ValueError):  # it was killed, or could not fork, or one of us has no descriptor left
                self.close()
                with suppress(OSError):  # its socket stays closed: the next attempt fails too, and opens another
                    self._open()
        raise CardDown(self._first + number, f"no process could be started for it, {_ATTEMPTS} times")

    def _fork(self, number: int) -> Born:
        mine, theirs = socket.socketpair()
        with theirs, ExitStack() as if_raised:
            if_raised.callback(mine.close)
            send(self._socket, {"number": number}, [theirs.fileno()])
            answer, (life,) = receive(self._socket)
            if_raised.pop_all()
            return Born(mine, answer["pid"], life)

    def close(self) -> None:
        """Let it end; its cards go on."""
        self._socket.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> None:
    """Fork cards until the supervisor is gone."""
    supervisor = socket.socket(fileno=os.dup(0))
    while True:
        try:
            message, (descriptor,) = receive(supervisor)
        except EOFError:
            _bury()
            return
        _bury()
        pid = os.fork()
        if pid == 0:
            supervisor.close()  # else nobody would see that the nursery has ended
            _live(message["number"], descriptor)
        os.close(descriptor)
        life = os.pidfd_open(pid)
        try:
            send(supervisor, {"pid": pid}, [life])
        except ConnectionError:
            return
        os.close(life)


def _live(number: int, descriptor: int) -> None:
    """The life of a card, in its process."""
    try:
        os.setsid()
        os.dup2(descriptor, 0)
        os.close(descriptor)
        be_card(number)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _bury() -> None:
    """Let the system forget cards that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
