"""Tensors of clients in shared memory: what Triton's client sends and gets, and what a hostile client cannot."""

from __future__ import annotations

import errno
import json
import os
import threading
import uuid
from contextlib import suppress
from multiprocessing import shared_memory
from unittest.mock import Mock

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from fake_server import DIM, values_of
from test_bad_requests import post as post_infer
from test_standard_protocol import post
from tritonclient.utils import InferenceServerException

from thermocline.errors import BadInput
from thermocline.heat.text_ids import id_of_text
from thermocline.serve.protocol import grpc_messages, rest, schema
from thermocline.serve.protocol.shared_memory import SharedRange, SharedRegions
from thermocline.serve.protocol.tensors import RequestLimits

PREFIX = f"thermocline-{uuid.uuid4().hex[:8]}-"
CLIENTS = [triton, triton_http]


@pytest.fixture
def running(serve):
    return serve(shared_memory=PREFIX)


@pytest.fixture
def region():
    """Makes shared memory of some bytes, and returns its name."""
    made = []

    def make(size, name=None):
        made.append(shared_memory.SharedMemory(name or f"{PREFIX}{len(made)}", create=True, size=size))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each.unlink()


def client_of(api, running):
    return api.InferenceServerClient(running.grpc if api is triton else running.http)


@pytest.mark.parametrize("api", CLIENTS)
def test_ids_and_rows_in_shared_memory_equal_those_in_messages(running, api):
    ids = np.array([3, 17, 1008], np.int64)
    inputs = shm.create_shared_memory_region("inputs", f"/{PREFIX}in", 8 * 100)
    outputs = shm.create_shared_memory_region("outputs", f"/{PREFIX}out", 4096)
    try:
        shm.set_shared_memory_region(inputs, [ids], offset=16)
        with client_of(api, running) as client:
            assert "system_shared_memory" in (client.get_server_metadata()["extensions"] if api is triton_http else
                                              client.get_server_metadata().extensions)  # fmt: skip
            client.register_system_shared_memory("inputs", f"/{PREFIX}in", 8 * 100)
            client.register_system_shared_memory("outputs", f"/{PREFIX}out", 4096)
            user, item = api.InferInput("user", [3], "INT64"), api.InferInput("item", [3], "INT64")
            user.set_shared_memory("inputs", ids.nbytes, offset=16)
            item.set_data_from_numpy(ids)
            wanted = [api.InferRequestedOutput("user"), api.InferRequestedOutput("item")]
            wanted[0].set_shared_memory("outputs", 4000, offset=64)
            result = client.infer("tables", [user, item], outputs=wanted)
            found = shm.get_contents_as_numpy(outputs, np.float32, [3, DIM], offset=64)
            np.testing.assert_array_equal(found, values_of(1, "user")[ids])
            np.testing.assert_array_equal(result.as_numpy("item"), values_of(1, "item")[ids])
            status = client.get_system_shared_memory_status()
            names = {each["name"] for each in status} if api is triton_http else set(status.regions)
            assert names == {"inputs", "outputs"}
            client.unregister_system_shared_memory("inputs")
            with pytest.raises(InferenceServerException):
                client.infer("tables", [user])
            client.unregister_system_shared_memory()
            status = client.get_system_shared_memory_status()
            assert not (status if api is triton_http else status.regions)
    finally:
        shm.destroy_shared_memory_region(inputs)
        shm.destroy_shared_memory_region(outputs)


@pytest.mark.parametrize("api", CLIENTS)
def test_texts_in_shared_memory_are_ids(running, api, region):
    memory = region(100)
    memory.buf[:7] = b"\3\0\0\0tea"
    with client_of(api, running) as client:
        client.register_system_shared_memory("texts", memory.name, 100)
        tensor = api.InferInput("user", [1], "BYTES")
        tensor.set_shared_memory("texts", 7)
        with pytest.raises(InferenceServerException) as caught:  # these tables have few rows, and the error names the id
            client.infer("tables", [tensor])
        assert str(id_of_text("tea")) in str(caught.value)


@pytest.mark.parametrize("api", CLIENTS)
def test_texts_in_shared_memory_are_read_outside_of_the_event_loop(running, api, region, monkeypatch):
    memory, threads, read = region(100), [], SharedRegions.read

    def record(*given):
        threads.append(threading.current_thread().name.partition("_")[0])
        return read(*given)

    monkeypatch.setattr(SharedRegions, "read", record)
    with client_of(api, running) as client:
        client.register_system_shared_memory("r", memory.name, 100)
        for datatype, size in (("INT64", 8), ("BYTES", 4)):
            tensor = api.InferInput("user", [1], datatype)
            tensor.set_shared_memory("r", size)
            with suppress(InferenceServerException):  # these tables have few rows
                client.infer("tables", [tensor])
    assert threads[0] not in ("messages", "json") and threads[1] == ("messages" if api is triton else "json")


def ask(name="r", offset=0, size=8, output=None):
    shared = {"shared_memory_region": name, "shared_memory_offset": offset, "shared_memory_byte_size": size}
    tensor = {"name": "user", "shape": [size // 8], "datatype": "INT64", "parameters": shared}
    if output is not None:
        output = {"shared_memory_region": name, "shared_memory_offset": 0, "shared_memory_byte_size": output}
    outputs = [] if output is None else [{"name": "user", "parameters": output}]
    return {"inputs": [tensor], "outputs": outputs}


def register(running, key, size=64, offset=0, name="r"):
    return post(
        running.http, f"/v2/systemsharedmemory/region/{name}/register", {"key": key, "offset": offset, "byte_size": size}
    )


def infer(running, body):
    return post_infer(running.http, json.dumps(body).encode())[0]


def test_only_files_with_the_prefix_are_opened(running, region, tmp_path):
    other = region(64, name=f"other-{uuid.uuid4().hex[:8]}")
    link = f"/dev/shm/{PREFIX}link"
    (tmp_path / "secret").write_bytes(bytes(64))
    os.symlink(tmp_path / "secret", link)
    os.mkfifo(f"/dev/shm/{PREFIX}pipe")
    os.link(f"/dev/shm/{other.name}", f"/dev/shm/{PREFIX}name")
    try:
        hostile = [
            other.name,
            f"{PREFIX}name",
            f"{PREFIX}link",
            f"{PREFIX}pipe",
            f"{PREFIX}../x",
            "../../etc/passwd",
            f"{PREFIX}\0",
            f"{PREFIX}none",
            "",
        ]
        for key in hostile:
            assert register(running, key)[0] == 400, key
    finally:
        os.unlink(link)
        os.unlink(f"/dev/shm/{PREFIX}pipe")
        os.unlink(f"/dev/shm/{PREFIX}name")
    assert register(running, region(64).name)[0] == 200


def test_ranges_are_checked_and_files_that_shrink_end_nothing(running, region):
    memory = region(64)
    assert register(running, memory.name, size=10_000)[0] == 400
    assert register(running, memory.name, size=-1)[0] == register(running, memory.name, offset="0")[0] == 400
    assert register(running, memory.name)[0] == 200 and register(running, memory.name)[0] == 400
    assert infer(running, ask()) == 200
    assert infer(running, ask("other")) == infer(running, ask(offset=60)) == infer(running, ask(size=-8)) == 400
    assert infer(running, ask(offset=-1)) == infer(running, ask(offset="0")) == 400
    assert infer(running, ask(output=4 * DIM)) == 200
    assert infer(running, ask(output=4 * DIM - 1)) == infer(running, ask(output=65)) == 400
    os.truncate(f"/dev/shm/{memory.name}", 4)
    inline = [{"name": "user", "shape": [1], "datatype": "INT64", "data": [3]}]
    assert infer(running, ask()) == infer(running, ask(output=4 * DIM) | {"inputs": inline}) == 400
    assert os.stat(f"/dev/shm/{memory.name}").st_size == 4
    os.truncate(f"/dev/shm/{memory.name}", 64)
    memory.buf[:64] = bytes(64)
    assert infer(running, ask()) == 200


def test_large_ranges_are_refused_before_they_are_read(region):
    regions, memory = SharedRegions(PREFIX), region(1 << 20)
    regions.register("r", memory.name, 0, 1 << 20)
    assert len(regions.read("user", SharedRange("r", 0, 64 * 63), 63)) == 64 * 63
    with pytest.raises(BadInput) as caught:
        regions.read("user", SharedRange("r", 0, 64 * 63 + 1), 63)
    assert caught.value.available == 64 * 63


def test_inputs_of_a_request_share_the_limit_of_what_is_read(region):
    limits, regions, memory = RequestLimits(values=63), SharedRegions(PREFIX), region(1 << 20)
    regions.register("r", memory.name, 0, 1 << 20)
    half = ask(size=32 * 63)["inputs"][0]
    tensors = [half | {"name": f"feature{number}"} for number in range(3)]
    text = [json.dumps({"inputs": tensors[:count]}).encode() for count in (2, 3)]
    assert rest.read_request("tables", "", text[0], len(text[0]), limits, regions)[0].copied == 64 * 63
    with pytest.raises(BadInput, check=lambda error: error.parameter == "feature2" and error.available == 0):
        rest.read_request("tables", "", text[1], len(text[1]), limits, regions)
    message = schema.ModelInferRequest(model_name="tables")
    for each in tensors:
        tensor = message.inputs.add(name=each["name"], datatype="INT64", shape=each["shape"])
        tensor.parameters["shared_memory_region"].string_param = "r"
        tensor.parameters["shared_memory_byte_size"].int64_param = 32 * 63
    with pytest.raises(BadInput, check=lambda error: error.parameter == "feature2" and error.available == 0):
        grpc_messages.read_request(message.SerializeToString(), limits, regions)


def test_outputs_that_find_no_memory_are_refused(region, monkeypatch):
    regions, memory = SharedRegions(PREFIX), region(64)
    regions.register("r", memory.name, 0, 64)
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(BadInput, check=lambda error: error.parameter == "user"):
        regions.write("user", SharedRange("r", 0, 64), np.zeros(16, np.float32))


def test_shared_memory_is_off_without_the_option(served, region):
    assert register(served, region(64).name)[0] == 400
    assert infer(served, ask()) == 400
    assert post(served.http, "/v2/systemsharedmemory/unregister", {})[0] == 400
