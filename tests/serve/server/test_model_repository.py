"""The model repository: loading, replacing, unloading, and names that try to leave the folder."""

from __future__ import annotations

import asyncio
import json
import threading
from http.client import HTTPConnection
from typing import ClassVar

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from fake_server import PATIENCE_S, FakeLoader, FakeTables, make_folder, start, until, values_of
from tritonclient.utils import InferenceServerException

from thermocline.errors import BadInput
from thermocline.serve.errors import NotReady
from thermocline.serve.server.config import ServerLimits
from thermocline.serve.server.metrics import ServerMetrics
from thermocline.serve.server.model_repository import ModelRepository

APIS = [over_grpc, over_http]


def client_of(running, api):
    return api.InferenceServerClient(running.grpc if api is over_grpc else running.http)


def rows(api, client, name="shop", id=3, version=""):
    tensor = api.InferInput("user", [1], "INT64")
    tensor.set_data_from_numpy(np.array([id]))
    return client.infer(name, [tensor], model_version=version).as_numpy("user")


def not_found(error):
    return error.status() in ("StatusCode.NOT_FOUND", "404", None) or "no model" in error.message()


def only(version):
    return json.dumps({"version_policy": {"specific": {"versions": [version]}}})


def invalid(error):
    return error.status() in ("StatusCode.INVALID_ARGUMENT", "400")


def index(client):
    found = client.get_model_repository_index()
    lines = (
        found
        if isinstance(found, list)
        else [{"name": m.name, "version": m.version, "state": m.state, "reason": m.reason} for m in found.models]
    )
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("api", APIS)
def test_the_newest_version_is_served_and_can_be_replaced(serve, api):
    running = serve("shop/9", "shop/10", "shop/notes", "film")
    with client_of(running, api) as client:
        assert {name: line["version"] for name, line in index(client).items()} == {"film": "1", "shop": "10"}
        np.testing.assert_array_equal(rows(api, client), values_of(10, "user")[[3]])
        client.load_model("shop", config=only(9))
        np.testing.assert_array_equal(rows(api, client, version="9"), values_of(9, "user")[[3]])
        (old,) = [model for model in running.models if model.version == "10"]
        until(lambda: old.closed, "the old version was not closed")
        make_folder(running.folder, "shop/11")
        client.load_model("shop")
        np.testing.assert_array_equal(rows(api, client), values_of(11, "user")[[3]])
        with pytest.raises(InferenceServerException, check=not_found):
            client.load_model("shop", config=only(12))
        with pytest.raises(InferenceServerException, check=not_found):
            rows(api, client, version="9")


@pytest.mark.parametrize("api", APIS)
def test_an_unloaded_model_is_unknown_until_it_is_loaded_again(serve, api):
    running = serve("shop", "film")
    with client_of(running, api) as client:
        client.unload_model("shop")
        assert not client.is_model_ready("shop") and client.is_server_ready()
        with pytest.raises(InferenceServerException, check=not_found):
            rows(api, client)
        assert index(client)["shop"]["state"] == "UNAVAILABLE"
        with pytest.raises(InferenceServerException, check=not_found):
            client.unload_model("shop")
        client.load_model("shop")
        rows(api, client)


def test_readiness_of_an_unknown_model_is_404_and_of_a_loading_one_503(serve):
    running = serve("shop/1", "film")

    def status(path):
        connection = HTTPConnection(running.http)
        connection.request("GET", f"/v2/models/{path}/ready")
        with connection.getresponse() as response:
            return response.status

    assert [status(path) for path in ("shop", "shop/versions/1", "shop/versions/2", "shoe")] == [200, 200, 404, 404]
    with client_of(running, over_grpc) as client:
        assert client.is_model_ready("shop") and not client.is_model_ready("shoe") and not client.is_model_ready("shop", "2")
        client.unload_model("shop")
        assert status("shop") == 404
    lock = running.server.repository._load_locks["shop"]
    running.do(lock.acquire())
    assert status("shop") == 503
    lock.release()
    running.server.repository.draining = True
    assert status("film") == 503


def test_a_server_is_ready_when_its_last_model_is_loaded(tmp_path):
    make_folder(tmp_path, "a", "b", "c")
    seen = []

    async def begin():
        class Loader(FakeLoader):
            def load(self, name, version, folder):
                with pytest.raises(NotReady):
                    repository.served("c")
                seen.append((repository.ready, [entry["state"] for entry in repository.index()]))
                return super().load(name, version, folder)

        repository = ModelRepository(tmp_path, Loader([]), ServerLimits(), ServerMetrics())
        await repository.load_all()
        ready = repository.ready
        await repository.close()
        return ready

    assert asyncio.run(begin())
    later, there = "LOADING", "READY"
    assert seen == [(False, [later, later, later]), (False, [there, later, later]), (False, [there, there, later])]


def test_a_damaged_version_leaves_the_old_one_in_use(serve, caplog):
    running = serve("shop/1")
    make_folder(running.folder, "shop/2")
    (running.folder / "shop/2/damaged").touch()
    with client_of(running, over_grpc) as client:
        with pytest.raises(InferenceServerException) as caught:
            client.load_model("shop")
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        np.testing.assert_array_equal(rows(over_grpc, client), values_of(1, "user")[[3]])
        line = index(client)["shop"]
        assert line["state"] == "READY" and line["version"] == "1" and "checksum" in line["reason"]
    assert "load failed; version 1 stays in use" in caplog.messages


def test_damaged_models_and_versions_do_not_stop_the_others_at_the_start(tmp_path):
    folder = make_folder(tmp_path, "film", "shop/8", "shop/9", "shop/10", "zoo")
    for damaged in ("film", "shop/10"):
        (folder / damaged / "damaged").touch()
    running, stop = start(folder)
    try:
        with client_of(running, over_grpc) as client:
            assert client.is_server_ready() and not client.is_model_ready("film")
            found = index(client)
            np.testing.assert_array_equal(rows(over_grpc, client), values_of(9, "user")[[3]])
    finally:
        stop()
    states = {name: (line["state"], line["version"]) for name, line in found.items()}
    assert states == {"film": ("UNAVAILABLE", ""), "shop": ("READY", "9"), "zoo": ("READY", "1")}
    assert "checksum" in found["film"]["reason"] and "checksum" in found["shop"]["reason"] and not found["zoo"]["reason"]
    assert [model.version for model in running.models] == ["9", "1"]


def test_a_server_without_any_good_version_does_not_start(tmp_path):
    folder = make_folder(tmp_path, "film", "shop/9")
    for damaged in ("film", "shop/9"):
        (folder / damaged / "damaged").touch()
    with pytest.raises(BadInput, check=lambda error: error.table == "user"):
        start(folder)


@pytest.mark.parametrize(
    "name", ["..", ".", "", "/etc", "../secret", "shop/../../secret", "shop/1", "a\\b", "x\0y", "ﬁlm", "link", "x" * 500]
)
def test_names_cannot_leave_the_folder(serve, tmp_path, name):
    running = serve("shop")
    make_folder(tmp_path / "secret", ".")
    (running.folder / "link").symlink_to(tmp_path / "secret")
    loaded = len(running.models)
    with client_of(running, over_grpc) as client, pytest.raises(InferenceServerException) as caught:
        client.load_model(name)
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert len(running.models) == loaded
    assert set(index(client_of(running, over_grpc))) == {"shop"}


def test_clients_cannot_upload_models(serve):
    running = serve("shop")
    for api in APIS:
        with client_of(running, api) as client:
            with pytest.raises(InferenceServerException, check=invalid):
                client.load_model("shop", config="{}", files={"file:1/model.bin": b"x"})
            with pytest.raises(InferenceServerException, check=invalid):
                client.load_model("shop", config="[7]")


def test_no_request_fails_or_mixes_versions_during_a_replacement(serve):
    running = serve("shop/1", "shop/2")
    stop, wrong, seen = threading.Event(), [], set()
    ids_N = np.arange(0, 1000, 7)

    def ask():
        with client_of(running, over_grpc) as client:
            tensors = []
            for feature in ("user", "item"):
                tensors.append(over_grpc.InferInput(feature, [len(ids_N)], "INT64"))
                tensors[-1].set_data_from_numpy(ids_N)
            while not stop.is_set():
                try:
                    result = client.infer("shop", tensors)
                    version = int(result.get_response().model_version)
                    seen.add(version)
                    for feature in ("user", "item"):
                        np.testing.assert_array_equal(result.as_numpy(feature), values_of(version, feature)[ids_N])
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    with client_of(running, over_grpc) as client:
        for turn in range(12):
            seen.clear()
            client.load_model("shop", config=only(1 + turn % 2))
            until(lambda turn=turn: wrong or 1 + turn % 2 in seen, "no client saw this version")
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)
    until(lambda: sum(not model.closed for model in running.models) == 1, "versions were left open")


class Reloadable(FakeTables):
    """A model that changes its version in place, and whose results name their version."""

    def load(self, folder):
        if (folder / "damaged").exists():
            raise BadInput("block 3 has another checksum", table="user")
        self.tables = {feature: values_of(int(folder.name), feature) for feature in self.tables}
        self.version = f"{folder.name}.5"

    def follow(self):
        if (newer := len(self.saved) + 1) != int(self.version):
            self.tables = {feature: values_of(100 + newer, feature) for feature in self.tables}
            self.version = str(newer)

    saved: ClassVar[list[int]] = []  # newer saves

    def infer(self, requests):
        return [VersionedResult(answer, self.version) for answer in super().infer(requests)]


class VersionedResult(dict):
    def __init__(self, answer, version):
        super().__init__(answer)
        self.version = version


def test_a_model_with_load_changes_its_version_in_place(serve, monkeypatch):
    monkeypatch.setattr("fake_server.FakeTables", Reloadable)
    running = serve("shop/1", "shop/2")
    with client_of(running, over_grpc) as client:
        assert client.get_model_metadata("shop").versions == ["2"]
        client.load_model("shop", config=only(1))
        np.testing.assert_array_equal(rows(over_grpc, client, version="1"), values_of(1, "user")[[3]])
        rows(over_grpc, client, version="1.5")
        assert client.get_model_metadata("shop").versions == ["1.5"]
        (running.folder / "shop/2/damaged").touch()
        with pytest.raises(InferenceServerException, check=invalid):
            client.load_model("shop")
        np.testing.assert_array_equal(rows(over_grpc, client), values_of(1, "user")[[3]])
    assert len(running.models) == 1


def test_newer_saves_are_followed(serve, monkeypatch):
    monkeypatch.setattr("fake_server.FakeTables", Reloadable)
    monkeypatch.setattr(Reloadable, "saved", [])
    running = serve(".", follow=0.01)
    with client_of(running, over_grpc) as client:
        np.testing.assert_array_equal(rows(over_grpc, client, "tables"), values_of(1, "user")[[3]])
        Reloadable.saved.append(1)
        until(lambda: client.get_model_metadata("tables").versions == ["2"], "the server did not follow")
        np.testing.assert_array_equal(rows(over_grpc, client, "tables"), values_of(102, "user")[[3]])
    assert len(running.models) == 1
