"""Infer over HTTP: JSON, with tensors as JSON numbers or, by the binary extension, as bytes after the JSON.

The header `Inference-Header-Content-Length` holds the length of the JSON. The bytes of each tensor with a `binary_data_size`
follow in order. Outputs are binary where the request says so: by output (`binary_data`), or for all (`binary_data_output`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from thermocline.errors import BadInput

from .tensors import DATATYPES, Array, InferRequest, from_bytes, from_values, refuse_unsupported

HEADER_LENGTH = "Inference-Header-Content-Length"


def read_request(
    model: str, version: str, body: bytes, header_length: str | None
) -> tuple[InferRequest, frozenset[str] | None]:
    """Read the body of an infer request. Returns the request, and the outputs that it wants as bytes (None: all)."""
    length = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit() and int(header_length) <= length):
            words = f"{HEADER_LENGTH} is {header_length[:20]!r}, but the body has {length} bytes"
            raise BadInput(words, parameter=HEADER_LENGTH)
        length = int(header_length)
    content = read_json(body[:length])
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
    return InferRequest(model, version, id, inputs, outputs), binary


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is not JSON: {str(error)[:100]}", parameter="body") from error
    if not isinstance(content, dict):
        raise BadInput("the body must be a JSON object", parameter="body")
    return content


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


def _read_outputs(wanted: object, binary: bool) -> tuple[tuple[str, ...], frozenset[str] | None]:
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


def write_response(
    model: str, version: str, id: str, outputs: Mapping[str, Array], binary: frozenset[str] | None
) -> tuple[bytes, int | None]:
    """The body of a response, and the length of its JSON if bytes follow."""
    tensors, pieces = [], []
    for name, array in outputs.items():
        tensor: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype], "shape": list(array.shape)}
        if binary is None or name in binary:
            tensor["parameters"] = {"binary_data_size": array.nbytes}
            pieces.append(np.ascontiguousarray(array).data if array.nbytes else b"")
        else:
            tensor["data"] = array.reshape(-1).tolist()
        tensors.append(tensor)
    content = {"model_name": model, "model_version": version, "outputs": tensors} | ({"id": id} if id else {})
    written = json.dumps(content, separators=(",", ":")).encode()
    return (b"".join((written, *pieces)), len(written)) if pieces else (written, None)
