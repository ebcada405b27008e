"""Protobuf descriptors: equal to tritonclient's, and independent of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from thermocline.serve.protocol import schema
from thermocline.serve.protocol.grpc_messages import varint

public = pytest.importorskip("tritonclient.grpc.service_pb2")

config = pytest.importorskip("tritonclient.grpc.model_config_pb2")

CONFIG = {"ModelConfig", "ModelInput", "ModelOutput"}  # a few fields of many
# Deliberately left out.
LEFT_OUT = {
    ("InferStatistics", "cache_hit"),
    ("InferStatistics", "cache_miss"),
    ("ModelStatistics", "memory_usage"),
    ("ModelStatistics", "response_stats"),
}


def fields(message):
    return {
        (message.name, one.name): (one.number, one.type, one.is_repeated, one.message_type and one.message_type.full_name)
        for one in message.fields
    }


def all_messages(descriptors):
    for one in descriptors:
        yield one
        yield from all_messages(one.nested_types)


def ours():
    (file,) = {schema.message("ModelInferRequest").DESCRIPTOR.file}
    return {one.full_name: one for one in all_messages(file.message_types_by_name.values())}


def test_every_field_has_the_public_number_and_type():
    theirs = {
        one.full_name: one
        for file in (public.DESCRIPTOR, config.DESCRIPTOR)
        for one in all_messages(file.message_types_by_name.values())
    }
    assert len(ours()) == 53
    for name, message in ours().items():
        found, expected = fields(message), fields(theirs[name])
        left_out = {key for key in expected if message.name in CONFIG and key not in found} | LEFT_OUT
        assert found == {key: value for key, value in expected.items() if key not in left_out}
        assert message.name in CONFIG or [one.name for one in message.oneofs] == [one.name for one in theirs[name].oneofs]


def test_messages_are_independent_of_tritonclient_in_one_process():
    assert schema.ModelInferRequest is not public.ModelInferRequest
    request = public.ModelInferRequest(model_name="tables", id="7", raw_input_contents=[b"\x01" * 8])
    request.parameters["a"].int64_param = -3
    request.inputs.add(name="user", datatype="INT64", shape=[1])
    read = schema.ModelInferRequest.FromString(request.SerializeToString())
    assert read.SerializeToString(deterministic=True) == request.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    "order",
    [("thermocline.serve.protocol.schema", "tritonclient.grpc"), ("tritonclient.grpc", "thermocline.serve.protocol.schema")],
)
def test_both_can_be_imported_in_any_order(order):
    code = f"import {order[0]}, {order[1]}; from google.protobuf import descriptor_pool as d; " + (
        "d.Default().FindMessageTypeByName('inference.ModelInferRequest')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**21 - 1, 2**31, 2**40 + 5])
def test_varints_equal_those_of_protobuf(value):
    message = schema.message("StatisticDuration")(count=value)
    assert message.SerializeToString() == (b"\x08" + varint(value) if value else b"")
