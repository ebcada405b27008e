"""Stall part of the serve benchmark: what the largest requests within the limits do to other clients and to memory.

    stall/REQUEST           milliseconds that a health check waits meanwhile, against the 50 that are asked
    stall/REQUEST/memory    growth of the server's peak memory, against 4 times the request and its answer

A thread asks for health all the time, and the longest wait of a round counts; the value is the least of all rounds, because
other programs delay health checks, too. `stall/nothing` is a round without a request.
"""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np

from benchmarks.runner.record import Recorder
from thermocline.serve.protocol import schema

from .lean import make_features
from .load_client import METHOD, OPTIONS
from .network import DIM, RunningServer, check_ready, ours, started

ROWS, IDS, HEALTH_MS, TIMES = 10_007, 1 << 18, 50.0, 4
ANSWERED = (32 << 20) // (4 * DIM)  # ids whose rows are as long as a response may be
ROUNDS = 8
_HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
Request = tuple[str, bytes, int]  # path over HTTP, or empty; bytes; length of the JSON in them


def run(recorder: Recorder, wanted: Callable[[str], bool], quick: bool, progress: Callable[[int, int, str], None]) -> None:
    """Send every request, several times."""
    cases = {f"stall/{name}": request for name, request in make_requests().items() if wanted(f"stall/{name}")}
    if not cases:
        return
    with tempfile.TemporaryDirectory() as name:
        make_features(Path(name) / "checkpoint", 1, ROWS)
        contender = ours(Path(name) / "checkpoint", 2)
        with started([contender], Path(name)) as (server,):
            server.wait(check_ready)
            port = _http_port(server)
            for number, (case, request) in enumerate(cases.items()):
                progress(number, len(cases), case)
                found = [_attack(server, port, request) for _ in range(2 if quick else ROUNDS)]
                waited, grown = min(wait for wait, _, _ in found), min(peak for _, peak, _ in found)
                allowed = TIMES * (len(request[1]) + found[0][2])
                recorder.add(case, waited, "ms", "asked", HEALTH_MS, HEALTH_MS / waited)
                if request[1]:
                    recorder.add(f"{case}/memory", grown, "bytes", "asked", allowed, allowed / max(grown, 1))


def make_requests() -> dict[str, Request]:
    """Requests by name, as large as the limits allow in one way."""
    ids = np.arange(ANSWERED) % ROWS
    typed = schema.ModelInferRequest(model_name="tables")
    typed.inputs.add(name="C1", datatype="INT64", shape=[len(ids)]).contents.int64_contents.extend(ids.tolist())
    raw = schema.ModelInferRequest(model_name="tables", raw_input_contents=[ids.tobytes()])
    raw.inputs.add(name="C1", datatype="INT64", shape=[len(ids)])
    texts = schema.ModelInferRequest(model_name="tables", raw_input_contents=[b"\3\0\0\0tea" * IDS])
    texts.inputs.add(name="C1", datatype="BYTES", shape=[IDS])
    tensor = {"name": "C1", "datatype": "INT64", "shape": [len(ids)]}
    sized, wants = tensor | {"parameters": {"binary_data_size": ids.nbytes}}, {"binary_data_output": True}
    binary = json.dumps({"inputs": [sized], "parameters": wants}).encode()
    numbers = json.dumps({"inputs": [tensor | {"shape": [IDS], "data": [1 << 62] * IDS}]}).encode()
    answer = json.dumps({"inputs": [tensor | {"shape": [IDS // DIM], "data": [7] * (IDS // DIM)}]}).encode()
    return {
        "nothing": ("", b"", 0),
        "grpc/outputs": ("", b"\x32\0" * 3_000_000, 0),
        "grpc/inputs": ("", b"\x2a\0" * 3_000_000, 0),
        "grpc/raw": ("", raw.SerializeToString(), 0),
        "grpc/typed": ("", typed.SerializeToString(), 0),
        "grpc/texts": ("", texts.SerializeToString(), 0),
        "http/binary": ("infer", binary + ids.tobytes(), len(binary)),
        "http/ids": ("infer", numbers, len(numbers)),
        "http/answer": ("infer", answer, len(answer)),
        "http/lists": ("infer", b'{"inputs":[' + b"[]," * 2_000_000 + b"0]}", 0),
    }  # fmt: skip


def _http_port(server: RunningServer) -> int:
    """The port that the server chose for HTTP, from its listening sockets."""
    links = [str(link.readlink()) for link in Path(f"/proc/{server.process.pid}/fd").iterdir()]
    inodes = {link for link in links if link.startswith("socket:")}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {int(each[1].split(":")[1], 16) for each in lines if each[3] == "0A" and f"socket:[{each[9]}]" in inodes}
    (port,) = ports - {server.port}
    return port


def _attack(server: RunningServer, port: int, request: Request) -> tuple[float, int, int]:
    """Longest wait of a health check in milliseconds, growth of the server's peak memory, and bytes of the answer."""
    memory = Path(f"/proc/{server.process.pid}")
    (memory / "clear_refs").write_text("5")
    before = _peak(memory)
    with _health(port) as waits:
        answered = _send(server.port, port, request)
    return 1e3 * max(waits), _peak(memory) - before, answered


def _peak(process: Path) -> int:
    lines = (process / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@contextmanager
def _health(port: int) -> Iterator[list[float]]:
    """Ask for health in a thread until the end of the block; the seconds that each answer took."""
    waits: list[float] = []
    done = threading.Event()

    def ask() -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while not done.is_set():
                began = time.perf_counter()
                connection.sendall(_HEALTH)
                connection.recv(1 << 12)
                waits.append(time.perf_counter() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)
    yield waits
    done.set()
    thread.join()


def _send(grpc_port: int, http_port: int, request: Request) -> int:
    """Send a request; returns the bytes of the answer, of an error 0."""
    path, data, length = request
    if not data:
        time.sleep(0.5)
        return 0
    if not path:
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options=OPTIONS) as channel:
            try:
                return len(channel.unary_unary(METHOD)(data, timeout=60))
            except grpc.RpcError:
                return 0
    lines = [f"POST /v2/models/tables/{path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", f"Content-Length: {len(data)}"]
    lines += [f"Inference-Header-Content-Length: {length}"] if length else []
    with socket.create_connection(("127.0.0.1", http_port)) as connection:
        connection.sendall("\r\n".join([*lines, "\r\n"]).encode() + data)
        total = 0
        while got := len(connection.recv(1 << 20)):
            total += got
    return total
