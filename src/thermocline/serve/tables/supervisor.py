"""The supervisor of shard processes: starts them, has them load, and restarts those that die.

A thread watches each process. A process that ends is replaced, gets the memory of all versions again, and is ready. Lookups do
not notice: the memory was never gone. If a process dies while it loads, the waiting thread replaces it and repeats its share.
Pauses between restarts grow. After `ATTEMPTS` loading fails with `ShardDown`, and all processes are killed, because replies to
the failed request could be taken for replies to the next one; their watchers replace them.
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
from thermocline.serve.errors import NotReady, ShardDown

from .forkserver import ForkedProcess, Forkserver
from .load_job import LoadJob
from .segments import SharedSegment
from .shard_server import receive, send

LOGGER = logging.getLogger("thermocline.serve")
ATTEMPTS = 5
_PAUSE_S, _MAX_PAUSE_S = 0.05, 5.0


class LoadedVersion(NamedTuple):
    """The job of a version as a file in memory, and its segments."""

    job: int
    segments: Sequence[SharedSegment]

    @property
    def descriptors(self) -> list[int]:
        return [self.job, *(segment.descriptor for segment in self.segments)]


class ShardProcess:
    """A running shard process."""

    def __init__(self, forked: ForkedProcess) -> None:
        self.socket, self.pid, self._pidfd = forked

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message. A process that is gone is noticed by `reply`."""
        with suppress(OSError):
            send(self.socket, message, list(descriptors))

    def reply(self) -> dict[str, Any]:
        """The reply to a message. Raises EOFError if the process is gone."""
        try:
            return receive(self.socket)[0]
        except OSError:
            raise EOFError from None

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
        """Kill the process, and drop its replies."""
        self.socket.close()
        self.kill_only()

    def kill_only(self) -> None:
        """Kill a process whose reply another thread may wait for: `reply` raises there."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)


class Supervisor:
    """Keeps `shards` processes alive. `first`: the number of this host's first shard."""

    def __init__(self, shards: int, first: int = 0) -> None:
        self._first = first
        self._lock = threading.RLock()
        self._versions: dict[str, LoadedVersion] = {}
        self._deaths = [0] * shards
        self._closed = False
        self._ready = [True] * shards
        self._processes: list[ShardProcess] = []
        self._forkserver = Forkserver(first)
        try:
            for number in range(shards):
                self._processes.append(ShardProcess(self._forkserver.start(number)))
            for number in range(shards):
                threading.Thread(target=self._watch, args=(number,), name=f"shard-{number}", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def _watch(self, number: int) -> None:
        while True:
            process = self._processes[number]
            process.wait()
            with self._lock, suppress(ShardDown):  # the next attempt pauses for longer
                if self._closed:
                    return
                if self._processes[number] is process:
                    self._replace(number)
            if self._processes[number] is process:
                time.sleep(_PAUSE_S)  # without the lock, so that other threads get it

    def _replace(self, number: int) -> None:
        """Start a process again, and give it the versions that it held."""
        self._ready[number] = False
        self._deaths[number] += 1
        self._log(logging.WARNING, "a shard process has ended and is restarted", number)
        self._processes[number].end()
        if self._deaths[number] > 1:
            time.sleep(min(_PAUSE_S * 2 ** min(self._deaths[number], 10), _MAX_PAUSE_S))
        process = self._processes[number] = ShardProcess(self._forkserver.start(number))
        for name, version in self._versions.items():
            process.send({"do": "hold", "version": name}, version.descriptors)
            try:
                process.reply()
            except EOFError:
                return  # its watcher tries again
        self._ready[number] = True
        self._log(logging.INFO, "a shard process is back", number)

    def _log(self, level: int, event: str, number: int) -> None:
        fields = {"shard": self._first + number, "pid": self._processes[number].pid, "deaths": self._deaths[number]}
        LOGGER.log(level, event, extra={"fields": fields})

    def _request_all(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> list[dict[str, Any]]:
        """The replies of all processes. A process that dies is replaced and asked again."""
        with self._lock:
            try:
                for process in self._processes:
                    process.send(message, descriptors)
                return [self._reply(number, message, descriptors) for number in range(len(self._processes))]
            except BaseException:
                for process in self._processes:
                    process.kill()
                raise

    def _reply(self, number: int, message: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        for _ in range(ATTEMPTS):
            try:
                reply = self._processes[number].reply()
                self._deaths[number] = 0
                return reply
            except EOFError:
                if self._closed:
                    raise NotReady("the shards were closed while they loaded") from None
                self._replace(number)
                self._processes[number].send(message, descriptors)
        raise ShardDown(self._first + number, f"its process ended {ATTEMPTS} times during {message['do']!r}")

    def load(self, name: str, job: LoadJob, segments: Sequence[SharedSegment]) -> int:
        """Have all processes load a version, and verify its checksums at the same time.

        Returns:
            Bytes that were read

        Raises:
            FormatError: a file is damaged
            NotReady: the supervisor was closed
            ShardDown: a process died `ATTEMPTS` times
        """
        text = job.to_bytes()
        descriptor = os.memfd_create("thermocline-job")
        os.write(descriptor, text)
        version = LoadedVersion(descriptor, segments)
        with self._lock:
            if self._closed:  # processes started now would never end
                os.close(descriptor)
                raise NotReady("the shards are closed")
            self._versions[name] = version
            replies = self._request_all({"do": "hold", "version": name}, version.descriptors)
            replies += self._request_all({"do": "verify", "version": name})
            for phase in range(len(job.phases)):
                replies += self._request_all({"do": "load", "version": name, "phase": phase})
            replies += self._request_all({"do": "verified", "version": name})
        if errors := [reply["error"] for reply in replies if "error" in reply]:
            self.drop(name)
            raise FormatError(errors[0])
        return sum(reply.get("bytes", 0) for reply in replies[len(self._processes) :])

    def drop(self, name: str) -> None:
        """Have all processes release a version."""
        with self._lock:
            version = self._versions.pop(name, None)
            if version is not None:
                try:
                    if not self._closed:
                        self._request_all({"do": "drop", "version": name})
                finally:
                    os.close(version.job)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def ready(self) -> list[bool]:
        """Whether each process is up. The memory is there in any case."""
        return list(self._ready)

    def close(self) -> None:
        """End all processes, without waiting for a load."""
        self._closed = True
        while not self._lock.acquire(timeout=_PAUSE_S):
            for process in list(self._processes):
                process.kill_only()
        try:
            for process in self._processes:
                process.end()
            self._forkserver.close()
            for version in self._versions.values():
                os.close(version.job)
            self._versions.clear()
        finally:
            self._lock.release()
