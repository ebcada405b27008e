"""An authenticated session over TCP: both sides prove the secret, and every message has a MAC of a key of this session.

    message     size of JSON, size of data, JSON, data, HMAC-SHA256 of all of it, the direction and the number of the message

A recorded message fits no other session and no other place in its own. Without TLS, content is readable on the network, but
only holders of the secret can change it. Strangers get nothing but a random number.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from thermocline.errors import BadInput

from .frames import configure, receive_exactly, receive_into
from .rendezvous import NUMBER, HostTls, proof

_SIZES, _COUNT = struct.Struct("<QQ"), struct.Struct("<Q")
_MAX_JSON, _PIECE = 1 << 20, 1 << 20
MAC = 32
CLIENT, SERVER = b"publish client", b"publish server"


class AuthenticationFailed(EOFError):
    """The other side has another secret, or a message was changed."""


class Session:
    """Messages over a connection whose sides have proved the secret."""

    def __init__(self, connection: socket.socket, key: bytes, side: bytes) -> None:
        self._connection, self._key = connection, key
        self._sides = side, SERVER if side == CLIENT else CLIENT
        self._counts = [0, 0]  # messages sent, received

    def _mac(self, received: bool) -> hmac.HMAC:
        mac = hmac.new(self._key, self._sides[received] + _COUNT.pack(self._counts[received]), hashlib.sha256)
        self._counts[received] += 1
        return mac

    def send(self, message: dict[str, Any], pieces: Sequence[Any] = ()) -> None:
        """Send JSON, then bytes in pieces."""
        text, mac = json.dumps(message).encode(), self._mac(received=False)
        head = _SIZES.pack(len(text), sum(len(piece) for piece in pieces)) + text
        for piece in (head, *pieces):
            mac.update(piece)
        self._connection.sendall(head)
        for piece in pieces:
            self._connection.sendall(piece)
        self._connection.sendall(mac.digest())

    def receive(self, limit: int) -> tuple[dict[str, Any], bytearray]:
        """Receive a message with at most `limit` bytes of data. Raises EOFError if the other side is gone or not trusted."""
        mac, head = self._mac(received=True), receive_exactly(self._connection, _SIZES.size)
        size, more = _SIZES.unpack(head)
        if size > _MAX_JSON or more > limit:
            raise AuthenticationFailed(f"a message of {size:,} + {more:,} bytes; the limit is {_MAX_JSON:,} + {limit:,}")
        text, data = receive_exactly(self._connection, size), bytearray(more)
        mac.update(head + text)
        view = memoryview(data)
        for begin in range(0, more, _PIECE):
            receive_into(self._connection, view[begin : begin + _PIECE])
            mac.update(view[begin : begin + _PIECE])  # while it is in the cache
        if not hmac.compare_digest(bytes(receive_exactly(self._connection, MAC)), mac.digest()):
            raise AuthenticationFailed("a message was changed on its way")
        message = json.loads(text)
        if not isinstance(message, dict):
            raise AuthenticationFailed("not a message of this protocol")
        return message, data

    def settimeout(self, seconds: float | None) -> None:
        self._connection.settimeout(seconds)

    def close(self) -> None:
        """Close the connection; a thread that waits for it wakes up."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def read_address(text: str) -> tuple[str, int]:
    """Host and port of a --publish-port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BadInput(f"{text!r} is not an address; give host:port of a server's --publish-port", parameter="to", value=text)
    return host.strip("[]"), int(port)


def connect(address: tuple[str, int], secret: bytes, tls: HostTls | None, seconds: float) -> Session:
    """Connect to a server. Raises OSError or EOFError."""
    connection = socket.create_connection(address, seconds)
    try:
        connection.settimeout(seconds)
        configure(connection, seconds)
        if tls is not None:
            connection = tls.wrap(connection, server=False)
        theirs, mine = bytes(receive_exactly(connection, NUMBER)), secrets.token_bytes(NUMBER)
        connection.sendall(mine + proof(secret, CLIENT, theirs, mine))
        if not hmac.compare_digest(bytes(receive_exactly(connection, NUMBER)), proof(secret, SERVER, mine, theirs)):
            raise AuthenticationFailed("the server has another secret")
        return Session(connection, proof(secret, b"publish key", theirs, mine), CLIENT)
    except BaseException:
        connection.close()
        raise


def accept(connection: socket.socket, secret: bytes, tls: HostTls | None, seconds: float) -> Session:
    """The server's side. Raises OSError or EOFError, and closes the connection, unless the other side has the secret."""
    try:
        connection.settimeout(seconds)
        configure(connection, seconds)
        if tls is not None:
            connection = tls.wrap(connection, server=True)
        mine = secrets.token_bytes(NUMBER)
        connection.sendall(mine)
        theirs, found = (bytes(receive_exactly(connection, NUMBER)) for _ in range(2))
        if not hmac.compare_digest(found, proof(secret, CLIENT, mine, theirs)):
            raise AuthenticationFailed("the client has another secret")
        connection.sendall(proof(secret, SERVER, theirs, mine))
        return Session(connection, proof(secret, b"publish key", mine, theirs), SERVER)
    except BaseException:
        connection.close()
        raise
