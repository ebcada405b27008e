"""Frames between hosts over TCP. Frames hold no code, and a host answers only to a front end with the same secret.

    b"R"  version, runs of (shard and table, count), places     ->  size, records one after another
    b"C"  JSON, then bytes                                       ->  the same

Rows are requested by place, four bytes each: the front end knows the place of every row, so a host needs no id maps and no
splits. The reply holds records as they are stored, an int8 row in a quarter of the bytes of fp32.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rendezvous import NUMBER, proof

ROWS, CONTROL = b"R", b"C"
_ROWS, _SIZES = struct.Struct("<III"), struct.Struct("<QQ")
SIZE = struct.Struct("<Q")
REFUSED = (1 << 64) - 1  # as the size of a reply: the host does not have the version
_MAX_JSON, _MAX_DATA = 1 << 24, 1 << 40
Places = NDArray[np.uint32]


def receive_exactly(source: socket.socket, size: int) -> bytearray:
    """Receive `size` bytes. Raises EOFError if the other side is gone."""
    data = bytearray(size)
    receive_into(source, memoryview(data))
    return data


def receive_into(source: socket.socket, into: memoryview) -> None:
    """Fill a buffer. Raises EOFError if the other side is gone."""
    done = 0
    while done < len(into):
        got = source.recv_into(into[done:])
        if not got:
            raise EOFError("the other side is gone")
        done += got


def send_message(to: socket.socket, message: dict[str, Any], *data: Any) -> None:
    """Send JSON, then bytes."""
    text = json.dumps(message).encode()
    parts = [each.tobytes() if isinstance(each, np.ndarray) else each for each in data]
    to.sendall(_SIZES.pack(len(text), sum(map(len, parts))) + text)
    for part in parts:
        to.sendall(part)


def receive_message(source: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """Receive a message of `send_message`."""
    text, more = _SIZES.unpack(receive_exactly(source, _SIZES.size))
    if text > _MAX_JSON or more > _MAX_DATA:
        raise EOFError("not a message of this protocol")
    message: dict[str, Any] = json.loads(receive_exactly(source, text))
    return message, receive_exactly(source, more)


def prove_to_host(connection: socket.socket, secret: bytes) -> None:
    """The front end's side of a mutual proof of the secret. Raises EOFError if the other side does not have it."""
    theirs, mine = bytes(receive_exactly(connection, NUMBER)), secrets.token_bytes(NUMBER)
    connection.sendall(mine + proof(secret, b"front", theirs, mine))
    if not hmac.compare_digest(bytes(receive_exactly(connection, NUMBER)), proof(secret, b"host", mine, theirs)):
        raise EOFError("the host has another secret")


def prove_to_front(connection: socket.socket, secret: bytes) -> bool:
    """A host's side; whether the front end has the secret."""
    mine = secrets.token_bytes(NUMBER)
    connection.sendall(mine)
    theirs, found = (bytes(receive_exactly(connection, NUMBER)) for _ in range(2))
    if not hmac.compare_digest(found, proof(secret, b"front", mine, theirs)):
        return False
    connection.sendall(proof(secret, b"host", theirs, mine))
    return True


def exchange_messages(with_host: socket.socket, message: dict[str, Any], *data: Any) -> dict[str, Any]:
    """The reply of a host to a message."""
    with_host.sendall(CONTROL)
    send_message(with_host, message, *data)
    return receive_message(with_host)[0]


def request_rows(to: socket.socket, version: int, runs_K2: NDArray[np.int64], places_N: Places) -> int:
    """Request rows: of each run, a number of shard and table, and a count of places. Returns the bytes sent."""
    header = ROWS + _ROWS.pack(version, len(runs_K2), len(places_N))
    frame = header + runs_K2.astype(np.uint32).tobytes() + places_N.tobytes()
    to.sendall(frame)
    return len(frame)


def receive_row_request(source: socket.socket) -> tuple[int, list[tuple[int, int]], Places]:
    """Receive a request of `request_rows`, after its first byte."""
    version, count, total = _ROWS.unpack(receive_exactly(source, _ROWS.size))
    runs = np.frombuffer(receive_exactly(source, 8 * count), np.uint32).reshape(-1, 2)
    places_N = np.frombuffer(receive_exactly(source, 4 * total), np.uint32)
    return version, [(number, length) for number, length in runs.tolist()], places_N


def configure(connection: socket.socket, seconds: float) -> None:
    """Send small frames at once, and detect a silent machine after `seconds`.

    The kernel's keepalive probes do that: a process that waits for a processor does not count as silent.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, max(1, round(seconds) - 1)),
        (socket.TCP_USER_TIMEOUT, round(1000 * seconds)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
