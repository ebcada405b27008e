"""The forkserver: a process that has imported what shard processes need, and forks them.

    python -m thermocline.serve.tables.forkserver             started by `supervisor.py`; standard input is a socket

Python and numpy take 0.17 s to start, which forked processes save. The server itself cannot fork: it has threads, whose locks a
child would hold for ever. The forkserver has none. (multiprocessing's forkserver would import the server's main module.)

Shard processes are not children of the supervisor, which watches them through a process descriptor (`pidfd`). They outlive
their forkserver; the next start opens another one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import NamedTuple

from thermocline.serve.errors import ShardDown

from .shard_server import main as run_shard_server
from .shard_server import receive, send

_ATTEMPTS = 3


class ForkedProcess(NamedTuple):
    """A new process: a socket to it, its pid, and its pidfd."""

    socket: socket.socket
    pid: int
    pidfd: int


class Forkserver:
    """Starts shard processes. Not thread-safe. `first`: the number of this host's first shard."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._open()

    def _open(self) -> None:
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        mine, theirs = socket.socketpair()
        with theirs, ExitStack() as on_error:
            on_error.callback(mine.close)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thermocline.serve.tables.forkserver"],
                stdin=theirs.fileno(),
                # One thread: numpy would start threads for linear algebra, which doubles its start-up time.
                env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C goes to the group, not to its processes
            )
            on_error.pop_all()
        self._socket = mine

    def start(self, number: int) -> ForkedProcess:
        """Start a shard process. Raises `ShardDown` after several attempts."""
        for _ in range(_ATTEMPTS):
            try:
                return self._fork(number)
            except (EOFError, OSError, ValueError):  # the forkserver is gone, cannot fork, or a descriptor is missing
                self.close()
                with suppress(OSError):  # the next attempt opens another one
                    self._open()
        raise ShardDown(self._first + number, f"no process could be started for it, {_ATTEMPTS} times")

    def _fork(self, number: int) -> ForkedProcess:
        mine, theirs = socket.socketpair()
        with theirs, ExitStack() as on_error:
            on_error.callback(mine.close)
            send(self._socket, {"number": number}, [theirs.fileno()])
            reply, (pidfd,) = receive(self._socket)
            on_error.pop_all()
            return ForkedProcess(mine, reply["pid"], pidfd)

    def close(self) -> None:
        """End the forkserver. Its shard processes live on."""
        self._socket.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> None:
    """Fork shard processes until the supervisor is gone."""
    supervisor = socket.socket(fileno=os.dup(0))
    while True:
        try:
            message, (descriptor,) = receive(supervisor)
        except EOFError:
            _reap()
            return
        _reap()
        pid = os.fork()
        if pid == 0:
            supervisor.close()  # an open copy would hide the end of the forkserver
            _run_child(message["number"], descriptor)
        os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        try:
            send(supervisor, {"pid": pid}, [pidfd])
        except ConnectionError:
            return
        os.close(pidfd)


def _run_child(number: int, descriptor: int) -> None:
    try:
        os.setsid()
        os.dup2(descriptor, 0)
        os.close(descriptor)
        run_shard_server(number)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _reap() -> None:
    """Reap shard processes that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
