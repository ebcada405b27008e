"""A card on a CPU: a process that brings rows into shared memory, and then holds that memory.

Lookups read its memory directly, so a card has nothing to do while it serves; and if it dies, the memory that it filled lives
on in the group and in the card that takes its place. Messages are JSON with their length in front; descriptors of memory travel
beside them. It needs numpy and nothing larger, and is forked by the process of `nursery.py`; its standard
input is a socket.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from thermocline.errors import BadInput, FormatError

from .load_job import Job
from .segments import Segment

_MOST = 250  # descriptors that Linux lets travel at once
_CHUNK = 1 << 20  # bytes read at a time for checksums: they are still in the processor's cache when they are summed


def send(to: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """A message, with descriptors."""
    text = json.dumps(message).encode()
    socket.send_fds(to, [len(text).to_bytes(8, "little")], descriptors or [])
    to.sendall(text)


def receive(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What `send` sent. EOFError if the other side is gone."""
    try:
        head, descriptors, _, _ = socket.recv_fds(source, 8, _MOST)
        text = _exactly(source, int.from_bytes(head + _exactly(source, 8 - len(head)), "little")) if head else b""
    except ConnectionError:
        raise EOFError from None
    if not text:
        raise EOFError
    return json.loads(text), descriptors


def _exactly(source: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = source.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class Card:
    """Holds the segments of the versions it was told of."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.jobs: dict[str, Job] = {}
        self.segments: dict[str, list[Segment]] = {}
        self._verifying: dict[str, Future[None]] = {}
        self._hasher = ThreadPoolExecutor(1)

    def take(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Do what a message asks, and say what was done."""
        version = message["version"]
        if message["do"] == "hold":
            job = Job.from_bytes(_whole(descriptors[0]))
            sizes = job.arrangement.sizes_C[job.first : job.first + len(descriptors) - 1]
            self.jobs[version] = job
            self.segments[version] = [Segment(size, descriptor=d) for size, d in zip(sizes, descriptors[1:], strict=True)]
            return {"bytes": sizes[self.number]}
        if message["do"] == "drop":
            self.jobs.pop(version, None)
            self.segments.pop(version, None)
            self._verifying.pop(version, None)
            return {}
        if message["do"] == "verify":
            self._verify(version)
            return {}
        if message["do"] == "verified":
            self._verify(version).result()
            return {}
        assert message["do"] == "load"
        segments = self.segments[version]
        try:
            return {"bytes": self.jobs[version].run(message["phase"], self.number, len(segments), segments)}
        except (IndexError, TypeError, ValueError):
            self._verify(version).result()  # which says more, if it is because of damage
            raise

    def _verify(self, version: str) -> Future[None]:
        """Checksums of this card's share of the files, in a thread of their own while rows are put in place."""
        if version not in self._verifying:
            job, shares = self.jobs[version], len(self.segments[version])
            self._verifying[version] = self._hasher.submit(_verify_all, job, self.number, shares)
        return self._verifying[version]


def _whole(descriptor: int) -> bytes:
    """All of a file in memory, which is then closed. All cards share its position, so it is read by places."""
    size, data = os.fstat(descriptor).st_size, b""
    while len(data) < size:
        data += os.pread(descriptor, size - len(data), len(data))
    os.close(descriptor)
    return data


def _verify_all(job: Job, share: int, shares: int) -> None:
    for number, sha256 in job.checksums[share::shares]:
        _verify(job.files[number], sha256)


def _verify(path: str, sha256: str) -> None:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while got := file.readinto(buffer):
            digest.update(buffer[:got])
    if digest.hexdigest() != sha256:
        raise FormatError(
            f"'{path}' is damaged: its sha256 is {digest.hexdigest()[:12]}... and was {sha256[:12]}...; copy it again from "
            "where it was written, or use another checkpoint"
        )


def main(number: int) -> None:
    """Serve messages until the group is gone."""
    supervisor, card = socket.socket(fileno=os.dup(0)), Card(number)
    while True:
        try:
            message, descriptors = receive(supervisor)
        except EOFError:
            return
        try:
            answer = card.take(message, descriptors)
        except (BadInput, OSError, IndexError, TypeError, ValueError) as error:
            answer = {"error": str(error)}
        try:
            send(supervisor, answer)
        except ConnectionError:
            return
