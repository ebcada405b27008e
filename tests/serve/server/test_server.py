"""The server: shutdown, credentials, ports, metrics, logs."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import queue
import re
import shutil
import ssl
import subprocess
import threading
import time
from http.client import HTTPConnection
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import grpc
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from fake_server import PATIENCE_S, FakeLoader, until, values_of
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from support import has
from thermocline.cli import app
from thermocline.errors import BadInput
from thermocline.serve.protocol import schema
from thermocline.serve.server import dynamic_batcher as batcher_module
from thermocline.serve.server import json_log as log
from thermocline.serve.server import server as server_module
from thermocline.serve.server.config import Credentials, ServerLimits
from thermocline.serve.server.dynamic_batcher import MAX_LOOP_SECONDS
from thermocline.serve.server.json_log import LOGGER, JsonFormatter

ASK = build_opener(ProxyHandler({}))


def get(running, path, token=None, scheme="http", opener=ASK):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with opener.open(Request(f"{scheme}://{running.http}{path}", headers=headers), timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def tensor(*ids):
    made = over_grpc.InferInput("user", [len(ids)], "INT64")
    made.set_data_from_numpy(np.array(ids))
    return [made]


def slow(running):
    """Make the model wait in the worker thread until `hold` is set."""
    running.model.hold.clear()
    running.server.repository.served("tables").batcher._seconds_per_id = MAX_LOOP_SECONDS


def test_a_draining_server_finishes_its_requests_and_refuses_others(serve):
    running = serve(limits=ServerLimits(drain=120))
    slow(running)
    answers = []
    with over_grpc.InferenceServerClient(running.grpc) as client:
        asking = threading.Thread(target=lambda: answers.append(client.infer("tables", tensor(5)).as_numpy("user")))
        asking.start()
        assert running.model.entered.wait(PATIENCE_S)
        stopping = asyncio.run_coroutine_threadsafe(running.server.stop(), running.loop)
        until(lambda: running.server.repository.draining, "not draining")
        with over_grpc.InferenceServerClient(running.grpc) as other, pytest.raises(InferenceServerException) as caught:
            other.infer("tables", tensor(5), client_timeout=5)
        refused = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")  # gRPC's choice: no listener, no answer, taken and let go
        assert caught.value.status() in [f"StatusCode.{one}" for one in refused]
        assert answers == [] and not stopping.done()
        running.model.hold.set()
        asking.join(PATIENCE_S)
        stopping.result(PATIENCE_S)
    np.testing.assert_array_equal(answers[0], values_of(1, "user")[[5]])
    assert running.model.closed


def test_unhandled_calls_at_shutdown_are_refused_not_cancelled(serve, monkeypatch):
    monkeypatch.setattr(server_module, "QUIET_SECONDS", 1.0)  # for slow machines
    monkeypatch.setattr(server_module, "MAX_REFUSING_SECONDS", 60.0)
    running = serve()
    request = schema.ModelInferRequest(model_name="tables", raw_input_contents=[np.arange(5).tobytes()])
    request.inputs.add(name="item", datatype="INT64", shape=[5])
    there, sent = threading.Event(), threading.Event()

    def keep_the_loop():
        there.set()
        assert sent.wait(60)

    with grpc.insecure_channel(running.grpc) as channel:
        ask = channel.unary_unary(f"/{schema.SERVICE}/ModelInfer")
        ask(request.SerializeToString(), timeout=60)  # connects
        running.loop.call_soon_threadsafe(keep_the_loop)
        assert there.wait(60)
        asked = [ask.future(request.SerializeToString(), timeout=60) for _ in range(16)]
        stopping = asyncio.run_coroutine_threadsafe(running.server.stop(), running.loop)
        sent.set()
        codes = {one.code() for one in asked}
        stopping.result(60)
    assert grpc.StatusCode.UNAVAILABLE in codes and codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK}


def test_a_draining_server_closes_connections(serve):
    running = serve()
    connection = HTTPConnection(running.http)
    for draining in (False, True):
        running.server.repository.draining = draining
        for path in ("/v2/health/ready", "/v2/models/none"):
            connection.request("GET", path)
            with connection.getresponse() as response:
                assert (response.getheader("Connection") == "close") == draining


def test_a_draining_server_loads_no_model(serve):
    running = serve()
    running.server.repository.draining = True
    with over_grpc.InferenceServerClient(running.grpc) as client, pytest.raises(InferenceServerException) as caught:
        client.load_model("tables")
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    with over_http.InferenceServerClient(running.http) as other, pytest.raises(InferenceServerException) as caught:
        other.load_model("tables")
    assert caught.value.status() == "503"
    assert len(running.models) == 1


def test_expired_and_cancelled_requests_are_not_executed(serve, monkeypatch):
    running = serve()
    slow(running)
    batcher = running.server.repository.served("tables").batcher
    with over_grpc.InferenceServerClient(running.grpc) as client:
        first = threading.Thread(target=lambda: client.infer("tables", tensor(1)))
        first.start()
        assert running.model.entered.wait(PATIENCE_S)
        told = queue.Queue()

        def tell(result, error):
            told.put(error)

        asked = [client.async_infer("tables", tensor(2), tell, client_timeout=limit) for limit in (3600, None)]
        until(lambda: batcher.queued == 2, "the requests did not arrive")
        late = min(batcher._queue, key=lambda each: each.deadline)
        assert late.deadline - late.arrived == pytest.approx(3600, abs=PATIENCE_S)
        monkeypatch.setattr(batcher_module, "perf_counter", lambda: late.deadline)
        asked[1].cancel()
        until(lambda: any(each.future.cancelled() for each in batcher._queue), "the request was not cancelled")
        running.model.hold.set()
        first.join(PATIENCE_S)
        said = {str(told.get(timeout=PATIENCE_S).status()) for _ in asked}
        assert said == {"StatusCode.DEADLINE_EXCEEDED", "StatusCode.CANCELLED"}
    assert batcher.queued == 0 and running.model.batches == [1]


def test_a_request_of_a_closed_http_connection_is_not_executed(serve):
    import socket

    running = serve()
    slow(running)
    batcher = running.server.repository.served("tables").batcher
    body = json.dumps({"inputs": [{"name": "user", "shape": [1], "datatype": "INT64", "data": [1]}]})
    sent = f"POST /v2/models/tables/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    host, port = running.http.split(":")
    with socket.create_connection((host, int(port))) as first:
        first.sendall(sent)
        assert running.model.entered.wait(PATIENCE_S)
        with socket.create_connection((host, int(port))) as second:
            second.sendall(sent)
            until(lambda: batcher.queued == 1, "the request did not arrive")
        until(lambda: batcher._queue[0].future.cancelled(), "the request was not cancelled")
        running.model.hold.set()
        assert first.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: batcher.queued == 0, "the request is still queued")
    assert running.model.batches == [1]


def test_both_protocols_refuse_overload_at_once(serve):
    running = serve(limits=ServerLimits(queue=2, drain=3))
    slow(running)
    with over_grpc.InferenceServerClient(running.grpc) as client:
        waiting = [client.async_infer("tables", tensor(1), callback=lambda result, error: None) for _ in range(1)]
        assert running.model.entered.wait(PATIENCE_S)
        waiting += [client.async_infer("tables", tensor(1), callback=lambda result, error: None) for _ in range(2)]
        until(lambda: running.server.repository.served("tables").batcher.queued == 2, "the requests did not arrive")
        with pytest.raises(InferenceServerException) as caught:
            client.infer("tables", tensor(1))
        assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        with over_http.InferenceServerClient(running.http) as other:
            inputs = over_http.InferInput("user", [1], "INT64")
            inputs.set_data_from_numpy(np.array([1]))
            with pytest.raises(InferenceServerException) as caught:
                other.infer("tables", [inputs])
            assert caught.value.status() == "429"
        running.model.hold.set()
        until(lambda: sum(running.model.batches) == 3, "the queue was not executed")


def test_without_the_token_only_health_is_public(serve):
    running = serve(credentials=Credentials(token="s3cret"))
    with over_grpc.InferenceServerClient(running.grpc) as client:
        assert client.is_server_live() and client.is_server_ready()
        for headers in (None, {"authorization": "Bearer guess"}, {"authorization": "s3cret"}):
            with pytest.raises(InferenceServerException) as caught:
                client.infer("tables", tensor(5), headers=headers)
            assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
        answer = client.infer("tables", tensor(5), headers={"authorization": "Bearer s3cret"})
        np.testing.assert_array_equal(answer.as_numpy("user"), values_of(1, "user")[[5]])
    get(running, "/v2/health/ready")
    for path in ("/", "/metrics", "/status.json", "/v2", "/v2/models/tables"):
        with pytest.raises(HTTPError, check=has(code=401)):
            get(running, path)
        get(running, path, "s3cret")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")
def test_both_protocols_use_tls(serve, tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(["openssl", *made.split(), *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    running = serve(credentials=Credentials(certificate=certificate, key=key))
    with over_grpc.InferenceServerClient(running.grpc, ssl=True, root_certificates=str(certificate)) as client:
        np.testing.assert_array_equal(client.infer("tables", tensor(5)).as_numpy("user"), values_of(1, "user")[[5]])
    from urllib.request import HTTPSHandler

    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=ssl.create_default_context(cafile=certificate)))
    assert json.loads(get(running, "/v2", scheme="https", opener=opener))["name"] == "thermocline"
    with pytest.raises(OSError):
        get(running, "/v2")
    asked = CliRunner().invoke(app, ["serve", "status", f"https://{running.http}"])
    assert isinstance(asked.exception, BadInput) and "--tls-ca" in str(asked.exception)
    key.write_text("nonsense")
    with pytest.raises(BadInput, check=has(parameter="tls_cert")):
        serve(credentials=Credentials(certificate=certificate, key=key))


def test_a_taken_port_is_named(serve):
    running = serve()
    for which in ("http", "grpc"):
        port = int(getattr(running, which).split(":")[1])
        with pytest.raises(BadInput, check=has(parameter=f"{which}_port", value=port)):
            start_on(running, **{f"{which}_port": port})


def start_on(running, **ports):
    from thermocline.serve.server.config import ServerConfig
    from thermocline.serve.server.metrics import ServerMetrics
    from thermocline.serve.server.model_repository import ModelRepository
    from thermocline.serve.server.server import InferenceServer

    async def begin():
        repository = ModelRepository(running.folder, FakeLoader([]), ServerLimits(), ServerMetrics())
        server = InferenceServer(repository, ServerConfig(**({"http_port": 0, "grpc_port": 0} | ports)))
        try:
            await server.start()
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(begin(), PATIENCE_S))


def test_metrics_count_by_stage_shard_and_status(serve):
    running = serve()
    with over_grpc.InferenceServerClient(running.grpc) as client:
        for _ in range(7):
            client.infer("tables", tensor(1, 3, 4))
        with pytest.raises(InferenceServerException):
            client.infer("tables", tensor(-1))
        with pytest.raises(InferenceServerException):
            client.infer("made-up-name", tensor(1))
    text = get(running, "/metrics")
    values = dict(re.findall(r"^(thermocline_\S+(?: |\S+ ))(\S+)$", text, re.MULTILINE))
    values = {name.strip(): float(value) for name, value in values.items()}
    assert values['thermocline_requests_total{model="tables",status="OK"}'] == 7
    assert values['thermocline_requests_total{model="tables",status="INVALID_ARGUMENT"}'] == 1
    assert values['thermocline_requests_total{model="",status="NOT_FOUND"}'] == 1
    assert values['thermocline_ids_total{model="tables"}'] == 21
    for stage in ("read", "queue", "infer", "write", "all"):
        assert values[f'thermocline_request_seconds_count{{model="tables",stage="{stage}"}}'] == 7
        assert values[f'thermocline_request_seconds_bucket{{le="+Inf",model="tables",stage="{stage}"}}'] == 7
    assert values['thermocline_shard_lookups_total{model="tables",shard="1"}'] == 14
    assert values['thermocline_imbalance{model="tables"}'] == pytest.approx(14 / 10.5)
    assert values['thermocline_queue_depth{model="tables"}'] == 0
    assert values['thermocline_model_version{model="tables",version="1"}'] == 1
    assert "made-up-name" not in text


def test_the_dashboard_uses_only_existing_metrics(serve):
    from importlib.resources import files

    from thermocline.serve.server.metrics import ServerMetrics

    dashboard = json.loads((files("thermocline.serve.server") / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"thermocline_\w+", target["expr"])
    }
    families = {family.name: family.type for family in ServerMetrics().collect()}
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    counted = {name + ending for name, kind in families.items() for ending in endings[kind]}
    assert asked and asked <= counted
    assert {
        "thermocline_shard_lookups_total",
        "thermocline_imbalance",
        "thermocline_queue_depth",
        "thermocline_request_seconds_bucket",
    } <= asked


def test_log_lines_are_json_objects(caplog, serve, monkeypatch):
    monkeypatch.setattr(log, "_recent", [])  # faults of earlier tests count towards the limit
    with caplog.at_level(logging.INFO, LOGGER.name):
        running = serve()
        running.model.fail = ZeroDivisionError("made up")
        with over_grpc.InferenceServerClient(running.grpc) as client, pytest.raises(InferenceServerException):
            client.infer("tables", tensor(1))
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == LOGGER.name]
    assert [line["event"] for line in lines] == ["listening", "loading", "in use", "ready", "a request failed"]
    assert lines[0]["grpc_port"] > 0 and lines[2]["version"] == "1" and "ZeroDivisionError" in lines[-1]["traceback"]
    assert all({"time", "level"} <= set(line) for line in lines)


def test_a_server_without_models_is_live_but_not_ready(serve):
    running = serve()
    running.do(unload(running))
    with over_grpc.InferenceServerClient(running.grpc) as client:
        assert client.is_server_live() and not client.is_server_ready()
    with pytest.raises(HTTPError, check=has(code=503)):
        get(running, "/v2/health/ready")


async def unload(running):
    running.server.repository.unload("tables")


def test_a_hundred_concurrent_clients_get_their_own_rows(serve):
    running, began = serve(), time.time()
    slow(running)
    batcher = running.server.repository.served("tables").batcher

    async def go_on():
        while batcher.queued + sum(running.model.batches) < 100:
            await asyncio.sleep(0.002)
        running.model.hold.set()

    async def ask():
        async def one(number):
            async with grpc.aio.insecure_channel(running.grpc) as channel:
                request = schema.ModelInferRequest(
                    model_name="tables", id=str(number), raw_input_contents=[np.arange(number, number + 5).tobytes()]
                )
                request.inputs.add(name="item", datatype="INT64", shape=[5])
                data = await channel.unary_unary(f"/{schema.SERVICE}/ModelInfer")(
                    request.SerializeToString(), timeout=PATIENCE_S
                )
                response = schema.ModelInferResponse.FromString(data)
                assert response.id == str(number)
                rows_ND = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(5, -1)
                np.testing.assert_array_equal(rows_ND, values_of(1, "item")[number : number + 5])

        await asyncio.gather(go_on(), *(one(number) for number in range(100)))

    asyncio.run(ask())
    assert sum(running.model.batches) == 100 and max(running.model.batches) > 1
    assert began <= running.server.repository.metrics.of("tables").last <= time.time()


def test_a_finished_call_waits_for_no_garbage_collector(serve):
    running = serve()
    gc.collect()
    budget, contexts = running.server._service.budget, type_counter("_ServicerContext")
    with over_grpc.InferenceServerClient(running.grpc) as client:
        gc.disable()
        try:
            for _ in range(20):
                assert client.is_server_live()
                client.infer("tables", tensor(5))
            until(lambda: budget.held == 0 and contexts() == 0, "calls are still in memory")
        finally:
            gc.enable()


def type_counter(name):
    """How many objects there are of a type that Python names so, apart from those that are there now."""
    known = {id(each) for each in gc.get_objects() if type(each).__name__ == name}
    return lambda: sum(type(each).__name__ == name and id(each) not in known for each in gc.get_objects())
