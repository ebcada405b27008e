"""The supervisor of shard processes: starts them, has them load, and restarts those that die.

A thread watches each process, and kills one that sends no heartbeats. A process that ends is replaced and gets the memory of
all versions again; lookups do not notice. If it dies while it loads, the waiting thread replaces it and repeats its share.
After `ATTEMPTS` loading fails with `ShardDown`, and all processes are killed: replies to the failed request could be taken for
those to the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from thermocline.errors import FormatError
from thermocline.serve.errors import NotReady, ShardDown

from .forkserver import FORK_S, Forkserver, ShardProcess
from .load_job import LoadJob
from .segments import SharedSegment

LOGGER = logging.getLogger("thermocline.serve")
ATTEMPTS = 5
_PAUSE_S, _MAX_PAUSE_S = 0.05, 5.0


class Supervisor:
    """Keeps `shards` processes alive. `first`: the number of this host's first shard."""

    def __init__(self, shards: int, first: int = 0) -> None:
        self._first = first
        self._lock = threading.RLock()
        self._versions: dict[str, list[SharedSegment]] = {}  # the job, then the segments
        self._deaths = [0] * shards
        self._closed = False
        self._ready = [True] * shards
        self._processes: list[ShardProcess] = []
        self._forkserver = Forkserver(first)
        try:
            for number in range(shards):
                self._processes.append(self._forkserver.start(number))
            for number in range(shards):
                threading.Thread(target=self._watch, args=(number,), name=f"shard-{number}", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def _watch(self, number: int) -> None:
        while True:
            process = self._processes[number]
            if not process.watch():
                self._ready[number] = False
                self._log(logging.WARNING, "a shard process does not respond and is killed", number)
                process.kill()
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
        process = self._processes[number] = self._forkserver.start(number)
        for name, version in self._versions.items():
            process.send({"do": "hold", "version": name}, _descriptors(version))
            try:
                process.reply(FORK_S)
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
                    process.socket.close()  # with replies that came too late
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

    def load(self, name: str, job: LoadJob, segments: Sequence[SharedSegment]) -> None:
        """Have all processes load a version, and verify its checksums at the same time.

        Raises:
            FormatError: a file is damaged
            NotReady: the supervisor was closed
            ShardDown: a process died `ATTEMPTS` times
        """
        text = np.frombuffer(job.to_bytes(), np.uint8)
        version = [SharedSegment(len(text), "job"), *segments]
        version[0].write(0, text)
        with self._lock:
            if self._closed:  # processes started now would never end
                raise NotReady("the shards are closed")
            self._versions[name] = version
            replies = self._request_all({"do": "hold", "version": name}, _descriptors(version))
            for phase in range(len(job.phases)):
                replies += self._request_all({"do": "load", "version": name, "phase": phase})
            replies += self._request_all({"do": "verified", "version": name})
        if errors := [reply["error"] for reply in replies if "error" in reply]:
            self.drop(name)
            raise FormatError(errors[0])

    def drop(self, name: str) -> None:
        """Have all processes release a version."""
        with self._lock:
            if self._versions.pop(name, None) is not None and not self._closed:
                self._request_all({"do": "drop", "version": name})

    def segments(self, name: str) -> list[SharedSegment]:
        """The memory of a version that is loaded."""
        return self._versions[name][1:]

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
                process.kill()
        try:
            for process in self._processes:
                process.end()
            self._forkserver.close()
            self._versions.clear()
        finally:
            self._lock.release()


def _descriptors(version: Sequence[SharedSegment]) -> list[int]:
    return [segment.descriptor for segment in version]
