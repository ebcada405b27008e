"""What a client sends neither swells nor stalls the server: counts, JSON, bytes in flight, connections, late peers."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
from fake_server import DIM, PATIENCE_S, make_folder, until, values_of
from http2 import RawGrpc
from test_bad_requests import INFER, INVALID, ask, check_healthy, message, post, raw, typed

from thermocline.serve.protocol import schema
from thermocline.serve.protocol.grpc_messages import varint
from thermocline.serve.protocol.new_bytes import UNLOCKED_BYTES
from thermocline.serve.protocol.rest import write_response
from thermocline.serve.server import grpc_server, http_server
from thermocline.serve.server.config import RESERVED_FILES, ServerLimits
from thermocline.serve.server.dynamic_batcher import MAX_LOOP_IDS
from thermocline.serve.server.in_flight import CALL_BYTES, HEALTH_SHARE

LIVE, STREAM = f"/{schema.SERVICE}/ServerLive", f"/{schema.SERVICE}/ModelStreamInfer"
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
BYTES = 5_000_000
GET = "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def ids_message(ids):
    return message(shape=[ids], raw=bytes(8 * ids)).SerializeToString()


def infer(address, data):
    """The response of a call or its error. A client's own limit is 4 MB."""
    with grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        try:
            return schema.ModelInferResponse.FromString(channel.unary_unary(INFER)(data, timeout=PATIENCE_S))
        except grpc.RpcError as error:
            return error


def is_ok(address, path):
    return raw(address, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()).startswith(
        b"HTTP/1.1 200"
    )


def read_ids(ids, **parameters):
    tensor = {"name": "user", "shape": [ids], "datatype": "INT64", "data": [1] * ids}
    return json.dumps({"inputs": [tensor], "parameters": parameters}).encode()


# -- counts --


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A server in a process of its own: its pid, HTTP address and gRPC address."""
    command = [sys.executable, Path(__file__).with_name("fake_server.py"), make_folder(tmp_path_factory.mktemp("own"), ".")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as done:
        assert done.stdin is not None and done.stdout is not None
        http, grpc_address = done.stdout.readline().split()
        check_healthy(grpc_address)
        yield done.pid, http, grpc_address
        done.stdin.close()


def reset_peak(pid):
    """Set the peak to what is in memory now, and return it."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak(pid)


def peak(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'"",', b"[" * 40 + b"]" * 40 + b"," + b"0," * 400, b'{"a":1},' + b"0," * 9])
def test_many_json_values_are_refused_before_they_are_built(process, piece):
    pid, http, address = process
    before = reset_peak(pid)
    assert post(http, b'{"inputs":[' + piece * (BYTES // len(piece)) + b"0]}")[0] == 400
    assert peak(pid) - before <= 4 * BYTES
    check_healthy(address)


def nested(*tags):
    """A field in a field, around as many bytes of value 1."""
    data = b"\1" * BYTES
    for tag in reversed(tags):
        data = tag + varint(len(data)) + data
    return data


INPUT, SHAPE, CONTENTS, INT64S = b"\x2a", b"\x1a", b"\x2a", b"\x1a"
SWOLLEN = {
    "inputs": b"\x2a\0" * (BYTES // 2),
    "outputs": b"\x32\0" * (BYTES // 2),
    "raw_input_contents": b"\x3a\0" * (BYTES // 2),
    "parameters": b"\x22\0" * (BYTES // 2),
    "parameters of an input": INPUT + varint(BYTES) + b"\x22\0" * (BYTES // 2),
    "shape": nested(INPUT, SHAPE),
    "contents": nested(INPUT, CONTENTS, INT64S),
}


@pytest.mark.parametrize("data", SWOLLEN.values(), ids=SWOLLEN)
def test_many_small_fields_are_refused_before_they_are_built(process, data):
    pid, _, address = process
    before = reset_peak(pid)
    assert ask(address, data).code() is INVALID
    assert peak(pid) - before <= 4 * BYTES
    check_healthy(address)


def test_the_size_of_messages_follows_from_the_ids(serve):
    assert ServerLimits().max_message < 8 << 20
    running = serve(limits=ServerLimits(1000, drain=3))
    most = 20 * 1000 + 1024 * 2048
    assert ask(running.grpc, bytes(most + 1)).code() is EXHAUSTED
    assert post(running.http, bytes(most + 1))[0] == 413
    for ids, data in ((1000, ids_message(1000)), (1000, typed("int64_contents", [1] * 1000).SerializeToString())):
        assert infer(running.grpc, data).outputs[0].shape == [ids, DIM]
    assert ask(running.grpc, typed("int64_contents", [1] * 1001).SerializeToString()).code() is INVALID


def test_a_request_has_at_most_as_many_tensors_as_the_limit(serve):
    running = serve(limits=ServerLimits(tensors=63, drain=3))
    for field in ("inputs", "outputs"):
        request = message()
        for number in range(64):
            getattr(request, field).add(name=f"{number}")
        error = ask(running.grpc, request.SerializeToString())
        assert error.code() is INVALID and f"{field} or more, the limit is 63" in error.details()


def test_the_largest_request_passes_in_every_encoding(served):
    ids = 1 << 18
    for data in (ids_message(ids), typed("int64_contents", [1000] * ids).SerializeToString()):
        assert infer(served.grpc, data).outputs[0].shape == [ids, DIM]
    status, found = post(served.http, read_ids(ids, binary_data_output=True))
    assert status == 200 and found.endswith(values_of(1, "user")[1].tobytes())


def test_large_messages_of_other_methods_are_refused(served):
    for method in ("ServerLive", "RepositoryModelLoad"):
        assert ask(served.grpc, b"\x1a\0" * 50_000, f"/{schema.SERVICE}/{method}").code() is INVALID


# -- JSON --


@pytest.mark.parametrize("slow", ["read_request", "write_response"])
@pytest.mark.parametrize("protocol", [http_server, grpc_server])
def test_health_is_answered_while_large_messages_are_worked_on(serve, monkeypatch, protocol, slow):
    running, entered, go_on = serve(), threading.Event(), threading.Event()
    work, found = getattr(protocol, slow), []

    def held(*given):
        entered.set()
        assert go_on.wait(10)  # the event loop would answer nothing
        return work(*given)

    monkeypatch.setattr(protocol, slow, held)
    data = typed("int64_contents", [1] * 50_000).SerializeToString()  # responses of over a megabyte
    asks = {http_server: lambda: post(running.http, read_ids(20_000)), grpc_server: lambda: infer(running.grpc, data)}
    asking = threading.Thread(target=lambda: found.append(asks[protocol]()))
    asking.start()
    assert entered.wait(PATIENCE_S)
    with grpc.insecure_channel(running.grpc) as channel:
        channel.unary_unary(LIVE)(b"", timeout=9)
    assert is_ok(running.http, "/v2/health/live")
    assert not found
    go_on.set()
    asking.join(PATIENCE_S)
    assert found[0][0] == 200 if protocol is http_server else found[0].outputs[0].shape == [50_000, DIM]


def test_lookups_of_many_ids_leave_the_event_loop_at_once(served):
    batcher = served.server.repository.served("tables").batcher
    batcher._seconds_per_id = 0.0
    assert batcher.is_idle(MAX_LOOP_IDS) and not batcher.is_idle(MAX_LOOP_IDS + 1)


def test_responses_have_a_limit_before_anything_is_looked_up(serve):
    running = serve(limits=ServerLimits(response=63 * 4 * DIM, drain=3))
    assert infer(running.grpc, ids_message(63)).outputs[0].shape == [63, DIM]
    before = len(running.model.batches)
    for found in (infer(running.grpc, ids_message(64)), post(running.http, read_ids(64, binary_data_output=True))):
        assert found.code() is INVALID if isinstance(found, grpc.RpcError) else found[0] == 400
    bags = message(shape=[64], raw=bytes(512))
    bags.inputs.add(name="user.offsets", datatype="INT64", shape=[63])
    bags.raw_input_contents.append(np.arange(63).tobytes())
    assert infer(running.grpc, bags.SerializeToString()).outputs[0].shape == [63, DIM]
    assert len(running.model.batches) == before + 1


def test_large_json_answers_are_refused_and_binary_ones_sent(served):
    ids = (1 << 18) // DIM + 1
    status, error = post(served.http, read_ids(ids))
    assert status == 400 and "binary_data_output" in error and f"{ids * DIM:,}" in error and f"{1 << 18:,}" in error
    assert post(served.http, read_ids(ids, binary_data_output=True))[0] == 200
    assert post(served.http, read_ids(ids - 1))[0] == 200


@pytest.mark.parametrize("count", [0, 1, 63, UNLOCKED_BYTES // 8, UNLOCKED_BYTES // 8 + 63])
def test_json_of_any_size_holds_its_values(count):
    random = np.random.default_rng(3)
    floats_N, integers_N = random.standard_normal(count).astype(np.float32), random.integers(-9, 9, (count, 1))
    for binary in (frozenset(), frozenset({"b"}), None):
        written, length = write_response("mödel", "1", 'an "id"', {"a": floats_N, "b": integers_N}, binary)
        found = json.loads(written[:length])
        assert (found["model_name"], found["model_version"], found["id"]) == ("mödel", "1", 'an "id"')
        if binary is not None:
            assert found["outputs"][0] == {
                "name": "a",
                "datatype": "FP32",
                "shape": [count],
                "data": found["outputs"][0]["data"],
            }
            np.testing.assert_array_equal(np.array(found["outputs"][0]["data"], np.float32), floats_N)
        if binary != frozenset():
            assert found["outputs"][1]["parameters"] == {"binary_data_size": 8 * count}
            assert written.endswith(integers_N.tobytes())


# -- bytes in flight --

IDS = 250_000  # a response of 7 MB is more than the kernel takes from an unread connection
SMALL_BUDGET = ServerLimits(in_flight=10_000_000, slow=3600, drain=3)


def unread_http(running):
    data = read_ids(IDS, binary_data_output=True)
    host, port = running.http.split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    head = f"POST /v2/models/tables/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def is_refused(running):
    found = infer(running.grpc, ids_message(IDS))
    assert not isinstance(found, grpc.RpcError) or found.code() is EXHAUSTED
    return isinstance(found, grpc.RpcError)


def check_refused_until_time_passes(running):
    """Both protocols refuse requests but answer health probes, until late peers are gone."""
    until(lambda: is_refused(running), "there was room")
    assert post(running.http, read_ids(IDS, binary_data_output=True))[0] == 429
    assert running.server._service.budget.held <= SMALL_BUDGET.in_flight
    assert isinstance(ask(running.grpc, b"", LIVE), bytes)
    assert is_ok(running.http, "/v2/health/ready")
    until(lambda: running.pass_time(7200) or not is_refused(running), "there is no room")
    until(lambda: post(running.http, read_ids(IDS, binary_data_output=True))[0] == 200, "there is no room")
    until(lambda: running.server._service.budget.held == 0, "bytes were lost")


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_unread_grpc_answers_fill_one_budget_for_a_limited_time(serve, path):
    running = serve(limits=SMALL_BUDGET)
    with ExitStack() as stack:
        peers = [stack.enter_context(RawGrpc(running.grpc)) for _ in range(12)]
        for peer in peers:
            peer.call(path, typed("int64_contents", [1] * 60_000).SerializeToString())
        check_refused_until_time_passes(running)
        assert sum(peer.closed() for peer in peers) >= 3
    assert running.server.repository.metrics.dropped["read"] >= 3


def test_unread_http_answers_fill_the_same_budget(serve):
    running = serve(limits=SMALL_BUDGET)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(unread_http(running))
        check_refused_until_time_passes(running)
        connections = running.server._http._runner.server
        until(lambda: running.pass_time(7200) or not connections.connections, "an unread response is still there")
    assert running.server.repository.metrics.dropped["read"] >= 1


def test_health_probes_have_room_beside_a_full_budget(serve):
    running = serve(limits=ServerLimits(in_flight=HEALTH_SHARE * CALL_BYTES, slow=3600, drain=3))
    with RawGrpc(running.grpc) as peer:
        for _ in range(HEALTH_SHARE):
            peer.call(INFER, ids_message(63), sent=10)
        until(lambda: len(running.server._service.calls._calls) == HEALTH_SHARE, "the calls did not arrive")
        assert ask(running.grpc, ids_message(1)).code() is EXHAUSTED
        assert isinstance(ask(running.grpc, b"", LIVE), bytes)


def test_an_answer_larger_than_the_budget_is_sent_alone(serve):
    running = serve(limits=ServerLimits(in_flight=1 << 20, drain=3))
    assert not is_refused(running)
    assert post(running.http, read_ids(IDS, binary_data_output=True))[0] == 200


@pytest.mark.parametrize("path", [INFER, LIVE])
def test_a_half_sent_grpc_message_ends_its_connection(serve, path):
    running = serve(limits=ServerLimits(slow=3600, drain=3))
    calls = running.server._service.calls._calls
    with RawGrpc(running.grpc) as peer:
        peer.call(path, ids_message(63), sent=100)
        until(lambda: len(calls) == 1, "the call did not arrive")
        assert not peer.closed()
        running.pass_time(7200)
        until(peer.closed, "the connection is open")
    until(lambda: not calls, "the call is still there")
    assert running.server.repository.metrics.dropped["body"] == 1


def test_half_sent_grpc_messages_may_not_exceed_the_budget(serve):
    limits = ServerLimits(1000, message=1 << 20, in_flight=3 << 20, slow=3600, drain=3)
    running = serve(limits=limits)
    calls = running.server._service.calls
    with ExitStack() as stack:
        peers = [stack.enter_context(RawGrpc(running.grpc)) for _ in range(5)]
        for number, peer in enumerate(peers):
            peer.call(INFER, bytes(1 << 20), sent=100)
            until(lambda: len(calls._calls) == number + 1, "the call did not arrive")  # noqa: B023
        for _ in range(2):
            running.pass_time(2)
        until(lambda: [peer.closed() for peer in peers] == [True, True, False, False, False], "the oldest stay")


# -- connections --


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_beyond_the_limit_only_health_probes_are_answered(serve, caplog, kind):
    uvloop = pytest.importorskip("uvloop")
    running = serve(
        limits=ServerLimits(connections=3, slow=3600, drain=3), new_loop=uvloop.new_event_loop if kind == "uvloop" else None
    )
    host, port = running.http.split(":")
    with ExitStack() as stack, caplog.at_level(logging.DEBUG):
        for _ in range(3):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert raw(running.http, GET.format("/v2").encode()).startswith(b"HTTP/1.1 503")
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert raw(running.http, GET.format(path).encode()).startswith(b"HTTP/1.1 200")
        waiting = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(http_server.PROBES)]
        until(lambda: running.server._http.over == len(waiting), "the connections did not arrive")
        assert raw(running.http, b"").startswith(b"HTTP/1.1 503")
    until(lambda: running.server._http.over == 0, "the connections are still there")
    assert running.server.repository.metrics.dropped["limit"] == 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_grpc_connections_beyond_the_limit_are_closed(serve):
    running = serve(limits=ServerLimits(connections=3, drain=3))
    with ExitStack() as stack:
        peers = []
        for _ in range(3):
            peers.append(stack.enter_context(RawGrpc(running.grpc)))
            assert peers[-1].socket.recv(9)
        with socket.create_connection(running.grpc.split(":"), timeout=PATIENCE_S) as fourth:
            assert fourth.recv(9) == b""
        assert is_ok(running.http, "/v2/health/live")
    until(lambda: not isinstance(ask(running.grpc, b"", LIVE), grpc.RpcError), "there is still no room")


def test_idle_grpc_connections_and_streams_end(serve):
    running = serve(limits=ServerLimits(idle=0.05, drain=3))
    with RawGrpc(running.grpc) as peer:
        until(peer.closed, "an idle connection is open")
    running = serve(limits=ServerLimits(idle=3600, drain=3))
    with RawGrpc(running.grpc) as peer:
        peer.call(STREAM, b"", sent=0)
        until(lambda: len(running.server._service.calls._calls) == 1, "the call did not arrive")
        running.pass_time(7200)
        until(peer.closed, "an idle stream is open")
    assert running.server.repository.metrics.dropped["idle"] == 1


def test_few_file_descriptors_mean_few_connections(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    used = len(os.listdir("/proc/self/fd"))
    assert 1 <= ServerLimits().max_connections() <= max(1, (256 - used - RESERVED_FILES) // 2)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, 256))
    assert ServerLimits().max_connections() == 1024
