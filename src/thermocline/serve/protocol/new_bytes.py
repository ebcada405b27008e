"""Bytes that are allocated first and filled later: by kernels, and by copies that do not keep the interpreter lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

UNLOCKED_BYTES = 1 << 18  # of a piece that is copied without the interpreter lock
# CPython's functions to allocate uninitialised bytes, and for the address of bytes.
allocate = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


def join(pieces: Sequence[Any]) -> bytes:
    """`b"".join(pieces)`. Other threads run while it copies a large piece (`bytes.join` keeps the lock for 10 ms in 32 MiB)."""
    sizes = [len(piece) if isinstance(piece, bytes) else piece.nbytes for piece in pieces]
    if max(sizes, default=0) < UNLOCKED_BYTES:
        return b"".join(pieces)
    joined: bytes = allocate(None, sum(sizes))
    at = address_of(joined)
    for piece, size in zip(pieces, sizes, strict=True):
        ctypes.memmove(at, np.frombuffer(piece, np.uint8).__array_interface__["data"][0] if size else at, size)
        at += size
    return joined
