"""`thermocline serve run` and `serve inspect` as processes, with a checkpoint over two shards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

import thermocline
from support import mentions
from thermocline.cli import app
from thermocline.errors import BadInput

RUN = [sys.executable, "-c", "from thermocline.cli import main; main()", "serve", "run"]
FREE = ["--http-port", "0", "--grpc-port", "0"]


class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.user = thermocline.Embedding(1009, 7, rows=thermocline.RowConfig("fp32"))
        self.item = thermocline.EmbeddingBag(63, 16, mode="sum", rows=thermocline.RowConfig("int8"))


# A load that never ends, after some that do.
STUCK = """
import sys, threading
from thermocline.serve.tables.checkpoint_source import CheckpointSource
job, loads = CheckpointSource.load_job, [*range({})]
def stuck(*given):
    if loads:
        loads.pop()
        return job(*given)
    print("stuck", file=sys.stderr, flush=True)
    threading.Event().wait()
CheckpointSource.load_job = stuck
from thermocline.cli import main
main()
"""


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    """A model and its checkpoint."""
    torch.manual_seed(5)
    model, folder = Towers(), tmp_path_factory.mktemp("run") / "checkpoint"
    thermocline.save(model, folder)
    return model, folder


@pytest.fixture(scope="module")
def process(towers):
    """The server's process, its HTTP address and its gRPC address."""
    done = subprocess.Popen(
        [*RUN, towers[1], "--shards", "2", *FREE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert done.stdout is not None and done.stderr is not None
    line = done.stdout.readline()
    found = re.fullmatch(r"ready: http://(\S+)  grpc (\S+)\n", line)
    assert found, line + done.stderr.read()
    yield done, found[1], found[2]
    if done.poll() is None:
        done.kill()
    done.wait()


def ask(api, address, arrays):
    tensors = []
    for name, array in arrays.items():
        tensors.append(api.InferInput(name, list(array.shape), "INT64" if array.dtype == np.int64 else "FP32"))
        tensors[-1].set_data_from_numpy(array)
    with api.InferenceServerClient(address) as client:
        result = client.infer("tables", tensors)
        return {name: result.as_numpy(name) for name in ("user", "item") if result.as_numpy(name) is not None}


def test_rows_over_the_network_equal_those_of_the_model(towers, process):
    model, (_, http, grpc) = towers[0], process
    random = np.random.default_rng(3)
    ids_N, items_N, offsets_B = random.integers(0, 1009, 77), random.integers(0, 63, 50), np.array([0, 0, 13, 50])
    weights_N = random.standard_normal(50).astype(np.float32)
    expected = model.user(torch.from_numpy(ids_N)).detach().numpy()
    pooled = model.item(torch.from_numpy(items_N), torch.from_numpy(offsets_B), torch.from_numpy(weights_N)).detach().numpy()
    inputs = {"user": ids_N, "item": items_N, "item.offsets": offsets_B, "item.weights": weights_N}
    for api, address in ((over_grpc, grpc), (over_http, http)):
        found = ask(api, address, inputs)
        np.testing.assert_array_equal(found["user"], expected)
        np.testing.assert_array_equal(found["item"], pooled)


def test_a_killed_shard_comes_back_and_no_result_is_wrong(towers, process):
    from fake_server import until

    _, http, grpc = process
    with over_http.InferenceServerClient(http) as client:
        status = json.loads(client._get("status.json", None, None).read())
        shard = status["models"][0]["cards"][1]
        os.kill(shard["pid"], signal.SIGKILL)
        ids_N = np.arange(1009)
        expected = towers[0].user(torch.from_numpy(ids_N)).detach().numpy()
        for _ in range(20):
            np.testing.assert_array_equal(ask(over_grpc, grpc, {"user": ids_N})["user"], expected)

        def back():
            now = json.loads(client._get("status.json", None, None).read())["models"][0]["cards"][1]
            return now["ready"] and now["pid"] != shard["pid"]

        until(back, "the shard is still down")


def test_a_taken_port_is_a_one_line_error(towers, process):
    port = process[2].split(":")[1]
    done = subprocess.run(
        [*RUN, towers[1], "--grpc-port", port, "--http-port", "0", "--quiet"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_a_loading_server_ends_at_once_on_a_signal(told, towers):
    command = [sys.executable, "-c", STUCK.format(0), *RUN[3:], towers[1], "--shards", "2", *FREE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stderr is not None
        assert ["loading" in done.stderr.readline() for _ in range(2)] == [False, True]
        assert done.stderr.readline() == "stuck\n"
        done.send_signal(told)
        try:
            said, logged = done.communicate(timeout=120)
        finally:
            done.kill()
    assert done.returncode == 0 and said == ""
    assert [json.loads(line)["event"] for line in logged.splitlines()] == ["draining", "stopped"]


def test_a_server_that_loads_a_newer_version_ends_at_once(tmp_path):
    thermocline.save(Towers(), tmp_path)
    command = [sys.executable, "-c", STUCK.format(1), *RUN[3:], tmp_path, "--shards", "2", "--follow", "0.01", *FREE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None and done.stderr is not None
        try:
            assert done.stdout.readline().startswith("ready")
            thermocline.save(Towers(), tmp_path)
            while done.stderr.readline() != "stuck\n":
                assert done.poll() is None
            done.send_signal(signal.SIGTERM)
            _, logged = done.communicate(timeout=120)
        finally:
            done.kill()
    assert done.returncode == 0 and [json.loads(line)["event"] for line in logged.splitlines()] == ["draining", "stopped"]


def test_sigterm_ends_the_server_and_its_shards(process):
    done, http, _ = process
    with over_http.InferenceServerClient(http) as client:
        pids = [shard["pid"] for shard in json.loads(client._get("status.json", None, None).read())["models"][0]["cards"]]
    listening = sockets_at(http)
    assert listening
    done.send_signal(signal.SIGTERM)
    _, logged = done.communicate(timeout=600)
    assert done.returncode == 0
    events = [json.loads(line)["event"] for line in logged.splitlines() if line.startswith("{")]
    assert events[:2] == ["listening", "loading"] and events[-2:] == ["draining", "stopped"]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not listening & sockets_at(http), "a process outlives the server"


def sockets_at(address):
    """Sockets that listen there. Another program may get the port, but not the socket."""
    port = f":{int(address.split(':')[1]):04X}"
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {fields[9] for fields in lines if fields[1].endswith(port) and fields[3] == "0A"}


OPTIONS = [(["--split", "plan"], "--plan"), (["--tls-cert", "x"], "--tls-cert"), (["--cards", "4"], "--cards")]


@pytest.mark.parametrize("options, parameter", OPTIONS)
def test_invalid_options_are_refused(towers, options, parameter, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets both for its process
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    done = CliRunner().invoke(app, ["serve", "run", str(towers[1]), *FREE, *options])
    assert isinstance(done.exception, BadInput) and done.exception.parameter == parameter


def test_a_folder_without_a_checkpoint_is_a_one_line_error(tmp_path):
    done = subprocess.run([*RUN, tmp_path, *FREE, "--quiet"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and str(tmp_path) in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_damaged_checkpoint_is_a_one_line_error(towers, tmp_path):
    import shutil

    shutil.copytree(towers[1], tmp_path / "copy")
    (file,) = (tmp_path / "copy").glob("save-*/rows-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    done = subprocess.run(
        [*RUN, tmp_path / "copy", "--shards", "1", *FREE, "--quiet"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2 and file.name in done.stderr
    assert done.stderr.count("\n") == 1


def test_inspect_shows_the_rows_of_every_shard(towers):
    inspect = ["serve", "inspect", str(towers[1]), "--shards", "3"]
    found = json.loads(CliRunner().invoke(app, [*inspect, "--json", "-"]).stdout)
    assert found["cards"] == 3 and found["bytes"] == sum(found["bytes_of_card"])
    held = {table["table"]: table["places_of_card"] for table in found["tables"]}
    assert held == {"user": [337, 337, 337], "item": [21, 21, 21]}
    shown = CliRunner().invoke(app, [*inspect, "--split", "feature"]).stdout
    assert re.search(r"user\s+1,009 .* 1,009\s+0\s+0\s*\n", shown), shown


def test_inspect_of_a_folder_of_checkpoints_names_them(towers, tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "3").symlink_to(towers[1])
    done = CliRunner().invoke(app, ["serve", "inspect", str(tmp_path)])
    assert isinstance(done.exception, thermocline.BadInput)
    assert str(tmp_path / "shop" / "3") in str(done.exception)


def test_a_dlrm_ranks_candidates_over_the_network(tmp_path):
    from thermocline.models import DLRM

    torch.manual_seed(3)
    names = ("user", "item", "shop")
    tables = thermocline.EmbeddingCollection(
        [thermocline.Table(name, 211, 8) for name in names], rows=thermocline.RowConfig("int8", cache=0.0)
    )
    model = DLRM(tables, features=3, dim=8, dense=5).eval()
    thermocline.save(model, tmp_path / "saved")
    random = np.random.default_rng(3)
    request = {"user": random.integers(0, 211, 1), "item": random.integers(0, 211, 63), "shop": random.integers(0, 211, 63)}
    request["dense"] = random.standard_normal((1, 5)).astype(np.float32)
    ids = torch.stack([torch.from_numpy(request[name]).expand(63) for name in names], 1)
    with torch.no_grad():
        expected = model(torch.from_numpy(request["dense"]).expand(63, -1), ids).numpy()
    command = [*RUN, tmp_path / "saved", "--shards", "2", *FREE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            found = re.fullmatch(r"ready: http://(\S+)  grpc (\S+)\n", server.stdout.readline())
            assert found, server.stderr.read()
            for api, address in ((over_grpc, found[2]), (over_http, found[1])):
                tensors = [api.InferInput(n, list(a.shape), "FP32" if n == "dense" else "INT64") for n, a in request.items()]
                for tensor, array in zip(tensors, request.values(), strict=True):
                    tensor.set_data_from_numpy(array)
                with api.InferenceServerClient(address) as client:
                    assert client.is_model_ready("rank") and client.is_model_ready("tables")
                    scores_N = client.infer("rank", tensors).as_numpy("score")
                    np.testing.assert_allclose(scores_N, expected, rtol=1e-4, atol=1e-5)
                    client.load_model("rank")  # its tables, that is
                    with pytest.raises(InferenceServerException, check=mentions("'tables'")):
                        client.unload_model("rank")
            with over_grpc.InferenceServerClient(found[2]) as client:
                client.unload_model("tables")
                assert not client.is_model_ready("rank")
        finally:
            server.terminate()


def test_a_full_stdout_does_not_end_the_server(towers):
    with open("/dev/full", "w") as full:
        server = subprocess.Popen([*RUN, towers[1], "--shards", "1", *FREE], stdout=full, stderr=subprocess.PIPE, text=True)
    with server:
        assert server.stderr is not None
        lines = [json.loads(server.stderr.readline())]
        while "addresses" not in lines[-1]["event"]:
            lines.append(json.loads(server.stderr.readline()))
        (listening,) = [line for line in lines if line["event"] == "listening"]
        with over_http.InferenceServerClient(f"127.0.0.1:{listening['http_port']}") as client:
            assert client.is_server_ready()
        server.terminate()
        assert server.wait(120) == 0


def test_a_log_that_nobody_reads_does_not_stop_the_server(towers):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, b" " * 4096)
    os.set_blocking(writing, True)
    server = subprocess.Popen([*RUN, towers[1], "--shards", "1", *FREE], stdout=subprocess.PIPE, stderr=writing, text=True)
    os.close(writing)
    with server:
        assert server.stdout is not None
        found = re.fullmatch(r"ready: http://(\S+)  grpc (\S+)\n", server.stdout.readline())
        assert found is not None
        with over_http.InferenceServerClient(found[1]) as client:
            client.load_model("tables")  # writes to the log
            assert client.is_server_ready()
        server.terminate()
        assert server.wait(120) == 0
    os.close(reading)
