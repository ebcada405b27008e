"""A shard server on a CPU: a process that loads rows into shared memory, and then holds that memory.

Lookups read the memory directly, so the process is idle while it serves. If it dies, the memory lives on in the group and in
the process that replaces it. Messages are JSON, and descriptors of memory travel beside them.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from thermocline.errors import BadInput, FormatError

from .load_job import LoadJob
from .segments import SharedSegment

_MAX_DESCRIPTORS, _MAX_MESSAGE = 250, 1 << 16  # Linux's limit, and bytes
BEAT_S = 0.5  # seconds between heartbeats
_CHUNK = 1 << 20  # bytes hashed at a time: they stay in the processor's cache


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep the boundaries of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(to: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Send a message with descriptors."""
    socket.send_fds(to, [json.dumps(message).encode()], descriptors or [])


def receive(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a message of `send`. Raises EOFError if the other side is gone."""
    try:
        text, descriptors, _, _ = socket.recv_fds(source, _MAX_MESSAGE, _MAX_DESCRIPTORS)
    except ConnectionError:
        raise EOFError from None
    if not text:
        raise EOFError
    return json.loads(text), descriptors


class ShardServer:
    """The segments and load jobs of one shard process, by version."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: dict[str, tuple[LoadJob, list[SharedSegment]]] = {}
        self._checks: dict[str, Future[None]] = {}
        self._hasher = ThreadPoolExecutor(1)

    def handle(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Execute a message, and return the reply."""
        version, action = message["version"], message["do"]
        if action == "hold":
            text = SharedSegment(os.fstat(descriptors[0]).st_size, descriptor=descriptors[0])
            job = LoadJob.from_bytes(text.memory.tobytes())
            sizes = job.layout.sizes_S[job.first : job.first + len(descriptors) - 1]
            segments = [SharedSegment(size, descriptor=each) for size, each in zip(sizes, descriptors[1:], strict=True)]
            self.held[version] = job, segments
        elif action == "load":
            job, segments = self.held[version]
            self._verify(version)
            try:
                job.run(message["phase"], self.number, len(segments), segments)
            except (IndexError, TypeError, ValueError):
                self._verify(version).result()  # if the file is damaged, this error says so
                raise
        elif action == "verified":
            self._verify(version).result()
        elif action == "drop":
            self.held.pop(version, None)
            self._checks.pop(version, None)
        return {}

    def _verify(self, version: str) -> Future[None]:
        """Checksums of this process's share of the files, in a thread, while rows are written."""
        if version not in self._checks:
            job, segments = self.held[version]
            self._checks[version] = self._hasher.submit(_verify_files, job, self.number, len(segments))
        return self._checks[version]


def _verify_files(job: LoadJob, share: int, shares: int) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    for number, sha256 in job.checksums[share::shares]:
        path, digest = job.files[number], hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while got := file.readinto(buffer):
                digest.update(buffer[:got])
        if (found := digest.hexdigest()) != sha256:
            checksums = f"its sha256 is {found[:12]}... and was {sha256[:12]}..."
            raise FormatError(f"'{path}' is damaged: {checksums}; copy the file again, or use another checkpoint", path=path)


def _send_heartbeats(beats: int) -> None:
    """Show the supervisor that this process runs, until the supervisor is gone."""
    with suppress(BrokenPipeError):
        while True:
            with suppress(BlockingIOError):  # the supervisor is stopped
                os.write(beats, b".")
            time.sleep(BEAT_S)


def main(number: int, beats: int) -> None:
    """Handle messages until the supervisor is gone."""
    threading.Thread(target=_send_heartbeats, args=(beats,), daemon=True).start()
    supervisor, server = socket.socket(fileno=os.dup(0)), ShardServer(number)
    while True:
        try:
            message, descriptors = receive(supervisor)
        except EOFError:
            return
        try:
            reply = server.handle(message, descriptors)
        except (BadInput, OSError, IndexError, TypeError, ValueError) as error:
            reply = {"error": str(error)[: _MAX_MESSAGE // 8]}
        try:
            send(supervisor, reply)
        except ConnectionError:
            return
