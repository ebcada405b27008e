"""How much a client may ask for, and how long it may take to ask. Everything that grows with what clients send has a bound
here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    message: int = 64 << 20  # one request
    ids: int = 1 << 18  # values of all inputs of one request
    queue: int = 1024  # requests that wait for one model
    batch: int = 64  # requests of one micro-batch
    batch_ids: int = 1 << 16  # values of one micro-batch, but for a single larger request
    wait: float = 0.0  # the latency budget: how long the first request of a micro-batch may wait for others
    streams: int = 1024  # requests at the same time over gRPC, and connections over HTTP
    bodies: int = 256 << 20  # bytes of HTTP requests that are being read at the same time
    slow: float = 20.0  # to send the header of an HTTP request, and again to send its body; idle connections close after it
    drain: float = 10.0  # for requests in progress when the server is told to stop
