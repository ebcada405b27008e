"""A shard server on a CPU: a process that loads rows into shared memory, and then holds that memory.

Lookups read the memory directly, so the process is idle while it serves. If it dies, the memory lives on in the group and in
the process that replaces it. Messages are JSON after their length; descriptors of memory travel beside them. The process needs
numpy and not torch. The forkserver starts it; its standard input is a socket.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from thermocline.errors import BadInput, FormatError

from .load_job import LoadJob
from .segments import SharedSegment

_MAX_DESCRIPTORS = 250  # in one message, Linux's limit
_CHUNK = 1 << 20  # bytes hashed at a time: they stay in the processor's cache


def send(to: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Send a message with descriptors."""
    text = json.dumps(message).encode()
    socket.send_fds(to, [len(text).to_bytes(8, "little")], descriptors or [])
    to.sendall(text)


def receive(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a message of `send`. Raises EOFError if the other side is gone."""
    try:
        head, descriptors, _, _ = socket.recv_fds(source, 8, _MAX_DESCRIPTORS)
        text = (
            _receive_exactly(source, int.from_bytes(head + _receive_exactly(source, 8 - len(head)), "little")) if head else b""
        )
    except ConnectionError:
        raise EOFError from None
    if not text:
        raise EOFError
    return json.loads(text), descriptors


def _receive_exactly(source: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = source.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class ShardServer:
    """The segments and load jobs of one shard process, by version."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.jobs: dict[str, LoadJob] = {}
        self.segments: dict[str, list[SharedSegment]] = {}
        self._checks: dict[str, Future[None]] = {}
        self._hasher = ThreadPoolExecutor(1)

    def handle(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Execute a message, and return the reply."""
        version, action = message["version"], message["do"]
        if action == "hold":
            job = LoadJob.from_bytes(_read_memfd(descriptors[0]))
            sizes = job.layout.sizes_S[job.first : job.first + len(descriptors) - 1]
            self.jobs[version] = job
            self.segments[version] = [
                SharedSegment(size, descriptor=each) for size, each in zip(sizes, descriptors[1:], strict=True)
            ]
            return {"bytes": sizes[self.number]}
        if action == "drop":
            for held in (self.jobs, self.segments, self._checks):
                held.pop(version, None)
            return {}
        if action == "verify":
            self._verify(version)
            return {}
        if action == "verified":
            self._verify(version).result()
            return {}
        assert action == "load"
        segments = self.segments[version]
        try:
            return {"bytes": self.jobs[version].run(message["phase"], self.number, len(segments), segments)}
        except (IndexError, TypeError, ValueError):
            self._verify(version).result()  # if the file is damaged, this error says so
            raise

    def _verify(self, version: str) -> Future[None]:
        """Checksums of this process's share of the files, in a thread, while rows are written."""
        if version not in self._checks:
            job, shares = self.jobs[version], len(self.segments[version])
            self._checks[version] = self._hasher.submit(_verify_files, job, self.number, shares)
        return self._checks[version]


def _read_memfd(descriptor: int) -> bytes:
    """The content of a file in memory, which is then closed. Processes share its position, so `pread` is used."""
    size, data = os.fstat(descriptor).st_size, b""
    while len(data) < size:
        data += os.pread(descriptor, size - len(data), len(data))
    os.close(descriptor)
    return data


def _verify_files(job: LoadJob, share: int, shares: int) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    for number, sha256 in job.checksums[share::shares]:
        path, digest = job.files[number], hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while got := file.readinto(buffer):
                digest.update(buffer[:got])
        if digest.hexdigest() != sha256:
            raise FormatError(
                f"'{path}' is damaged: its sha256 is {digest.hexdigest()[:12]}... and was {sha256[:12]}...; copy the file "
                "again, or use another checkpoint",
                path=path,
            )


def main(number: int) -> None:
    """Handle messages until the supervisor is gone."""
    supervisor, server = socket.socket(fileno=os.dup(0)), ShardServer(number)
    while True:
        try:
            message, descriptors = receive(supervisor)
        except EOFError:
            return
        try:
            reply = server.handle(message, descriptors)
        except (BadInput, OSError, IndexError, TypeError, ValueError) as error:
            reply = {"error": str(error)}
        try:
            send(supervisor, reply)
        except ConnectionError:
            return
