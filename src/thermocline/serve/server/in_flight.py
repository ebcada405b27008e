"""Requests and responses in memory: one budget of bytes over both protocols, and the gRPC calls that hold it.

gRPC keeps a response until its peer has read it, for as long as the peer likes, and a cancelled handler does not end the call.
So calls that are late are ended by their connection: the socket is found by its peer's address, and shut down. Rejected: a
maximum connection age, which also ends the streams of good clients.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections import Counter
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from thermocline.serve.errors import Overloaded

from .config import ServerLimits

CALL_BYTES = 16 << 10  # what a gRPC call takes beside its messages
HEALTH_SHARE = 16  # health probes may use this part of the budget in addition to it
_FILES = "/proc/self/fd"


class ByteBudget:
    """Bytes of requests and responses in memory."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0

    def take(self, size: int, own: int = 0, spare: int = 0) -> None:
        """Add bytes to a request that holds `own`. Raises `Overloaded`, unless no other request holds any."""
        if self.held + size > self.limit + spare and self.held > own:
            held = f"{self.held:,} bytes of requests and responses are in memory"
            raise Overloaded(f"{held}, {size:,} more exceed the limit of {self.limit:,}; try later")
        self.held += size

    def give(self, size: int) -> None:
        """Return bytes."""
        self.held -= size


class GrpcCall:
    """A call: its bytes, and when its peer must have sent or read what the server waits for."""

    __slots__ = ("_budget", "_limits", "_loop", "context", "held", "until", "waits")

    def __init__(self, context: Any, budget: ByteBudget, limits: ServerLimits, loop: asyncio.AbstractEventLoop) -> None:
        self.context, self._budget, self._limits, self._loop, self.held = context, budget, limits, loop, 0
        self.waits, self.until = "body", loop.time() + limits.slow

    def wait(self, waits: str, seconds: float) -> None:
        """Wait for the peer: for its 'body', until it has 'read' a response, or for the next message of an 'idle' stream."""
        self.waits, self.until = waits, self._loop.time() + seconds

    def take(self, size: int, spare: int = 0) -> None:
        """Take bytes of the budget until the call ends."""
        self._budget.take(size, self.held, spare)
        self.held += size

    def execute(self, size: int) -> None:
        """The request has arrived."""
        self.until = math.inf
        self.take(size)

    def respond(self, size: int) -> None:
        """The response leaves. Its bytes are taken."""
        self.wait("read", self._limits.read_seconds(size))

    def next_message(self) -> None:
        """A streamed response has left."""
        self._budget.give(self.held - CALL_BYTES)
        self.held = CALL_BYTES
        self.wait("idle", self._limits.idle)


class GrpcCalls:
    """All gRPC calls. `sweep` ends those whose peer is late."""

    def __init__(self, budget: ByteBudget, limits: ServerLimits, dropped: Counter[str]) -> None:
        self._budget, self._limits, self._dropped = budget, limits, dropped
        self._calls: dict[asyncio.Task[Any], GrpcCall] = {}  # by the task that runs the handler
        self._swept = -math.inf

    def begin(self, context: Any, health: bool = False) -> GrpcCall:
        """Register the call of the current task before its message is read. Raises `Overloaded`.

        The task ends when its peer has read the response. A callback of the context would be a cycle of references: what a call
        held, with memory of gRPC, would wait for the garbage collector, and the next call would take memory that no cache has.
        """
        task = asyncio.current_task()
        assert task is not None
        call = GrpcCall(context, self._budget, self._limits, task.get_loop())
        call.take(CALL_BYTES, self._budget.limit // HEALTH_SHARE if health else 0)
        self._calls[task] = call
        task.add_done_callback(self._end)
        return call

    def _end(self, task: asyncio.Task[Any]) -> None:
        if (call := self._calls.pop(task, None)) is not None:
            self._budget.give(call.held)

    def sweep(self) -> None:
        """End calls whose peer is late, and the oldest half-sent requests where all of them could exceed the budget.

        A request that arrives has no known size. Its largest size counts if it has not arrived between two sweeps.
        """
        now = asyncio.get_running_loop().time()
        calls, begun = self._calls.values(), self._swept + self._limits.slow
        late = [call for call in calls if call.until <= now]
        arriving = [call for call in calls if call.waits == "body" and now < call.until < begun]
        late += arriving[: max(0, len(arriving) - max(1, self._budget.limit // self._limits.max_message))]
        self._swept = now
        for call in late:
            call.until = math.inf
            self._dropped[call.waits] += 1
        shut_down({call.context.peer() for call in late})


def shut_down(peers: set[str]) -> None:
    """Close the connections to some peers, as gRPC names them: 'ipv4:127.0.0.1:51234' or 'ipv6:%5B::1%5D:51234'."""
    if not peers or not os.path.isdir(_FILES):
        return
    addresses = set()
    for peer in peers:
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        addresses.add((_ipv4(host.strip("[]")), int(port)))
    for name in os.listdir(_FILES):
        with suppress(OSError):  # closed by now, or not connected
            if not os.readlink(f"{_FILES}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                address = connection.getpeername()
                if isinstance(address, tuple) and (_ipv4(address[0]), address[1]) in addresses:
                    connection.shutdown(socket.SHUT_RDWR)


def _ipv4(host: str) -> str:
    return host.removeprefix("::ffff:")
