"""What other tools expect of a server: health checking, reflection, model configuration, integer types, Triton's parameters."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from fake_server import PATIENCE_S, values_of
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tritonclient.utils import InferenceServerException

from thermocline.heat.text_ids import id_of_text
from thermocline.serve.protocol import rest, schema
from thermocline.serve.protocol.grpc_messages import read_request
from thermocline.serve.server import grpc_standard
from thermocline.serve.server.config import Credentials

HEALTH = "grpc.health.v1"


def check(address, service=""):
    request = schema.message("HealthCheckRequest", HEALTH)(service=service)
    with grpc.insecure_channel(address) as channel:
        found = channel.unary_unary(f"/{schema.HEALTH}/Check")(request.SerializeToString(), timeout=PATIENCE_S)
    return schema.message("HealthCheckResponse", HEALTH).FromString(found).status


def post(address, path, body):
    request = urllib.request.Request(f"http://{address}{path}", data=json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ask(ids, **parameters):
    return {"inputs": [{"name": "user", "shape": [len(ids)], "datatype": "INT64", "data": ids}], "parameters": parameters}


# -- gRPC's own services --


def test_health_checks_follow_the_models_and_need_no_token(serve):
    running = serve(credentials=Credentials(token="secret"))
    assert check(running.grpc) == check(running.grpc, schema.SERVICE) == grpc_standard.SERVING
    with pytest.raises(grpc.RpcError) as error:
        check(running.grpc, "another.Service")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    running.loop.call_soon_threadsafe(running.server.repository.unload, "tables")
    while check(running.grpc) == grpc_standard.SERVING:
        pass
    assert check(running.grpc) == grpc_standard.NOT_SERVING


def test_a_watch_tells_a_change_of_health_and_ends_with_its_client(serve, monkeypatch):
    monkeypatch.setattr(grpc_standard, "WATCH_SECONDS", 0.01)
    running = serve()
    calls = running.server._service.calls._calls
    with grpc.insecure_channel(running.grpc) as channel:
        stream = channel.unary_stream(f"/{schema.HEALTH}/Watch")(b"", timeout=PATIENCE_S)
        states = (schema.message("HealthCheckResponse", HEALTH).FromString(data).status for data in stream)
        assert next(states) == grpc_standard.SERVING
        running.loop.call_soon_threadsafe(running.server.repository.unload, "tables")
        assert next(states) == grpc_standard.NOT_SERVING
        stream.cancel()
    while calls:
        pass


@pytest.mark.parametrize("service", schema.REFLECTION)
def test_reflection_describes_every_service_well_enough_to_call_it(served, service):
    package = service.rpartition(".")[0]
    ask, answer = (schema.message(f"ServerReflection{kind}", package) for kind in ("Request", "Response"))
    queries = [ask(list_services="*"), ask(file_containing_symbol=schema.SERVICE), ask(file_containing_symbol="no.Such"), ask()]
    with grpc.insecure_channel(served.grpc) as channel:
        method = channel.stream_stream(f"/{service}/ServerReflectionInfo")
        found = [answer.FromString(data) for data in method((q.SerializeToString() for q in queries), timeout=PATIENCE_S)]
        assert {each.name for each in found[0].list_services_response.service} >= {schema.SERVICE, schema.HEALTH, service}
        pool = descriptor_pool.DescriptorPool()
        for data in found[1].file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
        assert [each.error_response.error_code for each in found[2:]] == [5, 3]
        (live,) = [each for each in pool.FindServiceByName(schema.SERVICE).methods if each.name == "ServerLive"]
        response = channel.unary_unary(f"/{schema.SERVICE}/{live.name}")(b"", timeout=PATIENCE_S)
        assert message_factory.GetMessageClass(live.output_type).FromString(response).live


# -- Triton's extensions --


def test_both_protocols_give_the_configuration_of_a_model(served):
    found = triton.InferenceServerClient(served.grpc).get_model_config("tables", as_json=True)["config"]
    over_http = triton_http.InferenceServerClient(served.http).get_model_config("tables")
    for config in (found, over_http):
        assert (config["name"], config["backend"]) == ("tables", "thermocline")
        assert config["input"][0]["data_type"] == "TYPE_INT64" and [int(size) for size in config["input"][0]["dims"]] == [-1]
        assert config["input"][0]["optional"]
    assert over_http["max_batch_size"] == 0


@pytest.mark.parametrize("client", [triton, triton_http])
@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.uint64, np.int64])
def test_ids_of_every_integer_type_give_the_same_rows(served, client, kind):
    ids = np.array([3, 17, 1008], kind)
    data = client.InferInput("user", ids.shape, np.dtype(kind).name.upper())
    data.set_data_from_numpy(ids)
    address = served.grpc if client is triton else served.http
    found = client.InferenceServerClient(address).infer("tables", [data]).as_numpy("user")
    np.testing.assert_array_equal(found, values_of(1, "user")[ids.astype(np.int64)])


TEXTS = ["", "tea", "grüner Tee", "x" * 70_000]


@pytest.mark.parametrize("client", [triton, triton_http])
def test_texts_become_the_ids_of_the_logs(served, client):
    for text in TEXTS:
        data = client.InferInput("user", [2], "BYTES")
        data.set_data_from_numpy(np.array([text, text], np.object_))
        address = served.grpc if client is triton else served.http
        with pytest.raises(InferenceServerException) as caught:  # these tables have few rows, and the error names the id
            client.InferenceServerClient(address).infer("tables", [data])
        assert str(id_of_text(text)) in str(caught.value)
    status, error = post(served.http, "/v2/models/tables/infer", {"inputs": [texts("tea", "mate")]})
    assert status == 400 and str(id_of_text("tea")).encode() in error
    typed = schema.ModelInferRequest(model_name="tables")
    typed.inputs.add(name="user", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"mate")
    assert read_request(typed.SerializeToString()).inputs["user"].tolist() == [id_of_text("mate")]


def texts(*given, name="user"):
    return {"name": name, "shape": [len(given)], "datatype": "BYTES", "data": list(given)}


def test_only_ids_are_texts(served):
    for tensor in (texts("tea", 3), texts("tea", "mate", name="user.offsets"), texts("tea") | {"data": "tea"}):
        assert post(served.http, "/v2/models/tables/infer", {"inputs": [tensor]})[0] == 400


def test_a_request_whose_timeout_passed_in_the_queue_is_not_executed(serve):
    running = serve()
    model = running.model
    model.hold.clear()
    results = []

    def infer(**parameters):
        results.append(post(running.http, "/v2/models/tables/infer", ask([3], **parameters)))

    running.server.repository.served("tables").batcher._max_loop_seconds = 0.0  # batches in the worker thread
    first = threading.Thread(target=infer)
    first.start()
    assert model.entered.wait(PATIENCE_S)
    second = threading.Thread(target=infer, kwargs={"timeout": 1})
    second.start()
    while not running.server.repository.served("tables").batcher.queued:
        pass
    model.hold.set()
    first.join(PATIENCE_S), second.join(PATIENCE_S)
    assert sorted(status for status, _ in results) == [200, 504] and model.batches == [1]


def test_priorities_and_timeouts_that_cannot_be_honoured_are_refused(served):
    for parameters in ({"priority": 1}, {"timeout": -1}, {"timeout": "soon"}, {"priority": None}):
        assert post(served.http, "/v2/models/tables/infer", ask([3], **parameters))[0] == 400, parameters
    assert post(served.http, "/v2/models/tables/infer", ask([3], priority=0, timeout=10**9))[0] == 200
    ids = np.array([3], np.int64)
    data = triton.InferInput("user", ids.shape, "INT64")
    data.set_data_from_numpy(ids)
    client = triton.InferenceServerClient(served.grpc)
    assert client.infer("tables", [data], timeout=10**9).as_numpy("user").shape == (1, 7)
    with pytest.raises(triton.InferenceServerException, match="priority"):
        client.infer("tables", [data], priority=3)


@pytest.mark.parametrize(
    "policy, code",
    [
        ({"latest": {"num_versions": 1}}, 200), ({"latest": {}}, 200), ({"specific": {"versions": [1]}}, 200), ({}, 200),
        ({"latest": {"num_versions": 2}}, 400), ({"all": {}}, 400), ({"specific": {"versions": [1, 2]}}, 400), ("latest", 400),
    ],
)  # fmt: skip
def test_a_version_policy_is_honoured_or_refused(serve, policy, code):
    running = serve("shop/1")
    config = json.dumps({"version_policy": policy})
    assert post(running.http, "/v2/repository/models/shop/load", {"parameters": {"config": config}})[0] == code


def test_json_never_holds_infinity_or_nan(serve):
    running = serve()
    running.model.tables["user"][3] = np.inf
    running.model.tables["user"][4] = np.nan
    for ids in ([3], [4]):
        status, body = post(running.http, "/v2/models/tables/infer", ask(ids))
        assert status == 400 and "binary_data_output" in json.loads(body)["error"]
        assert post(running.http, "/v2/models/tables/infer", ask(ids, binary_data_output=True))[0] == 200
    weights = {"name": "user.weights", "shape": [1], "datatype": "FP32", "data": [float("inf")]}
    assert post(running.http, "/v2/models/tables/infer", {"inputs": [*ask([5])["inputs"], weights]})[0] == 400


@pytest.mark.parametrize("datatype, dtype", [("INT64", np.int64), ("FP32", np.float32), ("BYTES", np.int64)])
def test_an_input_without_values_is_an_empty_array(datatype, dtype):
    body = json.dumps({"inputs": [{"name": "user", "shape": [0], "datatype": datatype, "data": []}]}).encode()
    array = rest.read_request("tables", "", body, len(body))[0].inputs["user"]
    assert array.shape == (0,) and array.dtype == dtype
