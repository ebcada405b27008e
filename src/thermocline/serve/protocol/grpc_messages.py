"""ModelInfer over gRPC: from the bytes of a request to arrays, and from arrays to the bytes of a response.

This is the server's hot path. Requests are parsed by protobuf's C code; arrays are views of the bytes it hands out. Responses
are not built by protobuf: setting `raw_output_contents` copies every row into a message and serializing copies them again. A
message is a sequence of fields in any order, so the small fields are serialized as a message and the rows are appended behind
their tags, in one copy. At 2,048 rows of 64 columns that is half a MiB copied once instead of three times.

The shared-memory and classification parameters of Triton's extensions are refused by name instead of being ignored: whoever
sends them counts on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError

from thermocline.errors import BadInput

from . import schema
from .tensors import DATATYPES, Array, Asked, contiguous, from_bytes, from_values

_RAW_INPUT = b"\x3a"  # field 7, length-delimited
_RAW_OUTPUT = b"\x32"  # field 6, length-delimited
_STREAMED = b"\x12"  # field 2 of ModelStreamInferResponse, length-delimited
_REFUSED = ("shared_memory_region", "classification", "sequence_id")

# Datatype -> the field of InferTensorContents that holds its values. FP16 can only come as bytes.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def parse(name: str, data: bytes) -> Any:
    """The message `name` in `data`."""
    try:
        return schema.message(name).FromString(data)
    except DecodeError as error:
        raise BadInput(f"the {len(data)} bytes of this request are not a {name}: {error}") from error


def read_request(data: bytes) -> Asked:
    """A ModelInferRequest. Values come as raw bytes for all inputs, or in typed fields for all."""
    try:
        message = schema.ModelInferRequest.FromString(data)
    except DecodeError as error:
        raise BadInput(f"the {len(data)} bytes of this request are not a ModelInferRequest: {error}") from error
    raw, tensors = message.raw_input_contents, message.inputs
    if message.parameters:
        _refuse(message.parameters)
    if raw and len(raw) != len(tensors):
        raise BadInput(f"{len(tensors)} inputs but {len(raw)} raw_input_contents; give as many, or none and typed contents")
    inputs: dict[str, Array] = {}
    for at, tensor in enumerate(tensors):
        name = tensor.name
        if tensor.parameters:
            _refuse(tensor.parameters)
        if name in inputs:
            raise BadInput(f"input {name!r} comes twice")
        inputs[name] = from_bytes(name, tensor.datatype, tensor.shape, raw[at]) if raw else _from_contents(tensor)
    outputs: tuple[str, ...] = ()
    if message.outputs:
        for wanted in message.outputs:
            if wanted.parameters:
                _refuse(wanted.parameters)
        outputs = tuple(wanted.name for wanted in message.outputs)
    return Asked(message.model_name, message.model_version, message.id, inputs, outputs)


def _from_contents(tensor: Any) -> Array:
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise BadInput(f"input {tensor.name!r} is {tensor.datatype[:20]!r}, which cannot come as typed contents")
    for other, values in tensor.contents.ListFields():
        if other.name != field:
            raise BadInput(f"input {tensor.name!r} is {tensor.datatype}, but {len(values)} values came as {other.name}")
    values = getattr(tensor.contents, field)
    return from_values(tensor.name, tensor.datatype, tensor.shape, list(values))


def _refuse(parameters: Mapping[str, Any]) -> None:
    for name in _REFUSED:
        if name in parameters:
            raise BadInput(f"parameter {name!r} is not supported by this server; send the tensors with the request")


def head_of(data: bytes) -> bytes | None:
    """What comes before the values in a request with raw values of one input, if they are the last of it: another request
    with this head and as many bytes behind it is the same but for the values."""
    message = schema.ModelInferRequest.FromString(data)
    if len(message.raw_input_contents) != 1:
        return None
    values = message.raw_input_contents[0]
    head = data[: -len(values)] if values and data.endswith(values) else b""
    begin = _RAW_INPUT + varint(len(values))
    if not head.endswith(begin):
        return None
    # The bytes might be those of another field that looks so. If all before is a message, and one without values, they are not.
    try:
        before = schema.ModelInferRequest.FromString(head.removesuffix(begin))
    except DecodeError:
        return None
    return None if before.raw_input_contents else head


def head_of_response(model: str, version: str, name: str, dtype: Any, shape: tuple[int, ...]) -> bytes:
    """What comes before the values in a ModelInferResponse of one output."""
    message = schema.ModelInferResponse(model_name=model, model_version=version)
    message.outputs.add(name=name, datatype=DATATYPES[dtype], shape=shape)
    begin: bytes = message.SerializeToString() + _RAW_OUTPUT + varint(math.prod(shape) * dtype.itemsize)
    return begin


def write_response(model: str, version: str, id: str, outputs: Mapping[str, Array]) -> bytes:
    """A ModelInferResponse with `raw_output_contents`."""
    message = schema.ModelInferResponse(model_name=model, model_version=version, id=id)
    pieces: list[Any] = [b""]
    for name, array in outputs.items():
        message.outputs.add(name=name, datatype=DATATYPES[array.dtype], shape=array.shape)
        pieces.append(_RAW_OUTPUT + varint(array.nbytes))
        pieces.append(contiguous(array).data if array.nbytes else b"")
    pieces[0] = message.SerializeToString()
    return b"".join(pieces)


def write_streamed(response: bytes) -> bytes:
    """A ModelStreamInferResponse around the bytes of a response."""
    return b"".join((_STREAMED, varint(len(response)), response))


def varint(value: int) -> bytes:
    """A length as protobuf writes it: seven bits a byte, the lowest first."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
