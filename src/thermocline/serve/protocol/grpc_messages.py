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


def read_request(data: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> InferRequest:
    """Read a ModelInferRequest whose counts are checked. Either all inputs have raw bytes, or all have typed contents."""
    message = parse("ModelInferRequest", data)
    raw, tensors = message.raw_input_contents, message.inputs
    if len(tensors) > limits.tensors or len(message.outputs) > limits.tensors:
        refuse_count("inputs", len(tensors), limits.tensors)
        refuse_count("outputs", len(message.outputs), limits.tensors)
    timeout = math.inf
    if message.parameters:
        refuse_unsupported(message.parameters)
        timeout = _timeout(message.parameters)
    if raw and len(raw) != len(tensors):
        words = f"{len(tensors)} inputs but {len(raw)} raw_input_contents; give as many, or none and typed contents"
        raise BadInput(words, parameter="raw_input_contents")
    inputs: dict[str, Array] = {}
    for at, tensor in enumerate(tensors):
        name = tensor.name
        if tensor.parameters:
            refuse_unsupported(tensor.parameters)
        if name in inputs:
            raise BadInput(f"input {name!r} occurs twice", parameter=name)
        inputs[name] = from_bytes(name, tensor.datatype, tensor.shape, raw[at], limits) if raw else _from_contents(tensor)
    for wanted in message.outputs:
        if wanted.parameters:
            refuse_unsupported(wanted.parameters)
    outputs = tuple([wanted.name for wanted in message.outputs])
    return InferRequest(message.model_name, message.model_version, message.id, inputs, outputs, timeout)


def _timeout(parameters: Mapping[str, Any]) -> float:
    """Seconds that a request may wait, from Triton's parameters, of which it has no other."""
    given = {name: getattr(each, each.WhichOneof("parameter_choice") or "int64_param") for name, each in parameters.items()}
    return read_timeout(given)


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


def write_response(model: str, version: str, id: str, outputs: Mapping[str, Array]) -> bytes:
    """A ModelInferResponse with `raw_output_contents`."""
    message = schema.ModelInferResponse(model_name=model, model_version=version, id=id)
    pieces: list[Any] = [b""]
    for name, array in outputs.items():
        message.outputs.add(name=name, datatype=DATATYPES[array.dtype], shape=array.shape)
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
