"""gRPC messages and services: the `.proto` files of this folder, read into a private descriptor pool.

Generated code would register the same full names as `tritonclient` in protobuf's default pool, where the second registration
fails. So this module reads the files when it is imported. A test compares every field number with `tritonclient`'s. CUDA
shared memory, tracing and log settings are left out: they would let clients write the server's files.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE, HEALTH = f"{PACKAGE}.GRPCInferenceService", "grpc.health.v1.Health"
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
PROTO_FILES = ("open_inference.proto", "health.proto", "reflection_v1.proto", "reflection_v1alpha.proto")

_TOKEN = re.compile(r'"[^"]*"|[\w.]+|[{}()<>=;,]')
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")
}


def _describe(name: str) -> Any:
    """The descriptor of a file. Reads as much of the language as these files need."""
    text = re.sub(r"//.*", "", (files(__package__) / name).read_text(encoding="utf-8"))
    tokens = _TOKEN.findall(text)[::-1]
    file = descriptor_pb2.FileDescriptorProto(name=f"thermocline/{name}", syntax="proto3")
    while tokens:
        kind = tokens.pop()
        if kind == "message":
            _read_message(tokens, file.message_type.add())
        elif kind == "enum":
            _read_enum(tokens, file.enum_type.add())
        elif kind == "service":
            _read_service(tokens, file.service.add())
        elif kind == "package":
            file.package = tokens.pop()
    return file


def _expect(tokens: list[str], *expected: str) -> None:
    for each in expected:
        assert tokens.pop() == each, (each, tokens[-9:])


def _read_message(tokens: list[str], message: Any) -> None:
    message.name = tokens.pop()
    _expect(tokens, "{")
    inside_oneof = False
    while (kind := tokens.pop()) != "}" or inside_oneof:
        if kind == "}":
            inside_oneof = False
        elif kind == "message":
            _read_message(tokens, message.nested_type.add())
        elif kind == "enum":
            _read_enum(tokens, message.enum_type.add())
        elif kind == "oneof":
            message.oneof_decl.add(name=tokens.pop())
            _expect(tokens, "{")
            inside_oneof = True
        else:
            field = _read_field(tokens, message, kind)
            if inside_oneof:
                field.oneof_index = len(message.oneof_decl) - 1


def _read_field(tokens: list[str], message: Any, kind: str) -> Any:
    repeated, values = kind in ("repeated", "map"), ""
    if kind == "repeated":
        kind = tokens.pop()
    elif kind == "map":
        _expect(tokens, "<", "string", ",")
        values = tokens.pop()
        _expect(tokens, ">")
    field = message.field.add(name=tokens.pop(), label=_Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL)
    if values:
        kind = f"{field.name.capitalize()}Entry"
        entry = message.nested_type.add(name=kind)
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), values)
    _set_type(field, kind)
    _expect(tokens, "=")
    field.number = int(tokens.pop())
    _expect(tokens, ";")
    return field


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type_name = kind  # the pool finds it, from the innermost scope on


def _read_enum(tokens: list[str], enum: Any) -> None:
    enum.name = tokens.pop()
    _expect(tokens, "{")
    while (name := tokens.pop()) != "}":
        _expect(tokens, "=")
        enum.value.add(name=name, number=int(tokens.pop()))
        _expect(tokens, ";")


def _read_service(tokens: list[str], service: Any) -> None:
    service.name = tokens.pop()
    _expect(tokens, "{")
    while tokens.pop() == "rpc":
        method = service.method.add(name=tokens.pop())
        method.client_streaming, method.input_type = _read_type(tokens)
        _expect(tokens, "returns")
        method.server_streaming, method.output_type = _read_type(tokens)
        _expect(tokens, "{", "}")


def _read_type(tokens: list[str]) -> tuple[bool, str]:
    _expect(tokens, "(")
    kind, streams = tokens.pop(), False
    if kind == "stream":
        kind, streams = tokens.pop(), True
    _expect(tokens, ")")
    return streams, kind


POOL = descriptor_pool.DescriptorPool()
for _name in PROTO_FILES:
    POOL.AddSerializedFile(_describe(_name).SerializeToString())


@cache
def message(name: str, package: str = PACKAGE) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{package}.{name}"))


ModelInferRequest = message("ModelInferRequest")
ModelInferResponse = message("ModelInferResponse")
