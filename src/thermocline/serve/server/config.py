"""Configuration of a server: addresses, credentials, and a limit for every quantity that a client controls."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from thermocline.serve.protocol.tensors import RequestLimits

LOOPBACK = "127.0.0.1"
RESERVED_FILES = 96


class Credentials(NamedTuple):
    """Who may connect: a bearer token, a TLS certificate with its key, and the CA of clients' certificates. None disables each.

    `control_token` is the token of load and unload, in place of `token`.
    """

    token: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    control_token: str | None = None

    @property
    def identify_clients(self) -> bool:
        """Whether a stranger cannot make a request."""
        return self.token is not None or self.client_ca is not None


@dataclass(frozen=True)
class ServerLimits:
    """Sizes in bytes, times in seconds."""

    ids: int = 1 << 18  # values in all inputs of one request, and numbers in one JSON response
    tensors: int = 2048  # inputs of one request, and its outputs
    message: int | None = None  # of one request; None: what `ids` and `tensors` can need
    response: int = 32 << 20  # bytes of one response
    queue: int = 1024  # queued requests of one model
    batch: int = 64  # requests in one batch
    batch_ids: int = 1 << 16  # values in one batch of several requests
    wait: float = 0.0  # maximum queue delay: how long the first request of a batch waits for others
    streams: int = 1024  # concurrent gRPC requests of a connection
    connections: int = 1024  # of each protocol; fewer if the process may open few files
    in_flight: int = 512 << 20  # requests and responses in memory, over both protocols
    slow: float = 20.0  # to receive a header, and again for a body; idle HTTP connections close after it
    rate: int = 4 << 20  # bytes a second; clients have `slow` and the time at this rate to read a response
    idle: float = 300.0  # gRPC connections without a request, and streams without a message
    drain: float = 10.0  # for requests in flight at shutdown

    @property
    def max_message(self) -> int:
        """Bytes of one request: 20 for each id, as JSON writes the longest, and 1 KiB for each input with its output."""
        return 20 * self.ids + 1024 * self.tensors if self.message is None else self.message

    @property
    def request(self) -> RequestLimits:
        """Counts that the protocols check."""
        return RequestLimits(self.ids, self.tensors, self.response)

    def max_connections(self) -> int:
        """Connections of each protocol, so that both together leave `RESERVED_FILES` for shards, checkpoints and probes."""
        used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else RESERVED_FILES
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed == resource.RLIM_INFINITY:
            return self.connections
        return max(1, min(self.connections, (allowed - used - RESERVED_FILES) // 2))

    def read_seconds(self, size: int) -> float:
        """How long a client may take to read a response."""
        return self.slow + size / self.rate


@dataclass(frozen=True)
class ServerConfig:
    """Addresses to listen on (port 0 picks a free port), and who may connect."""

    host: str = LOOPBACK
    http_port: int = 8000
    grpc_port: int = 8001
    credentials: Credentials = field(default_factory=Credentials)
    limits: ServerLimits = field(default_factory=ServerLimits)
    follow: float = 0.0  # seconds between checks for newer saves; 0: never
    model_control: bool = True  # whether clients may load and unload models
    publish_port: int | None = None  # for trainers that publish; None: closed
    allow_hosts: tuple[str, ...] = ()  # names, beside addresses and localhost, by which browsers may reach this server
    shared_memory: str | None = None  # what the names of clients' shared memory begin with; None: refused
    fronts: int = 1  # processes that answer clients

    @property
    def clients_control(self) -> bool:
        """Whether load and unload are possible: never for strangers from other machines."""
        known = self.credentials.identify_clients or self.credentials.control_token is not None
        return self.model_control and (known or self.host == LOOPBACK or self.host in ("localhost", "::1"))
