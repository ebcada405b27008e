"""Invalid requests: each gets a client error that names its input, and the server answers the next request."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from contextlib import closing

import grpc
import numpy as np
import pytest
from fake_server import DIM, until, values_of

from thermocline.serve.protocol import schema
from thermocline.serve.server.config import ServerLimits

INFER = f"/{schema.SERVICE}/ModelInfer"


def message(model="tables", name="user", datatype="INT64", shape=(2,), raw=b"\0" * 16, **more):
    request = schema.ModelInferRequest(model_name=model, raw_input_contents=[raw] if raw is not None else [], **more)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    return request


def ask(address, data, method=INFER, **options):
    """The response of a call, or its error."""
    with grpc.insecure_channel(address) as channel:
        try:
            return channel.unary_unary(method)(data, timeout=60, **options)
        except grpc.RpcError as error:
            return error


def check_healthy(address):
    response = schema.ModelInferResponse.FromString(ask(address, message().SerializeToString()))
    rows_ND = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(2, DIM)
    np.testing.assert_array_equal(rows_ND, values_of(1, "user")[[0, 0]])


def twice(name):
    request = message()
    request.inputs.add(name=name, datatype="INT64", shape=[2])
    request.raw_input_contents.append(b"\0" * 16)
    return request


def with_parameter(name):
    request = message()
    request.inputs[0].parameters[name].string_param = "x"
    return request


def with_output(name):
    request = message()
    request.outputs.add(name=name)
    return request


def typed(field, values, datatype="INT64"):
    request = message(raw=None, datatype=datatype, shape=[len(values)])
    getattr(request.inputs[0].contents, field).extend(values)
    return request


INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
WRONG = [
    (message(model="chairs"), MISSING, "'chairs'"),
    (message(model="x" * 100_000), MISSING, "'xxx"),
    (message(model_version="7"), MISSING, "'7'"),
    (message(name="colour"), INVALID, "'colour'"),
    (message(name="user\x00\u202e"), INVALID, "'user"),
    (message(datatype="FP32", raw=b"\0" * 8), INVALID, "INT64"),
    (message(datatype="BF16"), INVALID, "'BF16'"),
    (message(datatype="BYTES", raw=b"\3\0\0\0one\4\0\0\0two"), INVALID, "14"),
    (message(datatype="BYTES", raw=b"\3\0\0\0one\3\0\0\0two!"), INVALID, "15"),
    (message(datatype="BYTES", raw=b"\3\0\0\0one"), INVALID, "7"),
    (message(datatype="BYTES", raw=b"\xff\xff\xff\xff"), INVALID, "4"),
    (message(datatype="BYTES", shape=[2**40], raw=b""), INVALID, f"{2**40:,}"),
    (message(name="user.offsets", datatype="BYTES", raw=b"\0\0\0\0" * 2), INVALID, "BYTES"),
    (message(datatype="int64"), INVALID, "'int64'"),
    (message(shape=[3]), INVALID, "24"),
    (message(shape=[-2]), INVALID, "-2"),
    (message(shape=[-1, -2]), INVALID, "-2"),
    (message(shape=[]), INVALID, "16"),
    (message(shape=[2, 1]), INVALID, "[2, 1]"),
    (message(shape=[2**62, 4]), INVALID, "16"),
    (message(shape=[1] * 70), INVALID, "8"),
    (message(shape=[2**33, 2**33]), INVALID, "16"),
    (message(raw=b"\0" * 17), INVALID, "17"),
    (message(raw=None), INVALID, "'user'"),
    (twice("user"), INVALID, "'user'"),
    (with_parameter("shared_memory_region"), INVALID, "shared_memory_region"),
    (with_output("colour"), INVALID, "'colour'"),
    (with_output("item"), INVALID, "'item'"),
    (typed("fp32_contents", [1.0]), INVALID, "fp32_contents"),
    (typed("int_contents", [2**20], "INT8"), INVALID, "INT8"),
    (schema.ModelInferRequest(model_name="tables"), INVALID, "inputs"),
    (message(raw=np.array([-1, 5], np.int64).tobytes()), INVALID, "-1"),
    (message(raw=np.array([5, 2**62], np.int64).tobytes()), INVALID, str(2**62)),
]


@pytest.mark.parametrize("request_message, code, named", WRONG, ids=range(len(WRONG)))
def test_an_invalid_grpc_request_gets_its_status(served, request_message, code, named):
    error = ask(served.grpc, request_message.SerializeToString())
    assert isinstance(error, grpc.RpcError) and error.code() is code
    assert named in error.details() and len(error.details()) <= 800
    check_healthy(served.grpc)


def test_truncated_messages_are_client_errors(served):
    whole = message().SerializeToString()
    refused = 0
    for length in range(1, len(whole)):
        answer = ask(served.grpc, whole[:length])
        if isinstance(answer, grpc.RpcError):
            assert answer.code() in (INVALID, MISSING), answer
            refused += 1
    assert refused > len(whole) / 2
    error = ask(served.grpc, b"\xff" * 1000)
    assert error.code() is INVALID and "ModelInferRequest" in error.details()
    assert ask(served.grpc, b"\xff" * 10, f"/{schema.SERVICE}/ModelReady").code() is INVALID
    assert ask(served.grpc, b"", f"/{schema.SERVICE}/NoSuchMethod").code() is grpc.StatusCode.UNIMPLEMENTED
    check_healthy(served.grpc)


def test_too_many_ids_and_too_large_messages_are_refused(serve):
    running = serve(limits=ServerLimits(message=100_000, ids=1000, drain=3))
    error = ask(running.grpc, message(shape=[1001], raw=bytes(8008)).SerializeToString())
    assert error.code() is INVALID and "1,001" in error.details() and "1,000" in error.details()
    error = ask(running.grpc, message(shape=[12_500], raw=bytes(100_000)).SerializeToString())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert post(running.http, b"x" * 100_001)[0] == 413
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < 100_000
    assert post(running.http, bomb, {"Content-Encoding": "gzip"})[0] == 413
    check_healthy(running.grpc)


# -- HTTP --


def post(address, body, headers=None, path="/v2/models/tables/infer", method="POST"):
    with closing(http.client.HTTPConnection(address, timeout=120)) as connection:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        text = response.read()
    return response.status, json.loads(text)["error"] if response.status >= 400 and text else text


def body(**changes):
    tensor = {"name": "user", "shape": [2], "datatype": "INT64", "data": [1, 2]} | changes
    return json.dumps({"inputs": [{key: value for key, value in tensor.items() if value is not None}]}).encode()


WRONG_HTTP = [
    (b"", {}, 400, "JSON"),
    (b"{", {}, 400, "JSON"),
    (b"[" * 100_000, {}, 400, "JSON"),
    (b"\xff\xfe", {}, 400, "JSON"),
    (b"[]", {}, 400, "JSON object"),
    (b"{}", {}, 400, "'inputs'"),
    (b'{"inputs": 5}', {}, 400, "'inputs'"),
    (b'{"inputs": []}', {}, 400, "inputs"),
    (b'{"inputs": [7]}', {}, 400, "input"),
    (b'{"inputs": [], "id": 7}', {}, 400, "'id'"),
    (b'{"inputs": [], "outputs": [7]}', {}, 400, "'outputs'"),
    (body(name=None), {}, 400, "'datatype'"),
    (body(shape="2"), {}, 400, "'shape'"),
    (body(shape=[2.0]), {}, 400, "'shape'"),
    (body(shape=[True]), {}, 400, "'shape'"),
    (body(data=None), {}, 400, "'data'"),
    (body(data=[1]), {}, 400, "2"),
    (body(data=["a", "b"]), {}, 400, "INT64"),
    (body(data=[1.5, 2]), {}, 400, "INT64"),
    (body(data=[[1], [2, 3]]), {}, 400, "INT64"),
    (body(data=[2**70, 1]), {}, 400, "INT64"),
    (body(data={"a": 1}), {}, 400, "INT64"),
    (body(data=[None, 1]), {}, 400, "INT64"),
    (body(name="colour"), {}, 400, "'colour'"),
    (body(datatype="FP32"), {}, 400, "INT64"),
    (body(datatype="STRING"), {}, 400, "'STRING'"),
    (body(data=[-1, 5]), {}, 400, "-1"),
    (body(parameters=5), {}, 400, "'parameters'"),
    (body(parameters={"binary_data_size": 16}), {}, 400, "0 bytes"),
    (body(parameters={"binary_data_size": -1}), {}, 400, "-1"),
    (body(parameters={"shared_memory_region": "x"}), {}, 400, "shared_memory_region"),
    (body(), {"Inference-Header-Content-Length": "9999"}, 400, "Inference-Header-Content-Length"),
    (body(), {"Inference-Header-Content-Length": "-1"}, 400, "Inference-Header-Content-Length"),
    (body() + b"123", {"Inference-Header-Content-Length": str(len(body()))}, 400, "3 bytes"),
    (b"not gzip", {"Content-Encoding": "gzip"}, 400, ""),
]


@pytest.mark.parametrize("data, headers, status, named", WRONG_HTTP, ids=range(len(WRONG_HTTP)))
def test_an_invalid_http_request_gets_its_status(served, data, headers, status, named):
    found, error = post(served.http, data, headers)
    assert found == status and named in error
    assert post(served.http, body())[0] == 200


def test_unknown_paths_are_errors_in_json(served):
    assert post(served.http, body(), path="/v2/models/chairs/infer")[0] == 404
    assert post(served.http, body(), path="/v2/models/tables/versions/7/infer")[0] == 404
    assert post(served.http, body(), path="/nowhere")[0] == 404
    assert post(served.http, None, path="/v2/models/tables/infer", method="GET")[0] == 405
    assert post(served.http, body(), path="/v2/models/..%2f..%2fetc/infer")[0] == 404


def raw(address, data, wait=120.0):
    """The response to raw bytes, until the server closes."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        got = b""
        try:
            connection.sendall(data)
            while piece := connection.recv(65_536):
                got += piece
        except ConnectionResetError:
            pass
    return got


def test_a_short_body_and_an_incomplete_header_time_out(serve):
    running = serve(limits=ServerLimits(slow=3600, drain=3))
    head = f"POST /v2/models/tables/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body()) + 5}\r\n\r\n".encode()
    assert b" 408 " in running.cut_off(head + body())
    assert running.cut_off(b"POST /v2/models/tables/infer HTTP/1.1\r\nHost: 127.0.0.1\r\n") == b""
    check_healthy(running.grpc)


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 3\r\nContent-Length: 5\r\n",
        b"Content-Length: -3\r\n",
        b"Content-Length: abc\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"A: " + b"x" * 100_000 + b"\r\n",
        b"\x00\x01: y\r\n",
    ],
)
def test_malformed_http_is_a_client_error(served, head):
    got = raw(served.http, b"POST /v2/models/tables/infer HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n{}\r\n\r\n")
    assert got.startswith(b"HTTP/1.") and b" 400 " in got.split(b"\r\n")[0]
    check_healthy(served.grpc)


def test_connections_beyond_the_limit_are_refused(serve):
    running = serve(limits=ServerLimits(connections=3, slow=3600, drain=3))
    host, port = running.http.split(":")
    open_ones = [socket.create_connection((host, int(port))) for _ in range(3)]
    try:
        until(
            lambda: b" 503 " in raw(running.http, b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"),
            "no connection was refused",
        )
    finally:
        for one in open_ones:
            one.close()
    until(
        lambda: raw(running.http, b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n").startswith(
            b"HTTP/1.1 200"
        ),
        "full",
    )


def test_bodies_in_memory_have_a_limit(serve):
    running = serve(limits=ServerLimits(in_flight=len(body()) + 10, slow=3600, drain=3))
    host, port = running.http.split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v2/models/tables/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 30\r\n\r\n{")
        until(lambda: post(running.http, body())[0] == 429, "there was room for both")
    until(lambda: post(running.http, body())[0] == 200, "the memory was not released")


def test_a_fault_of_the_server_reveals_only_its_type(serve):
    running = serve()
    running.model.fail = ZeroDivisionError("secret")
    error = ask(running.grpc, message().SerializeToString())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "ZeroDivisionError" in error.details() and "secret" not in error.details()
    running.model.fail = ZeroDivisionError("secret")
    status, error = post(running.http, body())
    assert status == 500 and "secret" not in error
    check_healthy(running.grpc)


def test_a_shard_that_is_down_is_named_and_others_answer(serve):
    running = serve()
    running.model.down = 1
    error = ask(running.grpc, message(raw=np.array([0, 1], np.int64).tobytes()).SerializeToString())
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "shard 1" in error.details()
    check_healthy(running.grpc)
    status, error = post(running.http, body())
    assert status == 503 and "shard 1" in error
    assert post(running.http, None, path="/v2/models/tables/ready", method="GET")[0] == 503
