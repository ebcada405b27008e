"""The forkserver: a process that has imported what shard processes need, and forks them.

Python and numpy take 0.17 s to start, which forked processes save. The server itself cannot fork: it has threads, whose locks a
child would hold for ever. (multiprocessing's forkserver would import the server's main module.) Shard processes are not
children of the supervisor, which watches them through a process descriptor, and they outlive their forkserver.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from thermocline.serve.errors import ShardDown

from .shard_server import main as run_shard_server
from .shard_server import receive, send, socket_pair

_ATTEMPTS = 3
FORK_S = 30.0  # seconds for a forkserver to start a process: it may have to start itself
SILENT_S, _LOOKS = 4.0, 4  # seconds without a heartbeat, after which a shard process is hung
# Isolated: Python puts neither the working directory nor PYTHONPATH before the folders that this process imports from.
_START = "import sys; sys.path[:] = sys.argv[1:]; from thermocline.serve.tables.forkserver import main; main()"


def search_path() -> list[str]:
    """Folders this process imports from, without the working directory, which others may be able to write."""
    here = os.getcwd()
    paths = [str(Path(__file__).parents[3]), *(path for path in sys.path if path and os.path.isabs(path))]
    return [path for n, path in enumerate(paths) if n == 0 or os.path.realpath(path) != here]


class ShardProcess:
    """A running shard process: a socket to it, its pid, its process descriptor, and a pipe with its heartbeats."""

    def __init__(self, socket: socket.socket, pid: int, pidfd: int, beats: int) -> None:
        self.socket, self.pid, self._pidfd, self._beats = socket, pid, pidfd, beats

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message. A process that is gone is noticed by `reply`."""
        with suppress(OSError):
            send(self.socket, message, list(descriptors))

    def reply(self, seconds: float | None = None) -> dict[str, Any]:
        """The reply to a message. Raises EOFError if the process is gone, or does not reply in time."""
        try:
            self.socket.settimeout(seconds)
            return receive(self.socket)[0]
        except OSError:
            raise EOFError from None

    def watch(self) -> bool:
        """Wait for the end of the process, or until it sends no heartbeat for `SILENT_S`; whether it has ended."""
        poll, silent = select.poll(), 0
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self._beats, select.POLLIN)
        while silent < _LOOKS:  # several, because this process may have been stopped as well
            ready = [descriptor for descriptor, _ in poll.poll(1000 * SILENT_S / _LOOKS)]
            if self._pidfd in ready:
                return True
            if ready and not os.read(self._beats, 64):  # it ends
                return self.wait(SILENT_S)
            silent = 0 if ready else silent + 1
        return False

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the process, at most `seconds`; whether it has ended."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def end(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        self.socket.close()
        if not self.wait(5):
            self.kill()
            self.wait()
        with suppress(ChildProcessError):  # a child only if the forkserver is gone and this is process 1, as in a container
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)

    def kill(self) -> None:
        """Kill the process. `reply` raises, also in a thread that waits for it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)
        os.close(self._beats)


class Forkserver:
    """Starts shard processes. Not thread-safe. `first`: the number of this host's first shard."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._open()

    def _open(self) -> None:
        mine, theirs = socket_pair()
        with theirs, ExitStack() as on_error:
            on_error.callback(mine.close)
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, *search_path()],
                stdin=theirs.fileno(),
                # One thread: numpy would start threads for linear algebra, which doubles its start-up time.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C goes to the group, not to its processes
            )
            on_error.pop_all()
        self._socket = mine
        self._socket.settimeout(FORK_S)

    def start(self, number: int) -> ShardProcess:
        """Start a shard process. Raises `ShardDown` after several attempts."""
        for _ in range(_ATTEMPTS):
            try:
                return self._fork(number)
            except (EOFError, OSError, ValueError):  # the forkserver is gone, cannot fork, or a descriptor is missing
                self.close()
                with suppress(OSError):  # the next attempt opens another one
                    self._open()
        raise ShardDown(self._first + number, f"no process could be started for it, {_ATTEMPTS} times")

    def _fork(self, number: int) -> ShardProcess:
        mine, theirs = socket_pair()
        with theirs, ExitStack() as on_error:
            on_error.callback(mine.close)
            beats, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            on_error.callback(os.close, beats)
            try:
                send(self._socket, {"number": number}, [theirs.fileno(), writing])
            finally:
                os.close(writing)
            reply, (pidfd,) = receive(self._socket)
            on_error.pop_all()
            return ShardProcess(mine, reply["pid"], pidfd, beats)

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
    with suppress(EOFError, ConnectionError):
        while True:
            message, descriptors = receive(supervisor)
            _reap()
            pid = os.fork()
            if pid == 0:
                supervisor.close()  # an open copy would hide the end of the forkserver
                _run_child(message["number"], *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            pidfd = os.pidfd_open(pid)
            send(supervisor, {"pid": pid}, [pidfd])
            os.close(pidfd)
    _reap()


def _reap() -> None:
    """Reap shard processes that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _run_child(number: int, descriptor: int, beats: int) -> None:
    try:
        os.setsid()
        os.dup2(descriptor, 0)
        os.close(descriptor)
        run_shard_server(number, beats)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)
