"""What hosts say to each other: frames over TCP. Nothing in them is code, and whoever does not know the token is not heard.

    b"R"  which version, runs of (card and table, count), places     ->  size, records one after another
    b"C"  JSON and bytes behind it                                   ->  the same

Rows are asked for by place, four bytes each: the front knows where every row lies, so a host needs no id maps and no splits
to answer, and what comes back is the record as it is stored, an int8 row in a quarter of the bytes of fp32.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS, CONTROL = b"R", b"C"
_ROWS, _SIZES = struct.Struct("<III"), struct.Struct("<QQ")
SIZE = struct.Struct("<Q")
REFUSED = (1 << 64) - 1  # in place of the size of an answer: a message follows instead
LONGEST = 1 << 40
Runs = NDArray[np.uint32]


def exactly(source: socket.socket, size: int) -> bytearray:
    """So many bytes. EOFError if the other side is gone."""
    data = bytearray(size)
    fill(source, memoryview(data))
    return data


def fill(source: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        got = source.recv_into(into[done:])
        if not got:
            raise EOFError("the other side is gone")
        done += got


def tell(to: socket.socket, message: dict[str, Any], *data: Any) -> None:
    """A message, and bytes behind it."""
    text = json.dumps(message).encode()
    parts = [each.tobytes() if isinstance(each, np.ndarray) else each for each in data]
    to.sendall(_SIZES.pack(len(text), sum(map(len, parts))) + text)
    for part in parts:
        to.sendall(part)


def hear(source: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """What `tell` told."""
    text, more = _SIZES.unpack(exactly(source, _SIZES.size))
    if text > 1 << 24 or more > LONGEST:
        raise EOFError("that is not a message of ours")
    said: dict[str, Any] = json.loads(exactly(source, text))
    return said, exactly(source, more)


def ask_rows(to: socket.socket, held: int, runs: Sequence[tuple[int, int]], places_N: Runs) -> int:
    """Ask for rows: of each run a number of card and table, and how many places. Returns the bytes that were sent."""
    frame = b"".join(
        (ROWS, _ROWS.pack(held, len(runs), len(places_N)), np.array(runs, np.uint32).tobytes(), places_N.tobytes())
    )
    to.sendall(frame)
    return len(frame)


def hear_rows(source: socket.socket) -> tuple[int, list[tuple[int, int]], Runs]:
    """What `ask_rows` asked, after its first byte."""
    held, count, total = _ROWS.unpack(exactly(source, _ROWS.size))
    runs = np.frombuffer(exactly(source, 8 * count), np.uint32).reshape(-1, 2)
    places_N = np.frombuffer(exactly(source, 4 * total), np.uint32)
    return held, [(number, many) for number, many in runs.tolist()], places_N


def prepare(connection: socket.socket, seconds: float) -> None:
    """Small frames leave at once, and a machine that is gone without a word is noticed after so many seconds: by the kernel,
    whose counterpart answers however busy its machine is. A process that waits for a processor is not gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, max(1, round(seconds) - 1)),
        (socket.TCP_USER_TIMEOUT, round(1000 * seconds)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
