"""Who may do what: control of models, browsers, and clients' certificates."""

from __future__ import annotations

import json
import ssl
from http.client import HTTPConnection, HTTPSConnection

import grpc
import pytest
import tritonclient.grpc as triton
from fake_server import PATIENCE_S

from thermocline.serve.protocol import schema
from thermocline.serve.server.config import Credentials, ServerConfig

LOAD = "/v2/repository/models/tables/load"


def ask(running, method, path, **headers):
    connection = HTTPConnection(running.http, timeout=PATIENCE_S)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    status = connection.getresponse().status
    connection.close()
    return status


def load(running, **metadata):
    with triton.InferenceServerClient(running.grpc) as client:
        try:
            client.load_model("tables", headers=metadata)
        except triton.InferenceServerException as error:
            return error.status().removeprefix("StatusCode.")
    return "OK"


def test_models_are_loaded_with_their_own_token_only(serve):
    running = serve(credentials=Credentials("reads", control_token="controls"))
    assert ask(running, "POST", LOAD, Authorization="Bearer reads") == 403
    assert ask(running, "POST", LOAD) == 403
    assert ask(running, "POST", LOAD, Authorization="Bearer controls") == 200
    assert ask(running, "GET", "/v2", Authorization="Bearer controls") == 401
    assert ask(running, "POST", LOAD.replace("/load", "/unload"), Authorization="Bearer reads") == 403
    assert load(running, authorization="Bearer reads") == load(running) == "PERMISSION_DENIED"
    assert load(running, authorization="Bearer controls") == "OK"
    running = serve(credentials=Credentials(control_token="controls"))
    assert (ask(running, "GET", "/v2"), ask(running, "POST", LOAD)) == (200, 403)


def test_control_can_be_off(serve):
    running = serve(model_control=False)
    assert ask(running, "POST", LOAD) == 403 and load(running) == "PERMISSION_DENIED"
    assert ask(running, "GET", "/v2/models/tables") == 200


@pytest.mark.parametrize(
    "host, credentials, allowed",
    [
        ("127.0.0.1", Credentials(), True), ("::1", Credentials(), True), ("0.0.0.0", Credentials(), False),
        ("10.0.0.7", Credentials("token"), True), ("10.0.0.7", Credentials(control_token="token"), True),
    ],
)  # fmt: skip
def test_strangers_on_other_machines_never_control_models(host, credentials, allowed):
    assert ServerConfig(host, credentials=credentials).clients_control is allowed
    assert not ServerConfig(host, credentials=credentials, model_control=False).clients_control


def test_pages_of_other_sites_cannot_use_a_browser_here(serve):
    running = serve(allow_hosts=("tables.local",))
    port = running.http.partition(":")[2]
    for host in ("127.0.0.1", f"localhost:{port}", "[::1]:8000", "10.1.2.3", "tables.local:80"):
        assert ask(running, "GET", "/v2", Host=host) == 200, host
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        assert ask(running, "GET", "/v2", Host=host) == 421, host
        assert ask(running, "GET", "/v2/health/live", Host=host) == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert ask(running, "POST", LOAD, Origin=origin) == 403, origin
    assert ask(running, "GET", "/status.json", Origin=f"http://{running.http}") == 200


def test_names_do_not_matter_where_clients_have_a_token(serve):
    running = serve(credentials=Credentials("reads"))
    assert ask(running, "GET", "/v2", Host="tables.prod.svc", Authorization="Bearer reads") == 200
    assert ask(running, "GET", "/v2", Host="tables.prod.svc", Authorization="Bearer reads", Origin="http://evil.example") == 403


def test_clients_without_a_certificate_of_the_ca_are_refused_by_both_protocols(serve, tmp_path, make_certificates):
    certificate, key, ca = make_certificates(tmp_path / "ours")
    other_certificate, other_key, _ = make_certificates(tmp_path / "theirs")
    running = serve(credentials=Credentials(certificate=certificate, key=key, client_ca=ca))

    def is_live(own):
        pair = [file.read_bytes() for file in own] if own else [None, None]
        credentials = grpc.ssl_channel_credentials(ca.read_bytes(), pair[1], pair[0])
        with grpc.secure_channel(running.grpc, credentials) as channel:
            try:
                channel.unary_unary(f"/{schema.SERVICE}/ServerLive")(b"", timeout=PATIENCE_S)
            except grpc.RpcError:
                return False
        context = ssl.create_default_context(cafile=ca)
        if own:
            context.load_cert_chain(*own)
        connection = HTTPSConnection(running.http, context=context, timeout=PATIENCE_S)
        connection.request("GET", "/v2")
        return json.loads(connection.getresponse().read())["name"] == "thermocline"

    assert is_live((certificate, key))
    assert not is_live(None) and not is_live((other_certificate, other_key))
    context = ssl.create_default_context(cafile=ca)
    with pytest.raises(OSError):
        connection = HTTPSConnection(running.http, context=context, timeout=PATIENCE_S)
        connection.request("GET", "/v2")
        connection.getresponse()
