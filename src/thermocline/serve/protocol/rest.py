"""Infer over HTTP: JSON, with tensors as JSON numbers or, by the binary extension, as bytes after the JSON.

The header `Inference-Header-Content-Length` holds the length of the JSON. The bytes of each tensor with a `binary_data_size`
follow in order. Outputs are binary where the request says so: by output (`binary_data`), or for all (`binary_data_output`).

JSON is expensive: 36 bytes and 80 ns to read a number, 0.5 us to write one. Values are counted before they are parsed, and a
response holds a limited count. Both run in a worker thread if they are large. Python's JSON keeps the interpreter lock for a
whole document, so numbers are written in pieces, with pauses in which the event loop gets the lock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from thermocline.errors import BadInput

from .tensors import (
    DATATYPES,
    DEFAULT_LIMITS,
    Array,
    InferRequest,
    RequestLimits,
    from_bytes,
    from_values,
    read_timeout,
    refuse_count,
    refuse_unsupported,
)

HEADER_LENGTH = "Inference-Header-Content-Length"
PIECE = 1024  # numbers that are written at once
NUMBER_BYTES = 24  # of a number in JSON, at most
_PAUSE_SECONDS = 1e-5
Binary = frozenset[str] | None  # outputs that a request wants as bytes; None: all


def json_length(body: bytes, header_length: str | None) -> int:
    """The length of the JSON in a body."""
    if header_length is None:
        return len(body)
    digits = header_length.isascii() and header_length.isdigit() and len(header_length) < 20
    if not digits or int(header_length) > len(body):
        words = f"{HEADER_LENGTH} is {header_length[:20]!r}, but the body has {len(body)} bytes"
        raise BadInput(words, parameter=HEADER_LENGTH)
    return int(header_length)


def read_request(
    model: str, version: str, body: bytes, length: int, limits: RequestLimits = DEFAULT_LIMITS
) -> tuple[InferRequest, Binary]:
    """Read the body of an infer request, whose first `length` bytes are JSON."""
    content = read_json(body[:length], limits)
    tensors = content.get("inputs")
    if not isinstance(tensors, list):
        raise BadInput("the request needs a list 'inputs' of objects with name, shape, datatype and data", parameter="inputs")
    inputs: dict[str, Array] = {}
    rest = memoryview(body)[length:]
    for tensor in tensors:
        name, array, rest = _read_input(tensor, rest)
        if name in inputs:
            raise BadInput(f"input {name!r} occurs twice", parameter=name)
        inputs[name] = array
    if len(rest):
        words = f"{len(rest)} bytes follow the last binary tensor; binary_data_size and {HEADER_LENGTH} disagree"
        raise BadInput(words, parameter=HEADER_LENGTH)
    parameters = _parameters(content)
    outputs, binary = _read_outputs(content.get("outputs", []), parameters.get("binary_data_output") is True)
    id = content.get("id", "")
    if not isinstance(id, str):
        raise BadInput("'id' must be a string", parameter="id")
    return InferRequest(model, version, id, inputs, outputs, read_timeout(parameters)), binary


def read_json(body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> dict[str, Any]:
    """The JSON object in a body. Every value but the first follows one of three characters."""
    refuse_count("JSON values", sum(map(body.count, (b",", b"[", b"{"))), limits.values + limits.fields)
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is not JSON: {str(error)[:100]}", parameter="body") from error
    if not isinstance(content, dict):
        raise BadInput("the body must be a JSON object", parameter="body")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _read_input(tensor: object, rest: memoryview) -> tuple[str, Array, memoryview]:
    """One input, and the bytes that follow its own."""
    if not isinstance(tensor, dict):
        raise BadInput("every input must be an object with name, shape, datatype and data", parameter="inputs")
    name, datatype, shape = (tensor.get(key) for key in ("name", "datatype", "shape"))
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise BadInput("every input needs the strings 'name' and 'datatype'", parameter="inputs")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise BadInput(f"input {name!r}: 'shape' must be a list of integers", parameter=name)
    size = _parameters(tensor).get("binary_data_size")
    if size is None:
        if "data" not in tensor:
            raise BadInput(f"input {name!r} has neither 'data' nor 'binary_data_size'", parameter=name)
        return name, from_values(name, datatype, shape, tensor["data"]), rest
    if type(size) is not int or not 0 <= size <= len(rest):
        words = f"input {name!r}: binary_data_size is {str(size)[:20]}, but {len(rest)} bytes follow the JSON"
        raise BadInput(words, parameter=name)
    return name, from_bytes(name, datatype, shape, rest[:size]), rest[size:]


def _read_outputs(wanted: object, binary: bool) -> tuple[tuple[str, ...], Binary]:
    if not isinstance(wanted, list) or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in wanted):
        raise BadInput("'outputs' must be a list of objects with a 'name'", parameter="outputs")
    if not wanted:
        return (), None if binary else frozenset()
    content = {one["name"]: _parameters(one).get("binary_data", binary) is True for one in wanted}
    return tuple(content), frozenset(name for name, as_bytes in content.items() if as_bytes)


def _parameters(content: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = content.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise BadInput("'parameters' must be an object", parameter="parameters")
    refuse_unsupported(parameters)
    return parameters


def json_numbers(outputs: Mapping[str, Array], binary: Binary, limit: int) -> int:
    """Numbers that a response holds as JSON. Raises `BadInput` if they are more than `limit`."""
    numbers = 0 if binary is None else sum(array.size for name, array in outputs.items() if name not in binary)
    if numbers > limit:
        words = f"the response would have {numbers:,} numbers in JSON, the limit is {limit:,}; ask for binary tensors"
        way_out = '"parameters": {"binary_data_output": true}'
        raise BadInput(f"{words} ({way_out}), or split the request", needed=numbers, available=limit, parameter="outputs")
    return numbers


def write_response(model: str, version: str, id: str, outputs: Mapping[str, Array], binary: Binary) -> tuple[bytes, int | None]:
    """The body of a response, and the length of its JSON if bytes follow."""
    pieces: list[Any] = ['{"model_name":', _text(model), ',"model_version":', _text(version), ',"outputs":[']
    tails: list[Any] = []
    for name, array in outputs.items():
        head = {"name": name, "datatype": DATATYPES[array.dtype], "shape": list(array.shape)}
        pieces.append(_text(head)[:-1])
        if binary is None or name in binary:
            pieces.append(f',"parameters":{{"binary_data_size":{array.nbytes}}}}},')
            tails.append(np.ascontiguousarray(array).data if array.nbytes else b"")
        else:
            pieces.extend((',"data":[', *_numbers(array), "]},"))
    pieces[-1] = pieces[-1].rstrip(",")
    pieces.append(f'],"id":{_text(id)}}}' if id else "]}")
    written = "".join(pieces).encode()
    return (b"".join((written, *tails)), len(written)) if tails else (written, None)


def _numbers(array: Array) -> Iterator[str]:
    """The numbers of an array, with commas between them."""
    values_N = array.reshape(-1)
    for start in range(0, len(values_N), PIECE):
        if start:
            time.sleep(_PAUSE_SECONDS)
            yield ","
        yield _text(values_N[start : start + PIECE].tolist())[1:-1]


def _text(content: object) -> str:
    """JSON, which has no NaN and no Infinity."""
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False)
    except ValueError:
        words = 'the response has NaN or Infinity, which JSON cannot hold; ask for binary tensors ("binary_data_output": true)'
        raise BadInput(words, parameter="outputs") from None
