"""Infer over HTTP: JSON, with tensors as JSON numbers or, by the binary extension, as bytes behind the JSON.

A body with binary tensors is the JSON, whose length the header `Inference-Header-Content-Length` says, and then the bytes of
each tensor that has a `binary_data_size`, in order. The response is binary where the request asked for it, by output
(`binary_data`) or for all (`binary_data_output`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from thermocline.errors import BadInput

from .tensors import DATATYPES, Array, Asked, contiguous, from_bytes, from_values

HEADER_LENGTH = "Inference-Header-Content-Length"
_REFUSED = ("shared_memory_region", "classification", "sequence_id")


class Posted(NamedTuple):
    """A request, and which outputs it wants as bytes (None: all)."""

    asked: Asked
    binary: frozenset[str] | None


def read_request(model: str, version: str, body: bytes, header_length: str | None) -> Posted:
    length = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit() and int(header_length) <= length):
            raise BadInput(f"{HEADER_LENGTH} is {header_length[:20]!r}, but the body has {length} bytes")
        length = int(header_length)
    said = read_json(body[:length])
    tensors = said.get("inputs")
    if not isinstance(tensors, list):
        raise BadInput("the request needs a list 'inputs', of objects with name, shape, datatype and data")
    inputs: dict[str, Array] = {}
    rest = memoryview(body)[length:]
    for tensor in tensors:
        name, array, rest = _read_input(tensor, rest)
        if name in inputs:
            raise BadInput(f"input {name!r} comes twice")
        inputs[name] = array
    if len(rest):
        raise BadInput(
            f"{len(rest)} bytes are left behind the last binary tensor; binary_data_size and {HEADER_LENGTH} disagree"
        )
    parameters = _parameters(said)
    outputs, binary = _read_outputs(said.get("outputs", []), parameters.get("binary_data_output") is True)
    id = said.get("id", "")
    if not isinstance(id, str):
        raise BadInput("'id' must be a text")
    return Posted(Asked(model, version, id, inputs, outputs), binary)


def read_json(body: bytes) -> dict[str, Any]:
    """The object in a body."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is not JSON: {str(error)[:100]}") from error
    if not isinstance(said, dict):
        raise BadInput("the body must be a JSON object")
    return said


def _read_input(tensor: object, rest: memoryview) -> tuple[str, Array, memoryview]:
    """One input and the bytes behind its own."""
    if not isinstance(tensor, dict):
        raise BadInput("every input must be an object with name, shape, datatype and data")
    name, datatype, shape = (tensor.get(key) for key in ("name", "datatype", "shape"))
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise BadInput("every input needs the texts 'name' and 'datatype'")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise BadInput(f"input {name!r}: 'shape' must be a list of whole numbers")
    size = _parameters(tensor).get("binary_data_size")
    if size is None:
        if "data" not in tensor:
            raise BadInput(f"input {name!r} has neither 'data' nor a 'binary_data_size'")
        return name, from_values(name, datatype, shape, tensor["data"]), rest
    if type(size) is not int or not 0 <= size <= len(rest):
        raise BadInput(f"input {name!r}: binary_data_size is {str(size)[:20]}, but {len(rest)} bytes are left behind the JSON")
    return name, from_bytes(name, datatype, shape, rest[:size]), rest[size:]


def _read_outputs(wanted: object, binary: bool) -> tuple[tuple[str, ...], frozenset[str] | None]:
    if not isinstance(wanted, list) or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in wanted):
        raise BadInput("'outputs' must be a list of objects with a 'name'")
    if not wanted:
        return (), None if binary else frozenset()
    said = {one["name"]: _parameters(one).get("binary_data", binary) is True for one in wanted}
    return tuple(said), frozenset(name for name, as_bytes in said.items() if as_bytes)


def _parameters(said: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = said.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise BadInput("'parameters' must be an object")
    for name in _REFUSED:
        if name in parameters:
            raise BadInput(f"parameter {name!r} is not supported by this server; send the tensors with the request")
    return parameters


def write_response(
    model: str, version: str, id: str, outputs: Mapping[str, Array], binary: frozenset[str] | None
) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON where bytes follow it."""
    tensors, pieces = [], []
    for name, array in outputs.items():
        tensor: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype], "shape": list(array.shape)}
        if binary is None or name in binary:
            tensor["parameters"] = {"binary_data_size": array.nbytes}
            pieces.append(contiguous(array).data if array.nbytes else b"")
        else:
            tensor["data"] = array.reshape(-1).tolist()
        tensors.append(tensor)
    said = {"model_name": model, "model_version": version, "outputs": tensors} | ({"id": id} if id else {})
    written = json.dumps(said, separators=(",", ":")).encode()
    return (b"".join((written, *pieces)), len(written)) if pieces else (written, None)
