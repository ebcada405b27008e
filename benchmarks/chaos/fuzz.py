"""Malformed requests: bytes of valid ones, cut, flipped, repeated, moved, or with invalid fields. The server's tests use them,
too."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from thermocline.serve.protocol import schema

_STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**70, 1.5, -0.0, "", "x", "..", "../../etc/passwd", "\x00", "\u202e", [], [[]], {}, {"a":
    1}, [None], ["1"], [1, [2]], [2**70], [1e308], 10**40,
)  # fmt: skip
_TYPES = ("INT64", "INT32", "FP32", "FP64", "BYTES", "BF16", "BOOL", "int64", "", "\x00")


def spoiled_grpc(draw: random.Random, good: bytes) -> bytes:
    """Corrupted bytes of a ModelInferRequest."""
    return draw.choice(_GRPC)(draw, good)


def _cut(draw: random.Random, good: bytes) -> bytes:
    return good[: draw.randrange(len(good))]


def _flip(draw: random.Random, good: bytes) -> bytes:
    data = bytearray(good)
    for _ in range(draw.choice((1, 2, 8, 64))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def _noise(draw: random.Random, good: bytes) -> bytes:
    return draw.randbytes(draw.choice((0, 1, 7, 63, 1000)))


def _repeat(draw: random.Random, good: bytes) -> bytes:
    """Repeat fields, or nest some inside others."""
    at, end = sorted(draw.randrange(len(good)) for _ in range(2))
    return draw.choice((good + good, good[:at] + good[at:end] * draw.choice((2, 5)) + good[end:]))


def _odd_fields(draw: random.Random, good: bytes) -> bytes:
    """A well-formed message with invalid values."""
    message = schema.ModelInferRequest.FromString(good)
    tensor = message.inputs[0]
    what = draw.randrange(7)
    if what == 0:
        del tensor.shape[:]
        tensor.shape.extend(draw.choice((-1, 0, 1, 2**40, 2**62, -(2**63))) for _ in range(draw.randrange(4)))
    elif what == 1:
        tensor.datatype = draw.choice(_TYPES)
    elif what == 2:
        tensor.name = draw.choice(("", "x" * 10_000, "user.offsets", "user.weights", "\u0000"))
    elif what == 3:
        message.model_name = draw.choice(("", "..", "a/b", "x" * 10_000))
    elif what == 4:
        message.raw_input_contents[0] = draw.randbytes(draw.randrange(200))
    elif what == 5:
        message.outputs.add(name=draw.choice(("", "user", "x" * 1000)))
        message.parameters["sequence_id"].int64_param = draw.randrange(3)
    else:
        del message.raw_input_contents[:]
        tensor.contents.fp32_contents.extend([1.0, float("nan")])
        tensor.contents.bytes_contents.append(b"\xff")
    data: bytes = message.SerializeToString()
    return data


_GRPC: tuple[Callable[[random.Random, bytes], bytes], ...] = (_cut, _flip, _noise, _repeat, _odd_fields)


def spoiled_http(draw: random.Random, model: str, feature: str) -> bytes:
    """Corrupted bytes of an HTTP request, or a request with invalid values."""
    body = json.dumps(_spoiled_json(draw, feature)).encode()
    if draw.random() < 0.2:
        body = body[: draw.randrange(len(body) + 1)]
    length: object = len(body)
    headers = ["Host: 127.0.0.1", "Connection: close"]
    kind = draw.randrange(6)
    if kind == 0:
        length = draw.choice((-1, 0, len(body) + 7, "x", 10**30, ""))
    elif kind == 1:
        headers.append(f"Inference-Header-Content-Length: {draw.choice((-1, 0, 5, 10**9, 'x'))}")
    elif kind == 2:
        headers.append(f"Content-Encoding: {draw.choice(('gzip', 'deflate', 'br', 'nonsense'))}")
    method = draw.choice(("POST",) * 8 + ("GET", "PUT", "P\x01ST"))
    name = draw.choice((model,) * 8 + ("..", "%2e%2e%2f", "x" * 5000, "%00"))
    head = [f"{method} /v2/models/{name}/infer HTTP/1.1", *headers, f"Content-Length: {length}"]
    data = "\r\n".join(head).encode() + b"\r\n\r\n" + body
    return _flip(draw, data) if draw.random() < 0.2 else data


def _spoiled_json(draw: random.Random, feature: str) -> Any:
    tensor: dict[str, Any] = {"name": feature, "shape": [2], "datatype": "INT64", "data": [1, 2]}
    said: dict[str, Any] = {"inputs": [tensor], "outputs": [{"name": feature}], "parameters": {"binary_data_output": True}}
    target = draw.choice((tensor, tensor, tensor, said))
    target[draw.choice((*target, "id", "parameters"))] = draw.choice(_STRANGE)
    return said
