"""The protocol with unmodified clients: tritonclient over gRPC and HTTP, blocking and asynchronous, and curl."""

from __future__ import annotations

import asyncio
import json
import queue
import shutil
import subprocess

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
import tritonclient.http.aio as over_http_aio
from fake_server import DIM, ROWS, values_of
from tritonclient.utils import InferenceServerException

from support import mentions

IDS = {"user": np.array([3, 0, 1008, 3, 77], np.int64), "item": np.array([5], np.int64)}
BLOCKING = [over_grpc, over_http]
ASYNC = [over_grpc_aio, over_http_aio]


def address(served, api):
    return served.grpc if "grpc" in api.__name__ else served.http


def tensors(api, arrays, **options):
    inputs = []
    for name, array in arrays.items():
        kind = {"i": "INT64", "f": "FP32"}[array.dtype.kind]
        inputs.append(api.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array, **options)
    return inputs


def check(result, ids=IDS, version=1):
    for feature, ids_N in ids.items():
        np.testing.assert_array_equal(result.as_numpy(feature), values_of(version, feature)[ids_N])


@pytest.mark.parametrize("api", BLOCKING)
def test_a_client_gets_its_rows(served, api):
    with api.InferenceServerClient(address(served, api)) as client:
        result = client.infer("tables", tensors(api, IDS), request_id="a-42")
        check(result)
        response = result.get_response()
        said = response if isinstance(response, dict) else {"id": response.id, "model_version": response.model_version}
        assert (said["id"], said["model_version"]) == ("a-42", "1")


@pytest.mark.parametrize("api", ASYNC)
def test_an_asyncio_client_gets_its_rows(served, api):
    async def ask():
        client = api.InferenceServerClient(address(served, api))
        try:
            assert await client.is_server_live() and await client.is_server_ready() and await client.is_model_ready("tables")
            results = await asyncio.gather(*(client.infer("tables", tensors(api, IDS)) for _ in range(9)))
        finally:
            await client.close()
        for result in results:
            check(result)

    asyncio.run(ask())


def test_http_tensors_may_be_json(served):
    with over_http.InferenceServerClient(served.http) as client:
        wanted = [over_http.InferRequestedOutput("user", binary_data=False)]
        result = client.infer("tables", tensors(over_http, IDS, binary_data=False), outputs=wanted)
        check(result, {"user": IDS["user"]})
        assert "data" in result.get_output("user") and result.get_output("item") is None


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_http_bodies_may_be_compressed(served, algorithm):
    with over_http.InferenceServerClient(served.http) as client:
        check(client.infer("tables", tensors(over_http, IDS), request_compression_algorithm=algorithm))


@pytest.mark.parametrize("api", BLOCKING)
def test_a_client_may_choose_outputs_and_pool(served, api):
    offsets = np.array([0, 2], np.int64)
    with api.InferenceServerClient(address(served, api)) as client:
        inputs = tensors(api, IDS | {"user.offsets": offsets})
        result = client.infer("tables", inputs, outputs=[api.InferRequestedOutput("user")])
    rows_ND = values_of(1, "user")[IDS["user"]]
    np.testing.assert_array_equal(result.as_numpy("user"), np.add.reduceat(rows_ND, offsets))
    assert result.as_numpy("item") is None


@pytest.mark.parametrize("api", BLOCKING)
@pytest.mark.parametrize("number", [0, 1, 1000, 20_011])
def test_requests_of_any_size_are_answered(served, api, number):
    ids_N = np.random.default_rng(number).integers(0, ROWS, number)
    with api.InferenceServerClient(address(served, api)) as client:
        result = client.infer("tables", tensors(api, {"item": ids_N}))
        check(result, {"item": ids_N})
        assert result.as_numpy("item").shape == (number, DIM)


@pytest.mark.parametrize("api", BLOCKING)
def test_health_and_metadata(served, api):
    with api.InferenceServerClient(address(served, api)) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("tables") and client.is_model_ready("tables", "1")
        options = {"as_json": True} if api is over_grpc else {}
        server = client.get_server_metadata(**options)
        assert server["name"] == "thermocline" and "binary_tensor_data" in server["extensions"]
        model = client.get_model_metadata("tables", **options)
        assert model["versions"] == ["1"] and model["platform"] == "thermocline"
        assert {one["name"] for one in model["outputs"]} == {"user", "item"}
        (user,) = [one for one in model["inputs"] if one["name"] == "user"]
        assert user["datatype"] == "INT64" and [int(size) for size in user["shape"]] == [-1]


@pytest.mark.parametrize("api", BLOCKING)
def test_statistics_count_requests(served, api):
    with api.InferenceServerClient(address(served, api)) as client:
        options = {"as_json": True} if api is over_grpc else {}

        def count():
            (seen,) = client.get_inference_statistics("tables", **options)["model_stats"]
            return int(seen.get("inference_count", 0)), int(seen.get("inference_stats", {}).get("success", {}).get("ns", 0))

        before, spent = count()
        client.infer("tables", tensors(api, IDS))
        after = count()
        assert after[0] == before + 1 and after[1] > spent


def test_a_stream_answers_in_order_and_survives_an_invalid_request(served):
    answers = queue.Queue()
    with over_grpc.InferenceServerClient(served.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(5):
            name = "tables" if number != 2 else "chairs"
            client.async_stream_infer(name, tensors(over_grpc, {"user": np.array([number])}), request_id=str(number))
        for number in range(5):
            result, error = answers.get(timeout=120)
            if number == 2:
                assert "chairs" in str(error)
            else:
                assert result.get_response().id == str(number)
                check(result, {"user": np.array([number])})
        client.stop_stream()


def test_typed_contents_equal_raw_bytes(served):
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    request = service_pb2.ModelInferRequest(model_name="tables")
    tensor = request.inputs.add(name="user", datatype="INT64", shape=[3])
    tensor.contents.int64_contents.extend([7, 0, 9])
    with grpc.insecure_channel(served.grpc) as channel:
        response = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    rows_ND = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(list(response.outputs[0].shape))
    np.testing.assert_array_equal(rows_ND, values_of(1, "user")[[7, 0, 9]])


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl_gets_its_rows(served):
    body = {"inputs": [{"name": "user", "shape": [2], "datatype": "INT64", "data": [1, 2]}]}
    url = f"http://{served.http}/v2/models/tables/infer"
    done = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", url, "-d", json.dumps(body)], capture_output=True, text=True, timeout=60
    )
    (output,) = json.loads(done.stdout)["outputs"]
    assert output["shape"] == [2, DIM]
    assert output["data"] == values_of(1, "user")[[1, 2]].reshape(-1).tolist()


@pytest.mark.parametrize("api", BLOCKING)
def test_errors_reach_a_client_with_their_status(served, api):
    with api.InferenceServerClient(address(served, api)) as client:
        with pytest.raises(InferenceServerException, check=mentions("'chairs'")) as caught:
            client.infer("chairs", tensors(api, IDS))
        assert caught.value.status() in ("StatusCode.NOT_FOUND", "404")
        with pytest.raises(InferenceServerException, check=mentions("1009")) as caught:
            client.infer("tables", tensors(api, {"user": np.array([1009])}))
        assert caught.value.status() in ("StatusCode.INVALID_ARGUMENT", "400")
