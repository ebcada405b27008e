"""A gRPC client in bytes, which can do what a real one never does: send half a message, or not read a response."""

from __future__ import annotations

import socket
import struct
from types import TracebackType

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(path: str) -> bytes:
    """A header block of literals, without Huffman coding or an index."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    return b"".join(
        bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields.items()
    )


class RawGrpc:
    """One connection. `sent` bytes of each message are sent, all of them by default; nothing is read.

    So nothing is known of the server's flow control: all messages together must be shorter than 65,535 bytes.
    """

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=120)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        self._next = 1

    def call(self, path: str, message: bytes, sent: int | None = None) -> None:
        prefixed = b"\0" + struct.pack(">I", len(message)) + message
        part = prefixed[:sent]
        pieces = [frame(HEADERS, END_HEADERS, self._next, headers(path))]
        for at in range(0, len(part), 1 << 14):
            last = sent is None and at + (1 << 14) >= len(part)
            pieces.append(frame(DATA, END_STREAM if last else 0, self._next, part[at : at + (1 << 14)]))
        self.socket.sendall(b"".join(pieces))
        self._next += 2

    def closed(self) -> bool:
        """Whether the server closed the connection, which the bytes that are there precede."""
        self.socket.settimeout(0.02)
        try:
            while self.socket.recv(1 << 20):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    def __enter__(self) -> RawGrpc:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()
