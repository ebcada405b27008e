"""gRPC messages of the Open Inference Protocol and of Triton's extensions, in a private descriptor pool.

Generated code would register the same full names as `tritonclient` in protobuf's default pool, where the second registration
fails. So this module builds the descriptors from the text below. A test compares every field number with `tritonclient`'s.
Shared memory, tracing and log settings are left out: they would let clients map the server's memory or write its files.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

# One line for each message: its name, then `number name type`. A dot nests a message; `*` marks a repeated field, `{}` a map
# from strings, `|` a member of the oneof `parameter_choice`.
_MESSAGES = """
ServerLiveRequest:
ServerLiveResponse: 1 live bool
ServerReadyRequest:
ServerReadyResponse: 1 ready bool
ModelReadyRequest: 1 name string, 2 version string
ModelReadyResponse: 1 ready bool
ServerMetadataRequest:
ServerMetadataResponse: 1 name string, 2 version string, 3 extensions string*
ModelMetadataRequest: 1 name string, 2 version string
ModelMetadataResponse: 1 name string, 2 versions string*, 3 platform string, \
4 inputs .TensorMetadata*, 5 outputs .TensorMetadata*
ModelMetadataResponse.TensorMetadata: 1 name string, 2 datatype string, 3 shape int64*
InferParameter: 1 bool_param bool|, 2 int64_param int64|, 3 string_param string|, 4 double_param double|, 5 uint64_param uint64|
InferTensorContents: 1 bool_contents bool*, 2 int_contents int32*, 3 int64_contents int64*, 4 uint_contents uint32*, \
5 uint64_contents uint64*, 6 fp32_contents float*, 7 fp64_contents double*, 8 bytes_contents bytes*
ModelInferRequest: 1 model_name string, 2 model_version string, 3 id string, 4 parameters InferParameter{}, \
5 inputs .InferInputTensor*, 6 outputs .InferRequestedOutputTensor*, 7 raw_input_contents bytes*
ModelInferRequest.InferInputTensor: 1 name string, 2 datatype string, 3 shape int64*, 4 parameters InferParameter{}, \
5 contents InferTensorContents
ModelInferRequest.InferRequestedOutputTensor: 1 name string, 2 parameters InferParameter{}
ModelInferResponse: 1 model_name string, 2 model_version string, 3 id string, 4 parameters InferParameter{}, \
5 outputs .InferOutputTensor*, 6 raw_output_contents bytes*
ModelInferResponse.InferOutputTensor: 1 name string, 2 datatype string, 3 shape int64*, 4 parameters InferParameter{}, \
5 contents InferTensorContents
ModelStreamInferResponse: 1 error_message string, 2 infer_response ModelInferResponse
ModelStatisticsRequest: 1 name string, 2 version string
StatisticDuration: 1 count uint64, 2 ns uint64
InferStatistics: 1 success StatisticDuration, 2 fail StatisticDuration, 3 queue StatisticDuration, \
4 compute_input StatisticDuration, 5 compute_infer StatisticDuration, 6 compute_output StatisticDuration
InferBatchStatistics: 1 batch_size uint64, 2 compute_input StatisticDuration, 3 compute_infer StatisticDuration, \
4 compute_output StatisticDuration
ModelStatistics: 1 name string, 2 version string, 3 last_inference uint64, 4 inference_count uint64, 5 execution_count uint64, \
6 inference_stats InferStatistics, 7 batch_stats InferBatchStatistics*
ModelStatisticsResponse: 1 model_stats ModelStatistics*
ModelRepositoryParameter: 1 bool_param bool|, 2 int64_param int64|, 3 string_param string|, 4 bytes_param bytes|
RepositoryIndexRequest: 1 repository_name string, 2 ready bool
RepositoryIndexResponse: 1 models .ModelIndex*
RepositoryIndexResponse.ModelIndex: 1 name string, 2 version string, 3 state string, 4 reason string
RepositoryModelLoadRequest: 1 repository_name string, 2 model_name string, 3 parameters ModelRepositoryParameter{}
RepositoryModelLoadResponse:
RepositoryModelUnloadRequest: 1 repository_name string, 2 model_name string, 3 parameters ModelRepositoryParameter{}
RepositoryModelUnloadResponse:
"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")
}
_FIELD = re.compile(r"(\d+) (\w+) ([\w.]+)(\*|\{\}|\|)?$")


def _describe() -> Any:
    """The file descriptor of the messages above."""
    file = descriptor_pb2.FileDescriptorProto(name="thermocline/open_inference.proto", package=PACKAGE, syntax="proto3")
    for line in _MESSAGES.strip().splitlines():
        name, _, fields = line.partition(":")
        outer, _, inner = name.partition(".")
        if inner:
            (parent,) = [message for message in file.message_type if message.name == outer]
            message = parent.nested_type.add(name=inner)
        else:
            message = file.message_type.add(name=outer)
        for field in filter(None, fields.strip().split(", ")):
            _add_field(message, f"{PACKAGE}.{name}", field)
    return file


def _add_field(message: Any, full_name: str, text: str) -> None:
    found = _FIELD.match(text)
    assert found is not None, text
    number, name, kind, mark = found.groups()
    field = message.field.add(name=name, number=int(number), json_name=name)
    field.label = _Field.LABEL_REPEATED if mark in ("*", "{}") else _Field.LABEL_OPTIONAL
    if mark == "{}":
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        value = entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_MESSAGE)
        value.type_name = f".{PACKAGE}.{kind}"
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{full_name}.{entry.name}"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        inside = f".{full_name}{kind}" if kind.startswith(".") else f".{PACKAGE}.{kind}"
        field.type, field.type_name = _Field.TYPE_MESSAGE, inside
    if mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0


POOL = descriptor_pool.DescriptorPool()
POOL.AddSerializedFile(_describe().SerializeToString())


@cache
def message(name: str) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ModelInferRequest = message("ModelInferRequest")
ModelInferResponse = message("ModelInferResponse")
