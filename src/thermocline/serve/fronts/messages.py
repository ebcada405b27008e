"""Messages between a server and its front processes: JSON with descriptors, and versions of tables in shared memory.

A version is pickled with its arrays apart, in one segment that all fronts map: id maps and dense parameters are in memory once.
Pickles are safe here: both ends are processes of one server, on a socket pair that no other process has.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thermocline.serve.tables.segments import SharedSegment
from thermocline.serve.tables.shard_server import receive, send

_INLINE_BYTES = 1 << 15  # of a message; a longer one travels in shared memory
_ALIGN = 64


def send_message(to: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message of any length."""
    text = json.dumps(message).encode()
    if len(text) <= _INLINE_BYTES:
        send(to, dict(message), [*descriptors])
        return
    apart = SharedSegment(len(text), "message")
    apart.write(0, np.frombuffer(text, np.uint8))
    send(to, {"apart": len(text)}, [*descriptors, apart.descriptor])


def receive_message(source: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a message of `send_message`. Raises EOFError if the other side is gone."""
    message, descriptors = receive(source)
    if "apart" in message:
        with open(descriptors.pop(), "rb", buffering=0) as file:
            message = json.loads(os.pread(file.fileno(), message["apart"], 0))
    return message, descriptors


class _TensorPickler(pickle.Pickler):
    """Pickles tensors as arrays, whose bytes are kept apart."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat_B = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return _make_tensor, (flat_B.numpy(), value.dtype, tuple(value.shape))


def _make_tensor(flat_B: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat_B).view(dtype).view(shape)


def pack(values: Mapping[str, Any]) -> SharedSegment:
    """Values in shared memory: number of pieces, their sizes, then a pickle and its arrays, each aligned."""
    stream, apart = io.BytesIO(), list[pickle.PickleBuffer]()
    _TensorPickler(stream, 5, buffer_callback=apart.append).dump(dict(values))
    pieces = [np.frombuffer(each, np.uint8) for each in (stream.getbuffer(), *(buffer.raw() for buffer in apart))]
    head = np.array([len(pieces), *map(len, pieces)], np.int64).view(np.uint8)
    segment, at = SharedSegment(sum(_aligned(len(each)) for each in (head, *pieces)), "version"), 0
    for each in (head, *pieces):
        segment.write(at, each)
        at += _aligned(len(each))
    return segment


def unpack(descriptor: int) -> dict[str, Any]:
    """The values of `pack`. Their arrays are views of the shared memory."""
    memory = SharedSegment(os.fstat(descriptor).st_size, descriptor=descriptor).memory
    count = int(memory[:8].view(np.int64)[0])
    sizes = memory[8 : 8 + 8 * count].view(np.int64).tolist()
    pieces, at = [], _aligned(8 + 8 * count)
    for size in sizes:
        pieces.append(memory[at : at + size])
        at += _aligned(size)
    values: dict[str, Any] = pickle.loads(pieces[0].tobytes(), buffers=pieces[1:])
    return values


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
