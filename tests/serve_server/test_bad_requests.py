"""Requests that are wrong: each gets a precise client error, and the server answers the next one as if nothing had been."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from contextlib import closing

import grpc
import numpy as np
import pytest
from running import DIM, until, values_of

from thermocline.serve.protocol import schema
from thermocline.serve.server.limits import Limits

INFER = f"/{schema.SERVICE}/ModelInfer"


def message(model="tables", name="user", datatype="INT64", shape=(2,), raw=b"\0" * 16, **more):
    request = schema.ModelInferRequest(model_name=model, raw_input_contents=[raw] if raw is not None else [], **more)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    return request


def ask(address, data, method=INFER, **options):
    """The bytes that a call brings, or its error."""
    with grpc.insecure_channel(address) as channel:
        try:
            return channel.unary_unary(method)(data, timeout=60, **options)
        except grpc.RpcError as error:
            return error


def still_well(address):
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
    (message(model="chairs"), MISSING, "no model 'chairs'"),
    (message(model="x" * 100_000), MISSING, "no model 'xxx"),
    (message(model_version="7"), MISSING, "version 1, not '7'"),
    (message(name="colour"), INVALID, "no input 'colour'; it has 'item'"),
    (message(name="user\x00\u202e"), INVALID, "no input"),
    (message(datatype="FP32", raw=b"\0" * 8), INVALID, "must be INT64, but FP32 came"),
    (message(datatype="BYTES"), INVALID, "'BYTES'"),
    (message(datatype="int64"), INVALID, "'int64'"),
    (message(shape=[3]), INVALID, "24 bytes, but 16 bytes came"),
    (message(shape=[-2]), INVALID, "bytes came"),
    (message(shape=[-1, -2]), INVALID, "0 or more"),
    (message(shape=[]), INVALID, "takes 8 bytes, but 16"),
    (message(shape=[2, 1]), INVALID, "must have shape [-1] (-1: any size), but [2, 1] came"),
    (message(shape=[2**62, 4]), INVALID, "but 16 bytes came"),
    (message(shape=[1] * 70), INVALID, "at most 8"),
    (message(shape=[2**33, 2**33]), INVALID, "but 16 bytes came"),
    (message(raw=b"\0" * 17), INVALID, "17 bytes came"),
    (message(raw=None), INVALID, "has 2 values, but 0 came"),
    (twice("user"), INVALID, "comes twice"),
    (with_parameter("shared_memory_region"), INVALID, "shared_memory_region"),
    (with_output("colour"), INVALID, "no output 'colour'"),
    (with_output("item"), INVALID, "none of its inputs came"),
    (typed("fp32_contents", [1.0]), INVALID, "1 values came as fp32_contents"),
    (typed("int_contents", [2**20], "INT8"), INVALID, "outside of INT8"),
    (schema.ModelInferRequest(model_name="tables"), INVALID, "no inputs"),
    (message(raw=np.array([-1, 5], np.int64).tobytes()), INVALID, "id at position 0 is -1"),
    (message(raw=np.array([5, 2**62], np.int64).tobytes()), INVALID, "position 1"),
]


@pytest.mark.parametrize(
    "request_message, code, words", WRONG, ids=[f"{at}-{words[:20]}" for at, (_, _, words) in enumerate(WRONG)]
)
def test_a_wrong_grpc_request_is_told_what_is_wrong(served, request_message, code, words):
    error = ask(served.grpc, request_message.SerializeToString())
    assert isinstance(error, grpc.RpcError) and error.code() is code
    assert words in error.details() and len(error.details()) <= 800
    still_well(served.grpc)


def test_bytes_that_are_no_message_are_the_clients_mistake(served):
    whole = message().SerializeToString()
    refused = 0
    for length in range(1, len(whole)):
        answer = ask(served.grpc, whole[:length])
        if isinstance(answer, grpc.RpcError):
            assert answer.code() in (INVALID, MISSING), answer
            refused += 1
    assert refused > len(whole) / 2
    error = ask(served.grpc, b"\xff" * 1000)
    assert error.code() is INVALID and "not a ModelInferRequest" in error.details()
    assert ask(served.grpc, b"\xff" * 10, f"/{schema.SERVICE}/ModelReady").code() is INVALID
    assert ask(served.grpc, b"", f"/{schema.SERVICE}/NoSuchMethod").code() is grpc.StatusCode.UNIMPLEMENTED
    still_well(served.grpc)


def test_too_many_ids_and_too_large_messages_are_refused(serve):
    running = serve(limits=Limits(message=100_000, ids=1000, drain=3))
    error = ask(running.grpc, message(shape=[1001], raw=bytes(8008)).SerializeToString())
    assert error.code() is INVALID and "1,001 values, the limit is 1,000" in error.details()
    error = ask(running.grpc, message(shape=[12_500], raw=bytes(100_000)).SerializeToString())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status, said = post(running.http, b"x" * 100_001)
    assert status == 413
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < 100_000
    status, said = post(running.http, bomb, {"Content-Encoding": "gzip"})
    assert status == 413, said
    still_well(running.grpc)


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
    (b"", {}, 400, "not JSON"),
    (b"{", {}, 400, "not JSON"),
    (b"[" * 100_000, {}, 400, "not JSON"),
    (b"\xff\xfe", {}, 400, "not JSON"),
    (b"[]", {}, 400, "must be a JSON object"),
    (b"{}", {}, 400, "list 'inputs'"),
    (b'{"inputs": 5}', {}, 400, "list 'inputs'"),
    (b'{"inputs": []}', {}, 400, "no inputs"),
    (b'{"inputs": [7]}', {}, 400, "must be an object"),
    (b'{"inputs": [], "id": 7}', {}, 400, "'id' must be a text"),
    (b'{"inputs": [], "outputs": [7]}', {}, 400, "'outputs' must be"),
    (body(name=None), {}, 400, "needs the texts"),
    (body(shape="2"), {}, 400, "list of whole numbers"),
    (body(shape=[2.0]), {}, 400, "list of whole numbers"),
    (body(shape=[True]), {}, 400, "list of whole numbers"),
    (body(data=None), {}, 400, "neither 'data' nor"),
    (body(data=[1]), {}, 400, "has 2 values, but 1 came"),
    (body(data=["a", "b"]), {}, 400, "is INT64, but its data is not"),
    (body(data=[1.5, 2]), {}, 400, "is INT64, but its data is not"),
    (body(data=[[1], [2, 3]]), {}, 400, "not a list of INT64"),
    (body(data=[2**70, 1]), {}, 400, "INT64"),
    (body(data={"a": 1}), {}, 400, "INT64"),
    (body(data=[None, 1]), {}, 400, "INT64"),
    (body(name="colour"), {}, 400, "no input 'colour'"),
    (body(datatype="FP32"), {}, 400, "must be INT64, but FP32 came"),
    (body(datatype="STRING"), {}, 400, "'STRING'"),
    (body(data=[-1, 5]), {}, 400, "id at position 0 is -1"),
    (body(parameters=5), {}, 400, "'parameters' must be an object"),
    (body(parameters={"binary_data_size": 16}), {}, 400, "but 0 bytes are left"),
    (body(parameters={"binary_data_size": -1}), {}, 400, "binary_data_size is -1"),
    (body(parameters={"shared_memory_region": "x"}), {}, 400, "shared_memory_region"),
    (body(), {"Inference-Header-Content-Length": "9999"}, 400, "but the body has"),
    (body(), {"Inference-Header-Content-Length": "-1"}, 400, "but the body has"),
    (body() + b"123", {"Inference-Header-Content-Length": str(len(body()))}, 400, "3 bytes are left behind"),
    (b"not gzip", {"Content-Encoding": "gzip"}, 400, ""),
]


@pytest.mark.parametrize("data, headers, status, words", WRONG_HTTP, ids=range(len(WRONG_HTTP)))
def test_a_wrong_http_request_is_told_what_is_wrong(served, data, headers, status, words):
    found, said = post(served.http, data, headers)
    assert found == status and words in said
    assert post(served.http, body())[0] == 200


def test_paths_that_lead_nowhere_are_told_so_in_json(served):
    assert post(served.http, body(), path="/v2/models/chairs/infer")[0] == 404
    assert post(served.http, body(), path="/v2/models/tables/versions/7/infer") == (
        404,
        "model 'tables' is served in version 1, not '7'",
    )
    assert post(served.http, body(), path="/nowhere")[0] == 404
    assert post(served.http, None, path="/v2/models/tables/infer", method="GET")[0] == 405
    assert post(served.http, body(), path="/v2/models/..%2f..%2fetc/infer")[0] == 404


def raw(address, data, wait=120.0):
    """What comes back for bytes as they are, until the server closes."""
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


def test_a_body_shorter_than_it_says_and_a_slow_header_are_cut_off(serve):
    running = serve(limits=Limits(slow=3600, drain=3))
    head = f"POST /v2/models/tables/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body()) + 5}\r\n\r\n".encode()
    assert b" 408 " in running.cut_off(head + body())
    assert running.cut_off(b"POST /v2/models/tables/infer HTTP/1.1\r\nHost: x\r\n") == b""
    still_well(running.grpc)


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
def test_broken_http_is_a_client_error(served, head):
    got = raw(served.http, b"POST /v2/models/tables/infer HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n{}\r\n\r\n")
    assert got.startswith(b"HTTP/1.") and b" 400 " in got.split(b"\r\n")[0]
    still_well(served.grpc)


def test_more_connections_than_the_limit_are_turned_away(serve):
    running = serve(limits=Limits(streams=3, slow=3600, drain=3))
    host, port = running.http.split(":")
    open_ones = [socket.create_connection((host, int(port))) for _ in range(3)]
    try:
        until(
            lambda: b" 503 " in raw(running.http, b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
            "nobody was turned away",
        )
    finally:
        for one in open_ones:
            one.close()
    until(
        lambda: raw(running.http, b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200"),
        "full",
    )


def test_bodies_in_all_have_a_limit(serve):
    running = serve(limits=Limits(bodies=len(body()) + 10, slow=3600, drain=3))
    host, port = running.http.split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v2/models/tables/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n{")
        until(lambda: post(running.http, body())[0] == 429, "there was room for both")
    until(lambda: post(running.http, body())[0] == 200, "the room was not given back")


def test_a_fault_of_ours_says_no_more_than_its_kind(serve):
    running = serve()
    running.model.fail = ZeroDivisionError("secret")
    error = ask(running.grpc, message().SerializeToString())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "ZeroDivisionError" in error.details() and "secret" not in error.details()
    running.model.fail = ZeroDivisionError("secret")
    status, said = post(running.http, body())
    assert status == 500 and "secret" not in said
    still_well(running.grpc)


def test_a_card_that_is_down_is_named_and_others_answer(serve):
    running = serve()
    running.model.down = 1
    error = ask(running.grpc, message(raw=np.array([0, 1], np.int64).tobytes()).SerializeToString())
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "card 1 is down" in error.details()
    still_well(running.grpc)
    status, said = post(running.http, body())
    assert status == 503 and "card 1" in said
    assert post(running.http, None, path="/v2/models/tables/ready", method="GET")[0] == 503
