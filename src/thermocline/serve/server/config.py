"""Configuration of a server: addresses, credentials, and a limit for every quantity that a client controls."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

LOOPBACK = "127.0.0.1"


class Credentials(NamedTuple):
    """A bearer token, and a TLS certificate with its key. None disables each."""

    token: str | None = None
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True)
class ServerLimits:
    """Sizes in bytes, times in seconds."""

    message: int = 64 << 20  # of one request
    ids: int = 1 << 18  # values in all inputs of one request
    queue: int = 1024  # queued requests of one model
    batch: int = 64  # requests in one batch
    batch_ids: int = 1 << 16  # values in one batch of several requests
    wait: float = 0.0  # maximum queue delay: how long the first request of a batch waits for others
    streams: int = 1024  # concurrent gRPC requests of a connection, and HTTP connections
    bodies: int = 256 << 20  # HTTP bodies in memory
    slow: float = 20.0  # to receive an HTTP header, and again for a body; idle connections close after it
    drain: float = 10.0  # for requests in flight at shutdown


@dataclass(frozen=True)
class ServerConfig:
    """Addresses to listen on (port 0 picks a free port), and who may connect."""

    host: str = LOOPBACK
    http_port: int = 8000
    grpc_port: int = 8001
    credentials: Credentials = field(default_factory=Credentials)
    limits: ServerLimits = field(default_factory=ServerLimits)
    follow: float = 0.0  # seconds between checks for newer saves; 0: never
