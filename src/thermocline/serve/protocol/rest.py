"""Infer over HTTP: JSON, with tensors as JSON numbers or, by the binary extension, as bytes after the JSON.

The header `Inference-Header-Content-Length` holds the length of the JSON. The bytes of each tensor with a `binary_data_size`
follow in order. Outputs are binary where the request says so: by output (`binary_data`), or for all (`binary_data_output`).

JSON keeps the interpreter lock for a whole document. So values are counted before they are parsed, and lists, objects and
fields, which take ten times as long as numbers, have a lower limit. A response holds a limited count of numbers. Both run in a
worker thread if they are large.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from thermocline.errors import BadInput

from .new_bytes import join
from .shared_memory import NO_REGIONS, SharedRange, SharedRegions
from .tensors import (
    DATATYPES,
    DEFAULT_LIMITS,
    Array,
    InferRequest,
    Place,
    RequestLimits,
    from_bytes,
    from_values,
    read_timeout,
    refuse_count,
    refuse_unsupported,
)

HEADER_LENGTH = "Inference-Header-Content-Length"
NUMBER_BYTES = 24  # of a number in JSON, at most
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
    model: str, version: str, body: bytes, length: int, limits: RequestLimits = DEFAULT_LIMITS,
    regions: SharedRegions = NO_REGIONS,
) -> tuple[InferRequest, Binary]:  # fmt: skip
    """Read the body of an infer request, whose first `length` bytes are JSON."""
    content = read_json(body[:length], limits)
    tensors = content.get("inputs")
    if not isinstance(tensors, list):
        raise BadInput("the request needs a list 'inputs' of objects with name, shape, datatype and data", parameter="inputs")
    inputs: dict[str, Array] = {}
    rest, copied = memoryview(body)[length:], 0
    for tensor in tensors:
        name, array, rest, taken = _read_input(tensor, rest, limits, regions, copied)
        copied += taken
        if name in inputs:
            raise BadInput(f"input {name!r} occurs twice", parameter=name)
        inputs[name] = array
    if len(rest):
        words = f"{len(rest)} bytes follow the last binary tensor; binary_data_size and {HEADER_LENGTH} disagree"
        raise BadInput(words, parameter=HEADER_LENGTH)
    parameters = _parameters(content)
    outputs, binary, shared = _read_outputs(content.get("outputs", []), parameters.get("binary_data_output") is True)
    id = content.get("id", "")
    if not isinstance(id, str):
        raise BadInput("'id' must be a string", parameter="id")
    timeout, place = read_timeout(parameters), regions.placer(shared)
    return InferRequest(model, version, id, inputs, outputs, timeout, place, copied), binary


def read_json(body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> dict[str, Any]:
    """The JSON object in a body. Every value but the first follows one of three characters."""
    lists, fields = body.count(b"[") + body.count(b"{"), body.count(b":")
    refuse_count("JSON values", body.count(b",") + lists, limits.values + limits.fields)
    for of, found in (("JSON lists and objects", lists), ("JSON fields", fields)):
        refuse_count(of, found, max(limits.fields, 64), "send flat lists, or binary tensors")
    try:
        content = orjson.loads(body)
    except ValueError as error:
        raise BadInput(f"the body is not JSON: {str(error)[:100]}", parameter="body") from error
    if not isinstance(content, dict):
        raise BadInput("the body must be a JSON object", parameter="body")
    return content


def _read_input(
    tensor: object, rest: memoryview, limits: RequestLimits, regions: SharedRegions, copied: int
) -> tuple[str, Array, memoryview, int]:  # fmt: skip
    """One input, the bytes that follow its own, and how many came from shared memory. `copied`: of the inputs before."""
    if not isinstance(tensor, dict):
        raise BadInput("every input must be an object with name, shape, datatype and data", parameter="inputs")
    name, datatype, shape = (tensor.get(key) for key in ("name", "datatype", "shape"))
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise BadInput("every input needs the strings 'name' and 'datatype'", parameter="inputs")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise BadInput(f"input {name!r}: 'shape' must be a list of integers", parameter=name)
    parameters = _parameters(tensor)
    if (at := SharedRange.of(name, parameters)) is not None:
        data = regions.read(name, at, limits.values, copied)
        return name, from_bytes(name, datatype, shape, data, limits), rest, at.size
    size = parameters.get("binary_data_size")
    if size is None:
        if "data" not in tensor:
            raise BadInput(f"input {name!r} has neither 'data' nor 'binary_data_size'", parameter=name)
        return name, from_values(name, datatype, shape, tensor["data"]), rest, 0
    if type(size) is not int or not 0 <= size <= len(rest):
        words = f"input {name!r}: binary_data_size is {str(size)[:20]}, but {len(rest)} bytes follow the JSON"
        raise BadInput(words, parameter=name)
    return name, from_bytes(name, datatype, shape, rest[:size], limits), rest[size:], 0


def _read_outputs(wanted: object, binary: bool) -> tuple[tuple[str, ...], Binary, dict[str, SharedRange]]:
    """Names of the requested outputs, those that are not JSON, and those that go to shared memory."""
    if not isinstance(wanted, list) or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in wanted):
        raise BadInput("'outputs' must be a list of objects with a 'name'", parameter="outputs")
    if not wanted:
        return (), None if binary else frozenset(), {}
    content = {one["name"]: _parameters(one) for one in wanted}
    ranges = {name: SharedRange.of(name, parameters) for name, parameters in content.items()}
    shared = {name: each for name, each in ranges.items() if each is not None}
    as_bytes = {name for name, parameters in content.items() if parameters.get("binary_data", binary) is True}
    return tuple(content), frozenset(as_bytes | shared.keys()), shared


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


def write_response(
    model: str, version: str, id: str, outputs: Mapping[str, Array], binary: Binary, place: Place | None = None
) -> tuple[bytes, int | None]:  # fmt: skip
    """The body of a response, and the length of its JSON if bytes follow."""
    written: list[dict[str, Any]] = []
    tails: list[Any] = []
    for name, array in outputs.items():
        head: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype], "shape": list(array.shape)}
        flat_N = np.ascontiguousarray(array).reshape(-1)
        if place is not None and (placed := place(name, array)) is not None:
            head["parameters"] = placed
        elif binary is None or name in binary:
            head["parameters"] = {"binary_data_size": array.nbytes}
            tails.append(flat_N.data if array.nbytes else b"")
        elif np.isfinite(flat_N).all():
            head["data"] = flat_N
        else:
            way_out = 'ask for binary tensors ("binary_data_output": true)'
            raise BadInput(f"output {name!r} has NaN or Infinity, which JSON cannot hold; {way_out}", parameter="outputs")
        written.append(head)
    content: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": written}
    if id:
        content["id"] = id
    text = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return (join((text, *tails)), len(text)) if tails else (text, None)
