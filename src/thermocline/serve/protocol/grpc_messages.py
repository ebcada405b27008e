"""ModelInfer over gRPC: request bytes to arrays, arrays to response bytes.

Protobuf's C code parses requests; arrays are views of the bytes that it returns. Responses are not built by protobuf: setting
`raw_output_contents` copies every row, and serialization copies it again. Fields of a message may come in any order, so the
small fields are serialized as a message, and rows follow their tags in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from thermocline.errors import BadInput

from . import schema
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

_RAW_OUTPUT = b"\x32"  # field 6, length-delimited
_STREAMED = b"\x12"  # field 2 of ModelStreamInferResponse, length-delimited

# Datatype -> field of InferTensorContents. FP16 has none.
_CONTENTS = {
    "BOOL": "bool_contents", "BYTES": "bytes_contents", "FP32": "fp32_contents", "FP64": "fp64_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents", **{f"INT{bits}": "int_contents" for bits in (8, 16, 32)},
    **{f"UINT{bits}": "uint_contents" for bits in (8, 16, 32)},
}  # fmt: skip


def parse(name: str, data: bytes, message: Callable[[str], Any] = schema.message) -> Any:
    """The message `name` in `data`."""
    try:
        return message(name).FromString(data)
    except DecodeError as error:
        raise BadInput(f"the {len(data)} bytes of this request are not a {name}: {error}", parameter=name) from error


def read_request(
    data: bytes, limits: RequestLimits = DEFAULT_LIMITS, regions: SharedRegions = NO_REGIONS
) -> InferRequest:  # fmt: skip
    """Read a ModelInferRequest whose counts are checked. All inputs that are not in shared memory have raw bytes, or all typed
    contents."""
    message = parse("ModelInferRequest", data)
    raw, tensors = message.raw_input_contents, message.inputs
    if len(tensors) > limits.tensors or len(message.outputs) > limits.tensors:
        refuse_count("inputs", len(tensors), limits.tensors)
        refuse_count("outputs", len(message.outputs), limits.tensors)
    timeout = read_timeout(_parameters(message.parameters)) if message.parameters else math.inf
    ranges = {
        tensor.name: SharedRange.of(tensor.name, _parameters(tensor.parameters)) for tensor in tensors if tensor.parameters
    }
    shared = {name: each for name, each in ranges.items() if each is not None}
    if raw and len(raw) != len(tensors) - len(shared):
        words = f"{len(tensors)} inputs but {len(raw)} raw_input_contents; give as many, or none and typed contents"
        raise BadInput(words, parameter="raw_input_contents")
    inputs: dict[str, Array] = {}
    copied, pieces = 0, iter(raw)
    for tensor in tensors:
        name = tensor.name
        if name in inputs:
            raise BadInput(f"input {name!r} occurs twice", parameter=name)
        if (at := shared.get(name)) is not None:
            data = regions.read(name, at, limits.values, copied)
            copied += len(data)
        elif raw:
            data = next(pieces)
        else:
            inputs[name] = _from_contents(tensor)
            continue
        inputs[name] = from_bytes(name, tensor.datatype, tensor.shape, data, limits)
    wanted = [
        (each.name, SharedRange.of(each.name, _parameters(each.parameters))) for each in message.outputs if each.parameters
    ]
    place = regions.placer({name: each for name, each in wanted if each is not None}) if wanted else None
    outputs = tuple([each.name for each in message.outputs])
    return InferRequest(message.model_name, message.model_version, message.id, inputs, outputs, timeout, place, copied)


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Triton's parameters as Python values."""
    refuse_unsupported(given)
    return {name: getattr(each, each.WhichOneof("parameter_choice") or "int64_param") for name, each in given.items()}


def _from_contents(tensor: Any) -> Array:
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        words = f"input {tensor.name!r} is {tensor.datatype[:20]!r}, which has no typed contents; send raw bytes"
        raise BadInput(words, parameter=tensor.name)
    for other, values in tensor.contents.ListFields():
        if other.name != field:
            words = f"input {tensor.name!r} is {tensor.datatype}, but {len(values)} values are in {other.name}"
            raise BadInput(words, parameter=tensor.name)
    values = getattr(tensor.contents, field)
    return from_values(tensor.name, tensor.datatype, tensor.shape, values)


def response_head(model: str, version: str, id: str) -> bytes:
    """The fields of a ModelInferResponse that come before its outputs."""
    head: bytes = schema.ModelInferResponse(model_name=model, model_version=version, id=id).SerializeToString()
    return head


def write_response(
    model: str, version: str, id: str, outputs: Mapping[str, Array], place: Place | None = None
) -> bytes:  # fmt: skip
    """A ModelInferResponse with `raw_output_contents`; those of outputs in shared memory are empty."""
    message = schema.ModelInferResponse(model_name=model, model_version=version, id=id)
    pieces: list[Any] = [b""]
    for name, array in outputs.items():
        output = message.outputs.add(name=name, datatype=DATATYPES[array.dtype], shape=array.shape)
        if place is not None and (placed := place(name, array)) is not None:
            for key, value in placed.items():
                setattr(output.parameters[key], "string_param" if isinstance(value, str) else "int64_param", value)
            array = array[:0]
        pieces.append(_RAW_OUTPUT + varint(array.nbytes))
        pieces.append(np.ascontiguousarray(array).data if array.nbytes else b"")
    pieces[0] = message.SerializeToString()
    return join(pieces)


def write_streamed(response: bytes) -> bytes:
    """A ModelStreamInferResponse that holds the bytes of a response."""
    return join((_STREAMED, varint(len(response)), response))


def varint(value: int) -> bytes:
    """A length in protobuf's encoding: seven bits in each byte, the lowest first."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
